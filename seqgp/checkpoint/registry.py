"""Descriptions of the parts of a model as plain data, and how to rebuild them without pickle.

A checkpoint describes the parts of a model: kernels, means, likelihoods, transforms, priors and
constraints. Each is described by the name of its class and the arguments of its constructor. Only
classes that are registered here are ever built from a file, only with plain values, and nothing in
a file is executed.
"""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import botorch.models.transforms as bt
import gpytorch.constraints as gc
import gpytorch.kernels as gk
import gpytorch.likelihoods as gl
import gpytorch.means as gm
import gpytorch.priors as gp
import torch
from botorch.models.likelihoods.sparse_outlier_noise import SparseOutlierGaussianLikelihood
from botorch.models.utils import inducing_point_allocators as bi
from botorch.models.utils.priors import BetaPrior
from botorch.utils.constraints import NonTransformedInterval
from gpytorch.likelihoods.noise_models import FixedGaussianNoise, HomoskedasticNoise
from gpytorch.utils import transforms as gt
from torch import Tensor

from seqgp import likelihoods as sl
from seqgp.checkpoint.storage import DTYPES, CheckpointError, is_plain
from seqgp.models.tasks import LoadingKernel, TaskKernel, TaskMean, TaskStandardize
from seqgp.streaming.memory import MemoryOptions

#: Source of a constructor's argument: an attribute (``"a.b"``), a function, or ``None``.
Where = str | Callable[[Any], Any] | None

_TAG = "__"
_PLAIN = (bool, int, float, str, type(None))
_FUNCTIONS = {
    "exp": torch.exp,
    "log": torch.log,
    "sigmoid": torch.sigmoid,
    "softplus": torch.nn.functional.softplus,
    "inv_softplus": gt.inv_softplus,
    "inv_sigmoid": gt.inv_sigmoid,
}


class CannotDescribe(TypeError):
    """An object that cannot be described as plain data."""


class _Part(NamedTuple):
    """How to rebuild an object of a class."""

    cls: type
    where: Mapping[str, Where]
    positional: str | None  # the attribute that holds *args
    keywords: str | None  # the attribute that holds **kwargs


_PARTS: dict[str, _Part] = {}


def register(
    cls: type,
    where: Mapping[str, Where] | None = None,
    positional: str | None = None,
    keywords: str | None = None,
) -> type:
    """Let checkpoints describe and rebuild objects of a class of your own.

    The value of a constructor argument is taken from the attribute of the same name, with or
    without a leading underscore, and that of a constraint from ``raw_...``, as GPyTorch names them.
    Arguments that are not found keep their defaults. `save` checks that the rebuilt object is the
    same. The function can be used as a decorator.

    Args:
        cls: The class. Its tensors (parameters, buffers) need not be arguments.
        where: For arguments that are found elsewhere: an attribute, or a function of the object;
            ``None`` for arguments that are left at their defaults.
        positional: The attribute that holds ``*args``, if there are any.
        keywords: The attribute that holds ``**kwargs``, if these are named parts.

    Returns:
        The class.

    Example:
        >>> import gpytorch
        >>> from seqgp.checkpoint import register
        >>> @register
        ... class Periodic(gpytorch.kernels.PeriodicKernel):
        ...     def __init__(self, harmonics=3):
        ...         super().__init__()
        ...         self.harmonics = harmonics
    """
    _PARTS[name_of(cls)] = _Part(cls, dict(where or {}), positional, keywords)
    return cls


def name_of(cls: type) -> str:
    """Return the name of a class in files."""
    root = cls.__module__.partition(".")[0]
    if root in ("gpytorch", "botorch", "seqgp", "torch"):
        return f"{root}.{cls.__qualname__}"  # independent of the module that defines it
    return f"{cls.__module__}.{cls.__qualname__}"


# -------------------------------------------------------------------------------- describe


