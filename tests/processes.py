"""Copies of this process, which need not import again what it has imported."""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

MEGABYTE = 2**20


@contextmanager
def forking() -> Iterator[None]:
    """The other threads of this process are those of pytest-xdist, which wait for messages."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*multi-threaded, use of fork", DeprecationWarning)
        yield


def start(function: Callable[[], object]) -> int:
    """Run a function in a copy of this process; its number."""
    with forking():
        pid = os.fork()
    if pid:
        return pid
    try:
        function()
        status = 0
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def exit_code(pid: int) -> int:
    """Wait for a copy of this process."""
    _, status = os.waitpid(pid, 0)
    return os.waitstatus_to_exitcode(status)


def finish(pid: int) -> None:
    """Wait for a copy of this process, which must not have failed."""
    assert exit_code(pid) == 0


def peak_memory(function: Callable[[], object]) -> float:
    """How many megabytes a function takes, at most."""
    reading, writing = os.pipe()

    def measure() -> None:
        function_alone = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        function()
        growth = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - function_alone
        os.write(writing, str(growth).encode())

    finish(start(measure))
    os.close(writing)
    with open(reading) as file:
        growth = int(file.read())
    return growth / (MEGABYTE if sys.platform == "darwin" else 1024)


def printed_by(function: Callable[[], object], directory: Path) -> tuple[str, str]:
    """Run a function in a copy of this process, in some directory; it must not fail.

    Returns:
        What it printed, and what it and its own processes wrote to their error output.
    """
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:

        def work() -> None:
            os.dup2(output.fileno(), 1)
            os.dup2(errors.fileno(), 2)
            sys.stdout, sys.stderr = output, errors
            os.chdir(directory)
            function()

        code = exit_code(start(work))
        for file in (output, errors):
            file.seek(0)
        written = output.read(), errors.read()
    assert code == 0, "".join(written)
    return written
