"""Continual learning: five tasks of two digits each, every batch seen once, ten classes at the end.

All 70,000 images of MNIST, split 80:20; task t brings the digits 2t and 2t + 1 and nothing else, in
batches of 4,000. Softmax with ten latents, Matern-5/2, m = 300, 400 images of each batch
remembered. Accuracy and negative log predictive density are those on the test images of all tasks
so far, among ten classes. The digits of scikit-learn (8 x 8 pixels) go through the same protocol in
a minute, and 10,000 of MNIST's images serve where many runs are compared.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.baselines import continual
from benchmarks.known_warnings import known_warnings
from benchmarks.runner import Options, Unit
from benchmarks.tasks import DATA_SETS, Predict, Tasks, images, order_of, score, tasks_of

FULL, PART, SMALL, QUICK = DATA_SETS

METHODS: dict[str, Callable[[Tasks], Iterator[Predict]]] = {
    "ours": continual.ours,
    "ours, kernel learnt": partial(continual.ours, learn=True, steps=5),
    "ours, random memory": partial(continual.ours, policy="random"),
    "ours, replay 1": partial(continual.ours, replay=1.0),
    "ours, replay 0.5": partial(continual.ours, replay=0.5),
    "ours, replay 0": partial(continual.ours, replay=0.0),
    "ours, no memory": continual.without_memory,
    "ours, no memory, own sites": partial(continual.without_memory, mode=continual.OWN_SITES),
    "paper's rule": continual.paper,
    "paper's rule, no memory": partial(continual.paper, policy="none"),
    "Bui et al.": continual.bui,
    "VAR-GP": continual.var_gp,
    "offline": continual.offline,
}

#: Accuracy and NLPD as printed in the paper (for MNIST).
PRINTED = {
    "ours": "",
    "paper's rule": ".909 / .316",
    "paper's rule, no memory": ".208 / 68.0",
    "Bui et al.": ".200 / 2.15",
    "VAR-GP": ".905 / .324",
    "offline": ".962 / .155",
}

#: Methods that break down in single precision on MNIST, and so have double throughout.
DOUBLE = ("paper's rule", "paper's rule, no memory")

#: Images of each batch that are remembered, in per cent.
SHARES = (1.0, 2.5, 5.0, 10.0, 25.0)

#: Training images that are moved to the test set, in per cent.
MOVED = (5, 10, 20)

#: Digits of lowest and of highest leverage that are shown, of each class.
SHOWN = 8


def units(options: Options) -> tuple[dict[str, Any], list[Unit]]:
    """Ours on every seed first, then rivals and studies."""
    seeds = range(options.repeats or (1 if options.quick else 3))
    names = (QUICK,) if options.quick else (FULL, PART, SMALL)
    work = [
        Unit(f"{name}/{method}/seed{seed}", partial(measure, name, method, seed))
        for name in names
        for method in METHODS
        for seed in seeds
        if method != f"ours, replay {DATA_SETS[name].replay:g}"  # that is "ours"
    ]
    for name in names[-2:]:
        for seed in seeds:
            for share in SHARES[-3::2] if options.quick else SHARES:
                for replay in sorted({DATA_SETS[name].replay, 0.0}, reverse=True):
                    key = f"{name}/{_memory_label(name, share, replay)}/seed{seed}"
                    work.append(Unit(key, partial(measure_share, name, share, replay, seed)))
            work.append(Unit(f"{name}/leverage/seed{seed}", partial(leverage, name, seed)))
    for seed in seeds:
        key = f"{names[-1]}/ours, float32/seed{seed}"
        work.append(Unit(key, partial(measure, names[-1], "ours", seed, torch.float32)))
    settings = {"quick": options.quick, "m": {name: DATA_SETS[name].m for name in names}}
    return settings, work


def measure(name: str, method: str, seed: int, dtype: torch.dtype | None = None) -> dict[str, Any]:
    """Train one method on one stream, and score it after each task."""
    if method in DOUBLE:
        dtype = torch.float64
    return _measure(tasks_of(name, seed, dtype=dtype), METHODS[method])


def measure_share(name: str, share: float, replay: float, seed: int) -> dict[str, Any]:
    """Ours with another memory."""
    number = round(share / 100 * DATA_SETS[name].batch)
    method = partial(continual.ours, memory=number, replay=replay)
    return {**_measure(tasks_of(name, seed), method), "remembered": number}


def _memory_label(name: str, share: float, replay: float) -> str:
    """What a memory is called; its replay is said if it is not the data set's."""
    return f"memory {share:g}%" + (
        "" if replay == DATA_SETS[name].replay else f", replay {replay:g}"
    )


