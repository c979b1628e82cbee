"""Tutorials: scripts that can be read from top to bottom, and run."""
