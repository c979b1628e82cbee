"""The GPyTorch interface: a variational strategy that stores duals, and its bound."""

from seqgp.variational.elbo import DualELBO
from seqgp.variational.ngd import DualNGD
from seqgp.variational.strategy import DualVariationalStrategy

__all__ = ["DualELBO", "DualNGD", "DualVariationalStrategy"]
