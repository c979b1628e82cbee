"""The oldest versions that ``pyproject.toml`` allows, as constraints for pip.

``python -m tests.oldest_versions > oldest.txt``, then
``pip install -c oldest.txt ".[ax,plots,test]"``.
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

PROJECT = Path(__file__).parent.parent / "pyproject.toml"


def oldest_versions(project: Path = PROJECT) -> dict[str, str]:
    """Names of packages, and their lower bounds. Packages without a bound are left out."""
    declared = tomllib.loads(project.read_text())["project"]
    extras = declared["optional-dependencies"]
    requirements = [*declared["dependencies"], *extras["ax"], *extras["plots"]]
    bounds = (re.fullmatch(r"([\w-]+)>=([\d.]+)", requirement) for requirement in requirements)
    return {bound[1]: bound[2] for bound in bounds if bound}


if __name__ == "__main__":
    print("\n".join(f"{name}=={version}" for name, version in oldest_versions().items()))
