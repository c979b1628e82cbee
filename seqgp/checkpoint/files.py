"""Checkpoints: a model on disk, with everything that its stream needs to go on.

A file holds tensors, numbers and strings. It is written beside its place, flushed to the disk and
then renamed, so that there is always a whole one; it is read by ``torch.load(weights_only=True)``,
which executes nothing. What the model consists of is described by `seqgp.checkpoint.registry`; a
model with parts that are not known there is loaded with ``like=``, a model that the user has built
in the same way.
"""

from __future__ import annotations

import copy
import logging
import os
import random
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gpytorch
import numpy as np
import torch
from torch import Tensor

from seqgp._version import __version__
from seqgp.checkpoint.registry import (
    CannotDescribe,
    describe,
    difference,
    name_of,
    rebuild,
    register,
)
from seqgp.dual import Sites
from seqgp.models.sequential_gp import SequentialGP
from seqgp.observations import Observations
from seqgp.streaming import StreamState, UpdateRecord
from seqgp.variational.strategy import DualVariationalStrategy, Observed

__all__ = ["load", "load_extra", "register", "save"]

# Records, so that `seqgp.plots.history` can draw what was before, too.
for _part in (Observations, StreamState, UpdateRecord):
    register(_part)

_FORMAT, _VERSION = "seqgp checkpoint", 1
_LOG = logging.getLogger(__name__)

#: The modules of a `SequentialGP` that are described, and then given to its constructor or set.
_GIVEN = ("likelihood", "covar_module", "mean_module")
_SET = ("input_transform", "outcome_transform")
#: Attributes that are not saved, since they are made anew or saved otherwise.
_INTERNAL = {
    *vars(gpytorch.Module()),
    *("model", "_variational_distribution", "_cache", "_correction", "_observed"),
    *("_past", "_whitened", "_summary_known"),
}


def save(
    model: torch.nn.Module, path: str | os.PathLike[str], extra: dict[str, Any] | None = None
) -> None:
    """Write a model to a file, from which `load` makes one that goes on in the same way.

    Saved are hyperparameters, inducing points, the posterior and the summary, the memory and its
    weights, the likelihood, the transforms, the options and counts of the stream, and the state of
    the random number generators of torch, NumPy and Python. (An update has no optimiser that
    outlives it; the state of one of your own can be in ``extra``.) A stream that is saved after an
    update, killed, loaded and continued gives the same results as one that was not, bit by bit.

    The file is replaced as a whole or not at all, even if the process is killed meanwhile.

    Args:
        model: A `SequentialGP`, conditioned or not, or any GPyTorch model whose variational
            strategy is a `DualVariationalStrategy`.
        path: Where to. The directory has to exist.
        extra: More to save: numbers, strings, tensors, and lists, tuples and dictionaries of these
            (the number of the next batch, ``optimizer.state_dict()``), and records of updates.
            `load_extra` returns it.

    Example:
        >>> import tempfile, torch, seqgp
        >>> X = torch.linspace(0, 1, 60, dtype=torch.double).unsqueeze(-1)
        >>> Y = 2**0.5 * torch.sin(12.6 * X)
        >>> model = seqgp.SequentialGP(X[:30], Y[:30])
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     seqgp.save(model, f"{directory}/model.pt", extra={"next": 1})
        ...     again = seqgp.load(f"{directory}/model.pt")
        >>> records = [m.update(X[30:], Y[30:], steps=3) for m in (model, again)]
        >>> records[0].elbo == records[1].elbo
        True
    """
    if not isinstance(getattr(model, "variational_strategy", None), DualVariationalStrategy):
        raise TypeError(
            "model: expected a SequentialGP, or a GPyTorch model with a DualVariationalStrategy, "
            f"got a {type(model).__name__}. Models of a ModelListGP are saved one by one; a "
            "BatchOptimizer has a state_dict()."
        )
    path = Path(os.path.realpath(os.fspath(path)))
    if not path.parent.is_dir():
        raise FileNotFoundError(f"path: the directory {path.parent} does not exist; create it.")
    try:
        described_extra = describe(dict(extra or {}), "extra")
    except CannotDescribe as error:
        raise TypeError(
            f"extra: expected numbers, strings, tensors, lists, tuples and dictionaries; {error}."
        ) from None
    _write({**_content(model), "extra": described_extra}, path)
    _LOG.debug("saved %s to %s", type(model).__name__, path)


