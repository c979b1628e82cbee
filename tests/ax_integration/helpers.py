"""Real experiments, made small: two parameters, and candidates that are soon found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from ax.api.client import Client
from ax.api.configs import RangeParameterConfig

import seqgp.ax

#: What a trial gives: metrics, or the word for how it went wrong.
Outcome = dict[str, float] | str
QUICK = {"num_restarts": 2, "raw_samples": 32, "options": {"maxiter": 20}}


def unit_range(name: str) -> RangeParameterConfig:
    return RangeParameterConfig(name=name, parameter_type="float", bounds=(0.0, 1.0))


def make_client(
    objective: str,
    parameters: Sequence[Any] = (unit_range("x"), unit_range("y")),
    outcome_constraints: Sequence[str] = (),
    parameter_constraints: Sequence[str] = (),
    optimizer_options: dict[str, Any] | None = None,
    **options: Any,
) -> Client:
    """A client with an experiment, and our generation strategy with some options."""
    client = Client(random_seed=0)
    client.configure_experiment(list(parameters), parameter_constraints=list(parameter_constraints))
    client.configure_optimization(objective, outcome_constraints=list(outcome_constraints))
    optimizer_options = QUICK if optimizer_options is None else optimizer_options
    strategy = seqgp.ax.generation_strategy(optimizer_options=optimizer_options, **options)
    client.set_generation_strategy(strategy)
    return client


def tell(client: Client, index: int, outcome: Outcome) -> None:
    if outcome == "failed":
        client.mark_trial_failed(index)
    elif outcome == "abandoned":
        client.mark_trial_abandoned(index)
    else:
        client.complete_trial(index, raw_data=outcome)  # type: ignore[arg-type]


def run(
    client: Client, evaluate: Callable[[Any], Outcome], rounds: int, at_once: int = 1
) -> list[tuple[dict[str, Any], Outcome]]:
    """Ask and tell; parameters and outcomes of all trials."""
    done = []
    for _ in range(rounds):
        for index, parameters in client.get_next_trials(max_trials=at_once).items():
            outcome = evaluate(parameters)
            tell(client, index, outcome)
            done.append((dict(parameters), outcome))
    return done


def surrogate_of(client: Client) -> Any:
    """Ax's container of the models that made the last trial."""
    adapter: Any = client._generation_strategy.adapter
    return adapter.generator.surrogate


def model_of(client: Client, metric: str) -> Any:
    surrogate = surrogate_of(client)
    if len(surrogate.outcomes) == 1:
        return surrogate.model
    return surrogate.model.models[surrogate.outcomes.index(metric)]
