"""Learning from a stream: updates, the memory, and inducing points that follow the data."""

from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.update import UpdateRecord

__all__ = ["MemoryOptions", "UpdateRecord"]
