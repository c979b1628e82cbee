"""Models whose observations several processes share, and models that hold them all."""

from __future__ import annotations

import copy
from typing import TypeVar

import torch
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.models.protocol import DataModel
from seqgp.streaming.state import Shard, StreamState

Model = TypeVar("Model", bound=DataModel)


def gathered(model: Model) -> Model:
    """A copy that holds the observations of all ranks, and belongs to this process alone.

    Args:
        model: The model.
    """
    ranks = model.variational_strategy.ranks
    with ranks.together():
        copied = _copy(model, ALONE, model.stream.whole())
        ranks.agree()
    return copied


def scattered(model: Model, process_group: torch.distributed.ProcessGroup) -> Model:
    """A copy that shares its observations evenly with other processes.

    Args:
        model: The model, the same on all ranks.
        process_group: The processes.
    """
    model.check_not_fantasy()
    if not model.variational_strategy.ranks.alone:
        raise ValueError("process_group: this model has one already; use gathered() first.")
    ranks = Ranks(process_group)
    with ranks.together():
        copied = _copy(model, ranks, model.stream.split(ranks))
        ranks.agree()
    return copied


def _copy(model: Model, ranks: Ranks, stream: StreamState) -> Model:
    copied = copy.deepcopy(model)
    copied.stream = stream
    copied.variational_strategy.set_ranks(ranks)
    return copied


def with_graph(inputs: Tensor, own: Tensor, shard: Shard) -> Tensor:
    """Inputs of all ranks, of which those of this one have a graph, for a bound that is shared.

    Args:
        inputs: ``... x n x d``, those of all ranks in the order of their positions.
        own: ``... x k x d``, those of this one.
        shard: Which these are.
    """
    rows = own.detach() + shard.ranks.size * (own - own.detach())
    return inputs.index_copy(-2, shard.position, rows)
