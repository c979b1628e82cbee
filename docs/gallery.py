"""How tutorials become pages of the site."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from sphinx_gallery.scrapers import figure_rst

#: Tutorials in the order of the gallery.
TUTORIALS = (
    *("robot", "banana", "drift", "stream", "digits", "checkpoints", "shared_map"),
    *("hotspots", "threshold", "preferences", "failures", "ax_experiment"),
)


class ByIndex:
    """Sorts tutorials as they are listed above.

    Args:
        directory: The directory of the tutorials.
    """

    def __init__(self, directory: str) -> None:
        self.directory = directory

    def __call__(self, filename: str) -> int:
        """The place of a tutorial; modules that tutorials share come last, and are left out."""
        name = Path(filename).stem
        return TUTORIALS.index(name) if name in TUTORIALS else len(TUTORIALS)


def figures_of_tutorial(block: Any, variables: Any, configuration: Any) -> str:
    """Move the figures that a block of a tutorial has saved to the page of that tutorial.

    Each figure has the width of the page. (Several at once would be thumbnails, side by side.)

    Args:
        block: The block.
        variables: Sphinx-Gallery's variables of the block.
        configuration: Sphinx-Gallery's configuration.
    """
    saved = sorted(Path("figures").glob("*.png"), key=lambda path: path.stat().st_mtime)
    targets = [next(variables["image_path_iterator"]) for _ in saved]
    for source, target in zip(saved, targets, strict=True):
        shutil.move(source, target)
    return "".join(figure_rst([target], configuration["src_dir"]) for target in targets)


def short_run(configuration: Any, script: Any) -> list[str]:
    """Options of a tutorial while the site is built."""
    return ["--short", "--quiet"]
