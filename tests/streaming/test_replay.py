"""The memory stands for what has been folded where the summary has grown stale, and only there."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood
from torch import Tensor

from seqgp import SequentialGP
from seqgp.streaming.memory import MemoryOptions
from seqgp.streaming.replay import POWERS, choose_replay
from tests.helpers import unscaled

pytestmark = pytest.mark.usefixtures("float64")


def labels(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Classes that overlap: three in ten are 1 on the left, and seven in ten on the right."""
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 1, generator=generator)
    probability = torch.where(X < 0.5, 0.3, 0.7)
    return X, (torch.rand(n, 1, generator=generator) < probability).double()


def learnt(X: Tensor, Y: Tensor, memory: MemoryOptions) -> tuple[SequentialGP, list[float]]:
    """A model of a stream, and its replay after each update."""
    model = SequentialGP(X[:150], Y[:150], likelihood=BernoulliLikelihood(), inducing_points=8)
    replays = []
    for x, y in zip(X[150:].split(150), Y[150:].split(150), strict=True):
        model.update(x, y, memory=memory, steps=5)
        replays.append(model.stream.replay)
    return model, replays


def nlpd(model: SequentialGP) -> float:
    X, Y = labels(2000, 99)
    p = model.posterior(X, observation_noise=True).mean.detach()
    return -float(torch.where(Y > 0, p, 1 - p).log().mean())


@pytest.mark.slow
def test_one_class_after_the_other() -> None:
    """The summary of the first class is stale when the second one has come; the memory is not."""
    X, Y = labels(1500, 0)
    order = Y.squeeze(-1).argsort(stable=True)
    chosen, replays = learnt(X[order], Y[order], MemoryOptions(300))
    fixed, _ = learnt(X[order], Y[order], MemoryOptions(300, replay=0.0))
    assert replays[:3] == [0.0] * 3
    assert replays[-1] == 1
    assert chosen.stream.power in POWERS
    noise = -0.3 * math.log(0.3) - 0.7 * math.log(0.7)
    assert nlpd(chosen) < noise + 0.05 < nlpd(fixed)


def test_streams_of_nothing_new_keep_their_summary() -> None:
    X, Y = labels(750, 1)
    model, replays = learnt(X, Y, MemoryOptions(80))
    assert replays == [0.0] * 4
    given, _ = learnt(X, Y, MemoryOptions(80, replay=0.0))
    torch.testing.assert_close(
        model.posterior(X).mean, given.posterior(X).mean, rtol=1e-5, atol=1e-5
    )


def test_what_is_not_better_changes_nothing() -> None:
    """Candidates leave no trace: neither in the posterior nor in the state of the stream."""
    X, Y = labels(600, 2)
    model, _ = learnt(X, Y, MemoryOptions(80))
    before, stream = model.posterior(X).mean, model.stream
    choose_replay(model, model.num_seen)
    # The bound is that of other observations since the last of them have been folded.
    assert replace(model.stream, bound=stream.bound) == stream
    torch.testing.assert_close(model.posterior(X).mean, before, rtol=1e-6, atol=1e-6)


@unscaled
@pytest.mark.parametrize("likelihood", [None, BernoulliLikelihood()])
def test_a_memory_that_does_not_stand_for_the_stream_is_not_asked(
    likelihood: Likelihood | None,
) -> None:
    X, Y = labels(200, 3)
    order = Y.squeeze(-1).argsort(stable=True)
    model = SequentialGP(X[:40], Y[order][:40], likelihood=likelihood, outcome_transform=None)
    policy = "random" if likelihood is None else "recent"
    for x, y in zip(X[order][40:].split(40), Y[order][40:].split(40), strict=True):
        model.update(x, y, memory=MemoryOptions(20, policy=policy), steps=2)
    assert model.stream.replay == 0
    choose_replay(model, 10 * model.num_seen)
    assert model.stream.replay == 0
