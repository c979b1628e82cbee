"""AEPsych on simulated observers, run by a Python that has AEPsych: its classes, with defaults.

The input is a line of JSON, ``{"observer": ..., "criterion": "EAVC", "seed": 0, "trials": 60}``.
The output is a line of JSON: seconds of each trial, and scores.
"""

from __future__ import annotations

import json
import sys
import time
import warnings

import torch
from aepsych import acquisition  # type: ignore[import-not-found]
from aepsych.generators import OptimizeAcqfGenerator  # type: ignore[import-not-found]
from aepsych.models import GPClassificationModel  # type: ignore[import-not-found]

from benchmarks.psychometric import EVERY, OBSERVERS


def main() -> None:
    """One run: fit, generate, respond."""
    torch.set_default_dtype(torch.float64)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    job = json.loads(sys.stdin.readline())
    observer, seed = OBSERVERS[job["observer"]], job["seed"]
    torch.manual_seed(seed)
    low, high = torch.zeros(observer.dim), torch.ones(observer.dim)
    generator = OptimizeAcqfGenerator(
        low,
        high,
        acqf=getattr(acquisition, job["criterion"]),
        acqf_kwargs={
            "lb": low,
            "ub": high,
            "target": observer.threshold,
            "lookahead_type": "levelset",
        },
    )
    model = GPClassificationModel(dim=observer.dim)
    X = observer.initial_stimuli(seed)
    Y = observer.respond(X, 0, seed)
    level = torch.special.ndtri(torch.tensor(observer.threshold))
    seconds, scores = [], {}
    while True:
        start = time.process_time()
        model.fit(X, Y)
        fitted = time.process_time() - start
        if len(X) % EVERY == 0 or len(X) >= job["trials"]:
            with torch.no_grad():
                mean, variance = model.predict(observer.test_stimuli())
            above = torch.special.ndtr((mean - level) / variance.clamp_min(1e-12).sqrt())
            scores[len(X)] = observer.score(above.reshape(-1))
        if len(X) >= job["trials"]:
            break
        start = time.process_time()
        x = generator.gen(1, model).reshape(1, -1).to(X)
        seconds.append(fitted + time.process_time() - start)
        Y = torch.cat([Y, observer.respond(x, len(X), seed)])
        X = torch.cat([X, x])
    print(json.dumps({"trial_seconds": seconds, "scores": scores}))


if __name__ == "__main__":
    main()
