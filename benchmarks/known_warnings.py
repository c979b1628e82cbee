"""Warnings that benchmarks expect, from rivals and from runs that are cut short."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from botorch.exceptions.warnings import (
    BadInitialCandidatesWarning,
    InputDataWarning,
    NumericsWarning,
    OptimizationWarning,
)
from linear_operator.utils.warnings import NumericalWarning


@contextmanager
def known_warnings() -> Iterator[None]:
    """Suppress the warnings that say nothing new; all others are shown."""
    with warnings.catch_warnings():
        # Sites that have not converged after the steps they are given, and jitter.
        warnings.simplefilter("ignore", NumericalWarning)
        # Data of the first batches of a stream, and of benchmarks that are not standardized.
        warnings.simplefilter("ignore", InputDataWarning)
        # Acquisition functions that are flat, and optimisers that stop early.
        for category in (BadInitialCandidatesWarning, NumericsWarning, OptimizationWarning):
            warnings.simplefilter("ignore", category)
        warnings.filterwarnings("ignore", "Optimization failed", RuntimeWarning)
        yield
