"""A plugin for pytest that runs BoTorch's own tests with `SequentialGP` in place of its classes.

In a checkout of BoTorch, at the tag of the version that is installed and without its package, so
that the installed one is imported::

    PYTHONPATH=<this repository> python -m pytest -p tests.contract.swapped test

BoTorch's own subclasses and functions keep the class that they have, and ``isinstance`` with the
swapped name accepts both. ``SWAP=SingleTaskGP`` swaps only that one.
"""

from __future__ import annotations

import importlib
import os
import pkgutil
import warnings
from typing import Any

import botorch.models
from botorch.models import SingleTaskGP, SingleTaskVariationalGP, approximate_gp, gp_regression

from seqgp import SequentialGP


def in_place_of(theirs: type) -> type:
    """`SequentialGP` under a name of its own, of which instances of another class are, too."""

    class Either(type(SequentialGP)):  # type: ignore[misc]
        def __instancecheck__(cls, instance: Any) -> bool:
            return type.__instancecheck__(cls, instance) or type.__instancecheck__(theirs, instance)

    return Either(SequentialGP.__name__, (SequentialGP,), {"__module__": __name__})


def swap(names: list[str]) -> None:
    """Replace classes where tests import them from, once all that needs them has been imported."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module in pkgutil.walk_packages(botorch.__path__, "botorch."):
            try:
                importlib.import_module(module.name)
            except ImportError:  # for want of JAX
                continue
    homes = {gp_regression: SingleTaskGP, approximate_gp: SingleTaskVariationalGP}
    for home, theirs in homes.items():
        if theirs.__name__ in names:
            ours = in_place_of(theirs)
            for namespace in (home, botorch.models):
                setattr(namespace, theirs.__name__, ours)


def pytest_configure() -> None:
    """Swap when pytest loads this as a plugin, and not when something imports it."""
    swap(os.environ.get("SWAP", "SingleTaskGP,SingleTaskVariationalGP").split(","))
