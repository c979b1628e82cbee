"""The command line: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks import BENCHMARKS, headlines
from benchmarks.freshness import Freshness, freshness
from benchmarks.runner import Options, Result, run

RESULTS = Path(__file__).parent / "results"
PAGE = Path(__file__).parent.parent / "docs" / "benchmarks.md"
START = "<!-- how current: python -m benchmarks report -->"
#: Benchmarks whose whole table is on that page, below a comment of its own.
ON_PAGE = ("attack", "levelsets")


def parser() -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    width = max(map(len, [*BENCHMARKS, "report"]))
    lines = {name: entry.description for name, entry in BENCHMARKS.items()}
    lines["report"] = "render all pages that show results, and mark what is outdated"
    result = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="benchmarks:\n"
        + "\n".join(f"  {name:{width}}  {line}" for name, line in lines.items()),
        epilog="What has been measured is kept and skipped: an interrupted run goes on.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    result.add_argument("name", metavar="NAME", choices=lines, help="one of the above")
    result.add_argument("--quick", action="store_true", help="a smoke run, into NAME-quick.json")
    repeats = result.add_mutually_exclusive_group()
    repeats.add_argument("--seeds", type=int, metavar="N", help="how many random seeds")
    repeats.add_argument("--folds", type=int, metavar="N", help="how many folds")
    result.add_argument(
        "--against", metavar="PATH_OR_REVISION", help="regression: what to compare this tree with"
    )
    result.add_argument(
        "--strict", action="store_true", help="report: fail if anything is outdated"
    )
    result.add_argument("--only", metavar="GLOB", help="measure only what matches, e.g. 'memory/*'")
    result.add_argument("--fresh", action="store_true", help="forget what was measured before")
    result.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where results go")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark, or render the report."""
    cli = parser()
    given = cli.parse_args(arguments)
    if given.name == "report":
        states = report(given.out)
        outdated = [name for name, state in states.items() if not state]
        print(f"rendered {', '.join(states)}; outdated: {', '.join(outdated) or 'none'}")
        if outdated and given.strict:
            raise SystemExit(1)
        return
    entry = BENCHMARKS[given.name]
    if getattr(given, {"seeds": "folds", "folds": "seeds"}[entry.repeats]) is not None:
        cli.error(f"{given.name} is repeated over {entry.repeats}: use --{entry.repeats} N")
    if given.against is not None and given.name != "regression":
        cli.error(f"{given.name} compares with no other revision: --against is for regression")
    module = importlib.import_module(f"benchmarks.{given.name}")
    options = Options(given.quick, getattr(given, entry.repeats), given.against)
    settings, units = module.units(options)
    path = given.out / f"{given.name}{'-quick' * given.quick}.json"
    result = run(given.name, settings, units, path, fresh=given.fresh, only=given.only)
    print(f"{module.render(result.units, given.out)}\n\nwrote {path}")


def report(directory: Path) -> dict[str, Freshness]:
    """Render every full result in ``directory`` into ``README.md``, and say how current it is.

    If the directory is that of the committed results, the pages that quote them are rendered, too:
    the headlines in the README, and in ``docs/benchmarks.md`` the table that says which sections
    are of the present code, and those of `ON_PAGE`.

    Args:
        directory: Where the results are.

    Returns:
        How current each result is, by benchmark.
    """
    parts = [
        "# Results",
        "Made by `python -m benchmarks report`. Machines differ and are shared: times mean "
        "something as ratios within one run. Measurements that were made before code that they "
        "use was changed are marked as outdated.",
    ]
    states = {}
    for name, entry in BENCHMARKS.items():
        path = directory / f"{name}.json"
        if not path.exists():
            continue
        result = Result.load(path)
        states[name] = freshness(result)
        module = importlib.import_module(f"benchmarks.{name}")
        parts += [
            f"## {name}: {entry.description}",
            module.render(result.units, directory),
            f"{result.provenance()} (`python -m benchmarks {name}`)",
            str(states[name]),
        ]
    (directory / "README.md").write_text("\n\n".join(parts) + "\n")
    if directory == RESULTS:
        headlines.main()
        headlines.replace_block(PAGE, START, table(states))
        for name in ON_PAGE:
            headlines.replace_block(PAGE, comment_of(name), whole_table(name, directory))
    return states


def comment_of(name: str) -> str:
    """The comment below which the table of a benchmark is written."""
    return f"<!-- {name}: python -m benchmarks report -->"


def whole_table(name: str, directory: Path = RESULTS) -> str:
    """The table of a benchmark, and where it comes from."""
    result = Result.load(directory / f"{name}.json")
    text = importlib.import_module(f"benchmarks.{name}").render(result.units, directory)
    return f"{text}\n\n{result.provenance()}"


def table(states: dict[str, Freshness]) -> str:
    """Which benchmarks are of the present code, as Markdown."""
    lines = ["| benchmark | of the present code | outdated | unknown |", "|---|---|---|---|"]
    lines += [
        f"| `{name}` | {state.current} | {sum(state.outdated.values())} | {state.unknown} |"
        for name, state in states.items()
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
