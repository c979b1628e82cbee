"""GPJax on noise that varies, run by a Python that has GPJax: its classes, as in its guide.

The input is a line of JSON, ``{"X": ..., "Y": ..., "T": ...}``. The output is a line of JSON:
moments of the function and the expected noise at the inputs ``T``, and processor seconds.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any

import gpjax as gpx  # type: ignore[import-not-found]
import jax.numpy as jnp  # type: ignore[import-not-found]
import optax  # type: ignore[import-not-found]
from gpjax.likelihoods import (  # type: ignore[import-not-found]
    HeteroscedasticGaussian,
    LogNormalTransform,
)
from gpjax.variational_families import (  # type: ignore[import-not-found]
    HeteroscedasticVariationalFamily,
)
from jax import config  # type: ignore[import-not-found]

config.update("jax_enable_x64", True)

#: With more inducing points, whose values are not whitened, or smaller steps, Adam ends at lower
#: bounds. SciPy's L-BFGS ends at the same bound, unless its line search fails.
#: Where the objective becomes NaN on the way, smaller steps are tried.
STEPS, RATES = 2000, (0.05, 0.01, 0.002)
INDUCING = 10


def main() -> None:
    """Fit and predict."""
    job = {key: jnp.array(value) for key, value in json.loads(sys.stdin.readline()).items()}
    start = time.process_time()
    for rate in RATES:
        found = fitted(job, rate)
        if all(bool(jnp.isfinite(values).all()) for values in found.values()):
            break
    seconds = time.process_time() - start
    print(json.dumps({"fit": seconds, **{key: value.tolist() for key, value in found.items()}}))


def fitted(job: dict[str, Any], rate: float) -> dict[str, Any]:
    """Moments and expected noise of a model that is fitted with Adam."""
    priors = [
        gpx.gps.Prior(mean_function=mean, kernel=gpx.kernels.RBF(lengthscale=0.2))
        for mean in (gpx.mean_functions.Zero(), gpx.mean_functions.Constant(-2.0))
    ]
    model = gpx.gps.HeteroscedasticModel(
        prior=priors[0],
        likelihood=HeteroscedasticGaussian(noise_transform=LogNormalTransform()),
        noise_prior=priors[1],
    )
    Z = jnp.linspace(0, 1, INDUCING)[:, None]
    family = HeteroscedasticVariationalFamily(
        model=model,
        inducing_inputs=Z,
        inducing_inputs_g=Z,
        variational_mean_g=jnp.full((INDUCING, 1), -2.0),
    )
    best, _ = gpx.fit(
        model=family,
        objective=lambda q, data: -gpx.objectives.heteroscedastic_elbo(q, data),
        train_data=gpx.Dataset(X=job["X"], y=job["Y"]),
        optim=optax.adam(rate),
        num_iters=STEPS,
        verbose=False,
    )
    mean, variance, mean_g, variance_g = (part.ravel() for part in best.predict(job["T"]))
    return {"mean": mean, "variance": variance, "noise": jnp.exp(mean_g + 0.5 * variance_g)}


if __name__ == "__main__":
    main()
