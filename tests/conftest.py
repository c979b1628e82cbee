from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from botorch.acquisition.multi_objective import logei
from hypothesis import settings

from seqgp.likelihoods.quadrature import base_samples

torch.set_num_threads(1)  # small tensors, and a worker for each core

# BoTorch compiles a kernel of its own when it is first needed: that takes a minute, and if it is
# interrupted, all that need it later wait for ever. Tests use its form in Python.
logei._load_attempted = True

# What has to pass does not depend on luck: with CI set, hypothesis tries the same examples in each
# run. Without it, every run tries new ones, and remembers those that have failed.
settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
if os.environ.get("CI"):
    settings.load_profile("ci")

#: Likelihoods that take the same way through the library as one that is not among them.
MORE_OF_A_KIND = {
    "fixed_noise",
    "laplace",
    "beta",
    "negative_binomial",
    "overdispersed_binomial",
    "ordinal",
    "softmax_mixing",
}
#: Examples of docstrings that optimise something.
SLOW_EXAMPLES = {
    "seqgp.acquisition.fantasy_batch.fantasy_batch",
    "seqgp.active_learner.ActiveLearner",
    "seqgp.ax.strategy.generation_strategy",
    "seqgp.ax.strategy.probability_of_validity",
    "seqgp.batch_optimizer.BatchOptimizer",
}
#: Files whose tests share an expensive fixture or cache: a worker gets all of them.
TOGETHER = {
    "tests/ax_integration/test_storage.py",
    "tests/ax_integration/test_transforms.py",
    "tests/benchmarks/test_baselines.py",
    "tests/benchmarks/test_commands.py",
    "tests/benchmarks/test_regression.py",
    "tests/documentation/test_docs.py",
    "tests/documentation/test_readme.py",
    "tests/documentation/test_tutorials.py",
    "tests/test_cuda_surface.py",
    "tests/test_distributed.py",
    "tests/test_package.py",
}


#: The processor seconds until a test, or a part of it, began.
STARTED = pytest.StashKey[float]()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """The cases of each test go to one worker, and so do tests that share a fixture.

    What has most cases comes first, so that all workers end at about the same time. pytest-xdist's
    own groups rest on an attribute that tests no longer have since pytest 9.
    """
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = nodeid.partition("::")[0]
            return file if file in TOGETHER else nodeid.partition("[")[0]

    return Scheduling(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out of a quick run what hardly adds to it."""
    for item in items:
        case = getattr(item, "callspec", None)
        names = {value for value in case.params.values() if isinstance(value, str)} if case else {}
        if MORE_OF_A_KIND & {*names} or item.name in SLOW_EXAMPLES:
            item.add_marker(pytest.mark.slow)


# ---------------------------------------------------------------------------- processor seconds


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--costs",
        action="store_true",
        help="show processor seconds by file, and of what takes most",
    )


def processor_seconds() -> float:
    """Of this process, and of the children that have ended."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    item.stash[STARTED] = processor_seconds()
    return (yield)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Any:
    """Each of the three reports of a test has its own seconds; workers send what it holds."""
    report = yield
    before, item.stash[STARTED] = item.stash[STARTED], processor_seconds()
    report.processor_seconds = item.stash[STARTED] - before
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if not config.getoption("--costs"):
        return
    files: Counter[str] = Counter()
    tests: Counter[str] = Counter()
    for report in (each for reports in terminalreporter.stats.values() for each in reports):
        if isinstance(report, pytest.TestReport):
            seconds = getattr(report, "processor_seconds", 0.0)  # none if a worker has died
            files[report.nodeid.partition("::")[0]] += seconds
            tests[report.nodeid] += seconds
    terminalreporter.section(f"{files.total():.0f} processor seconds")
    for name, seconds in [*files.most_common(), *tests.most_common(100)]:
        terminalreporter.write_line(f"{seconds:8.1f}  {name}")


@pytest.fixture(scope="module")
def float64() -> Iterator[None]:
    """Make everything in float64, in which GPyTorch's quadrature nodes are exact as well.

    For the whole module, so that Hypothesis may use it: ``pytestmark = usefixtures("float64")``.
    """
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def meta() -> Iterator[Callable[[], None]]:
    """Call it to change the default device until the end of the test."""
    base_samples.cache_clear()
    yield lambda: torch.set_default_device("meta")
    torch.set_default_device(None)
    base_samples.cache_clear()
