"""Contents of a checkpoint, and how a model is restored from them.

A checkpoint contains everything that a stream needs to continue, as tensors, numbers and strings.
`seqgp.checkpoint.storage` writes and reads these. `seqgp.checkpoint.registry` describes the parts
of a model. A model with other parts is loaded with ``like=``, a model that the user has built in
the same way.
"""

from __future__ import annotations

import copy
import logging
import os
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

from seqgp.checkpoint import storage
from seqgp.checkpoint.limits import AllocationLimit
from seqgp.checkpoint.registry import (
    CannotDescribe,
    describe,
    difference,
    name_of,
    rebuild,
    register,
)
from seqgp.checkpoint.storage import CheckpointError
from seqgp.dual import Sites
from seqgp.models.multi_task_gp import SequentialMultiTaskGP
from seqgp.models.preference_gp import PreferenceGP
from seqgp.models.sequential_gp import SequentialGP
from seqgp.observations import Observations
from seqgp.streaming import StreamState, UpdateRecord
from seqgp.variational.strategy import DualVariationalStrategy, Observed

__all__ = ["load", "load_extra", "save"]

# Records, too, so that `seqgp.plots.history` can draw the updates before the checkpoint.
for _part in (Observations, StreamState, UpdateRecord):
    register(_part)

_VERSION = 2
_LOG = logging.getLogger(__name__)

#: Models that can be rebuilt from a file.
_KNOWN = (SequentialGP, PreferenceGP, SequentialMultiTaskGP)
_KNOWN_BY_NAME = {name_of(kind): kind for kind in _KNOWN}
#: The modules of a `SequentialGP` that are described; they are passed to its constructor or set.
_GIVEN = ("likelihood", "covar_module", "mean_module")
_SET = ("input_transform", "outcome_transform")
#: The fields of a checkpoint, and their types.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "class": str,
    "parts": (dict, type(None)),
    "reason": (str, type(None)),
    "modules": dict,
    "training": dict,
    "parameters": dict,
    "buffers": dict,
    "held": dict,
    "attributes": dict,
    "left_out": dict,
    "observed": (dict, type(None)),
    "random": dict,
    "extra": dict,
}
#: Maximum number of elements of tensors created while a model is built: a constant, plus a multiple
#: of the number of elements in the file. Our own models need less than one per saved element.
_FREE_ELEMENTS, _ELEMENTS_PER_SAVED_ONE = 10**7, 16
#: Attributes that every module has.
_RESERVED = set(vars(gpytorch.Module()))
#: Attributes that are not saved, because they are recomputed or saved in another way.
_INTERNAL = {
    *_RESERVED,
    *("model", "_variational_distribution", "_cache", "_correction", "_observed"),
    *("_past", "_whitened", "_summary_known", "_leaves", "_own_steps", "_floating", "settled_at"),
    *("guard", "training_graph"),
}
_NUMBER = int | float


