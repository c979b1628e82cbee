"""Attributes of Ax that we need and that have no public name.

All of them are read here and nowhere else, so that there is one place to look at when a new version
of Ax changes them. Checked with Ax 1.3.1.
"""

from __future__ import annotations

from typing import Any

from ax.adapter.base import Adapter
from ax.api.client import Client
from ax.core.experiment import Experiment
from ax.core.optimization_config import OptimizationConfig
from ax.generators.torch.botorch_modular.surrogate import Surrogate


def experiment_of(owner: Adapter | Client) -> Experiment:
    """The experiment of an adapter or a client. Ax's own transforms read it in the same way."""
    return owner._experiment  # noqa: SLF001


def optimization_config_of(adapter: Adapter) -> OptimizationConfig | None:
    """The optimization config that an adapter was made with."""
    return adapter._optimization_config  # noqa: SLF001


def adapter_of(client: Client) -> Adapter | None:
    """The adapter that made the last trial; ``None`` before the first one."""
    return client._generation_strategy.adapter  # noqa: SLF001


def previous_models_of(surrogate: Surrogate) -> dict[tuple[str, ...], Any]:
    """The models that a surrogate fitted last, by the names of their metrics.

    Empty if this version of Ax does not keep them: then models are fitted from scratch.
    """
    models = getattr(surrogate, "_submodels", {})
    return models if isinstance(models, dict) else {}
