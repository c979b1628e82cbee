"""Which results are of the present code: decided on a small repository with a history."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from benchmarks import BENCHMARKS, __main__, headlines
from benchmarks.freshness import Freshness, changed_since, code, freshness, modules, sources
from benchmarks.runner import Result

FILES = {
    "seqgp/__init__.py": "from seqgp.parts import Model, other\nfrom seqgp.loops import loop\n",
    "seqgp/parts/__init__.py": "from .model import Model\nfrom .other import other\n",
    "seqgp/parts/model.py": '"""A model."""\nfrom seqgp import maths\n\nclass Model: ...\n',
    "seqgp/parts/other.py": "other = 1\n",
    "seqgp/maths.py": "def f(x):\n    return x\n",
    "seqgp/loops.py": "loop = 1\n",
    "benchmarks/__init__.py": "",
    "benchmarks/runner.py": "a = 1\n",
    "benchmarks/toy.py": "from benchmarks.runner import a\nfrom seqgp import Model\n",
}


class Repository:
    """Files under version control."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._git("init", "--quiet")
        self.head = self.commit(FILES)

    def commit(self, files: dict[str, str]) -> str:
        """Write and commit files, and return the revision."""
        for name, text in files.items():
            path = self.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self._git("add", ".")
        self._git("-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "-m", "change")
        self.head = self._git("rev-parse", "HEAD")
        return self.head

    def _git(self, *arguments: str) -> str:
        command = ["git", "-C", str(self.root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    def freshness(self, **runs: tuple[str | None, bool]) -> Freshness:
        """Of units with these names, which were made at a revision, with changes or without."""
        for function in (modules, changed_since):
            function.cache_clear()
        made: list[dict[str, Any]] = [{"revision": r, "changed": c} for r, c in runs.values()]
        units = {f"{name}/seed0": {"run": run} for run, name in enumerate(runs)}
        return freshness(Result("toy", {}, made, units), self.root)


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path)


def test_sources_are_what_is_imported_and_nothing_else(repository: Repository) -> None:
    """Not the loop, nor what the package offers besides, nor the runner."""
    assert list(sources("toy", repository.root)) == [
        "benchmarks.toy",
        "seqgp.maths",
        "seqgp.parts.model",
    ]


def test_measurements_are_outdated_once_what_they_use_changes(repository: Repository) -> None:
    first = repository.head
    state = repository.freshness(a=(first, False))
    assert state
    assert str(state) == "All measurements are of the present code."
    second = repository.commit({"seqgp/maths.py": "def f(x):\n    return 2 * x\n"})
    state = repository.freshness(a=(first, False), b=(second, False))
    assert not state
    assert (state.current, state.outdated, state.unknown) == (1, {"a": 1}, 0)
    assert state.changed == ("seqgp.maths",)
    assert "**Outdated: 1 measurements**" in str(state)
    assert "a (1)" in str(state)
    assert "`seqgp.maths`" in str(state)


def test_changes_elsewhere_and_of_words_do_not_count(repository: Repository) -> None:
    first = repository.head
    repository.commit(
        {
            "seqgp/loops.py": "loop = 2\n",
            "seqgp/parts/other.py": "other = 2\n",
            "benchmarks/runner.py": "a = 2\n",
            "seqgp/maths.py": 'def f(x):\n    """Of x."""\n    return (x)  # x\n',
        }
    )
    assert repository.freshness(a=(first, False))


def test_changes_that_were_not_committed_are_seen(repository: Repository) -> None:
    (repository.root / "seqgp" / "maths.py").write_text("f = 1\n")
    assert repository.freshness(a=(repository.head, False)).outdated == {"a": 1}


def test_measurements_of_an_unknown_state_are_not_current(repository: Repository) -> None:
    state = repository.freshness(a=(None, False), b=("0" * 40, False), c=(repository.head, True))
    assert not state
    assert (state.current, state.unknown) == (0, 3)
    assert "**3 measurements** were made with changes" in str(state)


def test_code_is_compared_without_docstrings() -> None:
    assert code('class A:\n    """One."""\n    x = 1') == code("class A:  # two\n    x=1")
    assert code("class A:\n    x = 1") != code("class A:\n    x = 2")


def test_sources_of_every_benchmark_are_found() -> None:
    modules.cache_clear()
    assert "seqgp.acquisition.validity" not in sources("core")
    for name in BENCHMARKS:
        found = sources(name)
        assert f"benchmarks.{name}" in found
        assert any(module.startswith("seqgp.") for module in found), name


def test_report_can_be_strict(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    current, outdated = (Freshness(1, {}, 0, ()), Freshness(0, {"a": 1}, 0, ("b",)))  # type: ignore[arg-type]
    command = ["report", "--out", str(tmp_path)]
    monkeypatch.setattr(__main__, "report", lambda directory: {"core": current})
    __main__.main([*command, "--strict"])
    monkeypatch.setattr(__main__, "report", lambda directory: {"core": outdated})
    __main__.main(command)
    with pytest.raises(SystemExit):
        __main__.main([*command, "--strict"])
    assert "| `core` | 0 | 1 | 0 |" in __main__.table({"core": outdated})


def test_blocks_of_pages_are_replaced(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        f"before\n<!-- a -->\nold\n{headlines.END}\nafter\n<!-- b -->\n{headlines.END}\n"
    )
    headlines.replace_block(page, "<!-- a -->", "new")
    assert page.read_text() == (
        f"before\n<!-- a -->\nnew\n{headlines.END}\nafter\n<!-- b -->\n{headlines.END}\n"
    )
    with pytest.raises(ValueError, match="has no line"):
        headlines.replace_block(page, "<!-- c -->", "new")
