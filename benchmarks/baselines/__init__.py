"""Rivals, written from their papers, and our own models under the same protocol."""
