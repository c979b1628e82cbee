"""seqgp: sparse Gaussian processes that learn from a stream, for any likelihood."""

from seqgp import pathwise as _pathwise  # registers BoTorch's pathwise samplers  # noqa: F401
from seqgp import plots
from seqgp._version import __version__
from seqgp.checkpoint import load, save
from seqgp.likelihoods import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.model import SequentialGP
from seqgp.objectives import DualELBO
from seqgp.variational import DualVariationalStrategy

__all__ = [
    "BinomialLikelihood",
    "DualELBO",
    "DualVariationalStrategy",
    "OrdinalLikelihood",
    "OverdispersedBinomialLikelihood",
    "SequentialGP",
    "__version__",
    "load",
    "plots",
    "save",
]
