"""Acquisition functions, beyond those of BoTorch.

* `fantasy_batch`: batches from fantasies, for any acquisition function;
* `validity`, `valid_expected_improvement`: expected improvement where evaluations can fail;
* `uncertainty_reduction`, `pool_selection`: active learning, by the expected reduction of an
  uncertainty;
* `integrated_variance`: active learning, by the posterior variance;
* `information_about_best`: which duel tells most about the best item;
* `mixed_space`: inputs with levels, and linear constraints.
"""

from seqgp.acquisition.fantasies import Fantasies, fantasy_outcome
from seqgp.acquisition.fantasy_batch import (
    FantasyBatch,
    by_task,
    fantasy_batch,
    valid_improvement,
)
from seqgp.acquisition.information_about_best import InformationAboutBest
from seqgp.acquisition.integrated_variance import qNegIntegratedPosteriorVariance
from seqgp.acquisition.pool_selection import Selection, select_from_pool
from seqgp.acquisition.uncertainty import exceedance, prevalence
from seqgp.acquisition.uncertainty_reduction import (
    expected_reduction,
    qExpectedUncertaintyReduction,
)
from seqgp.acquisition.valid_expected_improvement import (
    LogValidExpectedImprovement,
    qLogValidExpectedImprovement,
)
from seqgp.acquisition.validity import NoValidObservationWarning, best_valid, log_validity

__all__ = [
    "Fantasies",
    "FantasyBatch",
    "InformationAboutBest",
    "LogValidExpectedImprovement",
    "NoValidObservationWarning",
    "Selection",
    "best_valid",
    "by_task",
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