def load(
    path: str | os.PathLike[str],
    like: Any = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    random_state: bool = False,
) -> Any:
    """The model that `save` wrote.

    Args:
        path: The file. Nothing in it is executed.
        like: A model that is built as the saved one was, with any data, if it has parts of your
            own: a kernel, a likelihood, a subclass (or make these known with
            `seqgp.checkpoint.register`). It is copied, not changed.
        device: Where to put the model; by default where ``like`` is, or the CPU.
        dtype: Its precision; by default as it was saved. Results then agree within that precision.
        random_state: Whether the random number generators of torch, NumPy and Python go on from
            where they were, too. A stream needs that only if your own code draws from them.

    Returns:
        The model.

    Example:
        >>> import tempfile, torch, seqgp
        >>> from gpytorch.kernels import RBFKernel
        >>> class Own(RBFKernel): ...  # a class that a checkpoint cannot rebuild by itself
        >>> X = torch.linspace(0, 1, 20, dtype=torch.double).unsqueeze(-1)
        >>> def build(n):
        ...     return seqgp.SequentialGP(X[:n], torch.sin(6 * X[:n]), covar_module=Own())
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     seqgp.save(build(20), f"{directory}/model.pt")
        ...     model = seqgp.load(f"{directory}/model.pt", like=build(3), dtype=torch.float32)
        >>> model.posterior(X.float()).mean.dtype, model.num_data
        (torch.float32, 20)
    """
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"dtype: expected one of torch's, as torch.float32, got {dtype!r}.")
    content = _read(path)
    with torch.device("cpu"):  # where the file is read to
        model: Any = _build(content) if like is None else _copy_of(like, content)
    _restore(model, content)
    if like is not None and device is None:
        device = next((p.device for p in like.parameters()), None)
    if device is not None:
        model.to(device=device)
    if dtype is not None:
        model.to(dtype=dtype)
    if random_state:
        _set_random_state(content["random"])
    return model


def load_extra(path: str | os.PathLike[str]) -> dict[str, Any]:
    """What was given to `save` as ``extra``.

    Args:
        path: The file.

    Example:
        >>> import tempfile, torch, seqgp
        >>> from seqgp.checkpoint.files import load_extra
        >>> X = torch.linspace(-1.6, 1.6, 20, dtype=torch.double).unsqueeze(-1)
        >>> with tempfile.TemporaryDirectory() as directory:
        ...     model = seqgp.SequentialGP((X + 1.6) / 3.2, X)
        ...     seqgp.save(model, f"{directory}/model.pt", extra={"next batch": 7})
        ...     load_extra(f"{directory}/model.pt")
        {'next batch': 7}
    """
    extra: dict[str, Any] = rebuild(_read(path)["extra"])
    return extra


# -------------------------------------------------------------------------------- what is saved


