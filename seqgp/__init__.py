"""seqgp: sparse Gaussian processes that learn from a stream, for any likelihood."""

import importlib
from typing import TYPE_CHECKING, Any

from seqgp import plots
from seqgp._version import __version__
from seqgp.checkpoint import load, save
from seqgp.likelihoods import (
    BinomialLikelihood,
    OrdinalLikelihood,
    OverdispersedBinomialLikelihood,
)
from seqgp.models import SequentialGP
from seqgp.variational import DualELBO, DualVariationalStrategy

if TYPE_CHECKING:
    from seqgp import acquisition as acquisition
    from seqgp import ax as ax
    from seqgp import batch_optimizer as batch_optimizer
    from seqgp import kernel_scales as kernel_scales
    from seqgp import simulated_survey as simulated_survey
else:

    def __getattr__(name: str) -> Any:
        """Modules that are imported when they are first asked for: not everyone needs them."""
        if name in ("acquisition", "ax", "batch_optimizer", "kernel_scales", "simulated_survey"):
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