def _measure(tasks: Tasks, method: Callable[[Tasks], Iterator[Predict]]) -> dict[str, Any]:
    scores: list[dict[str, Any]] = []
    train_seconds, start = 0.0, time.process_time()  # on a machine with other work
    with known_warnings():
        for number, predict in enumerate(method(tasks), 1):
            train_seconds += time.process_time() - start
            offline = method is METHODS["offline"]
            scores.append(score(tasks, predict, len(tasks.tasks) if offline else number))
            start = time.process_time()
    last = scores[-1]
    return {
        "accuracy": round(last["accuracy"], 5),
        "nlpd": round(last["nlpd"], 5),
        "train_seconds": round(train_seconds, 1),
        "accuracy_so_far": [round(each["accuracy"], 4) for each in scores],
        "by_task": [each["by_task"] for each in scores],
    }


def leverage(name: str, seed: int) -> dict[str, Any]:
    """Which images have the highest leverage, and what becomes of a model without them.

    Leverage under offline learning. The images of highest leverage, or as many at random, are
    moved from the training to the test set; offline learning of the rest, accuracy on the larger
    test set.
    """
    tasks = tasks_of(name, seed)
    X, y = tasks.everything
    train, test = order_of(name, seed)
    _, labels = images(DATA_SETS[name].source)
    index = np.concatenate([train[labels[train] // 2 == task] for task in range(5)])
    model = continual.fitted_to(tasks, X, y)
    scores = torch.cat(
        [
            model.leverage(x, label.unsqueeze(-1))
            for x, label in zip(X.split(2000), y.split(2000), strict=True)
        ]
    ).numpy()
    rng = np.random.RandomState(seed)
    measured: dict[str, Any] = {"moved": {}}
    for share in (0, *MOVED):
        number = int(share / 100 * len(index))
        order = np.argsort(-scores)
        for kind, gone in (("leverage", order), ("random", rng.permutation(len(index)))):
            left = np.setdiff1d(index, index[gone[:number]])
            moved = np.concatenate([test, index[gone[:number]]])
            rest = tasks_of(name, seed, (rng.permutation(left), moved))
            *_, predict = continual.offline(rest)
            accuracy = score(rest, predict, len(rest.tasks))["accuracy"]
            measured["moved"].setdefault(kind, {})[str(share)] = round(accuracy, 4)
    by_class = {}
    for label in range(tasks.num_classes):
        own = np.flatnonzero(labels[index] == label)
        own = own[np.argsort(scores[own], kind="stable")]
        shown = np.concatenate([own[:SHOWN], own[-SHOWN:]])
        by_class[str(label)] = [int(i) for i in index[shown]]
    return {**measured, "images": by_class}


def render(units: dict[str, dict[str, Any]], directory: Path) -> str:
    """A table a data set, and the studies."""
    parts = []
    for name in DATA_SETS:
        own = {
            key.split("/", 1)[1]: unit
            for key, unit in units.items()
            if key.split("/", 1)[0] == name
        }
        if own:
            parts.append(_table(name, own))
            parts += _by_task(name, own) + _shares(name, own) + _leverage(name, own, directory)
    return "\n\n".join(parts)


def _seeds(units: dict[str, dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """What was measured for one method, seed by seed."""
    return [unit for key, unit in units.items() if key.rsplit("/", 1)[0] == what]


def _mean(found: list[dict[str, Any]], field: str, digits: int = 3) -> str:
    values = [unit[field] for unit in found]
    spread = f" ({statistics.stdev(values):.{digits}f})" if len(values) > 1 else ""
    return f"{statistics.mean(values):.{digits}f}{spread}"


def _table(name: str, units: dict[str, dict[str, Any]]) -> str:
    data_set = DATA_SETS[name]
    lines = [
        f"**{name}**: batches of {data_set.batch:,}, m = {data_set.m}, {data_set.memory} images of "
        f"each remembered, replay {data_set.replay:g} for ours if not said otherwise. Accuracy and "
        "NLPD on all ten classes at the end, mean (standard deviation) over the seeds measured, "
        "their number, and processor seconds of training. Figures printed in the paper are for "
        "MNIST and marked P. All begin with the same kernel: lengthscale the median distance of "
        "the first batch, variance 20. *Kernel learnt*, Bui et al. and the paper's rule learn "
        "both; the others keep them. *Own sites*: what is folded are the sites of the likelihood "
        "itself, also of classes to come. Bui et al. is our summary without a memory and with own "
        "sites, hyperparameters by 5 steps of L-BFGS a batch; the paper's rule makes 20 steps of "
        "Adam a batch (100 in the paper) in double precision, as in single it breaks down (others: "
        "single on MNIST, double on the digits); VAR-GP has a fifth of the inducing points for "
        "each task.",
        "",
        "| | accuracy | NLPD | seeds | seconds | P accuracy / NLPD |",
        "|---|---|---|---|---|---|",
    ]
    for method in (*METHODS, "ours, float32"):
        found = _seeds(units, method)
        if found:
            cells = [_mean(found, "accuracy"), _mean(found, "nlpd"), str(len(found))]
            cells += [_mean(found, "train_seconds", 0), PRINTED.get(method, "")]
            lines.append(f"| {method} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_task(name: str, units: dict[str, dict[str, Any]]) -> list[str]:
    """Accuracy of ours on each task after each task."""
    found = _seeds(units, "ours")
    if not found:
        return []
    heads = " | ".join(f"{2 * task}, {2 * task + 1}" for task in range(5))
    lines = [
        f"{name}: accuracy of ours on the test images of each task, after each task; means.",
        "",
        f"| after task | {heads} | all so far |",
        "|---" * 7 + "|",
    ]
    for number in range(1, 6):
        rows = [unit["by_task"][number - 1] for unit in found]
        cells = [f"{statistics.mean(column):.3f}" for column in zip(*rows, strict=True)]
        cells += [""] * (5 - number)
        total = statistics.mean(unit["accuracy_so_far"][number - 1] for unit in found)
        lines.append(f"| {number} | " + " | ".join(cells) + f" | {total:.3f} |")
    return ["\n".join(lines)]


def _shares(name: str, units: dict[str, dict[str, Any]]) -> list[str]:
    """Accuracy against the size of the memory."""
    replays = sorted({DATA_SETS[name].replay, 0.0}, reverse=True)
    labels = [_memory_label(name, share, replay) for replay in replays for share in SHARES]
    if not any(_seeds(units, label) for label in labels):
        return []
    lines = [
        f"{name}: accuracy and NLPD of ours against the share of each batch that is remembered, "
        f"replay {replays[0]:g} if not said otherwise.",
        "",
        "| remembered | accuracy | NLPD | seconds |",
        "|---|---|---|---|",
    ]
    for label, found in [
        ("none", _seeds(units, "ours, no memory")),
        *(
            (label.replace("memory ", "").replace("%", " %"), _seeds(units, label))
            for label in labels
        ),
    ]:
        if found:
            cells = [_mean(found, "accuracy"), _mean(found, "nlpd")]
            lines.append(
                f"| {label} | " + " | ".join([*cells, _mean(found, "train_seconds", 0)]) + " |"
            )
    return ["\n".join(lines)]


def _leverage(name: str, units: dict[str, dict[str, Any]], directory: Path) -> list[str]:
    """The leverage study, and its picture if the images are at hand."""
    found = _seeds(units, "leverage")
    if not found:
        return []
    lines = [
        f"{name}: images moved from the training to the test set, those of highest leverage or as "
        "many at random; accuracy of offline learning of the rest on the larger test set.",
        "",
        "| moved | by leverage | at random |",
        "|---|---|---|",
    ]
    for share in map(str, (0, *MOVED)):
        cells = [
            f"{statistics.mean(unit['moved'][kind][share] for unit in found):.3f}"
            for kind in ("leverage", "random")
        ]
        lines.append(f"| {share} % | " + " | ".join(cells) + " |")
    parts = ["\n".join(lines)]
    file = f"splitmnist-{DATA_SETS[name].source}.png"
    with contextlib.suppress(FileNotFoundError):  # an earlier picture may be here, if not images
        _picture(name, found[0]["images"], directory / file)
    if (directory / file).exists():
        parts.append(f"![{SHOWN} digits of lowest and of highest leverage, each class]({file})")
    return parts


def _picture(name: str, chosen: dict[str, list[int]], path: Path) -> None:
    """Digits of low leverage on the left, of high leverage on the right."""
    from matplotlib.figure import Figure

    X, _ = images(DATA_SETS[name].source)
    side = round(X.shape[1] ** 0.5)
    gap = np.ones((side, side // 2))
    rows = []
    for label in sorted(chosen, key=int):
        digits = [1 - X[i].reshape(side, side) for i in chosen[label]]
        row = np.hstack([*digits[:SHOWN], gap, *digits[SHOWN:]])
        rows += [row, np.ones((side // 4, row.shape[1]))]
    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots()
    axes.imshow(np.vstack(rows), cmap="gray", vmin=0, vmax=1)
    axes.set_axis_off()
    axes.set_title("lowest leverage" + " " * 48 + "highest leverage", fontsize=11)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
