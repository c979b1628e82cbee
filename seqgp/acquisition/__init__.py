"""Acquisition functions."""

from seqgp.acquisition.active_learning import qNegIntegratedPosteriorVariance

__all__ = ["qNegIntegratedPosteriorVariance"]
