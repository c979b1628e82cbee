"""Peak memory of a piece of work, measured in a process of its own."""

from __future__ import annotations

import contextlib
import importlib
import json
import resource
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.runner import ROOT

MEGABYTE = 2**20


def peak_memory(work: Callable[..., Iterator[int]], **arguments: Any) -> dict[str, float]:
    """Run ``work`` in a fresh interpreter and measure how much memory it takes.

    Args:
        work: A generator function at the top level of a module. It makes its data, yields their
            size in bytes once, and then does what is to be measured.
        arguments: Its arguments, as JSON can hold them.

    Returns:
        In megabytes: ``data``, their size; ``before``, the process with its data when the work
        begins; ``peak``, its high-water mark; and ``extra``, the difference of the last two.
    """
    name = f"{work.__module__}:{work.__qualname__}"
    child = subprocess.run(
        [sys.executable, "-m", "benchmarks.memory", name, json.dumps(arguments)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    measured: dict[str, float] = json.loads(child.stdout.splitlines()[-1])
    return measured


def _measure(name: str, arguments: dict[str, Any]) -> dict[str, float]:
    module, function = name.split(":")
    work = getattr(importlib.import_module(module), function)(**arguments)
    data = next(work)
    _forget_peak()
    before = _resident("VmRSS")
    for _ in work:
        pass
    peak = _resident("VmHWM")
    numbers = {"data": data, "before": before, "peak": peak, "extra": peak - before}
    return {name: round(number / MEGABYTE, 1) for name, number in numbers.items()}


def _forget_peak() -> None:
    """Let the high-water mark start from here: preparations may have taken more (Linux only)."""
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _resident(field: str) -> int:
    """Resident bytes, now (``VmRSS``) or at most so far (``VmHWM``).

    On Linux from the kernel's own account: ``ru_maxrss`` of a child starts from the size of the
    process that it was started by. Elsewhere ``ru_maxrss``, the peak so far, has to do for both.
    """
    status = Path("/proc/self/status")
    if status.exists():
        line = next(line for line in status.read_text().splitlines() if line.startswith(field))
        return int(line.split()[1]) * 1024
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


if __name__ == "__main__":
    print(json.dumps(_measure(sys.argv[1], json.loads(sys.argv[2]))))
