"""The made country is what its documentation says."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from seqgp.simulated_survey import Country, make_country, read_country


@pytest.fixture(scope="module")
def country() -> Country:
    return make_country(1000)


def test_it_is_the_same_each_time(country: Country) -> None:
    again, other = make_country(1000), make_country(1000, seed=1)
    assert torch.equal(country.inputs, again.inputs)
    assert torch.equal(country.prevalence, again.prevalence)
    assert not torch.equal(country.prevalence, other.prevalence)
    assert make_country(10, dtype=torch.float32).inputs.dtype == torch.float32


@pytest.mark.parametrize("seed", range(4))
def test_most_villages_have_little_and_some_a_lot(seed: int) -> None:
    prevalence = make_country(1000, seed).prevalence
    hot = (prevalence > 0.1).double().mean()
    assert 0.15 < hot < 0.5
    assert prevalence.median() < 0.1
    assert prevalence.quantile(0.98) > 0.4
    assert prevalence.min() > 0
    assert prevalence.max() < 1


def test_covariates_hang_together(country: Country) -> None:
    column = {name.partition(",")[0]: country.inputs[:, k] for k, name in enumerate(country.names)}
    assert country.inputs.isfinite().all()

    def correlation(a: str, b: str) -> float:
        return float(torch.corrcoef(torch.stack([column[a], column[b]]))[0, 1])

    assert correlation("elevation", "temperature") < -0.8
    assert correlation("latitude", "rainfall") < -0.5
    near = column["distance to water"] < 1000
    assert country.prevalence[near].mean() > 1.3 * country.prevalence[~near].mean()


def test_surveys_are_counts_and_repeatable(country: Country) -> None:
    index = torch.tensor([5, 900, 17])
    counts = country.survey(index, tests=100)
    assert torch.equal(counts, country.survey(torch.arange(1000), tests=100)[index])
    assert not torch.equal(
        country.survey(torch.arange(1000)), country.survey(torch.arange(1000), seed=1)
    )
    everywhere = country.survey(torch.arange(1000), tests=100)
    assert ((everywhere >= 0) & (everywhere <= 100) & (everywhere == everywhere.round())).all()
    # Binomial: standardised residuals have unit variance.
    p = country.prevalence
    z = (everywhere - 100 * p) / (100 * p * (1 - p)).sqrt()
    assert abs(float(z.var()) - 1) < 5 * (2 / 1000) ** 0.5 + 0.05


def test_scaling(country: Country) -> None:
    index = torch.arange(50)
    X = country.scaled(index)
    torch.testing.assert_close(X[index].amin(0), torch.zeros(8, dtype=X.dtype))
    torch.testing.assert_close(X[index].amax(0), torch.ones(8, dtype=X.dtype))


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "country.csv"
    path.write_bytes(b"lng,lat,disease,theta\r-8.1,6.5,SM,0.25\r-6.3,4.9,SM,0.5")  # old line ends
    country = read_country(path)
    assert country.names == ("lng", "lat")
    assert country.inputs.tolist() == [[-8.1, 6.5], [-6.3, 4.9]]
    assert country.prevalence.tolist() == [0.25, 0.5]
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="column theta"):
        read_country(path)