def describe(value: Any, name: str) -> Any:
    """Describe a value by numbers, strings, lists, dictionaries and tensors.

    Args:
        value: The value.
        name: What to call it in the error.
    """
    if isinstance(value, torch.Size | tuple):
        kind = "size" if isinstance(value, torch.Size) else "tuple"
        if kind == "tuple" and type(value) is not tuple:
            raise CannotDescribe(f"{name} is a {type(value).__name__}")
        return {_TAG: kind, "items": [describe(v, f"{name}[{i}]") for i, v in enumerate(value)]}
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if not is_plain(value):
            raise CannotDescribe(f"{name} is a {type(value).__name__}")
        return value.detach().clone()
    if type(value) is list:
        return [describe(v, f"{name}[{i}]") for i, v in enumerate(value)]
    if isinstance(value, dict):
        items = [[describe(k, name), describe(v, f"{name}[{k!r}]")] for k, v in value.items()]
        return {_TAG: "dict", "items": items}
    if isinstance(value, torch.dtype) and value in DTYPES.values():
        return {_TAG: "dtype", "name": str(value).removeprefix("torch.")}
    for function_name, function in _FUNCTIONS.items():
        if value is function:
            return {_TAG: "function", "name": function_name}
    return _describe_part(value, name)


def _describe_part(value: Any, name: str) -> dict[str, Any]:
    part = _PARTS.get(name_of(type(value)))
    if part is None or part.cls is not type(value):
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        if callable(value) and hasattr(value, "__qualname__"):
            kind = f"the function {value.__qualname__}"
        raise CannotDescribe(f"{name} is {kind}, which is not a class that checkpoints can store")
    arguments = {}
    for argument, default in _arguments(part.cls).items():
        found, content = _find(value, argument, part)
        if found and not (content is None and default is None):
            arguments[argument] = describe(content, f"{name}.{argument}")
    result: dict[str, Any] = {_TAG: "part", "class": name_of(part.cls), "arguments": arguments}
    if part.positional is not None:
        items = getattr(value, part.positional)
        result["positional"] = [describe(v, f"{name}[{i}]") for i, v in enumerate(items)]
    if part.keywords is not None:
        for key, item in dict(getattr(value, part.keywords)).items():
            arguments[key] = describe(item, f"{name}.{key}")
    return result


def _arguments(cls: type) -> dict[str, Any]:
    """Return the arguments of a constructor and their defaults, including those of its bases."""
    found: dict[str, Any] = {}
    for base in cls.__mro__:
        if "__init__" not in vars(base) or base in (torch.nn.Module, object):
            continue
        parameters = list(inspect.signature(vars(base)["__init__"]).parameters.values())[1:]
        named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
        found = {p.name: p.default for p in named} | found
        if not any(p.kind == p.VAR_KEYWORD for p in parameters):
            break
    return found


def _find(value: Any, argument: str, part: _Part) -> tuple[bool, Any]:
    """Return whether the argument of a constructor is found in an object, and its value."""
    where = part.where.get(argument, "")
    if where is None:
        return False, None
    if callable(where):
        return True, where(value)
    candidates = [where] if where else [f"_{argument}", argument, f"raw_{argument}"]
    for candidate in candidates:
        content = value
        try:
            for attribute in candidate.split("."):
                content = getattr(content, attribute)
        except (AttributeError, RuntimeError):
            continue
        if not inspect.ismethod(content):
            return True, content
    return False, None


# -------------------------------------------------------------------------------- rebuild


