"""Benchmarks: one command for each table, ``python -m benchmarks NAME``.

Each benchmark is a module of this package with two functions:

    def units(options: Options) -> tuple[dict[str, Any], list[Unit]]
        The settings that all measurements share, and the measurements to make.

    def render(units: dict[str, dict[str, Any]], directory: Path) -> str
        The measurements as Markdown; figures go to the directory.

`BENCHMARKS` lists them. A measurement is written to disk as soon as it is made and is skipped the
next time, so a long table can be filled in pieces (see `benchmarks.runner`).
"""

from typing import Literal, NamedTuple


class Entry(NamedTuple):
    """One line of ``python -m benchmarks --help``."""

    description: str
    repeats: Literal["seeds", "folds"]


BENCHMARKS = {
    "core": Entry(
        "one natural-gradient step: speed against bare tensors, memory as n grows", "seeds"
    ),
    "fantasies": Entry("speed and errors of fantasies, against OVC and bare tensors", "seeds"),
    "fit": Entry("fitting a data set: bound and time against SingleTaskVariationalGP", "seeds"),
    "uci": Entry("six streams: predictions against rivals, offline learning, the paper", "folds"),
    "defaults": Entry("six streams with nothing but defaults, against rivals and refits", "folds"),
    "small_batches": Entry("thousands of updates with a few labels, against one fit", "seeds"),
    "drift": Entry("streams that change: predict, then learn, against river's learners", "seeds"),
    "banana": Entry("two crescents in four batches: conditioning and learning, a figure", "seeds"),
    "timing": Entry("test density against seconds of learning, at fixed hyperparameters", "folds"),
    "magnetic": Entry("a field mapped by a robot as it drives, against rivals", "seeds"),
    "update": Entry("one update as the past grows: time and memory, against a refit", "seeds"),
    "distributed": Entry("ranks that share data: seconds, memory and bytes of each", "seeds"),
    "lunar": Entry("batches for a lunar lander that may crash, against rivals", "seeds"),
    "constrained": Entry("hidden failing regions: regret, and the cost of a batch", "seeds"),
    "botorch_loop": Entry("a BoTorch loop that conditions between refits, against refits", "seeds"),
    "ax": Entry("Ax experiments with failing trials: regret and seconds a trial", "seeds"),
    "regression": Entry(
        "speed against an earlier revision, BoTorch and bare tensors, with targets", "seeds"
    ),
    "splitmnist": Entry(
        "digits in tasks of two classes: what is forgotten, against rivals", "seeds"
    ),
    "cuda": Entry("everything on a GPU: results and times, compared with the CPU", "seeds"),
    "attack": Entry("promises attacked: random calls, kills, corruption, interrupts", "seeds"),
    "levelsets": Entry("level sets of observers, trial by trial, against AEPsych", "seeds"),
    "preferences": Entry("a utility from comparisons, against PairwiseGP; duel loops", "seeds"),
    "outputs": Entry("correlated outputs, noise that varies, labels beside values", "seeds"),
    "hotspots": Entry("which village to survey next: scores by step, against rivals", "seeds"),
}
