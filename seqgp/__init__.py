"""seqgp: sparse Gaussian processes that learn from a stream, for any likelihood."""

import importlib
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    from seqgp import acquisition as acquisition
    from seqgp import ax as ax
    from seqgp import datasets as datasets
    from seqgp import kernels as kernels
    from seqgp import loop as loop
else:

    def __getattr__(name: str) -> Any:
        """Modules that are imported when they are first asked for: not everyone needs them."""
        if name in ("acquisition", "ax", "datasets", "kernels", "loop"):
            return importlib.import_module(f"seqgp.{name}")
        raise AttributeError(f"module 'seqgp' has no attribute {name!r}")


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
