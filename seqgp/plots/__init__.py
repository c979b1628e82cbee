"""Plots of a model: its posterior, the history of its stream, and the leverage of its memory.

The *memory* holds the observations that the model keeps as they are; *Bayesian leverage* measures
how much an observation determines the posterior. Plots need matplotlib
(``pip install "seqgp[plots]"``), which is imported when a plot is made. Each function draws into
given axes or a new figure, and returns the axes.
"""

from seqgp.plots.posterior_plot import posterior
from seqgp.plots.stream_plots import history, leverage

__all__ = ["history", "leverage", "posterior"]
