"""seqgp: sparse Gaussian processes that learn from a stream, for any likelihood.

Everything below is imported when it is first used, so that ``import seqgp`` takes no longer than
``import botorch``.
"""

import importlib
from typing import TYPE_CHECKING, Any

# BoTorch changes numerical settings of GPyTorch when it is imported. Import it first, so that
# results do not depend on which part of seqgp is used first.
import botorch as _botorch  # noqa: F401

from seqgp._version import __version__

if TYPE_CHECKING:
    from seqgp import acquisition as acquisition
    from seqgp import active_learner as active_learner
    from seqgp import ax as ax
    from seqgp import batch_optimizer as batch_optimizer
    from seqgp import checkpoint as checkpoint
    from seqgp import dual as dual
    from seqgp import kernel_scales as kernel_scales
    from seqgp import likelihoods as likelihoods
    from seqgp import models as models
    from seqgp import plots as plots
    from seqgp import simulated_survey as simulated_survey
    from seqgp import streaming as streaming
    from seqgp import variational as variational
    from seqgp.checkpoint import load as load
    from seqgp.checkpoint import save as save
    from seqgp.likelihoods import BinomialLikelihood as BinomialLikelihood
    from seqgp.likelihoods import OrdinalLikelihood as OrdinalLikelihood
    from seqgp.likelihoods import (
        OverdispersedBinomialLikelihood as OverdispersedBinomialLikelihood,
    )
    from seqgp.merging import merge as merge
    from seqgp.models import PreferenceGP as PreferenceGP
    from seqgp.models import SequentialGP as SequentialGP
    from seqgp.variational import DualELBO as DualELBO
    from seqgp.variational import DualNGD as DualNGD
    from seqgp.variational import DualVariationalStrategy as DualVariationalStrategy

__all__ = [
    "BinomialLikelihood",
    "DualELBO",
    "DualNGD",
    "DualVariationalStrategy",
    "OrdinalLikelihood",
    "OverdispersedBinomialLikelihood",
    "PreferenceGP",
    "SequentialGP",
    "__version__",
    "load",
    "merge",
    "plots",
    "save",
]

#: Names, and the modules that they are imported from.
_OBJECTS = {
    "BinomialLikelihood": "seqgp.likelihoods",
    "DualELBO": "seqgp.variational",
    "DualNGD": "seqgp.variational",
    "DualVariationalStrategy": "seqgp.variational",
    "OrdinalLikelihood": "seqgp.likelihoods",
    "OverdispersedBinomialLikelihood": "seqgp.likelihoods",
    "PreferenceGP": "seqgp.models",
    "SequentialGP": "seqgp.models",
    "load": "seqgp.checkpoint",
    "merge": "seqgp.merging",
    "save": "seqgp.checkpoint",
}

_MODULES = (
    "acquisition",
    "active_learner",
    "ax",
    "batch_optimizer",
    "checkpoint",
    "dual",
    "kernel_scales",
    "likelihoods",
    "models",
    "plots",
    "simulated_survey",
    "streaming",
    "variational",
)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Import what is asked for, and keep it."""
        if name in _MODULES:
            return importlib.import_module(f"seqgp.{name}")
        if name in _OBJECTS:
            value = getattr(importlib.import_module(_OBJECTS[name]), name)
            globals()[name] = value
            return value
        raise AttributeError(f"module 'seqgp' has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_MODULES})
