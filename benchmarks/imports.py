"""Imports of a source file from a package, determined without running it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path


def module_files(root: Path) -> dict[str, Path]:
    """Names of a package's modules, as in ``import a.b``, and their files."""
    return {
        ".".join((root.name, *path.relative_to(root).with_suffix("").parts)).removesuffix(
            ".__init__"
        ): path
        for path in sorted(root.rglob("*.py"))
    }


def import_statements(source: str, package: str) -> Iterator[tuple[str, list[str]]]:
    """Modules that a source imports, wherever it does, and the names taken from each.

    Args:
        source: Python source.
        package: The package that relative imports start from.
    """
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, []) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package.split(".")[: len(package.split(".")) + 1 - node.level]
            module = ".".join([*base, *filter(None, [node.module])]) if node.level else node.module
            assert module is not None  # only relative imports have none
            yield module, [alias.name for alias in node.names]
        # Names that are put together when the code runs are not seen; only the top has some.
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from ((name.value, []) for name in node.args if isinstance(name, ast.Constant))
