"""Ax's transforms of data: failures as data, and metrics that are not transformed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pandas as pd
from ax.adapter.data_utils import ExperimentData
from ax.adapter.transforms.base import Transform
from ax.adapter.transforms.bilog_y import BilogY
from ax.adapter.transforms.standardize_y import StandardizeY
from ax.adapter.transforms.winsorize import Winsorize
from ax.core.base_trial import BaseTrial
from ax.core.search_space import SearchSpace
from ax.core.trial_status import TrialStatus
from ax.storage.transform_registry import register_transform

from seqgp.ax.internals import experiment_of, optimization_config_of

if TYPE_CHECKING:
    from ax.adapter.base import Adapter

#: The name of the outcome that says which trials are valid: 1, or 0 for a failure.
VALIDITY = "seqgp_valid"


class LearnFailures(Transform):
    """Adds an outcome `VALIDITY` to the data: 0 for failed trials, 1 for all others with data.

    Ax ignores failed trials. Here their parameters are part of the data, with no other outcome than
    the new one. If no trial has failed, nothing is added.

    The configuration has ``statuses``, the names of the statuses that are failures.
    """

    def transform_experiment_data(self, experiment_data: ExperimentData) -> ExperimentData:
        """Add the outcome, and rows for failed trials.

        Args:
            experiment_data: Parameters and outcomes, one row per trial.
        """
        observations, arms = experiment_data.observation_data, experiment_data.arm_data
        failed = self._failed_trials()
        if not failed or observations.empty:
            return experiment_data
        rows: dict[tuple[int, str], dict[str, Any]] = {
            (trial.index, arm.name): {**arm.parameters, "metadata": {}}
            for trial in failed
            for arm in trial.arms
            if self._is_in_design(arm.parameters)
        }
        new = [key for key in rows if key not in arms.index]
        if new:
            index = pd.MultiIndex.from_tuples(new, names=arms.index.names)
            arms = pd.concat([arms, pd.DataFrame([rows[key] for key in new], index=index)])
            # With outcomes over time (a third level of the index), place failures at the last step.
            # At another step, they would seem to depend on the step.
            last = [level.max() for level in observations.index.levels[2:]]
            index = pd.MultiIndex.from_tuples(
                [(*key, *last) for key in new], names=observations.index.names
            )
            nothing = pd.DataFrame(float("nan"), index=index, columns=observations.columns)
            observations = pd.concat([observations, nothing])
        indices = {trial.index for trial in failed}
        trials = observations.index.get_level_values("trial_index")
        observations[("mean", VALIDITY)] = [float(trial not in indices) for trial in trials]
        observations[("sem", VALIDITY)] = float("nan")
        return ExperimentData(arm_data=arms, observation_data=observations)

    def _failed_trials(self) -> list[BaseTrial]:
        if self.adapter is None:
            raise ValueError("adapter: required by LearnFailures, to find failed trials.")
        statuses: Any = self.config.get("statuses", ("FAILED", "ABANDONED"))
        trials = experiment_of(self.adapter).trials_by_status
        return [trial for name in statuses for trial in trials[TrialStatus[name]]]

    def _is_in_design(self, parameters: Any) -> bool:
        assert self.adapter is not None
        return self.adapter.model_space.check_membership(parameters)


class HeldStatistics(Transform):
    """A transform whose statistics are held until the data have grown by a factor.

    Statistics of all data change with each new value, and with them all transformed old values.
    Then a model that has learnt the old values would have to be fitted from scratch.
    """

    _statistics: tuple[str, ...] = ()
    num_rows: int
    about: Any

    def _hold(self, experiment_data: ExperimentData | None, adapter: Adapter | None) -> None:
        """Copy the statistics of the previous transform of this class, if data are similar."""
        growth = float(self.config.get("growth", 0.0))  # type: ignore[arg-type]
        self.num_rows = 0 if experiment_data is None else len(experiment_data.observation_data)
        metrics = None if experiment_data is None else set(experiment_data.metric_signatures)
        self.about = metrics, None if adapter is None else optimization_config_of(adapter)
        previous = None if adapter is None else adapter.transforms.get(type(self).__name__)
        if not isinstance(previous, HeldStatistics) or previous.about != self.about:
            return
        if previous.num_rows <= self.num_rows <= growth * previous.num_rows:
            for name in (*self._statistics, "num_rows"):
                setattr(self, name, getattr(previous, name))

    def _raw_metrics(self) -> set[str]:
        """Metrics that are not transformed."""
        return {*self.config.get("raw_metrics", ()), VALIDITY}  # type: ignore[misc]


class StreamStandardizeY(HeldStatistics, StandardizeY):
    """Ax's `StandardizeY` for some metrics, with statistics that are held."""

    _statistics = ("Ymean", "Ystd")

    def __init__(
        self,
        search_space: SearchSpace | None = None,
        experiment_data: ExperimentData | None = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        super().__init__(search_space, experiment_data, adapter, config)
        for metric in self._raw_metrics() & set(self.Ymean):
            self.Ymean[metric], self.Ystd[metric] = 0.0, 1.0
        self._hold(experiment_data, adapter)


class StreamWinsorize(HeldStatistics, Winsorize):
    """Ax's `Winsorize` for some metrics, with limits that are held."""

    _statistics = ("cutoffs",)

    def __init__(
        self,
        search_space: SearchSpace | None = None,
        experiment_data: ExperimentData | None = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        super().__init__(search_space, experiment_data, adapter, config)
        for metric in self._raw_metrics():
            self.cutoffs.pop(metric, None)
        self._hold(experiment_data, adapter)


class StreamBilogY(HeldStatistics, BilogY):
    """Ax's `BilogY` for some metrics."""

    def __init__(
        self,
        search_space: SearchSpace | None = None,
        experiment_data: ExperimentData | None = None,
        adapter: Adapter | None = None,
        config: Any = None,
    ) -> None:
        super().__init__(search_space, experiment_data, adapter, config)
        for metric in self._raw_metrics():
            self.metric_to_bound.pop(metric, None)


for _transform in (LearnFailures, StreamStandardizeY, StreamWinsorize, StreamBilogY):
    register_transform(_transform)
