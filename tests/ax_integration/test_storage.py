"""Experiments that are saved, loaded and gone on with; analyses of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from ax.api.client import Client
from ax.api.configs import StorageConfig
from ax.core.analysis_card import ErrorAnalysisCard
from ax.storage.sqa_store.db import create_all_tables, get_engine, init_engine_and_session_factory

import seqgp.ax
from seqgp.ax.model import AxSequentialGP
from tests.ax_integration.helpers import QUICK, make_client, model_of, run, unit_range


def evaluate(p: Any) -> Any:
    if p["x"] > 0.8:
        return "failed"
    return {"z": p["x"] + p["y"] ** 2, "count": float(round(6 * p["x"]))}


@pytest.fixture(scope="module")
def client() -> Client:
    client = make_client(
        "z", outcome_constraints=["count <= 3"], likelihoods={"count": "poisson"}, num_initial=5
    )
    run(client, evaluate, 7)
    return client


@pytest.mark.slow
def test_json(client: Client, tmp_path: Path) -> None:
    path = str(tmp_path / "client.json")
    client.save_to_json_file(path)
    loaded = Client.load_from_json_file(path)
    pd.testing.assert_frame_equal(
        loaded.summarize(), client.summarize(), check_like=True, check_dtype=False
    )
    old, new = (c._generation_strategy for c in (client, loaded))
    assert [node.name for node in new._nodes] == [node.name for node in old._nodes]
    assert new._nodes[-1].generator_specs == old._nodes[-1].generator_specs
    run(loaded, evaluate, 2)
    for metric, kind in (("z", "Gaussian"), ("count", "Poisson"), (seqgp.ax.VALIDITY, "Bernoulli")):
        model = model_of(loaded, metric)
        assert isinstance(model, AxSequentialGP)
        assert kind in type(model.likelihood).__name__
    loaded.save_to_json_file(path)  # with a fitted model, and again
    assert len(Client.load_from_json_file(path).summarize()) == 9


@pytest.mark.slow
def test_sql(tmp_path: Path) -> None:
    config = StorageConfig(url=f"sqlite:///{tmp_path / 'ax.db'}")
    init_engine_and_session_factory(url=config.url, force_init=True)
    create_all_tables(get_engine())
    client = Client(storage_config=config, random_seed=0)
    client.configure_experiment([unit_range("x"), unit_range("y")], name="experiment")
    client.configure_optimization("z", outcome_constraints=["count <= 3"])
    client.set_generation_strategy(
        seqgp.ax.generation_strategy(
            likelihoods={"count": "poisson"}, num_initial=4, optimizer_options=QUICK
        )
    )
    run(client, evaluate, 5)
    loaded = Client.load_from_database("experiment", storage_config=config)
    run(loaded, evaluate, 1)
    assert isinstance(model_of(loaded, "count"), AxSequentialGP)
    assert len(loaded.summarize()) == 6


@pytest.mark.slow
def test_all_of_ax_s_analyses(client: Client) -> None:
    cards = [card for group in client.compute_analyses(display=False) for card in group.flatten()]
    assert not [card for card in cards if isinstance(card, ErrorAnalysisCard)]
    names = {card.name for card in cards}
    assert {"CrossValidationPlot", "SensitivityAnalysisPlot", "ArmEffectsPlot"} <= names
    titles = " ".join(card.title for card in cards)
    assert "Cross Validation for count" in titles
    assert seqgp.ax.VALIDITY not in titles


@pytest.mark.slow
def test_feature_importances(client: Client) -> None:
    adapter: Any = client._generation_strategy.adapter
    for metric in ("z", "count"):
        importances = adapter.feature_importances(metric)
        assert sum(importances.values()) == pytest.approx(1.0)
    assert importances["x"] > importances["y"]
