"""Cross validation, leave-one-out, fits through every door, and pathwise samples."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from botorch.cross_validation import (
    batch_cross_validation,
    efficient_loo_cv,
    gen_loo_cv_folds,
    loo_cv,
)
from botorch.models import SingleTaskGP
from botorch.models.transforms import Normalize, Standardize
from gpytorch.mlls import ExactMarginalLogLikelihood

from seqgp import SequentialGP
from tests.helpers import assert_close, latent, make_inputs
from tests.models.helpers import pair

pytestmark = pytest.mark.usefixtures("float64")


def transforms(outputs: int) -> dict[str, Any]:
    return {"input_transform": Normalize(2), "outcome_transform": Standardize(outputs)}


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("transformed", [False, True])
@pytest.mark.parametrize("function", [efficient_loo_cv, loo_cv])
def test_leave_one_out(function: Any, outputs: int, known: bool, transformed: bool) -> None:
    options = transforms(outputs) if transformed else {}
    results = [
        function(model) for model in pair(n=6, outputs=outputs, fixed_noise=known, **options)
    ]
    for name in ("observed_Y", "observed_Yvar"):
        ours, theirs = (getattr(result, name) for result in results)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            assert_close(ours, theirs)
    assert_close(*(result.posterior.mean for result in results))
    assert_close(*(result.posterior.variance for result in results))


def test_batch_cross_validation() -> None:
    """Each fold is fitted by L-BFGS, from the same start."""
    X = make_inputs(6, 2)
    folds = gen_loo_cv_folds(X, latent(X).unsqueeze(-1))
    results = [
        batch_cross_validation(
            kind, ExactMarginalLogLikelihood, folds, fit_args={"optimizer_kwargs": LONG}
        )
        for kind in (SequentialGP, SingleTaskGP)
    ]
    assert results[0].observed_Y.shape == results[1].observed_Y.shape == (6, 1, 1)
    # L-BFGS minimises the sum of six losses, and stops where that changes little: the evidence of
    # five points without noise is flat, so that rounding moves means by a hundredth.
    assert_close(*(result.posterior.mean for result in results), 0.02)


LONG = {"options": {"maxiter": 200}}


@pytest.mark.filterwarnings("ignore:train_targets")
def test_stream_warns_that_only_the_memory_is_there() -> None:
    X = make_inputs(8, 2)
    Y = torch.sin(5 * X).sum(-1, keepdim=True)
    model = SequentialGP(X[:4], Y[:4])
    model.update(X[4:], Y[4:], memory=3, learn=False)
    with pytest.warns(UserWarning, match="these are the 3 observations in the memory, out of 8"):
        efficient_loo_cv(model)
