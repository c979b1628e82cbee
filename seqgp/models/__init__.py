"""The BoTorch interface: models, their posteriors, and how they are fitted."""

from seqgp.models import pathwise as _pathwise  # registers BoTorch's samplers  # noqa: F401
from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.preference_gp import PreferenceGP
from seqgp.models.sequential_gp import SequentialGP

__all__ = ["PreferenceGP", "SequentialGP", "SequentialMultiTaskGP"]
