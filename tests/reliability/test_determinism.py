"""The same calls give the same bits, whatever else the process does."""

from __future__ import annotations

import random
import threading

import numpy as np
import pytest
import torch
from gpytorch.likelihoods import BernoulliLikelihood

from seqgp import SequentialGP
from tests.helpers import latent, make_inputs
from tests.reliability.interrupts import is_same, snapshot

pytestmark = pytest.mark.usefixtures("float64")


def stream(offset: float = 0.0) -> SequentialGP:
    """Learns hyperparameters and chooses what to remember."""
    X = make_inputs(40, 2)
    Y = (latent(X) > 1 + offset).double().unsqueeze(-1)
    likelihood = BernoulliLikelihood()
    model = SequentialGP(X[:20], Y[:20], likelihood=likelihood, inducing_points=6)
    for part in (slice(20, 30), slice(30, 40)):
        model.update(X[part], Y[part], steps=2, memory=8)
    return model


def test_global_random_numbers_do_not_matter() -> None:
    """Nor are they used up."""
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
        results.append(snapshot(stream()))
        assert torch.equal(before[0], torch.get_rng_state())
        assert (before[1] == np.random.get_state()[1]).all()  # noqa: NPY002
        assert before[2] == random.getstate()
    assert is_same(*results)


def test_models_of_different_threads_do_not_disturb_each_other() -> None:
    offsets = [0.0, 0.1, 0.2]
    expected = [snapshot(stream(offset)) for offset in offsets]
    models: dict[float, SequentialGP] = {}

    def learn(offset: float) -> None:
        torch.set_default_dtype(torch.float64)
        models[offset] = stream(offset)

    threads = [threading.Thread(target=learn, args=(offset,)) for offset in offsets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(models) == 3
    for offset, snapshot_alone in zip(offsets, expected, strict=True):
        assert is_same(snapshot(models[offset]), snapshot_alone)
