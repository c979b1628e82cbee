"""Checkpoints: models on disk, with everything that their streams need to continue."""

from seqgp.checkpoint.contents import load, load_extra, save
from seqgp.checkpoint.registry import register
from seqgp.checkpoint.storage import CheckpointError

__all__ = ["CheckpointError", "load", "load_extra", "register", "save"]
