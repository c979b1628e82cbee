"""The package as it is installed: what it imports, and what it says about itself."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from importlib.metadata import requires, version
from pathlib import Path

import pytest
import torch
import yaml
from packaging.version import Version

import seqgp
from seqgp import progress
from tests.oldest_versions import oldest_versions

ROOT = Path(seqgp.__file__).parent
DECLARED = {"torch", "gpytorch", "botorch", "linear_operator", "numpy", "seqgp"}


def top_level_imports(extra: str | None = None) -> Iterator[tuple[str, str]]:
    """Files, and the packages that importing them needs: of the library, or of an extra's part."""
    for path in ROOT.rglob("*.py"):
        if path.is_relative_to(ROOT / "ax") != (extra == "ax"):
            continue
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.Import):
                yield from ((path.name, alias.name.partition(".")[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                yield path.name, node.module.partition(".")[0]


def test_imports_are_declared_dependencies() -> None:
    from_botorch = {requirement.split(">")[0].strip() for requirement in requires("botorch") or ()}
    assert "scipy" in from_botorch
    known = DECLARED | {"scipy"} | set(sys.stdlib_module_names)
    assert {(file, name) for file, name in top_level_imports() if name not in known} == set()


def test_ax_is_imported_by_its_own_package_only() -> None:
    """The extra brings Ax, and Ax brings pandas."""
    assert "pandas" in (requires("ax-platform") or ())
    known = DECLARED | {"ax", "pandas"} | set(sys.stdlib_module_names)
    assert {(file, name) for file, name in top_level_imports("ax") if name not in known} == set()


def test_lower_bounds_are_found() -> None:
    """Those that a nightly workflow installs. The newest versions satisfy them."""
    bounds = oldest_versions()
    needed = {"torch", "gpytorch", "botorch", "linear-operator", "numpy"}
    assert set(bounds) == needed | {"ax-platform", "matplotlib"}
    for name, bound in bounds.items():
        assert Version(version(name)) >= Version(bound)


def test_releases_are_described() -> None:
    """The citation has the version; so has the changelog, once it is released."""
    sources = ROOT.parent
    assert f"version: {seqgp.__version__}\n" in (sources / "CITATION.cff").read_text()
    changes = (sources / "CHANGELOG.md").read_text()
    assert f"## [{seqgp.__version__}]" in changes or "## [Unreleased]" in changes


def test_workflows() -> None:
    """They can be read, test all versions of Python that we claim, and name files that exist."""
    sources = ROOT.parent
    texts = {p.stem: p.read_text() for p in (sources / ".github" / "workflows").glob("*.yml")}
    workflows = {name: yaml.safe_load(text) for name, text in texts.items()}
    assert set(workflows) == {"ci", "nightly", "release"}
    matrix = workflows["ci"]["jobs"]["matrix"]["strategy"]["matrix"]
    claimed = re.findall(r"Python :: (3\.\d+)", (sources / "pyproject.toml").read_text())
    assert matrix["python"] == claimed
    assert [name.partition("-")[0] for name in matrix["os"]] == ["ubuntu", "macos", "windows"]
    for text in texts.values():
        for path in re.findall(r"--ignore ([\w/.]+)", text):
            assert (sources / path).exists(), path
        for target in re.findall(r"make (\w+)", text):
            assert f"\n{target}:" in (sources / "Makefile").read_text(), target
    publish = workflows["release"]["jobs"]["publish"]
    assert publish["permissions"] == {"id-token": "write"}  # trusted publishing, without a token
    for template in (sources / ".github" / "ISSUE_TEMPLATE").glob("*.yml"):
        assert yaml.safe_load(template.read_text())


def test_version_and_types() -> None:
    assert seqgp.__version__ == version("seqgp")
    assert (ROOT / "py.typed").exists()
    assert all(hasattr(seqgp, name) for name in seqgp.__all__)


def test_progress_bars_need_no_tqdm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)  # as if it were not installed
    assert list(progress.progress_bar(range(3))) == [0, 1, 2]
    with progress.progress_bar(total=2) as bar:
        bar.update()
        bar.set_postfix(a=1)
    X = torch.rand(10, 1, dtype=torch.double)
    records = seqgp.SequentialGP(X, X).update_stream([(X, X)], learn=False)
    assert len(records) == 1


def run(code: str) -> str:
    """What a new interpreter prints."""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_import_is_lazy() -> None:
    unwanted = ["matplotlib", "ax", "scipy.stats", "seqgp.ax", "seqgp.plots", "seqgp.checkpoint"]
    found = f"print(set({unwanted}) & set(sys.modules))"
    # Nor does a model need any of them, and the loops need no Ax.
    code = f"import sys, seqgp; {found}; from seqgp import SequentialGP; {found}"
    code += "; import seqgp.batch_optimizer; print('ax' in sys.modules)"
    assert run(code) == "set()\nset()\nFalse\n"


def test_modules_are_there_without_being_imported() -> None:
    """When they are asked for, and not before."""
    code = """
import sys, seqgp
assert not {"seqgp.batch_optimizer", "seqgp.ax", "seqgp.simulated_survey"} & set(sys.modules)
assert seqgp.batch_optimizer.BatchOptimizer and seqgp.kernel_scales.sharp
assert seqgp.simulated_survey.make_country and seqgp.checkpoint.register
assert seqgp.acquisition.fantasy_batch and seqgp.plots.posterior
assert not hasattr(seqgp, "nothing")
sys.modules["ax"] = None  # as if it were not installed
try:
    seqgp.ax
except ImportError:
    print("done")
"""
    assert run(code) == "done\n"


def test_names_are_those_of_the_modules_that_define_them() -> None:
    code = """
import seqgp
assert set(seqgp.__all__) <= set(dir(seqgp)) and "batch_optimizer" in dir(seqgp)
from seqgp import *
assert SequentialGP is seqgp.SequentialGP is seqgp.models.sequential_gp.SequentialGP
assert save is seqgp.checkpoint.contents.save
print("done")
"""
    assert run(code) == "done\n"


@pytest.mark.slow
def test_every_module_can_be_imported_first() -> None:
    """Whatever is used first, there is no circular import.

    To import a module is to import its package first. So what a package itself imports needs no
    import of its own.
    """
    paths = [path.relative_to(ROOT.parent).with_suffix("") for path in ROOT.rglob("*.py")]
    modules = [".".join(path.parts).removesuffix(".__init__") for path in paths]
    modules = sorted(name for name in modules if not name.startswith("seqgp.ax"))
    assert "seqgp.streaming.memory" in modules
    code = f"""
import importlib, sys
brought = {{"": set()}}  # what the import of each module brings
for module in {modules}:  # packages come before what is in them
    brought[module] = brought[module.rpartition(".")[0]]
    if module not in brought[module]:
        for name in [name for name in sys.modules if name.partition(".")[0] == "seqgp"]:
            del sys.modules[name]
        importlib.import_module(module)
        brought[module] = set(sys.modules)
        assert module in brought[module]
print("done")
"""
    assert run(code) == "done\n"


@pytest.mark.slow
def test_import_takes_no_longer_than_that_of_botorch() -> None:
    """In processor seconds, with an allowance for noise: what seqgp adds to BoTorch."""
    code = """
import time
start = time.process_time()
import botorch
middle = time.process_time()
import seqgp
print(middle - start, time.process_time() - middle)
"""
    times = [[float(part) for part in run(code).split()] for _ in range(3)]
    botorch, ours = (min(column) for column in zip(*times, strict=True))
    assert ours <= 0.25 * botorch


@pytest.mark.slow
@pytest.mark.parametrize("first", ["seqgp", "botorch.sampling.pathwise"])
def test_pathwise_samples_whatever_is_imported_first(first: str) -> None:
    """BoTorch's dispatchers know the model by the time that there is one."""
    code = f"""
import {first}
import seqgp, torch
X = torch.linspace(0, 1, 9, dtype=torch.double).unsqueeze(-1)
model = seqgp.SequentialGP(X, 2**0.5 * torch.sin(12.6 * X))
from botorch.sampling.pathwise import draw_matheron_paths
print(tuple(draw_matheron_paths(model, torch.Size([3]))(X).shape))
"""
    assert run(code) == "(3, 9)\n"


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The source distribution, made of a copy of the sources, and unpacked."""
    directory = tmp_path_factory.mktemp("sdist")
    made = (".*", "__pycache__", "*.egg-info", "build", "dist", "_build", "figures")
    shutil.copytree(ROOT.parent, directory / "sources", ignore=shutil.ignore_patterns(*made))
    run_in("-m", "build", "--sdist", "--no-isolation", "--outdir", "..", cwd=directory / "sources")
    name = f"seqgp-{seqgp.__version__}"
    with tarfile.open(directory / f"{name}.tar.gz") as archive:
        archive.extractall(directory, filter="data")
    return directory / name


def run_in(*arguments: str, cwd: Path) -> str:
    """What Python prints in a directory, whose packages come before installed ones."""
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_source_distribution_has_everything(unpacked: Path) -> None:
    def files(root: Path) -> set[Path]:
        parts = ("seqgp", "tests", "benchmarks", "tutorials", "docs")
        found = (path for part in parts for path in (root / part).rglob("*"))
        return {
            path.relative_to(root)
            for path in found
            if not {"__pycache__", "_build", "figures"} & {*path.parts}
            # Made by Sphinx-Gallery.
            and not path.is_relative_to(root / "docs" / "tutorials")
            and path.name != "sg_execution_times.rst"
        }

    quick = {path for path in files(ROOT.parent) if path.match("benchmarks/results/*-quick.json")}
    assert files(unpacked) == files(ROOT.parent) - quick
    assert all((unpacked / name).exists() for name in ("Makefile", "constraints.txt", "LICENSE"))


@pytest.mark.slow
def test_tests_of_the_source_distribution_run(unpacked: Path) -> None:
    """All tests are there, see above. Those that read other files than modules are collected."""
    code = "import pytest, seqgp, sys; print(seqgp); sys.exit(pytest.main(sys.argv[1:]))"
    options = ("-q", "-p", "no:cacheprovider", "-k", "test_duals or links_lead_somewhere")
    tests = ("dual/test_duals.py", "documentation", "benchmarks", "test_package.py")
    printed = run_in("-c", code, *options, *(f"tests/{name}" for name in tests), cwd=unpacked)
    assert f"{unpacked}/seqgp" in printed
    assert "passed" in printed
    assert "failed" not in printed