def save(
    model: torch.nn.Module, path: str | os.PathLike[str], extra: dict[str, Any] | None = None
) -> None:
    """Save a model to a file, so that it can be loaded and updated further.

    The file holds hyperparameters, inducing points, posterior, summary and memory, the likelihood,
    transforms, the options and counts of the stream, and the state of the random number generators
    of torch, NumPy and Python. A stream that is killed, loaded and continued gives bitwise the same
    results as one that was not interrupted. (If you use an optimiser of your own, save its state in
    ``extra``.)

    The file is replaced as a whole or not at all, even if the process is killed. An existing file
    keeps its permissions.

    All processes of a model with a ``process_group`` have to call `save`. The first one writes the
    file, and `load` can distribute the model among any number of processes.

    Args:
        model: A `SequentialGP`, conditioned or not, or any GPyTorch model whose variational
            strategy is a `DualVariationalStrategy`.
        path: The file. Its directory must exist.
        extra: Anything else to save: numbers, strings, tensors, records of updates, and lists,
            tuples and dictionaries of these. Examples are the number of the next batch, or
            ``optimizer.state_dict()``. `load_extra` returns it.

    Raises:
        TypeError: If the model or ``extra`` cannot be saved.
        OSError: If the file cannot be written. An existing file is then intact.

    Example:
        >>> import tempfile, torch, seqgp
        >>> X = torch.linspace(0, 1, 60, dtype=torch.double).unsqueeze(-1)
        >>> Y = 2**0.5 * torch.sin(12.6 * X)
        >>> model = seqgp.SequentialGP(X[:30], Y[:30])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     seqgp.save(model, f"{directory}/model.seqgp", extra={"next": 1})
        ...     again = seqgp.load(f"{directory}/model.seqgp")
        >>> records = [m.update(X[30:], Y[30:], steps=3) for m in (model, again)]
        >>> records[0].elbo == records[1].elbo
        True
    """
    strategy = getattr(model, "variational_strategy", None)
    if not isinstance(strategy, DualVariationalStrategy):
        raise TypeError(
            "model: expected a SequentialGP, or a GPyTorch model with a DualVariationalStrategy, "
            f"got a {type(model).__name__}. Models of a ModelListGP are saved one by one; a "
            "BatchOptimizer has a state_dict()."
        )
    if not isinstance(extra, Mapping | None):
        raise TypeError(f"extra: expected a dictionary, got a {type(extra).__name__}.")
    try:
        described_extra = describe(dict(extra or {}), "extra")
    except CannotDescribe as error:
        raise TypeError(
            f"extra: expected numbers, strings, tensors, lists, tuples and dictionaries; {error}."
        ) from None
    except RecursionError:
        raise ValueError("extra: it is nested too deeply, or it contains itself.") from None
    ranks = strategy.ranks
    with ranks.together():
        whole = model.gathered() if isinstance(model, SequentialGP) and not ranks.alone else model
        if ranks.rank == 0:
            storage.write({**_content(whole), "extra": described_extra}, path, _VERSION)
        ranks.agree()
    _LOG.debug("saved %s to %s", type(model).__name__, path)


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    random_state: bool = False,
    process_group: torch.distributed.ProcessGroup | None = None,
) -> Any:
    """Load a model that was saved by `save`.

    Args:
        path: The file. Nothing in it is executed.
        like: A model that was built in the same way as the saved one, with any data. Required if
            the model contains classes of your own (a kernel, a likelihood, a subclass), unless you
            have registered these with `seqgp.checkpoint.register`. It is copied, not changed.
        device: The device of the model. By default that of ``like``, or the CPU.
        dtype: The dtype of the model. By default that of the saved model.
        random_state: Whether to restore the random number generators of torch, NumPy and Python.
            This is only needed if your own code uses them.
        process_group: Processes that share the model's observations from now on, as in
            `SequentialGP`. All of them have to load the same file.

    Returns:
        The model.

    Raises:
        CheckpointError: If the file is not a checkpoint, is damaged, or was written by an
            incompatible version; or if the model contains classes of your own and ``like`` is
            missing.
        OSError: If the file cannot be read.

    Example:
        >>> import tempfile, torch, seqgp
        >>> from gpytorch.kernels import RBFKernel
        >>> class Own(RBFKernel): ...  # a class that a checkpoint cannot rebuild by itself
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> def build(n):
        ...     return seqgp.SequentialGP(X[:n], torch.sin(6 * X[:n]), covar_module=Own())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     seqgp.save(build(20), f"{directory}/model.seqgp")
        ...     model = seqgp.load(f"{directory}/model.seqgp", like=build(3), dtype=torch.float32)
        >>> model.posterior(X.float()).mean.dtype, model.num_data
        (torch.float32, 20)
    """
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise TypeError(f"dtype: expected a torch.dtype such as torch.float32, got {dtype!r}.")
    if device is not None:
        torch.empty(0, device=device)  # raises if there is no such device
    content = _read(path)
    with torch.device("cpu"):  # the file is read into host memory
        model: Any = None if like is None else _copy_of(like, content)
        with _building_from(path, content):
            model = _build(content) if model is None else model
            _restore(model, content)
    if like is not None and device is None:
        device = next((p.device for p in like.parameters()), None)
    with _building_from(path, content):
        if device is not None:
            model.to(device=device)
        if dtype is not None:
            model.to(dtype=dtype)
    if random_state:
        with _building_from(path, content):
            _set_random_state(content["random"])
    return model if process_group is None else model.scattered(process_group)


