"""Construction of a `SequentialGP`: checks, defaults, shapes and inducing points."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from botorch.models.transforms.input import AffineInputTransform, InputTransform
from botorch.models.transforms.outcome import OutcomeTransform
from botorch.models.utils import validate_input_scaling
from botorch.models.utils.gpytorch_modules import (
    get_covar_module_with_dim_scaled_prior,
    get_gaussian_likelihood_with_lognormal_prior,
)
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from botorch.utils.types import DEFAULT, _DefaultType
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import (
    BernoulliLikelihood,
    FixedNoiseGaussianLikelihood,
    GaussianLikelihoodWithMissingObs,
    Likelihood,
)
from gpytorch.means import ConstantMean, Mean
from gpytorch.priors import NormalPrior
from torch import Tensor

from seqgp.distributed import ALONE, Ranks
from seqgp.likelihoods.outliers import has_outliers
from seqgp.likelihoods.traits import (
    has_one_latent,
    is_conjugate,
    is_real_valued,
    output_latents,
)
from seqgp.models.outcomes import default_transform, transform_observations
from seqgp.observations import Observations
from seqgp.streaming.greedy_allocator import GreedyAllocator
from seqgp.streaming.inducing_points import DEFAULT_LIMIT, fill_up
from seqgp.validation import (
    check_coefficients,
    check_inputs,
    check_instance,
    check_targets,
    check_tensor,
    check_Y,
    is_whole,
    one_hot_hint,
)

#: Up to this number of inputs, all of them are inducing points by default.
ALL_INPUTS = 1000


class Parts(NamedTuple):
    """The parts of a model.

    Attributes:
        observations: Raw inputs, transformed targets, arguments.
        likelihood: The likelihood.
        covar_module: The kernel.
        mean_module: The mean.
        inducing_points: ``... x m x d``, in the transformed space.
        num_latents: The number of latents of the likelihood, ``None`` for one.
        num_outputs: The number of outputs.
        batch_shape: The batch shape of the duals, without latents.
        has_output_dim: Whether the last batch dimension is that of the outputs.
        input_transform: The input transform, whose statistics are frozen.
        outcome_transform: The outcome transform, which has learnt its statistics.
        standardizes_by_default: Whether this is the default transform, which updates adapt.
    """

    observations: Observations
    likelihood: Likelihood
    covar_module: Kernel
    mean_module: Mean
    inducing_points: Tensor
    num_latents: int | None
    num_outputs: int
    batch_shape: torch.Size
    has_output_dim: bool
    input_transform: InputTransform | None
    outcome_transform: OutcomeTransform | None
    standardizes_by_default: bool


def assemble(
    train_X: Tensor,
    train_Y: Tensor | None,
    train_Yvar: Tensor | None,
    likelihood: Likelihood | None,
    covar_module: Kernel | None,
    mean_module: Mean | None,
    inducing_points: Tensor | int | None,
    input_transform: InputTransform | None,
    outcome_transform: OutcomeTransform | _DefaultType | None,
    allocator: InducingPointAllocator | None,
    likelihood_arguments: Mapping[str, Any] | None,
    coefficients: Tensor | None,
    num_outputs: int | None,
    ranks: Ranks = ALONE,
) -> Parts:
    """Return the parts of a model, given the arguments of `SequentialGP`, which documents them.

    Transforms learn their statistics from the data of all ranks, and inducing points are chosen
    among these data. The returned observations are those of this rank.
    """
    observed_X, points = train_X, train_X
    if coefficients is not None:
        check_coefficients(coefficients, train_X, "train_X")
        points = train_X[..., 0, :]
    check_inputs(points, name="train_X")
    if train_Y is None:  # there are no observations yet
        observed_X = points = train_X[..., :0, :]
        train_Y = _no_observations(points, likelihood, coefficients, num_outputs)
    check_Y(points, train_Y, "train_X", "train_Y")
    for name, part, kind in (
        ("likelihood", likelihood, Likelihood),
        ("covar_module", covar_module, Kernel),
        ("mean_module", mean_module, Mean),
        ("input_transform", input_transform, InputTransform),
    ):
        check_instance(part, kind, name)
    is_default = outcome_transform is DEFAULT
    outcomes: Any = None if is_default else outcome_transform
    check_instance(outcomes, OutcomeTransform, "outcome_transform")
    if train_Yvar is not None:
        _check_noise(train_Y, train_Yvar, likelihood)
    train_X, observed_X, train_Y = train_X.detach(), observed_X.detach(), train_Y.detach()
    train_Yvar = None if train_Yvar is None else train_Yvar.detach()
    if not train_Y.is_floating_point():
        train_Y = train_Y.to(train_X)
    given_Y, given_arguments = train_Y, dict(likelihood_arguments or {})
    gaussian = likelihood is not None and is_conjugate(likelihood)
    if gaussian:
        _check_gaussian(likelihood)
    if gaussian and train_Yvar is None and isinstance(given_arguments.get("noise"), Tensor):
        train_Yvar = _noise_columns(given_arguments.pop("noise"), train_Y)
    if train_Yvar is not None and likelihood is not None and has_outliers(likelihood):
        raise ValueError(
            f"train_Yvar: a {type(likelihood).__name__} has a base_noise, which is "
            "FixedGaussianNoise(noise) if noise variances are known."
        )
    flat = train_X if coefficients is None else train_X.flatten(-3, -2)
    all_Y = ranks.gather(train_Y, -2)
    all_Yvar = None if train_Yvar is None else ranks.gather(train_Yvar, -2)
    with torch.no_grad():
        # Inputs are exchanged only if a transform or the choice of inducing points needs them all.
        chosen = input_transform is not None or not isinstance(inducing_points, Tensor)
        all_X = ranks.gather(flat, -2) if chosen else flat
        if input_transform is not None:
            input_transform.to(train_X).train()
            all_X = input_transform(all_X)
        X = all_X
        if chosen and not ranks.alone:
            first = sum(ranks.counts(flat.shape[-2])[: ranks.rank])
            X = all_X[..., first : first + flat.shape[-2], :]
        at = X[..., : points.shape[-2], :] if coefficients is None else points
        if is_default:
            outcomes = default_transform(all_Y, likelihood, coefficients is not None)
        elif outcomes is not None:
            outcomes.to(train_X).train()
            # Learn the statistics of the transform, if it has any.
            outcomes(all_Y, all_Yvar, X=ranks.gather(at, -2))
        if outcomes is not None:
            train_Y, train_Yvar = transform_observations(
                outcomes, train_Y, train_Yvar, at, coefficients
            )
            _check_statistics(outcomes)
    m, batch_shape = train_Y.shape[-1], points.shape[:-2]
    aug_batch_shape = torch.Size([*batch_shape, m]) if m > 1 else batch_shape
    Y, noise = _to_targets(train_Y), None if train_Yvar is None else _to_targets(train_Yvar)
    if likelihood is None:
        if noise is None:
            likelihood = get_gaussian_likelihood_with_lognormal_prior(aug_batch_shape)
        else:
            all_noise = ranks.gather(noise)
            likelihood = FixedNoiseGaussianLikelihood(all_noise, batch_shape=aug_batch_shape)
    likelihood = likelihood.to(train_X)  # the device and dtype of the targets that it will check
    arguments = _arguments(given_arguments, train_Y.shape)
    if noise is not None:
        arguments["noise"] = noise
    latents = _num_latents(likelihood, train_Y)
    seen = output_latents(likelihood)
    outputs = latents or m if seen is None else len(seen)
    if num_outputs not in (None, outputs):
        raise ValueError(
            f"num_outputs: expected {outputs}, one for each column of train_Y or each latent "
            f"function of the likelihood, got {num_outputs}; leave it out."
        )
    # Latents share modules, whose batches have a dimension of size 1 for them.
    module_shape = aug_batch_shape
    if latents is not None and batch_shape:
        module_shape = torch.Size([*batch_shape, 1])
    if latents is not None and seen is not None:  # latents are functions of different kinds
        module_shape = torch.Size([*batch_shape, latents])
    observations = _observations(
        observed_X,
        Y,
        likelihood,
        arguments,
        coefficients,
        outcomes,
        _to_targets(given_Y),
        m > 1,
    )
    if covar_module is None:
        if len(observations):
            _check_scaling(X, train_Y, train_Yvar, likelihood, coefficients is not None)
        covar_module = get_covar_module_with_dim_scaled_prior(
            ard_num_dims=X.shape[-1], batch_shape=module_shape
        )
    covar_module = covar_module.to(X)
    # Functionals may repeat points, such as comparisons of one item with several others.
    candidates = all_X if coefficients is None or all_X.dim() > 2 else distinct(all_X)[0]
    Z = choose_inducing_points(candidates, inducing_points, covar_module, allocator)
    if (m > 1 or latents is not None) and Z.dim() > 2:
        Z = Z.unsqueeze(-3)
    if mean_module is None:
        mean_module = default_mean(likelihood, module_shape)
    return Parts(
        observations,
        likelihood,
        covar_module,
        mean_module,
        Z,
        latents,
        outputs,
        aug_batch_shape,
        m > 1,
        None if input_transform is None else frozen(input_transform),
        outcomes,
        # Latents other than the mean (a log variance) have units that updates do not convert.
        is_default and outcomes is not None and latents is None,
    )


def default_mean(likelihood: Likelihood | None, batch_shape: torch.Size) -> ConstantMean:
    """Return a constant mean, with a prior if observations are labels.

    If all labels are of one kind, that kind is likely, but not certain.

    Args:
        likelihood: The likelihood, ``None`` for a Gaussian.
        batch_shape: The batch shape of the mean.
    """
    prior = NormalPrior(0.0, 1.5) if isinstance(likelihood, BernoulliLikelihood) else None
    mean = ConstantMean(constant_prior=prior, batch_shape=batch_shape)
    initial = getattr(likelihood, "initial_means", None)
    if initial is not None:
        mean.initialize(constant=torch.tensor(initial).expand(batch_shape).clone())
    return mean


def _no_observations(
    points: Tensor,
    likelihood: Likelihood | None,
    coefficients: Tensor | None,
    num_outputs: int | None,
) -> Tensor:
    """Return ``... x 0 x m`` targets for a model that is built without observations."""
    if coefficients is not None:
        raise ValueError("train_Y: required with coefficients, got None.")
    one = likelihood is not None and not has_one_latent(likelihood)  # column, of several latents
    return points.new_zeros(*points.shape[:-1], 1 if one else num_outputs or 1)


def _check_scaling(
    X: Tensor, Y: Tensor, Yvar: Tensor | None, likelihood: Likelihood, functionals: bool
) -> None:
    """Emit BoTorch's warnings about data that do not suit its default priors.

    Inputs are checked for every likelihood; observations are checked if they should be
    standardised.
    """
    if not X.shape[-2]:
        return
    scaled = is_real_valued(likelihood) and not functionals
    if isinstance(likelihood, GaussianLikelihoodWithMissingObs) or not scaled:
        Y, Yvar = X.new_zeros(1, 1), None  # a single zero counts as standardised
    validate_input_scaling(train_X=X, train_Y=Y, train_Yvar=Yvar)


def frozen(transform: InputTransform) -> InputTransform:
    """Return a copy of a transform with frozen statistics.

    Inducing points and folded observations are in its space. The caller's transform can go on
    learning its statistics. Parameters are shared, so that the caller sees their fitted values.
    """
    shared: dict[int, Any] = {id(parameter): parameter for parameter in transform.parameters()}
    result: InputTransform = copy.deepcopy(transform, shared)
    for module in result.modules():
        if isinstance(module, AffineInputTransform):
            module.learn_coefficients = False
    return result


def _check_statistics(transform: OutcomeTransform) -> None:
    """Raise if observations are so large that the statistics of a transform overflow."""
    for statistics in transform.buffers():
        if not bool(statistics.isfinite().all()):
            raise ValueError(
                f"train_Y: its mean or its standard deviation overflows in {statistics.dtype}; "
                "scale the observations."
            )


def _check_gaussian(likelihood: Likelihood | None) -> None:
    """Raise if a user's Gaussian likelihood has a density of its own, which would be ignored."""
    kind = type(likelihood)
    for name in ("_shaped_noise_covar", "marginal", "forward", "expected_log_prob"):
        root = inspect.unwrap(getattr(kind, name)).__module__.partition(".")[0]
        if root not in ("gpytorch", "botorch", "seqgp"):
            raise ValueError(
                f"likelihood: {kind.__name__} overrides {name} of a Gaussian likelihood. Gaussian "
                "observations are learnt in closed form, with the variances likelihood.noise. If "
                "noise variances are known, pass them as train_Yvar; if they are learnt, see "
                "seqgp.HeteroscedasticGaussianLikelihood."
            )


