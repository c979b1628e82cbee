"""Learning from a stream: updates, the memory, and inducing points that follow the data.

The parts that users can exchange are objects with a small base: `MemoryPolicy` (what to remember),
`InducingPointRule` (where the inducing points go) and `UpdateRule` (how a batch is learnt).
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
