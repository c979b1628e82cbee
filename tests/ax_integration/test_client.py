"""Experiments from end to end, through Ax's `Client`."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from ax.api.client import Client
from ax.api.configs import ChoiceParameterConfig, RangeParameterConfig

import seqgp.ax
from seqgp.ax.model import AxSequentialGP
from tests.ax_integration.helpers import make_client, model_of, run, surrogate_of, unit_range


def choice(name: str, values: list[Any], ordered: bool = False) -> ChoiceParameterConfig:
    kind: Any = type(values[0]).__name__
    return ChoiceParameterConfig(name, values, parameter_type=kind, is_ordered=ordered)


def bump(p: Any, x: float, y: float) -> float:
    return math.exp(-((p["x"] - x) ** 2 + (p["y"] - y) ** 2) / 0.08)


# -------------------------------------------------------------------- failures


@pytest.mark.slow
def test_a_region_that_always_fails_is_left() -> None:
    """The larger of two bumps is where everything fails."""

    def evaluate(p: Any) -> Any:
        if (p["x"] - 0.8) ** 2 + (p["y"] - 0.8) ** 2 < 0.35**2:
            return "failed"
        return {"z": bump(p, 0.25, 0.25) + 2 * bump(p, 0.8, 0.8)}

    client = make_client("z", optimizer_options={"num_restarts": 2, "raw_samples": 128})
    done = run(client, evaluate, 17)
    failed = [outcome == "failed" for _, outcome in done]
    assert any(failed)
    assert sum(failed[-6:]) <= 2
    best, *_ = client.get_best_parameterization(use_model_predictions=False)
    assert evaluate(best)["z"] > 0.9
    inside, outside = seqgp.ax.probability_of_validity(
        client, [{"x": 0.85, "y": 0.85}, {"x": 0.2, "y": 0.3}]
    )
    assert inside < 0.5 < 0.8 < outside


@pytest.mark.slow
def test_nothing_but_failures_and_then_some() -> None:
    client = make_client("z", num_initial=3)
    done = run(client, lambda p: "failed", 6)
    assert len({tuple(p.values()) for p, _ in done}) == 6
    done += run(client, lambda p: {"z": p["x"]}, 1)  # the first that is valid: a single value
    done += run(client, lambda p: "abandoned", 1)
    done += run(client, lambda p: {"z": p["x"]}, 2)
    assert len({tuple(p.values()) for p, _ in done}) == 10
    assert isinstance(model_of(client, seqgp.ax.VALIDITY), AxSequentialGP)


def test_no_failures() -> None:
    client = make_client("-z", num_initial=3)

    def distance(p: Any) -> float:
        return (p["x"] - 0.4) ** 2 + (p["y"] - 0.6) ** 2

    run(client, lambda p: {"z": distance(p)}, 9)
    best, prediction, *_ = client.get_best_parameterization()
    assert distance(best) < 0.1**2
    assert set(prediction) == {"z"}
    assert seqgp.ax.probability_of_validity(client, [best]) == [1.0]


def test_failures_can_be_left_to_ax() -> None:
    client = make_client("z", num_initial=3, failures=())
    run(client, lambda p: "failed" if p["x"] > 0.7 else {"z": p["y"]}, 6)
    assert surrogate_of(client).outcomes == ["z"]


@pytest.mark.slow
def test_no_failed_trial_is_repeated_in_a_small_discrete_space() -> None:
    """All that can be tried is tried once, failures among it."""
    parameters = [
        RangeParameterConfig(name="n", parameter_type="int", bounds=(1, 3)),
        choice("c", ["u", "v", "w"]),
    ]
    client = make_client("n2", parameters, num_initial=4, optimizer_options={})
    done = run(client, lambda p: "failed" if p["c"] == "w" else {"n2": p["n"] ** 2}, 9)
    assert len({tuple(p.values()) for p, _ in done}) == 9


def test_before_there_are_models() -> None:
    client = make_client("z")
    with pytest.raises(RuntimeError, match="There is no model yet"):
        seqgp.ax.probability_of_validity(client, [{"x": 0.5, "y": 0.5}])


# -------------------------------------------------------------------- kinds of experiments


@pytest.mark.slow
def test_choices_integers_logarithms_and_failures() -> None:
    parameters = [
        RangeParameterConfig(
            name="rate", parameter_type="float", bounds=(1e-4, 1.0), scaling="log"
        ),
        RangeParameterConfig(name="layers", parameter_type="int", bounds=(1, 8)),
        choice("kind", ["a", "b", "c"]),
        choice("size", [8, 16, 32, 64], ordered=True),
        choice("flag", [True, False], ordered=True),
    ]

    def evaluate(p: Any) -> Any:
        assert isinstance(p["layers"], int)
        assert p["kind"] in ("a", "b", "c")
        if p["kind"] == "c":
            return "failed"
        return {"loss": (math.log10(p["rate"]) + 2) ** 2 + (p["layers"] - 3) ** 2 / 4 + p["flag"]}

    quick = {"num_restarts": 2, "raw_samples": 32}
    client = make_client("-loss", parameters, optimizer_options=quick)
    run(client, evaluate, 8)
    kernel = model_of(client, "loss").covar_module
    assert type(kernel).__name__ == "ProductKernel"
    valid, invalid = seqgp.ax.probability_of_validity(
        client,
        [
            {"rate": 0.01, "layers": 3, "kind": kind, "size": 16, "flag": True}
            for kind in ("a", "c")
        ],
    )
    assert valid > invalid


@pytest.mark.slow
def test_parameter_constraints() -> None:
    def evaluate(p: Any) -> Any:
        assert p["x"] + p["y"] <= 1 + 1e-6
        return "failed" if p["x"] > 0.7 else {"z": p["x"] * p["y"]}

    client = make_client("z", parameter_constraints=["x + y <= 1"], num_initial=4)
    run(client, evaluate, 6)


@pytest.mark.slow
def test_two_objectives_one_of_them_counts() -> None:
    client = make_client(
        "z, -count",
        outcome_constraints=["z >= 0.0", "count <= 10"],  # the reference point
        likelihoods={"count": "poisson"},
        num_initial=4,
    )

    def evaluate(p: Any) -> Any:
        rate = torch.tensor(8 * p["x"])
        return (
            "failed"
            if p["y"] > 0.9
            else {"z": p["x"] + p["y"], "count": float(torch.poisson(rate))}
        )

    run(client, evaluate, 6)
    assert len(client.get_pareto_frontier(use_model_predictions=False)) >= 1


def test_as_long_as_nothing_is_feasible() -> None:
    client = make_client(
        "z", outcome_constraints=["count <= 1"], likelihoods={"count": "poisson"}, num_initial=3
    )
    run(
        client,
        lambda p: "failed" if p["x"] > 0.6 else {"z": p["y"], "count": 5 + round(6 * p["x"])},
        5,
    )
    adapter: Any = client._generation_strategy.adapter
    acqf = adapter.generator._acquisition.acqf
    assert type(getattr(acqf, "acqf", acqf)).__name__ == "qLogProbabilityOfFeasibility"


def test_batches_and_pending_trials() -> None:
    """Trials that run at the same time differ, whatever comes back in whatever order."""
    client = make_client("z", num_initial=3)
    run(client, lambda p: "failed" if p["x"] > 0.8 else {"z": p["y"]}, 2, at_once=3)
    first = client.get_next_trials(max_trials=3)
    second = client.get_next_trials(max_trials=2)
    trials = {**first, **second}
    assert len({tuple(p.values()) for p in trials.values()}) == 5
    for index in reversed(trials):
        client.complete_trial(index, raw_data={"z": trials[index]["y"]})  # type: ignore[dict-item]
    client.get_next_trials(max_trials=1)
    assert model_of(client, "z").num_data >= 8


def test_given_parameters() -> None:
    client = make_client("z", num_initial=3)
    run(client, lambda p: "failed" if p["x"] > 0.8 else {"z": p["x"] * p["y"]}, 4)
    (parameters,) = client.get_next_trials(1, fixed_parameters={"x": 0.25}).values()
    assert parameters["x"] == 0.25


@pytest.mark.slow
def test_metrics_over_time() -> None:
    """A failure is one at the last step; steps are inputs of the models."""
    client = make_client("z", num_initial=3)
    for _ in range(5):
        for index, p in client.get_next_trials(max_trials=1).items():
            for step in (1, 2, 3):
                value = step * p["y"]  # type: ignore[operator]
                client.attach_data(index, raw_data={"z": value}, progression=step)
            if p["x"] > 0.4:  # type: ignore[operator]
                client.mark_trial_failed(index)
            else:
                client.complete_trial(index)
    observed = model_of(client, seqgp.ax.VALIDITY).observed
    assert {0.0, 1.0} == set(observed.Y.flatten().tolist())
    assert observed.X.shape[-1] in (2, 3)
    if observed.X.shape[-1] == 3:
        assert len(observed.X[:, -1].unique()) == 1


# -------------------------------------------------------------------- metrics


@pytest.mark.slow
def test_counts_are_minimised() -> None:
    """Noisy counts on a grid, whose rate is least at (0.3, 0.6)."""
    client = make_client("-defects", likelihoods={"defects": "poisson"}, num_initial=1)
    generator = torch.Generator().manual_seed(0)

    def rate(p: Any) -> float:
        return 2 + 40 * ((p["x"] - 0.3) ** 2 + (p["y"] - 0.6) ** 2)

    def evaluate(p: Any) -> Any:
        return {"defects": float(torch.poisson(torch.tensor(rate(p)), generator=generator))}

    for x, y in itertools.product((0.1, 0.3, 0.5, 0.7, 0.9), repeat=2):
        point = {"x": x, "y": y}
        client.complete_trial(client.attach_trial(point), raw_data=evaluate(point))
    run(client, evaluate, 3)
    points = [{"x": 0.3, "y": 0.6}, {"x": 0.9, "y": 0.1}]
    for point, predicted in zip(points, client.predict(points), strict=True):
        mean, error = predicted["defects"]
        assert abs(mean - rate(point)) < 3 * error
    best, *_ = client.get_best_parameterization()
    assert rate(best) < 4


@pytest.mark.slow
def test_rates_with_totals_that_vary() -> None:
    client = make_client("passed", likelihoods={"passed": ("binomial", "tests")}, num_initial=5)
    client.configure_tracking_metrics(["tests"])
    generator = torch.Generator().manual_seed(0)
    totals: list[float] = []

    def evaluate(p: Any) -> Any:
        total = int(torch.randint(5, 40, (), generator=generator))
        totals.append(total)
        probability = torch.tensor(0.9 - 0.8 * abs(p["x"] - 0.3))
        count = float(torch.binomial(torch.tensor(float(total)), probability, generator=generator))
        return {"passed": count / total, "tests": total}

    run(client, evaluate, 9)
    model = model_of(client, "passed")
    assert sorted(model.observed.totals.tolist()) == sorted(totals[:-1])
    good, bad = client.predict([{"x": 0.3, "y": 0.5}, {"x": 1.0, "y": 0.5}])
    assert 0 < bad["passed"][0] < good["passed"][0] < 1


@pytest.mark.slow
def test_binary_outcomes_as_a_constraint() -> None:
    """``ok >= 0.5`` means a probability of one half."""
    client = make_client(
        "z", outcome_constraints=["ok >= 0.5"], likelihoods={"ok": "bernoulli"}, num_initial=8
    )
    run(client, lambda p: {"z": p["x"], "ok": float(p["x"] < 0.5)}, 12)
    low, high = client.predict([{"x": 0.1, "y": 0.5}, {"x": 0.95, "y": 0.5}])
    assert low["ok"][0] > 0.5 > high["ok"][0]
    best, *_ = client.get_best_parameterization()
    assert 0.2 < best["x"] < 0.6  # type: ignore[operator]


def test_known_noise() -> None:
    client = make_client("z", num_initial=4)
    run(client, lambda p: {"z": (p["x"] * p["y"], 0.05)}, 7)
    assert "noise" in model_of(client, "z").likelihood_arguments


def test_a_missing_total_is_an_error() -> None:
    client = make_client("r", likelihoods={"r": ("binomial", "tests")}, num_initial=2)
    with pytest.raises(ValueError, match="the metric 'tests' is missing"):
        run(client, lambda p: {"r": 0.5}, 3)


# -------------------------------------------------------------------- streams


def test_models_are_updated_and_not_rebuilt() -> None:
    """Between fits from scratch, every step is one update of the model before."""
    client = make_client("z", num_initial=20, center=False)
    run(client, lambda p: {"z": p["x"] * p["y"]}, 21)
    previous = model_of(client, "z")
    for k in range(1, 4):
        run(client, lambda p: {"z": p["x"] * p["y"]}, 1)
        model = model_of(client, "z")
        assert model.num_updates == k
        assert model.num_data == previous.num_data + 1
        assert model is not previous
        previous = model


@pytest.mark.slow
def test_without_streaming_models_are_fitted_each_time() -> None:
    client = make_client("z", num_initial=20, center=False, stream=False)
    run(client, lambda p: {"z": p["x"] * p["y"]}, 22)
    assert model_of(client, "z").num_updates == 0


@pytest.mark.slow
def test_corrected_data_are_learnt_anew() -> None:
    client = make_client("z", num_initial=20, center=False)
    run(client, lambda p: {"z": p["x"] * p["y"]}, 22)
    assert model_of(client, "z").num_updates == 1
    client.attach_data(3, raw_data={"z": 0.9})
    run(client, lambda p: {"z": p["x"] * p["y"]}, 1)
    model = model_of(client, "z")
    assert (model.num_updates, model.num_data) == (0, 22)


def test_ours_is_what_the_client_uses() -> None:
    client = Client(random_seed=0)
    client.configure_experiment([unit_range("x")])
    client.configure_optimization("z")
    client.set_generation_strategy(seqgp.ax.generation_strategy(num_initial=2))
    run(client, lambda p: {"z": p["x"]}, 3)
    assert isinstance(model_of(client, "z"), AxSequentialGP)
    adapter: Any = client._generation_strategy.adapter
    assert adapter.feature_importances("z") == {"x": pytest.approx(1.0)}


# -------------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"likelihoods": {"z": "beta"}}, "expected one of 'gaussian'.*got 'beta'"),
        ({"likelihoods": {"z": torch.nn.Identity()}}, r"expected one of 'gaussian'.*got Identity"),
        ({"likelihoods": {"z": "binomial"}}, "with a total for binomial"),
        ({"likelihoods": {"z": ("poisson", 3)}}, "for 'z'"),
        ({"failures": ["broken"]}, "failures: expected names among"),
        ({"num_initial": 0}, "num_initial, min_valid"),
    ],
)
def test_options_are_checked(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        seqgp.ax.generation_strategy(**options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("likelihood", "value", "message"),
    [
        (("binomial", 20), 10.0, "expected a rate of success, k/n with n = 20, got 10; report the"),
        (("binomial", 20), 0.51, "expected a rate of success, k/n with n = 20, got 0.51; report"),
        ("poisson", 1.5, "1.5 is not a possible observation of PoissonLikelihood"),
        ("bernoulli", -1.0, "-1 is not a possible observation of BernoulliLikelihood"),
    ],
)
def test_impossible_values_name_the_metric(likelihood: Any, value: float, message: str) -> None:
    """Whether they come first, or when the model is updated."""
    for wrong, num_initial in ((0, 2), (11, 10)):
        options = {"num_initial": num_initial, "center": False}
        client = make_client("z", likelihoods={"z": likelihood}, **options)
        done = iter(range(30))

        def evaluate(p: Any, wrong: int = wrong, done: Any = done) -> Any:
            return {"z": value if next(done) == wrong else 1.0}

        with pytest.raises(ValueError, match=f"^metric 'z': {message}"):
            run(client, evaluate, num_initial + 3)


def test_a_metric_that_there_is_not() -> None:
    client = make_client("defects", likelihoods={"defect": "poisson"}, num_initial=2)
    with pytest.raises(ValueError, match=r"likelihoods: .* got 'defect'; did you mean 'defects'"):
        run(client, lambda p: {"defects": 1.0}, 3)


@pytest.mark.slow
def test_points_have_all_parameters_with_values_that_there_are() -> None:
    client = make_client("z", [unit_range("x"), choice("kind", ["a", "b"])], num_initial=2)
    done = run(client, lambda p: "failed" if p["kind"] == "b" else {"z": p["x"]}, 1)
    with pytest.raises(RuntimeError, match="min_valid that have not failed"):
        seqgp.ax.probability_of_validity(client, [done[0][0]])
    run(client, lambda p: "failed" if p["x"] > 0.8 else {"z": p["x"]}, 3)
    for point, message in (
        ({"x": 0.5}, "points: expected all parameters, x, kind; 'kind' is missing"),
        ({"x": 0.5, "kind": "c"}, "points: expected one of .*'a', 'b'.* for 'kind', got 'c'"),
        ({"x": 0.5, "kind": "a", "xx": 1}, "points: 'xx' is not a parameter of the experiment"),
    ):
        with pytest.raises(ValueError, match=message):
            seqgp.ax.probability_of_validity(client, [point])
    with pytest.raises(TypeError, match="points: expected a list of dictionaries"):
        seqgp.ax.probability_of_validity(client, {"x": 0.5, "kind": "a"})  # type: ignore[arg-type]
