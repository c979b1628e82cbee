"""seqgp: sparse Gaussian processes that learn from a stream, for any likelihood."""

from seqgp._version import __version__
from seqgp.likelihoods import BinomialLikelihood, OrdinalLikelihood
from seqgp.objectives import DualELBO
from seqgp.variational import DualVariationalStrategy

__all__ = [
    "BinomialLikelihood",
    "DualELBO",
    "DualVariationalStrategy",
    "OrdinalLikelihood",
    "__version__",
]
