"""Likelihoods: those that GPyTorch lacks, and what this library needs to know of any.

* `discrete`: binomial, overdispersed binomial and ordinal likelihoods;
* `traits`: is it conjugate, log-concave, of one latent function?
* `expectations`: expected log probabilities and their derivatives; `softmax` has those of a choice
  between classes, `quadrature` the nodes and weights that all of them share;
* `predictive`: log predictive densities.
"""

from seqgp.likelihoods import softmax as _softmax  # registers its rules  # noqa: F401
from seqgp.likelihoods.discrete import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.likelihoods.expectations import expectations, expected_log_prob
from seqgp.likelihoods.predictive import log_predictive

__all__ = [
    "BinomialLikelihood",
    "OrdinalLikelihood",
    "OverdispersedBinomialLikelihood",
    "expectations",
    "expected_log_prob",
    "log_predictive",
]
