"""The command line: ``python -m benchmarks --help``."""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path

from benchmarks import BENCHMARKS
from benchmarks.runner import Options, Result, run

RESULTS = Path(__file__).parent / "results"


def parser() -> argparse.ArgumentParser:
    """The options that all benchmarks share."""
    width = max(map(len, [*BENCHMARKS, "report"]))
    lines = {name: entry.description for name, entry in BENCHMARKS.items()}
    lines["report"] = "render all results in the directory into its README.md"
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
    result.add_argument("--only", metavar="GLOB", help="measure only what matches, e.g. 'memory/*'")
    result.add_argument("--fresh", action="store_true", help="forget what was measured before")
    result.add_argument("--out", type=Path, default=RESULTS, metavar="DIR", help="where results go")
    return result


def main(arguments: list[str] | None = None) -> None:
    """Run one benchmark, or render the report."""
    cli = parser()
    given = cli.parse_args(arguments)
    if given.name == "report":
        print(f"wrote {report(given.out)}")
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


def report(directory: Path) -> Path:
    """Render every full result in ``directory`` into ``README.md``."""
    parts = [
        "# Results",
        "Made by `python -m benchmarks report`. Machines differ and are shared: times mean "
        "something as ratios within one run.",
    ]
    for name, entry in BENCHMARKS.items():
        path = directory / f"{name}.json"
        if not path.exists():
            continue
        result = Result.load(path)
        module = importlib.import_module(f"benchmarks.{name}")
        parts += [
            f"## {name}: {entry.description}",
            module.render(result.units, directory),
            f"{result.provenance()} (`python -m benchmarks {name}`)",
        ]
    path = directory / "README.md"
    path.write_text("\n\n".join(parts) + "\n")
    return path


if __name__ == "__main__":
    main()
