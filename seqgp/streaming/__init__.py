"""Learning from a stream: updates, the memory, and inducing points that follow the data."""

# First, because models and updates import each other: this order works from either side.
from seqgp import models as _models  # noqa: F401
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.update import UpdateRecord

__all__ = ["MemoryOptions", "UpdateRecord"]
