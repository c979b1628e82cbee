"""Without Ax, or with an old one, an error that says what to do."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version as version_of

import pytest

from seqgp.ax.version_check import check_version, installed_version


@pytest.mark.parametrize("version", ["1.3.1", "1.3.1.dev3", "1.10.0", "2.0", "1.3.1+local"])
def test_new_enough(version: str) -> None:
    check_version(version)
    with pytest.raises(ImportError, match="not installed"):  # so it does look at its argument
        check_version(None)


@pytest.mark.parametrize(
    ("version", "message"),
    [(None, "not installed"), ("1.3.0", "found 1.3.0"), ("0.5.0", "found 0.5.0")],
)
def test_missing_or_too_old(version: str | None, message: str) -> None:
    with pytest.raises(ImportError, match=f"needs ax-platform >= 1.3.1.*{message}.*pip install"):
        check_version(version)


def test_the_installed_one_is_found() -> None:
    assert installed_version() == version_of("ax-platform")
    check_version(installed_version())


@pytest.mark.slow
def test_import_says_so() -> None:
    code = (
        "import importlib.metadata as m\n"
        "def version(name, real=m.version):\n"
        "    if name == 'ax-platform':\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return real(name)\n"
        "m.version = version\n"
        "import seqgp.ax\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "ImportError: seqgp.ax needs ax-platform >= 1.3.1, which is not" in done.stderr
    assert "seqgp[ax]" in done.stderr
