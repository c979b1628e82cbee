"""The table of headline results in the README: ``python -m benchmarks.headlines``.

Every figure is read from the results that are committed in ``benchmarks/results``, so the table
cannot say anything that was not measured. A test compares it with the README.
"""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.runner import Result

RESULTS = Path(__file__).parent / "results"
START, END = "<!-- headlines: python -m benchmarks.headlines -->", "<!-- end -->"


class Row(NamedTuple):
    """One line of the table.

    Attributes:
        what: What was measured.
        section: The anchor of its section in ``docs/benchmarks.md``.
        ours: The figure of seqgp.
        other: The best alternative, and its figure.
    """

    what: str
    section: str
    ours: str
    other: str


def load(name: str, directory: Path = RESULTS) -> dict[str, dict[str, Any]]:
    """The measurements of a benchmark."""
    return Result.load(directory / f"{name}.json").units


def mean(units: dict[str, dict[str, Any]], prefix: str, key: str) -> float:
    """The mean of a figure over folds or seeds."""
    values = [unit[key] for name, unit in units.items() if name.startswith(prefix + "/")]
    return statistics.mean(values)


def best(
    units: dict[str, dict[str, Any]], prefix: str, names: tuple[str, ...]
) -> tuple[str, float]:
    """The rival with the lowest test NLPD."""
    figures = {name: mean(units, f"{prefix}/{name}", "nlpd") for name in names}
    name = min(figures, key=figures.__getitem__)
    return name, figures[name]


def rows() -> list[Row]:
    """The table."""
    return [*_streams(), _digits(), _update(), _fantasies(), _loop(), _survey(), _failures()]


def _streams() -> list[Row]:
    units = load("uci")
    result = []
    for what, name in (("Bike sharing", "bike"), ("Adult income", "adult_ref")):
        rival, figure = best(units, f"sorted/{name}", ("Bui et al.", "OVC", "Csato & Opper"))
        ours, offline = (mean(units, f"sorted/{name}/{w}", "nlpd") for w in ("ours", "offline"))
        result.append(
            Row(
                f"{what}, in 50 batches seen once: test NLPD",
                "streams-of-six-data-sets",
                f"{ours:.3f}",
                f"{rival} {figure:.3f}, all data at once {offline:.3f}",
            )
        )
    return result


def _digits() -> Row:
    units = load("splitmnist")
    ours, rival, offline = (
        mean(units, f"mnist/{way}", "accuracy") for way in ("ours", "VAR-GP", "offline")
    )
    return Row(
        "MNIST, two new classes at a time: accuracy on all ten",
        "digits-in-tasks-of-two",
        f"{ours:.3f}",
        f"VAR-GP {rival:.3f}, all data at once {offline:.3f}",
    )


def _update() -> Row:
    unit = load("update")["time/bernoulli/m=100/n=1000000"]
    return Row(
        "500 more labels after a million: seconds at fixed hyperparameters",
        "one-update-as-the-past-grows",
        f"{unit['condition']:.2f}",
        f"learning all again {unit['refit']:.0f}",
    )


def _fantasies() -> Row:
    unit = load("fantasies")["gaussian/m=100/q=1"]["milliseconds"]
    return Row(
        "1,024 fantasies, 100 inducing points: milliseconds",
        "fantasies",
        f"{unit['ours']:.0f}",
        f"GPyTorch's OVC {unit['ovc']:,.0f}",
    )


def _loop() -> Row:
    units = load("botorch_loop")

    def figures(way: str) -> str:
        runs = [unit for key, unit in units.items() if key.startswith(f"{way}/")]
        regret = statistics.median(run["regret"][-1] for run in runs)
        seconds = statistics.median(run["model_seconds"] for run in runs)
        return f"{seconds:.0f} s ({regret:.3f})"

    return Row(
        "Hartmann6, 200 evaluations: time spent on the model (median regret)",
        "a-loop-of-bayesian-optimisation",
        figures("condition"),
        f"`SingleTaskGP` refitted each step {figures('exact')}",
    )


def _survey() -> Row:
    units = load("hotspots")

    def error(way: str) -> float:
        runs = [unit["mse"][99] for key, unit in units.items() if key.startswith(f"{way}/")]
        return statistics.mean(runs)

    return Row(
        "Which village to survey next: MSE of prevalence after 99 surveys",
        "which-village-to-survey-next",
        f"{error('ours'):.4f}",
        f"OVC {error('ovc'):.4f}, random choice {error('random'):.4f}",
    )


def _failures() -> Row:
    from benchmarks.ax import regret  # which needs Ax

    units = load("ax")

    def median(way: str) -> float:
        runs = [u["values"] for key, u in units.items() if key.startswith(f"regret/Gramacy/{way}/")]
        return statistics.median(float(regret("Gramacy", values)[-1]) for values in runs)

    return Row(
        "Ax with failing trials (Gramacy, 30 trials): median regret",
        "ax",
        f"{median('ours'):.3f}",
        f"Ax's default, failures given the worst value {median('penalised'):.3f}",
    )


def render() -> str:
    """The table in Markdown."""
    lines = ["| what was measured | seqgp | alternatives |", "|---|---|---|"]
    lines += [
        f"| [{row.what}](docs/benchmarks.md#{row.section}) | {row.ours} | {row.other} |"
        for row in rows()
    ]
    return "\n".join(lines)


def replace_block(path: Path, start: str, text: str) -> None:
    """Replace what is between a comment and the next ``<!-- end -->``.

    Args:
        path: A page.
        start: The comment.
        text: What is to be there.
    """
    before, found, rest = path.read_text().partition(start)
    if not found:
        raise ValueError(f"{path} has no line {start!r}, below which a table is to be written.")
    path.write_text(f"{before}{start}\n{text}\n{END}{rest.partition(END)[2]}")


def main() -> None:
    """Write the table into the README."""
    replace_block(Path(__file__).parent.parent / "README.md", START, render())


if __name__ == "__main__":
    main()
