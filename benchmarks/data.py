"""Location of the benchmarks' data sets."""

from __future__ import annotations

import os
from pathlib import Path

from benchmarks.runner import ROOT


def directories() -> list[Path]:
    """Where data are looked for: ``$SEQGP_DATA``, ``../shared/data``, the cache directory."""
    given = os.environ.get("SEQGP_DATA")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return [*([Path(given)] if given else []), ROOT.parent / "shared" / "data", cache / "seqgp"]


def find(name: str) -> Path:
    """The file or directory ``name`` in the first of the data directories that has it."""
    for directory in directories():
        if (directory / name).exists():
            return directory / name
    places = ", ".join(map(str, directories()))
    raise FileNotFoundError(f"{name} is in none of {places}; set SEQGP_DATA to where it is.")