def _check_noise(train_Y: Tensor, train_Yvar: Tensor, likelihood: Likelihood | None) -> None:
    """Raise unless noise variances match targets and likelihood."""
    if isinstance(train_Yvar, Likelihood):  # the third argument of SingleTaskVariationalGP
        raise TypeError(
            f"train_Yvar: expected noise variances, got a {type(train_Yvar).__name__}; pass it as "
            "likelihood=."
        )
    check_tensor(train_Yvar, "train_Yvar")
    if train_Yvar.shape != train_Y.shape:
        raise ValueError(
            f"train_Yvar: expected the shape of train_Y, {tuple(train_Y.shape)}, got "
            f"{tuple(train_Yvar.shape)}."
        )
    if likelihood is not None and not is_conjugate(likelihood):
        raise ValueError(
            "train_Yvar: noise variances are for Gaussian likelihoods, this is a "
            f"{type(likelihood).__name__}."
        )


def _to_targets(Y: Tensor) -> Tensor:
    """Convert BoTorch's shape ``... x n x m`` to ``... [m x] n``."""
    return Y.mT if Y.shape[-1] > 1 else Y.squeeze(-1)


def _noise_columns(noise: Tensor, Y: Tensor) -> Tensor:
    """Convert noise variances ``... [m x] n``, or of the shape of ``Y``, to ``... x n x m``."""
    if noise.shape == Y.shape:
        return noise
    m, n = Y.shape[-1], Y.shape[-2]
    try:
        rows = noise.expand(*Y.shape[:-2], *([m] if m > 1 else []), n)
    except RuntimeError:
        raise ValueError(
            f"noise: expected shape ... x {n}, an element for each observation, got "
            f"{tuple(noise.shape)}."
        ) from None
    return rows.mT if m > 1 else rows.unsqueeze(-1)