def _content(model: torch.nn.Module) -> dict[str, Any]:
    """All about a model, as plain data."""
    parts, reason = None, None
    try:
        parts = _describe_parts(model)
    except CannotDescribe as error:
        reason = str(error)
        _LOG.info("%s: seqgp.load will need like=", reason)
    attributes, left_out = _describe_attributes(model)
    return {
        "format": _FORMAT,
        "version": _VERSION,
        "written_by": __version__,
        "class": name_of(type(model)),
        "parts": parts,
        "reason": reason,
        "modules": {name: name_of(type(module)) for name, module in model.named_modules()},
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


def _tensors(
    model: torch.nn.Module, kind: str
) -> Iterator[tuple[str, torch.nn.Module, str, Tensor]]:
    """Tensors of all modules that are buffers, or attributes and nothing else."""
    for name, module in model.named_modules():
        held = module._buffers if kind == "buffers" else vars(module)
        for key, value in list(held.items()):
            saved = kind == "held" and name in _with_attributes(model)
            if isinstance(value, Tensor) and not saved:
                yield name, module, key, value


def _with_attributes(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """The modules whose plain attributes are saved: strategies, and the model if it is ours."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, DualVariationalStrategy | SequentialGP)
    }


def _describe_parts(model: torch.nn.Module) -> dict[str, Any]:
    """The modules that a `SequentialGP` consists of; raises if they could not be rebuilt."""
    if type(model) is not SequentialGP:
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
    """Plain attributes by module and name, and the names of those that cannot be described."""
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
    """What a conditioned model has observed."""
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


# -------------------------------------------------------------------------------- and loaded


def _build(content: dict[str, Any]) -> SequentialGP:
    """A `SequentialGP` of the saved parts, without data."""
    if content["parts"] is None:
        raise ValueError(
            f"The checkpoint does not say how to build its model: {content['reason']}. Pass like=, "
            "a model that is built as the saved one was, or make classes of your own known with "
            "seqgp.checkpoint.register before saving."
        )
    missing = [f"{n}.{key}".lstrip(".") for n, keys in content["left_out"].items() for key in keys]
    if missing:
        raise ValueError(
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
    outputs = targets.shape[-2] if attributes["has_output_dim"] else 1
    model = SequentialGP(
        X[..., :0, :] if held.coefficients is None else X[..., :0, :, :],
        X.new_empty(*X.shape[:-2], 0, outputs),
        inducing_points=Z.reshape(-1, *Z.shape[-2:])[0].to(X),
        learn_inducing_points=learns_Z,
        likelihood_arguments={key: value[..., :0] for key, value in held.arguments.items()},
        coefficients=None if held.coefficients is None else held.coefficients[..., :0, :],
        **{name: parts[name] for name in _GIVEN},
    )
    for name in _SET:
        if parts[name] is not None:
            setattr(model, name, parts[name])
    return model


def _copy_of(like: Any, content: dict[str, Any]) -> Any:
    """A copy of a model with the modules of the saved one."""
    if not isinstance(getattr(like, "variational_strategy", None), DualVariationalStrategy):
        raise TypeError(
            f"like: expected a model as the one that was saved, a {content['class']}, got a "
            f"{type(like).__name__}."
        )
    have = {name: name_of(type(module)) for name, module in like.named_modules()}
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
    """Give a model of the right modules everything else."""
    modules = dict(model.named_modules())
    parameters, saved = dict(model.named_parameters()), content["parameters"]
    if parameters.keys() != saved.keys():
        names = sorted(parameters.keys() ^ saved.keys())
        raise ValueError(
            f"The model and the checkpoint do not have the same parameters: {', '.join(names)} "
            "belong to one of them only. Build the model as the saved one was."
        )
    for name, parameter in parameters.items():
        value = saved[name]["value"]
        if value.shape != parameter.shape and not name.endswith("inducing_points"):
            raise ValueError(
                f"{name}: the checkpoint has shape {tuple(value.shape)}, the model "
                f"{tuple(parameter.shape)}. Build the model as the saved one was."
            )
        parameter.data = value
        parameter.requires_grad_(saved[name]["requires_grad"])
    for kind in ("buffers", "held"):
        for name, value in content[kind].items():
            owner, _, key = name.rpartition(".")
            into: Any = modules[owner]._buffers if kind == "buffers" else vars(modules[owner])
            into[key] = value
    for name, attributes in content["attributes"].items():
        modules[name].__dict__.update({key: rebuild(value) for key, value in attributes.items()})
    for name, training in content["training"].items():
        modules[name].training = training
    strategy: DualVariationalStrategy = model.variational_strategy
    strategy.clear_cache()
    strategy.observed = None
    if content["observed"] is not None:
        fields = {key: rebuild(value) for key, value in content["observed"].items()}
        sites = Sites(fields["lam"], fields["beta"])
        strategy.observed = Observed(fields["data"], model.likelihood, sites, fields["prior_mean"])


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
    torch.set_rng_state(state["torch"])
    if state["cuda"] and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"][: torch.cuda.device_count()])
    np.random.set_state(rebuild(state["numpy"]))  # noqa: NPY002
    random.setstate(rebuild(state["python"]))


# -------------------------------------------------------------------------------- files


def _write(content: dict[str, Any], path: Path) -> None:
    """Beside its place, to the disk, and then into place."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}.tmp")
    try:
        with open(beside, "xb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except BaseException:
        beside.unlink(missing_ok=True)
        raise
    if hasattr(os, "O_DIRECTORY"):  # the new name itself, where directories can be flushed
        directory = os.open(path.parent, os.O_DIRECTORY)
        try:
            os.fsync(directory)
        finally:
            os.close(directory)


def _read(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The content of a file, as far as it can be told to be a checkpoint."""
    with open(path, "rb") as file:
        try:
            content = torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # an unpickler fails on other files in any way that there is
            raise ValueError(
                f"{os.fspath(path)} is not a checkpoint of seqgp, or it is damaged: write one with "
                "seqgp.save. (Models that were pickled, by torch.save(model), are not read, since "
                "pickles can execute anything.)"
            ) from error
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise ValueError(
            f"{os.fspath(path)} holds something else than a checkpoint of seqgp; a state_dict goes "
            "into model.load_state_dict."
        )
    if content["version"] != _VERSION:
        raise ValueError(
            f"{os.fspath(path)} was written by seqgp {content['written_by']}, in version "
            f"{content['version']} of the format; this is seqgp {__version__}, which reads version "
            f"{_VERSION}."
        )
    return content
