"""Acquisition functions."""

from seqgp.acquisition.fantasy_batch import (
    Fantasies,
    FantasyBatch,
    fantasy_batch,
    fantasy_outcome,
    valid_improvement,
)
from seqgp.acquisition.integrated_variance import qNegIntegratedPosteriorVariance
from seqgp.acquisition.uncertainty import exceedance, prevalence
from seqgp.acquisition.uncertainty_reduction import (
    Selection,
    expected_reduction,
    qExpectedUncertaintyReduction,
    select_from_pool,
)
from seqgp.acquisition.validity import (
    LogValidExpectedImprovement,
    NoValidObservationWarning,
    best_valid,
    log_validity,
    qLogValidExpectedImprovement,
)

__all__ = [
    "Fantasies",
    "FantasyBatch",
    "LogValidExpectedImprovement",
    "NoValidObservationWarning",
    "Selection",
    "best_valid",
    "exceedance",
    "expected_reduction",
    "fantasy_batch",
    "fantasy_outcome",
    "log_validity",
    "prevalence",
    "qExpectedUncertaintyReduction",
    "qLogValidExpectedImprovement",
    "qNegIntegratedPosteriorVariance",
    "select_from_pool",
    "valid_improvement",
]
