"""A simulated survey: a country with villages and a disease."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class Country(NamedTuple):
    """The villages of a country.

    Attributes:
        inputs: ``n x d`` covariates of the villages.
        prevalence: ``n`` true prevalences of a disease.
        names: The ``d`` names of the covariates.

    Example:
        >>> import torch
        >>> country = make_country(50)
        >>> country.survey(torch.arange(3), tests=100).shape, country.scaled(torch.arange(50)).shape
        (torch.Size([3]), torch.Size([50, 8]))
    """

    inputs: Tensor
    prevalence: Tensor
    names: tuple[str, ...]

    def survey(self, index: Tensor, tests: int = 100, seed: int = 0) -> Tensor:
        """Sample the numbers of positive tests in some villages. They are reproducible.

        Args:
            index: ``k`` indices of villages.
            tests: The number of people tested in each village.
            seed: Seed of the samples.

        Returns:
            ``k`` counts.
        """
        generator = torch.Generator().manual_seed(seed)
        size = len(self.prevalence), tests
        draws = torch.rand(size, generator=generator, dtype=torch.float64, device="cpu")
        positive = (draws < self.prevalence.cpu().double().unsqueeze(-1)).sum(-1)
        return positive[index.cpu()].to(self.prevalence)

    def scaled(self, index: Tensor) -> Tensor:
        """All inputs ``n x d``, scaled such that those of some villages span the unit cube.

        Args:
            index: Indices of these villages.
        """
        low, high = self.inputs[index].amin(0), self.inputs[index].amax(0)
        return (self.inputs - low) / (high - low)


#: Names of the covariates of `make_country`.
NAMES = (
    "longitude",
    "latitude",
    "temperature",
    "rainfall",
    "rainfall seasonality",
    "temperature seasonality",
    "distance to water, m",
    "elevation, m",
)


def make_country(
    villages: int = 1500, seed: int = 0, dtype: torch.dtype = torch.float64
) -> Country:
    """Simulate a country of about 500 km x 500 km with a water-borne disease.

    It has a coast in the south, a mountain range, and rivers that run to the sea. It is colder in
    the mountains, wetter and less seasonal near the coast, and there are more villages along the
    rivers. Prevalence is highest near water where it is warm and wet. It also varies between
    regions for reasons that are not among the covariates, and between neighbouring villages. Most
    villages have a low prevalence, some a high one.

    Args:
        villages: The number of villages.
        seed: Seed of the country.
        dtype: The dtype of the result.

    Example:
        >>> country = make_country(300)
        >>> country.inputs.shape, country.prevalence.shape
        (torch.Size([300, 8]), torch.Size([300]))
    """
    rng = np.random.default_rng(seed)
    relief, wetness, hidden = (_smooth_field(rng, scale) for scale in (110.0, 150.0, 60.0))
    ridge = rng.uniform(150, 350), rng.uniform(-0.4, 0.4)

    def elevation(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        to_ridge = (x - ridge[0] - ridge[1] * (y - 250)) / 60
        height = 40 + 0.55 * y + 420 * np.exp(-0.5 * to_ridge**2) * y / 500
        return np.maximum(height + 70 * relief(x, y), 2.0)

    rivers = np.concatenate([_river(rng, start) for start in np.linspace(40, 460, 7)])
    x, y = _settle(rng, villages, rivers)
    place = np.stack([x, y], -1)
    water = np.array([np.linalg.norm(rivers - here, axis=-1).min() for here in place])
    stream = rng.exponential(6.0, villages)  # distance to the nearest brook
    water = 1000 * np.minimum(water, stream) * rng.lognormal(0, 0.2, villages)
    height = elevation(x, y)
    warmth = 27.5 - 6.5 * height / 1000 + 0.3 * rng.normal(size=villages)
    rain = 1900 - 1.7 * y + 180 * wetness(x, y) + 25 * rng.normal(size=villages)
    rain_season = 45 + 0.09 * y + 5 * wetness(x, y) + 1.5 * rng.normal(size=villages)
    warm_season = 90 + 0.14 * y + 0.02 * height + 4 * rng.normal(size=villages)

    near = np.exp(-water / 2500)
    suitable = 1 / (1 + np.exp(-(warmth - 25.6) / 0.25)) / (1 + np.exp(-(rain - 1300) / 70))
    logit = -5.2 + suitable * (1.6 + 2.8 * near + 1.8 * hidden(x, y)) + 0.4 * hidden(y, x)
    logit = logit + 0.35 * rng.normal(size=villages)
    columns = (x / 111, y / 111, warmth, rain, rain_season, warm_season, water, height)
    inputs = torch.from_numpy(np.stack(columns, -1)).to(dtype)
    return Country(inputs, torch.sigmoid(torch.from_numpy(logit)).to(dtype), NAMES)


def read_country(path: str | Path, dtype: torch.dtype = torch.float64) -> Country:
    r"""Read a country from a CSV file with covariates and a column ``theta`` of prevalences.

    Columns that are not numbers are ignored. This reads the data of Cote d'Ivoire of
    Andrade-Pacheco et al. (2020), which Maddox et al. (2021) use.

    Args:
        path: The file.
        dtype: The dtype of the result.

    Example:
        >>> import tempfile
        >>> with tempfile.NamedTemporaryFile("w", suffix=".csv") as file:
        ...     _ = file.write("village,warmth,theta\nA,20.5,0.1\nB,25.0,0.3\n")
        ...     file.flush()
        ...     country = read_country(file.name)
        >>> country.names, country.prevalence
        (('warmth',), tensor([0.1000, 0.3000], dtype=torch.float64))
    """
    with Path(path).open(newline=None) as file:
        rows = list(csv.DictReader(file))
    if not rows or "theta" not in rows[0]:
        raise ValueError(f"{path}: expected a CSV file with a column theta.")
    names = tuple(key for key in rows[0] if key != "theta" and _is_number(rows[0][key]))
    inputs = torch.tensor([[float(row[key]) for key in names] for row in rows], dtype=dtype)
    prevalence = torch.tensor([float(row["theta"]) for row in rows], dtype=dtype)
    return Country(inputs, prevalence, names)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


Field = Callable[["np.ndarray", "np.ndarray"], "np.ndarray"]


def _smooth_field(rng: np.random.Generator, scale: float, waves: int = 60) -> Field:
    """A random function of the plane with unit variance: a sum of waves of about ``scale`` km."""
    frequency = rng.normal(size=(waves, 2)) / scale
    phase = rng.uniform(0, 2 * math.pi, waves)

    def field(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        angle = x[:, None] * frequency[:, 0] + y[:, None] * frequency[:, 1] + phase
        value: np.ndarray = math.sqrt(2 / waves) * np.cos(angle).sum(-1)
        return value

    return field


def _river(rng: np.random.Generator, start: float) -> np.ndarray:
    """Points at every kilometre of a meandering river, from the sea inland."""
    length = int(rng.uniform(250, 520))
    bend = np.cumsum(rng.normal(size=length)) * 0.35
    slant = rng.uniform(-0.35, 0.35)
    y = np.arange(length, dtype=float)
    return np.stack([start + slant * y + 4 * np.sin(y / 17 + start) + bend, y], -1)


def _settle(
    rng: np.random.Generator, number: int, rivers: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Places of villages: half of them along rivers, the others anywhere."""
    inside = rivers[(np.abs(rivers - 250) < 248).all(-1)]
    banks = inside[rng.integers(len(inside), size=number)] + rng.normal(0, 7, (number, 2))
    anywhere = rng.uniform(0, 500, (number, 2))
    place = np.where(rng.random((number, 1)) < 0.5, banks, anywhere)
    place = np.clip(place, 0, 500) + rng.uniform(-0.5, 0.5, (number, 2))
    return place[:, 0], place[:, 1]
