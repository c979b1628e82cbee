"""Inducing points stay on observed values of discrete columns, whatever moves them."""

import pytest
import torch
from botorch.fit import fit_gpytorch_mll
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from hypothesis import example, given, settings
from hypothesis import strategies as st

import seqgp
from seqgp.streaming.inducing_points import Cluster, on_seen_values


def _data(n, seed, levels=(0.0, 0.2, 0.5)):
    generator = torch.Generator().manual_seed(seed)
    X = torch.rand(n, 3, dtype=torch.double, generator=generator)
    index = torch.randint(len(levels), (n,), generator=generator)
    X[:, 1] = torch.tensor(levels, dtype=torch.double)[index]
    Y = torch.sin(5 * X[:, :1]) + 3 * X[:, 1:2] + 0.1 * X[:, 2:]
    return X, Y


def _Z(model):
    return model.variational_strategy.inducing_points.detach()


@settings(max_examples=8, deadline=None)
@given(
    seed=st.integers(0, 1000),
    rules=st.lists(st.sampled_from(["learn", "both", "adapt", "cluster"]), min_size=1, max_size=2),
    k=st.integers(3, 8),
)
@example(seed=1, rules=["learn"], k=5)  # learnt
@example(seed=414, rules=["learn"], k=5)  # undone
def test_updates_keep_inducing_points_on_observed_values(seed, rules, k):
    X, Y = _data(40, seed)
    model = seqgp.SequentialGP(
        X[:20], Y[:20], inducing_points=k, learn_inducing_points=True, discrete_dims=[-2]
    )
    for rule, part in zip(rules, (slice(20, 30), slice(30, 40)), strict=False):
        before = _Z(model).clone()
        record = model.update(X[part], Y[part], inducing=rule, learn=True, steps=3, memory=15)
        assert set(_Z(model)[:, 1].tolist()) <= set(X[:, 1].tolist())
        if rule == "learn":  # the other columns move, unless what was learnt is no better
            undone = record.decision.startswith("kept hyperparameters: ")
            assert torch.equal(_Z(model)[:, 0], before[:, 0]) == undone


def test_weight_decay_moves_the_other_columns_only():
    """A training loop, an update in between, and another loop."""
    X, Y = _data(40, 2)
    model = seqgp.SequentialGP(
        X[:30], Y[:30], inducing_points=X[:6], learn_inducing_points=True, discrete_dims=[1]
    )
    mll = seqgp.DualELBO(model.likelihood, model)
    for _ in range(2):
        before = _Z(model).clone()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.5)
        model.train()
        for _ in range(3):
            optimizer.zero_grad()
            (-mll(model(*model.train_inputs), model.train_targets)).backward()
            optimizer.step()
        model.eval()
        assert torch.equal(_Z(model)[:, 1], before[:, 1])
        assert not torch.equal(_Z(model)[:, 0], before[:, 0])
        model.update(X[30:], Y[30:], learn=True, steps=2)
        assert set(_Z(model)[:, 1].tolist()) <= set(X[:, 1].tolist())


def test_fit_moves_the_other_columns_only():
    X, Y = _data(30, 1)
    Z = X[::4].clone()
    for dims in ([1], []):
        model = seqgp.SequentialGP(
            X, Y, inducing_points=Z, learn_inducing_points=True, discrete_dims=dims
        )
        fit_gpytorch_mll(seqgp.DualELBO(model.likelihood, model))
        assert not torch.equal(_Z(model)[:, [0, 2]], Z[:, [0, 2]])
        assert torch.equal(_Z(model)[:, 1], Z[:, 1]) == bool(dims)


def test_the_gradient_of_the_other_columns_is_unchanged():
    X, Y = _data(25, 2)
    gradients = []
    for dims in ([1], []):
        torch.manual_seed(0)
        model = seqgp.SequentialGP(
            X, Y, inducing_points=X[:6], learn_inducing_points=True, discrete_dims=dims
        )
        model.compute_custom_loss(seqgp.DualELBO(model.likelihood, model)).backward()
        gradients.append(model.variational_strategy.inducing_points.grad)
    assert (gradients[0][:, 1] == 0).all()
    assert (gradients[1][:, 1] != 0).any()
    torch.testing.assert_close(gradients[0][:, [0, 2]], gradients[1][:, [0, 2]])


class _Between(InducingPointAllocator):
    """Chooses means of inputs, which lie between levels."""

    def _get_quality_function(self, *args, **kwargs):
        raise NotImplementedError

    def allocate_inducing_points(self, inputs, covar_module, num_inducing, input_batch_shape):
        return 0.5 * (inputs[:num_inducing] + inputs[1 : num_inducing + 1])


def test_an_allocator_of_ones_own():
    X, Y = _data(20, 3)
    model = seqgp.SequentialGP(
        X, Y, inducing_points=5, inducing_point_allocator=_Between(), discrete_dims=[1]
    )
    assert set(_Z(model)[:, 1].tolist()) <= {0.0, 0.2, 0.5}
    model.init_inducing_points(X)
    assert set(_Z(model)[:, 1].tolist()) <= {0.0, 0.2, 0.5}


def test_combinations_have_been_seen_together():
    seen = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]])
    points = torch.tensor([[0.2, 0.0, 1.0], [0.9, 0.4, 0.6], [0.7, 0.0, 0.0]])
    result = on_seen_values(points, seen, (1, 2))
    expected = torch.tensor([[0.2, 0.0, 0.0], [0.9, 1.0, 1.0], [0.7, 0.0, 0.0]])
    assert torch.equal(result[1:], expected[1:])
    assert result[0, 1] == result[0, 2]
    batched = on_seen_values(points.expand(2, 3, 3), seen.expand(2, 2, 3), (1, 2))
    assert torch.equal(batched, result.expand(2, 3, 3))


def test_clusters_leave_levels_without_the_option():
    """So that the tests above would notice."""
    X, Y = _data(40, 4)
    model = seqgp.SequentialGP(X[:20], Y[:20], inducing_points=5)
    model.update(X[20:], Y[20:], inducing=Cluster(), learn=False)
    assert not set(_Z(model)[:, 1].tolist()) <= {0.0, 0.2, 0.5}


def test_it_is_saved(tmp_path):
    X, Y = _data(20, 5)
    model = seqgp.SequentialGP(X, Y, inducing_points=5, discrete_dims=(1,))
    seqgp.save(model, tmp_path / "model.pt")
    again = seqgp.load(tmp_path / "model.pt")
    assert again.discrete_dims == again.variational_strategy.discrete_dims == (1,)


@pytest.mark.parametrize(
    ("dims", "error"), [([3], ValueError), ([0.5], ValueError), ("1", TypeError), (1, TypeError)]
)
def test_wrong_columns(dims, error):
    X, Y = _data(10, 6)
    with pytest.raises(error, match="discrete_dims"):
        seqgp.SequentialGP(X, Y, discrete_dims=dims)