def rebuild(data: Any) -> Any:
    """Rebuild a value from its description.

    Args:
        data: What `describe` returned.
    """
    if isinstance(data, list):
        return [rebuild(item) for item in data]
    if not isinstance(data, dict):
        return data
    kind = data.get(_TAG)
    if kind in ("tuple", "size"):
        items = [rebuild(item) for item in data["items"]]
        return tuple(items) if kind == "tuple" else torch.Size(items)
    if kind == "dict":
        return {rebuild(key): rebuild(value) for key, value in data["items"]}
    if kind == "dtype" and data["name"] in DTYPES:
        return DTYPES[data["name"]]
    if kind == "function" and data["name"] in _FUNCTIONS:
        return _FUNCTIONS[data["name"]]
    if kind == "part":
        part = _PARTS.get(data["class"])
        if part is None:
            raise CheckpointError(
                f"The checkpoint holds a {data['class']}, which is not registered: register the "
                "class with seqgp.checkpoint.register first, or pass like=, a model that is built "
                "as the saved one was."
            )
        arguments = {key: rebuild(value) for key, value in data["arguments"].items()}
        if part.keywords is None and not arguments.keys() <= _arguments(part.cls).keys():
            raise CheckpointError(f"The checkpoint has unknown arguments of a {data['class']}.")
        return part.cls(*map(rebuild, data.get("positional", [])), **arguments)
    raise CheckpointError("The checkpoint is damaged, or was written by another version of seqgp.")


# -------------------------------------------------------------------------------- compare


def difference(a: Any, b: Any, name: str, seen: set[tuple[int, int]] | None = None) -> str | None:
    """Return the name of the first difference between two objects, if there is one.

    Tensors of modules are compared by shape only, since their values are saved separately.

    Args:
        a: The first object.
        b: The second one.
        name: What to call them.
        seen: Pairs that are being compared, by their identities.

    Returns:
        The name of the first difference, or ``None``.
    """
    seen = set() if seen is None else seen
    if a is b or (id(a), id(b)) in seen:
        return None
    if type(a) is not type(b):
        return name
    seen = seen | {(id(a), id(b))}
    if isinstance(a, Tensor):
        same = a.shape == b.shape and torch.allclose(
            a.double(), b.double(), rtol=0, atol=0, equal_nan=True
        )
        return None if same else name
    if isinstance(a, weakref.ref):
        return None
    if isinstance(a, torch.distributions.Transform):
        return None if a == b else name
    if isinstance(a, types.MethodType):
        return difference(a.__func__, b.__func__, name, seen)
    if isinstance(a, types.FunctionType):
        mine, theirs = ([c.cell_contents for c in f.__closure__ or ()] for f in (a, b))
        same = a.__code__ is b.__code__ and a.__defaults__ == b.__defaults__
        return difference(mine, theirs, name, seen) if same else name
    if isinstance(a, list | tuple):
        if len(a) != len(b):
            return name
        pairs: Iterable[Any] = (
            (f"{name}[{i}]", x, y) for i, (x, y) in enumerate(zip(a, b, strict=True))
        )
    elif isinstance(a, Mapping):
        if list(a) != list(b):
            return name
        pairs = ((f"{name}.{key}", a[key], b[key]) for key in a)
    elif isinstance(a, torch.nn.Module):
        return _difference_of_modules(a, b, name, seen)
    elif hasattr(a, "__dict__") and not isinstance(a, type | types.ModuleType):
        pairs = [(name, vars(a), vars(b))]
    else:
        try:
            return None if a == b or (a != a and b != b) else name
        except Exception:
            return name
    return next((d for n, x, y in pairs if (d := difference(x, y, n, seen)) is not None), None)


#: Attributes of modules of others that need not be the same.
_CACHES = {"_memoize_cache", "_cached_train_inputs"}


def _difference_of_modules(a: Any, b: Any, name: str, seen: set[tuple[int, int]]) -> str | None:
    def tensors(module: torch.nn.Module) -> dict[str, Any]:
        held = {k: v for k, v in vars(module).items() if isinstance(v, Tensor) and k not in _CACHES}
        parameters = module.named_parameters(recurse=False, remove_duplicate=False)
        buffers = module.named_buffers(recurse=False, remove_duplicate=False)
        return {**dict(parameters), **dict(buffers), **held}

    def others(module: torch.nn.Module) -> dict[str, Any]:
        skipped = {"training", "_parameters", "_buffers", *_CACHES}
        return {
            key: value
            for key, value in sorted(vars(module).items())
            if key not in skipped and "hook" not in key and not isinstance(value, Tensor)
        }

    mine, theirs = tensors(a), tensors(b)
    for key in {**mine, **theirs}:
        shapes = [t[key].shape if key in t else None for t in (mine, theirs)]
        if shapes[0] != shapes[1]:
            return f"{name}.{key}"
    return difference(others(a), others(b), name, seen)


