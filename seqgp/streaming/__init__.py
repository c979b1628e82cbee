"""Learning from a stream: updates, the memory, and inducing points that follow the data.

Users can replace three parts, each with a small base class: `MemoryPolicy` (which observations to
keep), `InducingPointRule` (where the inducing points are) and `UpdateRule` (how a batch is learnt).
"""

from seqgp.streaming.inducing_points import (
    AllInputs,
    Cluster,
    Exchange,
    InducingPointRule,
    Keep,
)
from seqgp.streaming.memory import MemoryOptions, MemoryPolicy
from seqgp.streaming.options import UpdateOptions
from seqgp.streaming.paper import PaperRule
from seqgp.streaming.rules import PseudoLikelihood, UpdateRule
from seqgp.streaming.state import StreamState
from seqgp.streaming.update import Remembered, UpdateRecord

__all__ = [
    "AllInputs",
    "Cluster",
    "Exchange",
    "InducingPointRule",
    "Keep",
    "MemoryOptions",
    "MemoryPolicy",
    "PaperRule",
    "PseudoLikelihood",
    "Remembered",
    "StreamState",
    "UpdateOptions",
    "UpdateRecord",
    "UpdateRule",
]
