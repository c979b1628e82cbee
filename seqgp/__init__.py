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
    from seqgp import duel_optimizer as duel_optimizer
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
    from seqgp.likelihoods import CensoredGaussianLikelihood as CensoredGaussianLikelihood
    from seqgp.likelihoods import ChoiceLikelihood as ChoiceLikelihood
    from seqgp.likelihoods import GammaLikelihood as GammaLikelihood
    from seqgp.likelihoods import (
        HeteroscedasticGaussianLikelihood as HeteroscedasticGaussianLikelihood,
    )
    from seqgp.likelihoods import OrdinalLikelihood as OrdinalLikelihood
    from seqgp.likelihoods import (
        OverdispersedBinomialLikelihood as OverdispersedBinomialLikelihood,
    )
    from seqgp.likelihoods import PsychometricLikelihood as PsychometricLikelihood
    from seqgp.likelihoods import RatingLikelihood as RatingLikelihood
    from seqgp.likelihoods import TieLikelihood as TieLikelihood
    from seqgp.merging import merge as merge
    from seqgp.models import PreferenceGP as PreferenceGP
    from seqgp.models import SequentialGP as SequentialGP
    from seqgp.models import SequentialMultiTaskGP as SequentialMultiTaskGP
    from seqgp.out_of_core import fit_batches as fit_batches
    from seqgp.out_of_core import from_batches as from_batches
    from seqgp.variational import DualELBO as DualELBO
    from seqgp.variational import DualNGD as DualNGD
    from seqgp.variational import DualVariationalStrategy as DualVariationalStrategy

__all__ = [
    "BinomialLikelihood",
    "CensoredGaussianLikelihood",
    "ChoiceLikelihood",
    "DualELBO",
    "DualNGD",
    "DualVariationalStrategy",
    "GammaLikelihood",
    "HeteroscedasticGaussianLikelihood",
    "OrdinalLikelihood",
    "OverdispersedBinomialLikelihood",
    "PreferenceGP",
    "PsychometricLikelihood",
    "RatingLikelihood",
    "SequentialGP",
    "SequentialMultiTaskGP",
    "TieLikelihood",
    "__version__",
    "fit_batches",
    "from_batches",
    "load",
    "merge",
    "plots",
    "save",
]

#: Names, and the modules that they are imported from.
_OBJECTS = {
    "BinomialLikelihood": "seqgp.likelihoods",
    "CensoredGaussianLikelihood": "seqgp.likelihoods",
    "ChoiceLikelihood": "seqgp.likelihoods",
    "DualELBO": "seqgp.variational",
    "DualNGD": "seqgp.variational",
    "DualVariationalStrategy": "seqgp.variational",
    "GammaLikelihood": "seqgp.likelihoods",
    "HeteroscedasticGaussianLikelihood": "seqgp.likelihoods",
    "OrdinalLikelihood": "seqgp.likelihoods",
    "OverdispersedBinomialLikelihood": "seqgp.likelihoods",
    "PsychometricLikelihood": "seqgp.likelihoods",
    "PreferenceGP": "seqgp.models",
    "SequentialMultiTaskGP": "seqgp.models",
    "RatingLikelihood": "seqgp.likelihoods",
    "TieLikelihood": "seqgp.likelihoods",
    "SequentialGP": "seqgp.models",
    "fit_batches": "seqgp.out_of_core",
    "from_batches": "seqgp.out_of_core",
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
    "duel_optimizer",
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