def _arguments(given: dict[str, Any], shape: torch.Size) -> dict[str, Any]:
    """Return per-point arguments as ``... [m x] n``; some may have the shape of ``Y``."""
    square = shape[-1] > 1 and shape[-1] == shape[-2]  # the two shapes cannot be told apart
    return {
        key: _to_targets(value)
        if isinstance(value, Tensor) and value.shape == shape and not square
        else value
        for key, value in given.items()
    }


def _num_latents(likelihood: Likelihood, train_Y: Tensor) -> int | None:
    """Return the number of latent functions of a likelihood, ``None`` for one."""
    if has_one_latent(likelihood):
        return None
    latents: int = getattr(likelihood, "num_features", 0)
    if not latents:
        raise ValueError(
            f"likelihood: {type(likelihood).__name__} has several latent functions, but no "
            "attribute num_features, their number."
        )
    if train_Y.shape[-1] > 1:
        raise ValueError(
            f"train_Y: {type(likelihood).__name__} takes one column of targets, got "
            f"{train_Y.shape[-1]}{one_hot_hint(likelihood, train_Y, 'train_Y')}"
        )
    return latents


def _observations(
    train_X: Tensor,
    targets: Tensor,
    likelihood: Likelihood,
    arguments: dict[str, Any],
    coefficients: Tensor | None,
    outcome_transform: OutcomeTransform | None,
    given: Tensor,
    has_outputs: bool,
) -> Observations:
    """Return checked copies of the data, so that the caller can change the originals later."""
    names = ("train_X", "train_Y")
    try:
        checked = Observations.checked(
            train_X,
            targets,
            likelihood,
            arguments,
            None,
            coefficients,
            names=names,
            has_outputs=has_outputs,
        )
    except ValueError as error:
        if outcome_transform is None:
            raise
        # The transform is at fault if targets are wrong that were right before.
        points = train_X if coefficients is None else train_X[..., 0, :]
        points = points.unsqueeze(-3) if has_outputs else points
        check_targets(given, points, likelihood, name="train_Y", **arguments)
        try:
            check_targets(targets, points, likelihood, **arguments)
        except ValueError:
            hint = "leave it out, since labels and counts must not be transformed"
            if is_conjugate(likelihood):
                hint = "choose one that is finite at all of them"
            raise ValueError(
                f"outcome_transform: after a {type(outcome_transform).__name__}, train_Y are no "
                f"longer possible observations of a {type(likelihood).__name__}; {hint}."
            ) from error
        raise
    return checked.to(lambda tensor: tensor.detach().clone())


