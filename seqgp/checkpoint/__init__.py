"""Checkpoints: models on disk, with all that their streams need to go on."""

from seqgp.checkpoint.files import load, load_extra, save
from seqgp.checkpoint.registry import register

__all__ = ["load", "load_extra", "register", "save"]