# -------------------------------------------------------------------------------- known classes


def _shape_of(attribute: str, dims: int = 1) -> Callable[[Any], torch.Size]:
    """Return a function that gets the batch shape of a module from one of its parameters."""
    return lambda module: getattr(module, attribute).shape[:-dims]


def _initial_value(constraint: gc.Interval) -> Tensor | None:
    """Return the initial value passed to a constraint, which stores the raw one."""
    value = constraint.initial_value
    return None if value is None else constraint.transform(value)


_NOISE: dict[str, Where] = {
    "noise_covar": None,
    "noise_prior": lambda m: getattr(m.noise_covar, "noise_prior", None),
    "noise_constraint": "noise_covar.raw_noise_constraint",
    "batch_shape": lambda m: m.noise_covar.raw_noise.shape[:-1],
}

for _cls in (
    gk.RBFKernel,
    gk.MaternKernel,
    gk.RQKernel,
    gk.PeriodicKernel,
    gk.CosineKernel,
    gk.PolynomialKernel,
    gk.LinearKernel,
    gk.ScaleKernel,
    gk.PiecewisePolynomialKernel,
    gk.ConstantKernel,
    gm.ZeroMean,
    gl.BernoulliLikelihood,
    gl.PoissonLikelihood,
    sl.BinomialLikelihood,
    sl.OverdispersedBinomialLikelihood,
    bt.outcome.Log,
    bt.outcome.Power,
    bt.outcome.Bilog,
    bi.GreedyVarianceReduction,
    MemoryOptions,
):
    register(_cls)

for _cls in (gc.Interval, gc.GreaterThan, gc.LessThan, gc.Positive, NonTransformedInterval):
    register(_cls, {"initial_value": _initial_value})
for _cls in (gk.AdditiveKernel, gk.ProductKernel):
    register(_cls, positional="kernels")
for _cls in (gl.GaussianLikelihood, gl.GaussianLikelihoodWithMissingObs):
    register(_cls, _NOISE)
register(torch.nn.Softplus)
register(
    gm.LinearMean,
    {
        "input_size": lambda m: m.weights.shape[-2],
        "batch_shape": _shape_of("weights", 2),
        "bias": lambda m: m.bias is not None,
    },
)
register(
    gl.FixedNoiseGaussianLikelihood,
    {
        "noise": "noise_covar.noise",
        "noise_covar": None,
        "learn_additional_noise": lambda m: m.second_noise_covar is not None,
        "batch_shape": lambda m: m.noise_covar.noise.shape[:-1],
    },
)
register(
    HomoskedasticNoise,
    {
        "noise_prior": lambda m: getattr(m, "noise_prior", None),
        "batch_shape": _shape_of("raw_noise"),
    },
)
register(FixedGaussianNoise)
register(
    SparseOutlierGaussianLikelihood,
    {
        "base_noise": "noise_covar.base_noise",
        "dim": "noise_covar.dim",
        "outlier_indices": lambda m: list(m.noise_covar.support),
        "rho_prior": lambda m: getattr(m.noise_covar, "rho_prior", None),
        "rho_constraint": "noise_covar.raw_rho_constraint",
        "batch_shape": lambda m: m.noise_covar.raw_rho.shape[:-1],
        "convex_parameterization": "noise_covar.convex_parameterization",
        "loo": "noise_covar.loo",
    },
)
register(
    gl.StudentTLikelihood,
    {"batch_shape": _shape_of("raw_noise")},
)
register(gl.LaplaceLikelihood, {"batch_shape": _shape_of("raw_noise")})
register(sl.GammaLikelihood, {"batch_shape": _shape_of("raw_shape")})
register(sl.CensoredGaussianLikelihood, {"batch_shape": _shape_of("raw_noise")})
register(sl.PsychometricLikelihood)
register(sl.HeteroscedasticGaussianLikelihood)
register(gl.BetaLikelihood, {"batch_shape": _shape_of("raw_scale")})
register(gl.NegativeBinomialLikelihood)
register(
    gl.SoftmaxLikelihood,
    {
        "mixing_weights": lambda m: m.mixing_weights is not None,
        "mixing_weights_prior": lambda m: getattr(m, "mixing_weights_prior", None),
    },
)
register(
    sl.OrdinalLikelihood,
    {
        "scale_constraint": lambda m: m.raw_scale_constraint if m.learn_scale else None,
        "cutpoints": None,  # saved as parameters
    },
)
register(
    sl.RatingLikelihood,
    {"scale": None, "level": None, "noise": None, "batch_shape": _shape_of("raw_noise")},
)
register(sl.ChoiceLikelihood)
register(sl.TieLikelihood, {"width": None})  # saved as a parameter


