"""Acquisition functions."""

from seqgp.acquisition.active_learning import qNegIntegratedPosteriorVariance
from seqgp.acquisition.fantasies import (
    Fantasies,
    FantasyBatch,
    fantasy_batch,
    fantasy_outcome,
    valid_improvement,
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
    "best_valid",
    "fantasy_batch",
    "fantasy_outcome",
    "log_validity",
    "qLogValidExpectedImprovement",
    "qNegIntegratedPosteriorVariance",
    "valid_improvement",
]