def choose_inducing_points(
    X: Tensor,
    inducing_points: Tensor | int | None,
    covar_module: Kernel,
    allocator: InducingPointAllocator | None,
    fills_up: bool = False,
) -> Tensor:
    """Choose ``batch_shape x k x d`` inducing points for inputs ``batch_shape x n x d``.

    Args:
        X: The transformed inputs.
        inducing_points: The points themselves, their maximum number, or ``None`` for the default.
        covar_module: The kernel.
        allocator: Chooses them; by default greedily by variance reduction.
        fills_up: Whether to add other inputs up to that number, even if they add no information
            under the present kernel.
    """
    if isinstance(inducing_points, Tensor):
        if inducing_points.dim() < 2 or inducing_points.shape[-1] != X.shape[-1]:
            raise ValueError(
                f"inducing_points: expected shape k x {X.shape[-1]}, got "
                f"{tuple(inducing_points.shape)}."
            )
        return inducing_points
    if inducing_points is not None and not is_whole(inducing_points):
        raise TypeError(
            f"inducing_points: expected a tensor or a whole number, got {inducing_points!r:.50}."
        )
    n = X.shape[-2]
    if n == 0:
        raise ValueError("train_X: without data, pass inducing_points as a tensor.")
    number = inducing_points
    if number is None:
        number = n if n <= ALL_INPUTS else DEFAULT_LIMIT
    number = min(n, number)
    if number < 1:
        raise ValueError(f"inducing_points: expected at least one, got {inducing_points}.")
    if number == n:
        return X
    if covar_module.batch_shape:  # choose for the first model: BoTorch supports few batches
        covar_module = covar_module[(0,) * len(covar_module.batch_shape)]
    allocator = GreedyAllocator() if allocator is None else allocator
    chosen = [
        allocator.allocate_inducing_points(x, covar_module, number, torch.Size())
        for x in X.reshape(-1, *X.shape[-2:])
    ]
    if fills_up:
        each = zip(chosen, X.reshape(-1, *X.shape[-2:]), strict=True)
        chosen = [fill_up(Z, x, number) for Z, x in each]
    number = min(len(points) for points in chosen)  # fewer if more would add no information
    return torch.stack([Z[:number] for Z in chosen]).reshape(*X.shape[:-2], number, X.shape[-1])


def discrete_columns(dims: Sequence[int], d: int) -> tuple[int, ...]:
    """Check indices of discrete columns, and return them as nonnegative numbers.

    Args:
        dims: The indices; negative ones count from the last column.
        d: The number of columns.
    """
    if isinstance(dims, str) or not isinstance(dims, Sequence):
        raise TypeError(f"discrete_dims: expected a list of columns, got {dims!r:.50}.")
    if any(not is_whole(i) or not -d <= i < d for i in dims):
        raise ValueError(f"discrete_dims: expected columns of {d} inputs, got {list(dims)!r:.80}.")
    return tuple(sorted({int(i) % d for i in dims}))


def distinct(points: Tensor) -> tuple[Tensor, Tensor]:
    """Return the distinct rows of ``n x d`` points, in order of appearance, and ``n`` indices.

    Args:
        points: The points.
    """
    rows, inverse = points.unique(dim=0, return_inverse=True)
    n = len(points)
    first = torch.full((len(rows),), n, device=points.device)
    first = first.scatter_reduce(0, inverse, torch.arange(n, device=points.device), "amin")
    order = first.argsort()
    rank = torch.empty_like(order)
    rank[order] = torch.arange(len(order), device=points.device)
    return rows[order], rank[inverse]
