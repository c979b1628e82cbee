"""Models, thresholds and uncertainties that tests of active learning share."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from seqgp import SequentialGP
from seqgp.acquisition.uncertainty import Uncertainty, link_of, nugget_of
from tests.helpers import make_inputs
from tests.models.helpers import data

THRESHOLD = {
    **dict.fromkeys(("gaussian", "fixed_noise", "heteroscedastic", "censored", "student_t"), 0.4),
    **dict.fromkeys(("gamma", "poisson"), 1.3),
}
NAMES = [
    *("gaussian", "bernoulli", "binomial", "overdispersed_binomial", "poisson"),
    "heteroscedastic",
]
TOTAL = 3


def points(n: int) -> Tensor:
    return make_inputs(n, 2)


def arguments_of(name: str) -> dict[str, Any]:
    return {"total_count": TOTAL} if name.endswith("binomial") else {}


def model_of(name: str, **options: Any) -> SequentialGP:
    return data(name).model(**options)


def threshold(name: str) -> float:
    return THRESHOLD.get(name, 0.3)


def uncertainty(model: SequentialGP, criterion: str, level: float, locations: Tensor) -> Tensor:
    """At each location, for a model with any batch shape."""
    f = model.posterior(locations)
    u = Uncertainty(criterion, link_of(model.likelihood), level)
    return u(f.mean.squeeze(-1), f.variance.squeeze(-1) + nugget_of(model.likelihood))
