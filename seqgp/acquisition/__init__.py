"""Acquisition functions."""

from seqgp.acquisition.active_learning import qNegIntegratedPosteriorVariance
from seqgp.acquisition.fantasies import (
    Fantasies,
    FantasyBatch,
    fantasy_batch,
    fantasy_outcome,
    valid_improvement,
)
from seqgp.acquisition.hotspots import (
    Selection,
    expected_reduction,
    qExpectedUncertaintyReduction,
    select_from_pool,
)
from seqgp.acquisition.uncertainty import exceedance, prevalence
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
