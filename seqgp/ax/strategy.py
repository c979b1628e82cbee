"""The generation strategy: quasi-random trials, then BoTorch with `SequentialGP`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from ax.adapter.registry import Generators, Mixed_transforms
from ax.adapter.transforms.derelativize import Derelativize
from ax.adapter.transforms.map_key_to_float import MapKeyToFloat
from ax.api.client import Client
from ax.core.experiment_status import ExperimentStatus
from ax.core.parameter import ChoiceParameter
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.generation_strategy.center_generation_node import CenterGenerationNode
from ax.generation_strategy.generation_node import GenerationNode
from ax.generation_strategy.generation_strategy import GenerationStrategy
from ax.generation_strategy.generator_spec import GeneratorSpec
from ax.generation_strategy.transition_criterion import MaxTrialsAwaitingData, MinTrials
from ax.generators.torch.botorch_modular.surrogate import SurrogateSpec
from ax.generators.torch.botorch_modular.utils import ModelConfig
from botorch.acquisition.acquisition import AcquisitionFunction

from seqgp.ax.acquisition import ValidAcquisition, validity_of
from seqgp.ax.adapters import SequentialAdapter, SequentialGenerators
from seqgp.ax.correlated import CorrelatedAcquisition
from seqgp.ax.internals import adapter_of, experiment_of
from seqgp.ax.model import GROWTH, LIKELIHOODS, MAX_INDUCING, AxSequentialGP
from seqgp.ax.transforms import (
    VALIDITY,
    LearnFailures,
    StreamBilogY,
    StreamStandardizeY,
    StreamWinsorize,
)
from seqgp.validation import check_instance

#: The name of a likelihood; of a binomial metric, a pair of the name and the total (or its metric).
Likelihood = str | tuple[str, int | str]

_NODE = "SequentialGP"


def generation_strategy(
    likelihoods: Mapping[str, Likelihood] | None = None,
    failures: Sequence[str] = ("FAILED", "ABANDONED"),
    num_initial: int = 5,
    min_valid: int = 1,
    center: bool = True,
    stream: bool = True,
    max_inducing: int = MAX_INDUCING,
    seed: int | None = None,
    torch_device: torch.device | str | None = None,
    botorch_acqf_class: type[AcquisitionFunction] | None = None,
    optimizer_options: Mapping[str, Any] | None = None,
    correlated: bool = False,
) -> GenerationStrategy:
    """A generation strategy for Ax's ``client.set_generation_strategy``.

    Quasi-random trials first, then BoTorch with a `SequentialGP` for each metric. A classifier
    learns from failed trials: the acquisition value of a candidate is multiplied by the probability
    that it is valid.

    Args:
        likelihoods: Likelihoods of metrics that are not Gaussian: ``"poisson"`` for counts,
            ``"bernoulli"`` for outcomes 0 and 1, ``("binomial", total)`` for rates of success. The
            total is a number, or the name of a metric that has it for each trial. These metrics are
            not transformed, and objectives and constraints refer to their expected values.
        failures: Names of the statuses of failed trials. If empty, failures are treated as Ax does:
            failed trials are ignored, and abandoned trials are pending forever.
        num_initial: The number of trials before models are used, including failed ones.
        min_valid: The minimum number of valid trials before models are used.
        center: Whether the first trial is the centre of the search space, as in Ax.
        stream: Whether models are updated with new data if possible, instead of being fitted from
            scratch each time. This uses attributes of Ax that are not public; if they are missing,
            models are fitted.
        max_inducing: The maximum number of inducing points of each model.
        seed: Seed of the quasi-random trials.
        torch_device: The device of all tensors.
        botorch_acqf_class: An acquisition function that replaces Ax's choice. Its values must be
            logarithms or nonnegative.
        optimizer_options: Options for optimising the acquisition function (``num_restarts``,
            ``raw_samples``, ``options``).
        correlated: Whether the probability of validity also learns from the values of the
            objective, if there is one and it is Gaussian. The two may be correlated then. That of
            `probability_of_validity` does not.

    Example:
        >>> from ax.api.client import Client
        >>> from ax.api.configs import RangeParameterConfig
        >>> import seqgp.ax
        >>> client = Client(random_seed=0)
        >>> client.configure_experiment(
        ...     [RangeParameterConfig(name="x", parameter_type="float", bounds=(0, 1))]
        ... )
        >>> client.configure_optimization(objective="-defects")
        >>> client.set_generation_strategy(
        ...     seqgp.ax.generation_strategy(likelihoods={"defects": "poisson"}, num_initial=3)
        ... )
        >>> for _ in range(5):
        ...     for index, parameters in client.get_next_trials(max_trials=1).items():
        ...         x = parameters["x"]
        ...         if x > 0.8:
        ...             client.mark_trial_failed(index)
        ...         else:
        ...             _ = client.complete_trial(index, raw_data={"defects": round(30 * (1 - x))})
        >>> client.get_best_parameterization(use_model_predictions=False)[0]["x"] <= 0.8
        True
    """
    likelihoods = dict(likelihoods or {})
    configs = {name: _options(name, given) for name, given in likelihoods.items()}
    statuses = [status.upper() for status in failures]
    for status in statuses:
        if status not in TrialStatus.__members__:
            names = ", ".join(TrialStatus.__members__)
            raise ValueError(f"failures: expected names among {names}, got {status!r}.")
    if num_initial < 1 or min_valid < 1:
        raise ValueError(
            f"num_initial, min_valid: expected at least one, got {num_initial} and {min_valid}."
        )
    nodes = [_initial_node(num_initial, min_valid, statuses, seed)]
    if center:
        nodes.insert(
            0,
            CenterGenerationNode(
                next_node_name=nodes[0].name, use_existing_trials_for_initialization=True
            ),
        )
    shared = {"stream": stream, "max_inducing": max_inducing}
    configs[VALIDITY] = {"likelihood_name": "bernoulli", "jumps": True}
    for total in [options.get("total_count") for options in configs.values()]:
        if isinstance(total, str):  # a metric, which is a count
            configs.setdefault(total, {"likelihood_name": "poisson"})
    raw = [name for name, options in configs.items() if options]
    held = {"raw_metrics": raw, "growth": GROWTH if stream else 0.0}
    kwargs: dict[str, Any] = {
        "surrogate_spec": SurrogateSpec(
            model_configs=[_model_config(shared)],
            metric_to_model_configs={
                name: [_model_config({**shared, **options})] for name, options in configs.items()
            },
            allow_batched_models=False,
        ),
        "acquisition_class": CorrelatedAcquisition if correlated else ValidAcquisition,
        "torch_device": None if torch_device is None else torch.device(torch_device),
        "transforms": [
            *([LearnFailures] if statuses else []),
            MapKeyToFloat,
            *Mixed_transforms,
            Derelativize,
            StreamWinsorize,
            StreamBilogY,
            StreamStandardizeY,
        ],
        "transform_configs": {
            "LearnFailures": {"statuses": statuses},
            "Derelativize": {"use_raw_status_quo": True},
            "StreamWinsorize": {"derelativize_with_raw_status_quo": True, **held},
            "StreamBilogY": {"derelativize_with_raw_status_quo": True, **held},
            "StreamStandardizeY": held,
        },
    }
    if botorch_acqf_class is not None:
        kwargs["botorch_acqf_class"] = botorch_acqf_class
    gen_kwargs: dict[str, Any] = {}
    if optimizer_options:
        gen_kwargs["model_gen_options"] = {"optimizer_kwargs": dict(optimizer_options)}
    nodes.append(
        GenerationNode(
            name=_NODE,
            generator_specs=[
                GeneratorSpec(
                    generator_enum=SequentialGenerators.BOTORCH,
                    generator_kwargs=kwargs,
                    generator_gen_kwargs=gen_kwargs,
                )
            ],
            should_deduplicate=True,
            suggested_experiment_status=ExperimentStatus.OPTIMIZATION,
        )
    )
    return GenerationStrategy(name="+".join(node.name for node in nodes), nodes=nodes)


def _options(metric: str, given: Likelihood) -> dict[str, Any]:
    """Options of the model of a metric."""
    name, *total = given if isinstance(given, tuple | list) and given else (given,)
    if name not in list(LIKELIHOODS) or len(total) != (name == "binomial"):
        names = ", ".join(map(repr, LIKELIHOODS))
        raise ValueError(
            f"likelihoods: expected one of {names} for {metric!r}, with a total for binomial as in "
            f"('binomial', 20); got {given!r:.80}."
        )
    if name == "gaussian":
        return {}
    return {"likelihood_name": name, **({"total_count": total[0]} if total else {})}


def _model_config(options: dict[str, Any]) -> ModelConfig:
    return ModelConfig(
        botorch_model_class=AxSequentialGP,
        model_options=options,
        name=f"SequentialGP, {options.get('likelihood_name', 'gaussian')}",
    )


def _initial_node(
    num_initial: int, min_valid: int, failures: list[str], seed: int | None
) -> GenerationNode:
    """Quasi-random trials until there are enough trials, and enough valid ones."""
    failed = [TrialStatus.FAILED, TrialStatus.ABANDONED]
    forgotten = [status for status in failed if status.name not in failures]
    return GenerationNode(
        name="Sobol",
        generator_specs=[
            GeneratorSpec(
                generator_enum=SequentialGenerators.INITIAL if failures else Generators.SOBOL,
                generator_kwargs={"seed": seed},
            )
        ],
        transition_criteria=[
            MinTrials(
                threshold=num_initial,
                transition_to=_NODE,
                use_all_trials_in_exp=True,
                not_in_statuses=forgotten,
            ),
            MinTrials(
                threshold=min_valid,
                transition_to=_NODE,
                use_all_trials_in_exp=True,
                only_in_statuses=[TrialStatus.COMPLETED],
                count_only_trials_with_data=True,
            ),
        ],
        pausing_criteria=[
            MaxTrialsAwaitingData(
                threshold=num_initial, not_in_statuses=failed, use_all_trials_in_exp=True
            )
        ],
        should_deduplicate=True,
        suggested_experiment_status=ExperimentStatus.INITIALIZATION,
    )


def _check_parameters(search_space: SearchSpace, points: Sequence[Mapping[str, Any]]) -> None:
    """Raise unless points have all parameters of a search space, with possible values."""
    if isinstance(points, Mapping):
        raise TypeError("points: expected a list of dictionaries, got a dictionary.")
    for point in points:
        check_instance(point, Mapping, "points", optional=False)
        for name, parameter in search_space.tunable_parameters.items():
            if name not in point:
                raise ValueError(
                    f"points: expected all parameters, {', '.join(search_space.parameters)}; "
                    f"{name!r} is missing in {dict(point)}."
                )
            if isinstance(parameter, ChoiceParameter) and point[name] not in parameter.values:
                raise ValueError(
                    f"points: expected one of {parameter.values} for {name!r}, got {point[name]!r}."
                )
        for name in point:
            if name not in search_space.parameters:
                near = difflib.get_close_matches(name, search_space.parameters, n=1)
                raise ValueError(
                    f"points: {name!r} is not a parameter of the experiment"
                    f"{f'; did you mean {near[0]!r}?' if near else '.'}"
                )


def probability_of_validity(client: Client, points: Sequence[Mapping[str, Any]]) -> list[float]:
    """The probability that trials do not fail, according to the models of the last trial.

    Args:
        client: A client with the `generation_strategy` of this module.
        points: Parameters by name, one mapping per trial.

    Returns:
        A probability for each point. It is one if no trial has failed yet.

    Example:
        >>> from ax.api.client import Client
        >>> from ax.api.configs import RangeParameterConfig
        >>> import seqgp.ax
        >>> client = Client(random_seed=0)
        >>> client.configure_experiment(
        ...     [RangeParameterConfig(name="x", parameter_type="float", bounds=(0, 1))]
        ... )
        >>> client.configure_optimization(objective="gain")
        >>> client.set_generation_strategy(seqgp.ax.generation_strategy(num_initial=3))
        >>> for _ in range(5):
        ...     for index, parameters in client.get_next_trials(max_trials=1).items():
        ...         if parameters["x"] > 0.55:
        ...             client.mark_trial_failed(index)
        ...         else:
        ...             _ = client.complete_trial(index, raw_data={"gain": parameters["x"]})
        >>> low, high = seqgp.ax.probability_of_validity(client, [{"x": 0.2}, {"x": 1.0}])
        >>> low > high
        True
    """
    adapter = adapter_of(client)
    if not isinstance(adapter, SequentialAdapter):
        raise RuntimeError(
            "There is no model yet, or the client has another generation strategy. Models are used "
            "after the initial trials of seqgp.ax.generation_strategy: num_initial of them, and at "
            "least min_valid that have not failed. Ask for further trials first."
        )
    _check_parameters(experiment_of(client).search_space, points)
    model, _ = validity_of(adapter.botorch_surrogate)
    if model is None:
        return [1.0] * len(points)
    X = adapter.model_inputs(points).to(model.observed.X)
    with torch.no_grad():
        posterior: Any = model.posterior(X.unsqueeze(-2))
        return posterior.mean.flatten().tolist()