def load_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Load what was passed to `save` as ``extra``.

    Args:
        path: The file. Nothing in it is executed.

    Raises:
        CheckpointError: If the file is not a valid checkpoint.

    Example:
        >>> import tempfile, torch, seqgp
        >>> from seqgp.checkpoint import load_extra
        >>> X = torch.linspace(-1.6, 1.6, 20, dtype=torch.double).unsqueeze(-1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     model = seqgp.SequentialGP((X + 1.6) / 3.2, X)
        ...     seqgp.save(model, f"{directory}/model.seqgp", extra={"next batch": 7})
        ...     load_extra(f"{directory}/model.seqgp")
        {'next batch': 7}
    """
    content = _read(path)
    with _building_from(path, content):
        extra = rebuild(content["extra"])
        if not isinstance(extra, dict):
            raise CheckpointError("Its extra is not a dictionary.")
    return extra


# -------------------------------------------------------------------------------- save


def _content(model: torch.nn.Module) -> dict[str, Any]:
    """Return a model as plain data, in its state before or after any concurrent update."""
    if isinstance(model, SequentialGP):
        with model.guard.reading:
            return _content_of(model)
    return _content_of(model)


def _content_of(model: torch.nn.Module) -> dict[str, Any]:
    parts, reason = None, None
    _settle(model)
    try:
        parts = _describe_parts(model)
    except CannotDescribe as error:
        reason = str(error)
        _LOG.info("%s: seqgp.load will need like=", reason)
    attributes, left_out = _describe_attributes(model)
    return {
        "class": name_of(type(model)),
        "parts": parts,
        "reason": reason,
        "modules": _classes(model),
        "training": {name: module.training for name, module in model.named_modules()},
        "parameters": {
            name: {"value": p.detach().clone(), "requires_grad": p.requires_grad}
            for name, p in model.named_parameters()
        },
        "buffers": {f"{n}.{k}": v.detach().clone() for n, _, k, v in _tensors(model, "buffers")},
        "held": {f"{n}.{k}": v.detach().clone() for n, _, k, v in _tensors(model, "held")},
        "attributes": attributes,
        "left_out": left_out,
        "observed": _describe_observed(model),
        "random": _random_state(),
    }


def _classes(model: torch.nn.Module) -> dict[str, str]:
    """Return the classes of all modules by name; shared ones appear under each of their names."""
    return {
        name: name_of(type(module)) for name, module in model.named_modules(remove_duplicate=False)
    }


def _tensors(
    model: torch.nn.Module, kind: str
) -> Iterator[tuple[str, torch.nn.Module, str, Tensor]]:
    """Return tensors of all modules that are buffers or plain attributes."""
    for name, module in model.named_modules():
        held = module._buffers if kind == "buffers" else vars(module)
        for key, value in list(held.items()):
            saved = kind == "held" and name in _with_attributes(model)
            if isinstance(value, Tensor) and not saved:
                yield name, module, key, value


def _settle(model: torch.nn.Module) -> None:
    """Determine the basis of the duals of all strategies, including those from a training loop."""
    for module in model.modules():
        if isinstance(module, DualVariationalStrategy):
            module.settle()


def _with_attributes(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return the modules whose plain attributes are saved: strategies, and our own models."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DualVariationalStrategy | SequentialGP)
    }


def _describe_parts(model: torch.nn.Module) -> dict[str, Any]:
    """Describe the modules of a `SequentialGP`; raise if they could not be rebuilt."""
    if type(model) not in _KNOWN:
        raise CannotDescribe(f"the model is a {type(model).__name__}")
    known = {"variational_strategy", *_GIVEN, *_SET}
    for name in model._modules:
        if name not in known:
            raise CannotDescribe(f"{name} is a module that a SequentialGP does not have")
    if len(list(model.parameters())) != len(list(model.named_parameters(remove_duplicate=False))):
        raise CannotDescribe("some of its modules share their parameters")
    modules = {name: model._modules.get(name) for name in (*_GIVEN, *_SET)}
    parts = {name: describe(module, name) for name, module in modules.items()}
    for name, module in modules.items():
        try:
            with torch.device("cpu"):
                differs = difference(module, rebuild(parts[name]), name)
        except Exception as error:
            raise CannotDescribe(f"{name} could not be rebuilt ({error})") from error
        if differs is not None:
            raise CannotDescribe(f"{differs} would not be rebuilt as it is")
    return parts


def _describe_attributes(model: Any) -> tuple[dict[str, Any], dict[str, list[str]]]:
    """Return plain attributes by module and name, and the names of those without a description."""
    described: dict[str, Any] = {}
    left_out: dict[str, list[str]] = {}
    for name, module in _with_attributes(model).items():
        described[name], left_out[name] = {}, []
        for key, value in vars(module).items():
            if key in _INTERNAL:
                continue
            try:
                described[name][key] = describe(value, f"{name}.{key}".lstrip("."))
            except CannotDescribe as error:
                _LOG.info("%s: seqgp.load will need like=", error)
                left_out[name].append(key)
    return described, left_out


def _describe_observed(model: Any) -> dict[str, Any] | None:
    """Describe the observations of a conditioned model."""
    observed = model.variational_strategy.observed
    if observed is None:
        return None
    data, likelihood, sites, prior_mean = observed
    if likelihood is not getattr(model, "likelihood", None):
        raise TypeError(
            "model: it was conditioned with another likelihood than its own; save the model that "
            "it came from and condition that one again."
        )
    fields = {"data": data, "prior_mean": prior_mean, "lam": sites.lam, "beta": sites.beta}
    return {key: describe(value, key) for key, value in fields.items()}


# -------------------------------------------------------------------------------- load


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Read the content of a file, and check its fields."""
    content = storage.read(path, _VERSION)
    with _building_from(path, content):
        for field, types in _FIELDS.items():
            _require(isinstance(content[field], types), field)
        _require(all(isinstance(name, str) for name in content["modules"].values()), "modules")
    return content


def _num_elements(content: Any) -> int:
    """Return the number of elements of all tensors in a structure."""
    if isinstance(content, Tensor):
        return content.numel()
    values = content.values() if isinstance(content, dict) else content
    return sum(map(_num_elements, values)) if isinstance(content, dict | list) else 0


@contextmanager
def _building_from(path: str | os.PathLike[str], content: Any) -> Iterator[None]:
    """Guard the use of a file's content, which may be invalid or need too much memory."""
    limit = _FREE_ELEMENTS + _ELEMENTS_PER_SAVED_ONE * _num_elements(content)
    try:
        with AllocationLimit(limit):
            yield
    except CheckpointError as error:
        raise CheckpointError(f"{os.fspath(path)}: {error}") from error.__cause__
    except torch.cuda.OutOfMemoryError:  # not the fault of the file
        raise
    except Exception as error:
        raise CheckpointError(
            f"{os.fspath(path)}: what the checkpoint describes cannot be built "
            f"({type(error).__name__}: {error}). It was not written by seqgp.save, or by another "
            "version of seqgp, GPyTorch or BoTorch."
        ) from error


def _build(content: dict[str, Any]) -> SequentialGP:
    """Build a `SequentialGP` from the saved parts, without data."""
    if content["parts"] is None:
        raise CheckpointError(
            f"The checkpoint does not say how to build its model: {content['reason']}. Pass like=, "
            "a model that is built as the saved one was, or make classes of your own known with "
            "seqgp.checkpoint.register before saving."
        )
    missing = [f"{n}.{key}".lstrip(".") for n, keys in content["left_out"].items() for key in keys]
    if missing:
        raise CheckpointError(
            f"The checkpoint does not hold {', '.join(missing)}, which cannot be described: pass "
            "like=, a model that has them."
        )
    parts = {name: rebuild(part) for name, part in content["parts"].items()}
    attributes = {key: rebuild(value) for key, value in content["attributes"][""].items()}
    held = attributes["stream"].observations
    X, targets = held.inputs, held.targets
    Z_name = "variational_strategy.inducing_points"
    learns_Z = Z_name in content["parameters"]
    Z = content["parameters"][Z_name]["value"] if learns_Z else content["buffers"][Z_name]
    batch_shape, num_data = X.shape[:-2], X.shape[-2]
    if held.coefficients is not None:
        batch_shape, num_data = X.shape[:-3], X.shape[-3]
        _require(held.coefficients.shape == X.shape[:-1], "coefficients")
    for name, rows in {"targets": targets, **held.arguments}.items():
        _require(rows.shape[-1] == num_data, name)
    _require(attributes["stream"].represents.shape == (num_data,), "represents")
    outputs = targets.shape[-2] if attributes["has_output_dim"] else 1
    # A subclass has the state of its base, but its constructor takes other data.
    model: SequentialGP = SequentialGP.__new__(_KNOWN_BY_NAME[content["class"]])
    SequentialGP.__init__(
        model,
        X[..., :0, :] if held.coefficients is None else X[..., :0, :, :],
        X.new_empty(*batch_shape, 0, outputs),
        # One point is enough, since all are restored later; more would only cost time.
        inducing_points=Z.reshape(-1, *Z.shape[-2:])[0, :1].to(X),
        learn_inducing_points=learns_Z,
        likelihood_arguments={key: value[..., :0] for key, value in held.arguments.items()},
        coefficients=None if held.coefficients is None else held.coefficients[..., :0, :],
        outcome_transform=None,  # set below
        **{name: parts[name] for name in _GIVEN},
    )
    for name in _SET:
        if parts[name] is not None:
            setattr(model, name, parts[name])
    for name, buffer in model.named_buffers():
        saved = content["buffers"].get(name)
        if isinstance(saved, Tensor) and name.startswith("variational_strategy."):
            # The one point stands for all. Batch dimensions may be missing, or added.
            sizes = zip(reversed(saved.shape), reversed(buffer.shape), strict=False)
            _require(all(size in (1, own, Z.shape[-2]) for size, own in sizes), name)
        elif isinstance(saved, Tensor):
            _require(saved.shape == buffer.shape, name)
    return model


def _copy_of(like: Any, content: dict[str, Any]) -> Any:
    """Return a copy of a model, checked to have the modules of the saved one."""
    if not isinstance(getattr(like, "variational_strategy", None), DualVariationalStrategy):
        raise TypeError(
            f"like: expected a model as the one that was saved, a {content['class']}, got a "
            f"{type(like).__name__}."
        )
    have = _classes(like)
    for name in {**content["modules"], **have}:
        wanted, found = content["modules"].get(name), have.get(name)
        if wanted != found:
            raise ValueError(
                f"like: expected a model that is built as the saved one was; its "
                f"{name or 'class'} is {found or 'missing'}, that of the saved one was "
                f"{wanted or 'missing'}."
            )
    return copy.deepcopy(like)


@torch.no_grad()
def _restore(model: Any, content: dict[str, Any]) -> None:
    """Restore everything except the modules of a model."""
    _settle(model)
    modules = dict(model.named_modules(remove_duplicate=False))
    parameters, saved = dict(model.named_parameters()), content["parameters"]
    if parameters.keys() != saved.keys():
        names = sorted(parameters.keys() ^ saved.keys())
        raise CheckpointError(
            f"The model and the checkpoint do not have the same parameters: {', '.join(names)} "
            "belong to one of them only. Build the model as the saved one was."
        )
    for name, parameter in parameters.items():
        value = saved[name]["value"]
        _require(isinstance(value, Tensor), name)
        if not _fits(value, parameter, inducing_points=name.endswith("inducing_points")):
            raise CheckpointError(
                f"{name}: the checkpoint has shape {tuple(value.shape)}, the model "
                f"{tuple(parameter.shape)}. Build the model as the saved one was."
            )
        parameter.data = value
        parameter.requires_grad_(saved[name]["requires_grad"])
    for kind in ("buffers", "held"):
        for name, value in content[kind].items():
            owner, _, key = name.rpartition(".")
            _require(isinstance(value, Tensor) and key not in _RESERVED, name)
            into: Any = modules[owner]._buffers if kind == "buffers" else vars(modules[owner])
            into[key] = value
    for name, attributes in content["attributes"].items():
        _require(not attributes.keys() & _INTERNAL, name)
        own = modules[name].__dict__
        for key, value in attributes.items():
            rebuilt = rebuild(value)
            _require(_is_alike(rebuilt, own.get(key)), f"{name}.{key}".lstrip("."))
            own[key] = rebuilt
    for name, training in content["training"].items():
        _require(isinstance(training, bool), name)
        modules[name].training = training
    strategy: DualVariationalStrategy = model.variational_strategy
    strategy.clear_cache()
    strategy.observed = None
    if isinstance(model, SequentialGP):
        model.note_hyperparameters()
    if content["observed"] is not None:
        fields = {key: rebuild(value) for key, value in content["observed"].items()}
        sites = Sites(fields["lam"], fields["beta"])
        strategy.observed = Observed(fields["data"], model.likelihood, sites, fields["prior_mean"])


def _fits(value: Tensor, parameter: Tensor, inducing_points: bool) -> bool:
    """Whether a value has the shape of a parameter; any number of inducing points is valid."""
    if inducing_points:
        return value.dim() >= 2 and value.shape[-1] == parameter.shape[-1]
    return value.shape == parameter.shape


def _is_alike(value: Any, own: Any) -> bool:
    """Whether an attribute has the same type as that of the model, as far as the model has one."""
    if value is None or own is None or (isinstance(value, _NUMBER) and isinstance(own, _NUMBER)):
        return True
    return type(value) is type(own)


def _require(condition: bool, name: str) -> None:
    """Raise if a field of a checkpoint is not valid."""
    if not condition:
        raise CheckpointError(f"{name or 'the model'} is not valid.")


# -------------------------------------------------------------------------------- random numbers


def _random_state() -> dict[str, Any]:
    kind, keys, *rest = np.random.get_state()  # noqa: NPY002 - the global one, as it is
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
        "numpy": describe((kind, [int(key) for key in keys], *rest), "numpy"),
        "python": describe(random.getstate(), "python"),
    }


def _set_random_state(state: dict[str, Any]) -> None:
    """Set all generators, or none of them if the state is invalid."""
    numpy_state, python_state = rebuild(state["numpy"]), rebuild(state["python"])
    kind, keys, position, *_ = numpy_state
    # NumPy would read out of bounds if the position were wrong.
    if kind != "MT19937" or len(keys) != 624 or not 0 <= position <= 624:
        raise CheckpointError("The state of NumPy's random number generator is not valid.")
    torch.Generator().set_state(state["torch"])  # check on an unused generator first
    np.random.RandomState().set_state(numpy_state)
    random.Random().setstate(python_state)
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    np.random.set_state(numpy_state)  # noqa: NPY002
    random.setstate(python_state)