def _task_values(module: Any) -> list[int]:
    return [int(value) for value in module.task_values]


_PRIOR: dict[str, Where] = {"validate_args": lambda prior: vars(prior).get("_validate_args")}
for _cls in (
    gp.NormalPrior,
    gp.LogNormalPrior,
    gp.HalfNormalPrior,
    gp.HalfCauchyPrior,
    gp.GammaPrior,
    gp.SmoothedBoxPrior,
):
    register(_cls, _PRIOR)
register(gp.UniformPrior, {**_PRIOR, "a": "low", "b": "high"})
register(BetaPrior, {**_PRIOR, "transform": None})
for _cls in (sl.TaskLikelihood, sl.GaussianTaskLikelihood):
    register(_cls, {"likelihoods": lambda m: list(m.likelihoods)})
register(
    gm.MultitaskMean,
    {"base_means": lambda m: list(m.base_means), "num_tasks": lambda m: m.num_tasks},
)
register(TaskMean, {"task_values": _task_values})
register(
    TaskKernel,
    {
        "task_values": _task_values,
        "num_tasks": None,
        "rank": lambda m: m.raw_covar_factor.shape[-1],
        "task_prior": lambda m: getattr(m, "IndexKernelPrior", None),
        "var_constraint": "raw_var_constraint",
        "active_dims": lambda m: m.active_dims.tolist(),
    },
)
register(
    LoadingKernel,
    {
        "task_values": _task_values,
        "loadings": lambda m: m.initial.tolist(),
        "fixed": lambda m: [int(t) for t in m.task_values[~m.is_learnt]],
        "loading_prior": lambda m: getattr(m, "loading_prior", None),
        "active_dims": lambda m: m.active_dims.tolist(),
    },
)
register(TaskStandardize, {"dtype": None})
register(gm.ConstantMean, {"constant_prior": lambda mean: getattr(mean, "mean_prior", None)})


def _indices(transform: Any) -> list[int] | None:
    indices = getattr(transform, "indices", None)
    return None if indices is None else indices.tolist()


register(
    bt.input.Normalize,
    {
        "indices": _indices,
        "bounds": lambda t: None if t.learn_coefficients else t.bounds,
        "learn_bounds": None,
        "almost_zero": None,
    },
)
register(bt.input.InputStandardize, {"indices": _indices})
register(bt.input.Log10, {"indices": _indices})
register(bt.outcome.Standardize)
for _cls in (bt.input.ChainedInputTransform, bt.outcome.ChainedOutcomeTransform):
    register(_cls, {"modules": None}, keywords="_modules")
