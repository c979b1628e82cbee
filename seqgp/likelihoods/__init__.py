"""Likelihoods that GPyTorch does not have, and functions of any likelihood.

* `discrete`: binomial, overdispersed binomial and ordinal likelihoods; `psychometric`: labels with
  guess and lapse rates; `continuous`: positive and censored numbers; `heteroscedastic`: noise that
  varies with the inputs; `ties`, `choices` and `ratings`: what people say of items;
* `traits`: whether a likelihood is conjugate, log-concave, or of one latent function;
* `expectations`: expected log probabilities and their derivatives; `softmax` has those of softmax
  likelihoods, `quadrature` the nodes and weights;
* `predictive`: log predictive densities, and moments of observations.
"""

from seqgp.likelihoods import softmax as _softmax  # registers its rules  # noqa: F401
from seqgp.likelihoods.by_task import GaussianTaskLikelihood, TaskLikelihood
from seqgp.likelihoods.choices import ChoiceLikelihood
from seqgp.likelihoods.continuous import CensoredGaussianLikelihood, GammaLikelihood
from seqgp.likelihoods.discrete import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.likelihoods.expectations import expectations, expected_log_prob
from seqgp.likelihoods.heteroscedastic import HeteroscedasticGaussianLikelihood
from seqgp.likelihoods.predictive import log_predictive
from seqgp.likelihoods.psychometric import PsychometricLikelihood
from seqgp.likelihoods.ratings import RatingLikelihood
from seqgp.likelihoods.ties import TieLikelihood

__all__ = [
    "BinomialLikelihood",
    "CensoredGaussianLikelihood",
    "ChoiceLikelihood",
    "GammaLikelihood",
    "GaussianTaskLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "OrdinalLikelihood",
    "OverdispersedBinomialLikelihood",
    "PsychometricLikelihood",
    "RatingLikelihood",
    "TaskLikelihood",
    "TieLikelihood",
    "expectations",
    "expected_log_prob",
    "log_predictive",
]
