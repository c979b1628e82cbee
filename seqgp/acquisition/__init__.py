"""Acquisition functions."""

from seqgp.acquisition.active_learning import qNegIntegratedPosteriorVariance
from seqgp.acquisition.hotspots import (
    Selection,
    expected_reduction,
    qExpectedUncertaintyReduction,
    select_from_pool,
)
from seqgp.acquisition.uncertainty import exceedance, prevalence

__all__ = [
    "Selection",
    "exceedance",
    "expected_reduction",
    "prevalence",
    "qExpectedUncertaintyReduction",
    "qNegIntegratedPosteriorVariance",
    "select_from_pool",
]
