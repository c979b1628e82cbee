"""What the models are given, in experiments that are run."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize

from seqgp.ax import VALIDITY
from seqgp.ax.model import GROWTH
from seqgp.ax.transforms import LearnFailures
from tests.ax_integration.helpers import make_client, run, surrogate_of


def dataset(client: Any, metric: str) -> Any:
    surrogate = surrogate_of(client)
    return surrogate.training_data[surrogate.outcomes.index(metric)]


def evaluate(parameters: Any) -> Any:
    x, y = parameters["x"], parameters["y"]
    if x > 0.85:
        return "failed"
    if y > 0.95:
        return "abandoned"
    return {"value": 100 + 50 * x + y, "count": float(round(30 * x)), "ok": float(y > 0.3)}


@pytest.fixture(scope="module")
def finished() -> tuple[Any, list[Any]]:
    client = make_client(
        "value",
        outcome_constraints=["count <= 10", "ok >= 0.2"],
        likelihoods={"count": "poisson", "ok": "bernoulli"},
        num_initial=8,
    )
    done = run(client, evaluate, 9)
    return client, done


def test_counts_and_labels_arrive_as_they_were_reported(finished: tuple[Any, list[Any]]) -> None:
    client, done = finished
    known = [outcome for _, outcome in done[:-1] if isinstance(outcome, dict)]
    for metric in ("count", "ok"):
        values = sorted(outcome[metric] for outcome in known)
        assert sorted(dataset(client, metric).Y.flatten().tolist()) == values


def test_gaussian_metrics_are_standardised(finished: tuple[Any, list[Any]]) -> None:
    Y = dataset(finished[0], "value").Y
    assert float(Y.mean()) == pytest.approx(0, abs=1e-12)
    assert float(Y.std()) == pytest.approx(1)


def test_failures_are_data(finished: tuple[Any, list[Any]]) -> None:
    client, done = finished
    data = dataset(client, VALIDITY)
    given = {(p["x"], p["y"]): float(isinstance(outcome, dict)) for p, outcome in done[:-1]}
    assert 0.0 in given.values()
    learnt = {tuple(x): y for x, (y,) in zip(data.X.tolist(), data.Y.tolist(), strict=True)}
    assert learnt == pytest.approx(given)
    failed = [x for x, y in learnt.items() if y == 0]
    assert not any(tuple(x) in failed for x in dataset(client, "value").X.tolist())


def test_constraints_are_on_the_scale_of_the_metric(finished: tuple[Any, list[Any]]) -> None:
    """``count <= 10`` and ``ok >= 0.2``, neither moved nor scaled."""
    adapter: Any = finished[0]._generation_strategy.adapter
    arguments = adapter._get_transformed_gen_args(adapter._search_space)
    bounds = {c.metric_names[0]: c.bound for c in arguments.optimization_config.outcome_constraints}
    assert bounds == {"count": 10.0, "ok": 0.2}


def test_nothing_is_added_while_nothing_has_failed() -> None:
    client = make_client("value", num_initial=2, center=False)
    run(client, lambda p: {"value": p["x"]}, 4)
    assert surrogate_of(client).outcomes == ["value"]


@pytest.mark.slow
def test_statistics_are_held_until_the_data_have_grown() -> None:
    client = make_client("value", num_initial=10)
    means, sizes, models = [], [], []
    for _ in range(16):
        run(client, lambda p: {"value": 10 * p["x"] + p["y"]}, 1)
        adapter: Any = client._generation_strategy.adapter
        transform = adapter and adapter.transforms.get("StreamStandardizeY")
        if transform is not None:
            means.append(transform.Ymean["value"])
            sizes.append(transform.num_rows)
            models.append(surrogate_of(client).model.num_updates)
    assert sizes[:6] == [10, 10, 10, 13, 13, 13]  # 10, 11, 12; 13 > 1.2 x 10
    assert GROWTH == 1.2
    assert len(set(means)) == len(set(sizes))
    assert models == [0, 1, 2, 0, 1, 2]
    # When taken, they are those of Ax itself.
    training = adapter.get_training_data()
    fresh = StandardizeY(experiment_data=training, adapter=adapter)
    held = type(transform)(experiment_data=training, config=transform.config)
    assert (held.Ymean, held.Ystd) == (fresh.Ymean, fresh.Ystd)


def test_winsorization_is_ax_s_for_gaussian_metrics(finished: tuple[Any, list[Any]]) -> None:
    adapter: Any = finished[0]._generation_strategy.adapter
    cutoffs = adapter.transforms["StreamWinsorize"].cutoffs
    assert set(cutoffs) == {"value"}
    config = {"derelativize_with_raw_status_quo": True}
    training = adapter.get_training_data()
    theirs = Winsorize(experiment_data=training, adapter=adapter, config=config).cutoffs["value"]
    assert cutoffs["value"] == pytest.approx(theirs)
    assert math.isinf(theirs[1])


def test_an_adapter_is_needed(finished: tuple[Any, list[Any]]) -> None:
    adapter: Any = finished[0]._generation_strategy.adapter
    with pytest.raises(ValueError, match="required by LearnFailures"):
        LearnFailures().transform_experiment_data(adapter.get_training_data())


def test_data_on_another_device_or_dtype_are_ax_s_business(
    finished: tuple[Any, list[Any]],
) -> None:
    assert dataset(finished[0], VALIDITY).X.dtype == torch.double
