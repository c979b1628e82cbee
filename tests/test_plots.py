"""Plots show what the model says."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import matplotlib as mpl
import pytest
import torch
from botorch.models.transforms import Normalize, Standardize
from gpytorch.likelihoods import BernoulliLikelihood, PoissonLikelihood, SoftmaxLikelihood
from matplotlib import pyplot as plt
from matplotlib.figure import Figure
from torch import Tensor

import seqgp
from seqgp import OrdinalLikelihood, OverdispersedBinomialLikelihood, SequentialGP
from tests.helpers import unscaled

mpl.use("Agg")
pytestmark = pytest.mark.usefixtures("float64")


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    plt.close("all")


X = torch.linspace(0, 3, 40, dtype=torch.float64).unsqueeze(-1)
PLANE = torch.rand(60, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def line_of(panel: Any, label: str) -> tuple[Tensor, Tensor]:
    (line,) = [line for line in panel.lines if line.get_label() == label]
    return torch.as_tensor(line.get_xdata()), torch.as_tensor(line.get_ydata())


def band_of(panel: Any, label: str, x: Tensor) -> tuple[Tensor, Tensor]:
    """Lower and upper edge of a band."""
    (band,) = [c for c in panel.collections if c.get_label() == label]
    vertices = torch.as_tensor(band.get_paths()[0].vertices)
    edges = [vertices[vertices[:, 0] == value, 1] for value in x]
    return torch.stack([e.min() for e in edges]), torch.stack([e.max() for e in edges])


def gaussian() -> SequentialGP:
    Y = 20 + 5 * torch.sin(3 * X)
    bounds = torch.tensor([[0.0], [3.0]])
    return SequentialGP(
        X,
        Y,
        input_transform=Normalize(1, bounds=bounds),
        outcome_transform=Standardize(1),
        inducing_points=12,
    )


def test_the_range_is_that_of_the_data() -> None:
    """And not of inducing points far away, unless there are no data to tell the range."""
    Z = torch.tensor([[-50.0], [0.0], [0.5], [1.0], [80.0]])
    model = SequentialGP(X / 3, torch.sin(X), inducing_points=Z)
    (panel,) = seqgp.plots.posterior(model, resolution=20)
    assert panel.get_xlim() == pytest.approx((-0.05, 1.05))
    model.update(X / 3, torch.sin(X), memory=0, learn=False)
    assert model.num_data == 0
    (panel,) = seqgp.plots.posterior(model, resolution=20)
    assert panel.get_xlim() == pytest.approx((-56.5, 86.5))


def test_a_gaussian_posterior() -> None:
    model = gaussian()
    (panel,) = seqgp.plots.posterior(model, bounds=torch.tensor([[0.0], [3.0]]), resolution=20)
    x, y = line_of(panel, "mean")
    f = model.posterior(x.unsqueeze(-1))
    noisy = model.posterior(x.unsqueeze(-1), observation_noise=True)
    torch.testing.assert_close(y, f.mean.squeeze(-1).detach())
    for label, variance in (("95 %", f.variance), ("observations", noisy.variance)):
        low, high = band_of(panel, label, x)
        torch.testing.assert_close(high - low, 2 * 1.959964 * variance.squeeze(-1).sqrt().detach())
    points = next(c for c in panel.collections if "memory" in c.get_label())
    offsets = torch.as_tensor(points.get_offsets().data)
    torch.testing.assert_close(offsets[:, :1], X)
    torch.testing.assert_close(offsets[:, 1:], 20 + 5 * torch.sin(3 * X))
    crosses, _ = line_of(panel, "inducing points")
    assert len(crosses) == 12
    assert 0 <= crosses.min() <= crosses.max() <= 3  # on the scale of the inputs


@unscaled
def test_probabilities_are_in_closed_form() -> None:
    model = SequentialGP(X, (X > 1).to(X), likelihood=BernoulliLikelihood(), inducing_points=10)
    (panel,) = seqgp.plots.posterior(model, resolution=15)
    x, y = line_of(panel, "mean")
    f = model(x.unsqueeze(-1))
    expected = torch.special.ndtr(f.mean / (1 + f.variance).sqrt()).detach()
    torch.testing.assert_close(y, expected, rtol=1e-6, atol=1e-6)
    low, high = band_of(panel, "95 %", x)
    for edge, sign in ((low, -1), (high, 1)):
        at = torch.special.ndtr(f.mean + sign * 1.959964 * f.stddev).detach()
        torch.testing.assert_close(edge, at, rtol=1e-6, atol=1e-6)


@unscaled
def test_rates_have_the_mean_of_observations() -> None:
    counts = torch.poisson(3 + torch.sin(X))
    model = SequentialGP(X, counts, likelihood=PoissonLikelihood(), inducing_points=10)
    (panel,) = seqgp.plots.posterior(model, resolution=15)
    x, y = line_of(panel, "mean")
    expected = model.posterior(x.unsqueeze(-1), observation_noise=True).mean.squeeze(-1)
    # 32 nodes here, 64 there; softplus is kinked on the scale of the posterior
    torch.testing.assert_close(y, expected.detach(), rtol=1e-4, atol=1e-4)


def test_two_inputs_and_classes() -> None:
    Y = (3 * PLANE[:, :1]).floor()
    likelihood = SoftmaxLikelihood(num_features=3, num_classes=3, mixing_weights=False)
    model = SequentialGP(PLANE, Y, likelihood=likelihood, inducing_points=10)
    images = []
    for k in range(3):
        left, right = seqgp.plots.posterior(model, output=k, resolution=8)
        images.append(torch.as_tensor(left.images[0].get_array().data))
        assert left.get_title() == f"probability of class {k}"
        assert right.get_title() == "standard deviation"
    torch.testing.assert_close(sum(images), torch.ones(8, 8))
    for k, image in enumerate(images):  # classes are strips from left to right
        assert int(image.mean(0).argmax()) in range(3 * k - 1, 3 * k + 3)


@unscaled
def test_other_models() -> None:
    counts = (20 * PLANE.mean(-1, keepdim=True)).round()
    binomial = SequentialGP(
        PLANE, counts, likelihood=OverdispersedBinomialLikelihood(20), inducing_points=10
    )
    figure = Figure()
    (panel,) = seqgp.plots.posterior(binomial, figure.subplots(), show="mean", resolution=8)
    assert panel.get_title() == "proportion"
    image = panel.images[0].get_array()
    assert 0 <= image.min() <= image.max() <= 1
    assert panel.images[0].get_clim() == (image.min(), image.max())  # not from 0 to 1
    shown = torch.as_tensor(panel.collections[-2].get_array().data)
    torch.testing.assert_close(shown, counts.squeeze(-1) / 20)  # the memory, as proportions
    ordinal = SequentialGP(
        X, (X > 1).to(X) + (X > 2), likelihood=OrdinalLikelihood(3), inducing_points=8
    )
    (panel,) = seqgp.plots.posterior(ordinal)
    assert panel.get_ylabel() == "expected class"
    x, y = line_of(panel, "mean")
    observations = ordinal.posterior(x.unsqueeze(-1), observation_noise=True)
    torch.testing.assert_close(y, observations.mean.squeeze(-1).detach(), rtol=1e-6, atol=1e-6)
    two = SequentialGP(PLANE, torch.cat([PLANE[:, :1], -PLANE[:, :1]], -1), inducing_points=8)
    slopes = []
    for output in (0, 1):
        (panel,) = seqgp.plots.posterior(two, output=output, dims=[0], at=torch.tensor([0.0, 0.5]))
        y = line_of(panel, "mean")[1]
        slopes.append(float(y[-1] - y[0]))
    assert slopes[0] > 0 > slopes[1]
    fantasy = gaussian().condition_on_observations(X[:1], X[:1])
    assert len(seqgp.plots.posterior(fantasy)) == 1


def test_history() -> None:
    model = gaussian()
    batches = [(x, 20 + 5 * torch.sin(3 * x)) for x in (torch.rand(3, 10, 1) * 3)]
    records = [model.update(x, y, memory=20, steps=3) for x, y in batches]
    upper, middle, lower = seqgp.plots.history(records)
    seen, density = line_of(upper, "of the batch")
    assert seen.tolist() == [10, 20, 30]
    assert density.tolist() == pytest.approx([r.log_density for r in records])
    average = line_of(upper, "average so far")[1]
    assert float(average[-1]) == pytest.approx(sum(r.log_density for r in records) / 3)
    assert {"noise", "lengthscale", "constant"} <= {line.get_label() for line in middle.lines}
    assert line_of(lower, "in memory")[1].tolist() == [r.num_memory for r in records]
    assert line_of(seqgp.plots.history(records[0])[0], "of the batch")[0].tolist() == [10]
    heights = [bar.get_height() for bar in lower.patches]
    assert heights == [r.memory_gained for r in records] + [-r.memory_lost for r in records]


def test_leverage() -> None:
    model = gaussian()
    (panel,) = seqgp.plots.leverage(model, top=5)
    widths = [bar.get_width() for bar in panel.patches]
    assert widths == pytest.approx(model.memory.leverage.sort(descending=True).values[:5].tolist())
    first = int(model.memory.leverage.argmax())
    assert panel.get_yticklabels()[0].get_text().startswith(f"x = ({float(X[first]):.3g}), y = ")
    (panel,) = seqgp.plots.leverage(model, top=3, names=[f"no. {i}" for i in range(40)])
    assert panel.get_yticklabels()[0].get_text() == f"no. {first}"


def test_nothing_changes() -> None:
    model = gaussian().train()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    seqgp.plots.posterior(model)
    assert model.training
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"show": "all"}, "show: expected 'mean', 'sd' or 'both'"),
        ({"dims": (0, 3)}, "dims: expected one or two of 0 to 1"),
        ({"output": 2}, "output: expected one of 0 to 0"),
        ({"bounds": torch.ones(2, 2)}, "bounds: expected shape 2 x 2, lower bounds first"),
        ({"at": torch.ones(3)}, "at: expected 2 inputs"),
        ({"axes": []}, "axes: expected 2, got 0"),
    ],
)
def test_errors(options: dict[str, Any], message: str) -> None:
    model = SequentialGP(PLANE, PLANE[:, :1] * 3, inducing_points=5)
    with pytest.raises(ValueError, match=message):
        seqgp.plots.posterior(model, **options)


def test_more_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    three = SequentialGP(torch.rand(9, 3), torch.randn(9, 1))
    with pytest.raises(ValueError, match=r"dims: with 3 inputs, choose one or two"):
        seqgp.plots.posterior(three)
    with pytest.raises(TypeError, match="model: expected a SequentialGP"):
        seqgp.plots.posterior(BernoulliLikelihood())
    with pytest.raises(ValueError, match="at least one update"):
        seqgp.plots.history([])
    with pytest.raises(ValueError, match="names: expected 9, got 1"):
        seqgp.plots.leverage(three, names=["a"])
    monkeypatch.setitem(sys.modules, "matplotlib.pyplot", None)  # as if it were not installed
    with pytest.raises(ImportError, match=r'pip install "seqgp\[plots\]"'):
        seqgp.plots.posterior(three, dims=(0,))
