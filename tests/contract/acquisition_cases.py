"""How to build each of BoTorch's acquisition functions for a model, and where to evaluate it.

Each case is built for a `SequentialGP` and for a `SingleTaskGP` with the same hyperparameters and
data, with the same random numbers.
"""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, NamedTuple

import botorch.acquisition
import torch
from botorch.acquisition import (
    AcquisitionFunction,
    ExpectedImprovement,
    LogExpectedImprovement,
    PosteriorMean,
    UpperConfidenceBound,
)
from botorch.acquisition.cost_aware import InverseCostWeightedUtility
from botorch.acquisition.multi_objective.utils import compute_sample_box_decomposition
from botorch.acquisition.objective import GenericMCObjective
from botorch.acquisition.utils import project_to_target_fidelity
from botorch.models import ModelListGP
from botorch.models.cost import AffineFidelityCostModel
from botorch.sampling import ListSampler, SobolQMCNormalSampler
from botorch.utils.multi_objective.box_decompositions import NondominatedPartitioning
from torch import Tensor

from tests.helpers import make_inputs
from tests.models.helpers import pair

__all__ = ["CASES", "Case", "acquisition_functions"]

#: Inputs of the model, of which the last is the fidelity for multi-fidelity cases.
D = 2


class Case(NamedTuple):
    """An acquisition function, and the models that it is for.

    Attributes:
        build: Builds it, from its class and a model.
        q: How many points it is evaluated at jointly.
        outputs: How many outputs the model has.
        fixed_noise: Whether the noise variances are known.
        as_list: Whether the outputs are those of a `ModelListGP`.
        tol: Tolerance of the comparison with `SingleTaskGP`.
        note: What to know about it; shown in the documentation.
        compares: Whether values are those of `SingleTaskGP`. If not, the note says why.
        differentiable: Whether there is a gradient to compare with finite differences.
    """

    build: Callable[[Any, Any], AcquisitionFunction]
    q: int = 1
    outputs: int = 1
    fixed_noise: bool = False
    as_list: bool = False
    tol: float = 1e-6
    note: str = ""
    compares: bool = True
    differentiable: bool = True

    def models(self) -> tuple[Any, Any]:
        """Ours and BoTorch's, which know the same."""
        if self.as_list:
            ours, exact = zip(*(pair(n=7 + k, d=D) for k in range(self.outputs)), strict=True)
            return ModelListGP(*ours), ModelListGP(*exact)
        return pair(n=8, d=D, outputs=self.outputs, fixed_noise=self.fixed_noise)

    def inputs(self) -> Tensor:
        """Three t-batches of ``q`` points."""
        return make_inputs(3, self.q, D) * 0.8 + 0.1


def sampler(size: int = 16, seed: int = 0) -> SobolQMCNormalSampler:
    return SobolQMCNormalSampler(torch.Size([size]), seed=seed)


def baseline(number: int = 4) -> Tensor:
    return make_inputs(number, D)


def feasible(samples: Tensor) -> Tensor:
    """A constraint on the last output: at most a half."""
    return samples[..., -1] - 0.5


def first(samples: Tensor, X: Tensor | None = None) -> Tensor:
    return samples[..., 0]


def cost_aware() -> InverseCostWeightedUtility:
    cost = AffineFidelityCostModel(fidelity_weights={1: 1.0}, fixed_cost=0.5)
    return InverseCostWeightedUtility(cost_model=cost)


def project(X: Tensor) -> Tensor:
    return project_to_target_fidelity(X, target_fidelities={1: 1.0}, d=D)


def partitioning() -> NondominatedPartitioning:
    front = torch.tensor([[0.4, -0.2], [0.1, 0.3], [-0.3, 0.5]])
    return NondominatedPartitioning(torch.tensor([-1.0, -1.0]), Y=front)


def pareto() -> dict[str, Tensor]:
    """Pareto-optimal inputs of two sample functions, their values, and the boxes under them."""
    fronts = torch.tensor([[[0.9, 0.2], [0.2, 0.8]], [[0.7, 0.4], [0.3, 1.0]]])
    return {
        "pareto_sets": make_inputs(2, 2, D),
        "pareto_fronts": fronts,
        "hypercell_bounds": compute_sample_box_decomposition(fronts),
    }


def prior_at(X: Tensor) -> Tensor:
    return (-(X - 0.3).square().sum(-1)).exp().mean(-1)


def module(function: Callable[[Tensor], Tensor]) -> torch.nn.Module:
    class Module(torch.nn.Module):
        def forward(self, X: Tensor) -> Tensor:
            return function(X)

    return Module()


#: By name of the class; arguments of `build` are the class and the model.
CASES: dict[str, Case] = {
    # ------------------------------------------------------------ analytic
    "LogProbabilityOfImprovement": Case(lambda f, m: f(m, best_f=0.3)),
    "ProbabilityOfImprovement": Case(lambda f, m: f(m, best_f=0.3)),
    "qAnalyticProbabilityOfImprovement": Case(lambda f, m: f(m, best_f=0.3), q=2, tol=1e-5),
    "ExpectedImprovement": Case(lambda f, m: f(m, best_f=0.3)),
    "LogExpectedImprovement": Case(lambda f, m: f(m, best_f=0.3)),
    "LogConstrainedExpectedImprovement": Case(
        lambda f, m: f(m, best_f=0.3, objective_index=0, constraints={1: (None, 0.5)}), outputs=2
    ),
    "LogProbabilityOfFeasibility": Case(lambda f, m: f(m, constraints={1: (None, 0.5)}), outputs=2),
    "ConstrainedExpectedImprovement": Case(
        lambda f, m: f(m, best_f=0.3, objective_index=0, constraints={1: (None, 0.5)}), outputs=2
    ),
    "LogNoisyExpectedImprovement": Case(
        lambda f, m: f(m, baseline(), num_fantasies=4), fixed_noise=True, note="Known noise only."
    ),
    "NoisyExpectedImprovement": Case(
        lambda f, m: f(m, baseline(), num_fantasies=4), fixed_noise=True, note="Known noise only."
    ),
    "UpperConfidenceBound": Case(lambda f, m: f(m, beta=2.0)),
    "PosteriorMean": Case(lambda f, m: f(m)),
    "ScalarizedPosteriorMean": Case(lambda f, m: f(m, weights=torch.tensor([0.5, -1.0])), q=2),
    "PosteriorStandardDeviation": Case(lambda f, m: f(m)),
    # ------------------------------------------------------------ Monte Carlo
    "qExpectedImprovement": Case(lambda f, m: f(m, best_f=0.3, sampler=sampler()), q=2),
    "qNoisyExpectedImprovement": Case(lambda f, m: f(m, baseline(), sampler=sampler()), q=2),
    "qProbabilityOfImprovement": Case(
        lambda f, m: f(m, best_f=0.3, sampler=sampler(), tau=0.1), q=2
    ),
    "qSimpleRegret": Case(lambda f, m: f(m, sampler=sampler()), q=2),
    "qUpperConfidenceBound": Case(lambda f, m: f(m, beta=2.0, sampler=sampler()), q=2),
    "qLowerConfidenceBound": Case(lambda f, m: f(m, beta=2.0, sampler=sampler()), q=2),
    "qPosteriorStandardDeviation": Case(lambda f, m: f(m, sampler=sampler()), q=2),
    "qLogExpectedImprovement": Case(
        lambda f, m: f(
            m,
            best_f=0.3,
            sampler=sampler(),
            objective=GenericMCObjective(first),
            constraints=[feasible],
        ),
        q=2,
        outputs=2,
    ),
    "qLogNoisyExpectedImprovement": Case(lambda f, m: f(m, baseline(), sampler=sampler()), q=2),
    "qLogProbabilityOfFeasibility": Case(
        lambda f, m: f(m, constraints=[feasible], sampler=sampler()), q=2, outputs=2
    ),
    # ------------------------------------------------------------ look-ahead
    "qKnowledgeGradient": Case(
        lambda f, m: f(m, num_fantasies=4, sampler=sampler(4), current_value=torch.tensor(0.2)),
        q=6,
    ),
    "qMultiFidelityKnowledgeGradient": Case(
        lambda f, m: f(
            m,
            num_fantasies=4,
            sampler=sampler(4),
            current_value=torch.tensor(0.2),
            cost_aware_utility=cost_aware(),
            project=project,
        ),
        q=6,
    ),
    "ProjectedAcquisitionFunction": Case(lambda f, m: f(PosteriorMean(m), project), q=1),
    "qMultiStepLookahead": Case(lambda f, m: f(m, [1, 1], samplers=[sampler(2), sampler(2)]), q=7),
    "qHypervolumeKnowledgeGradient": Case(
        lambda f, m: f(
            m,
            torch.tensor([-1.0, -1.0]),
            num_fantasies=2,
            num_pareto=2,
            sampler=ListSampler(sampler(2), sampler(2, 1)),
            inner_sampler=sampler(4),
            current_value=torch.tensor(0.2),
        ),
        q=5,
        outputs=2,
        as_list=True,
    ),
    "qMultiFidelityHypervolumeKnowledgeGradient": Case(
        lambda f, m: f(
            m,
            torch.tensor([-1.0, -1.0]),
            {1: 1.0},
            num_fantasies=2,
            num_pareto=2,
            sampler=ListSampler(sampler(2), sampler(2, 1)),
            inner_sampler=sampler(4),
            current_value=torch.tensor(0.2),
            cost_aware_utility=cost_aware(),
            project=project,
        ),
        q=5,
        outputs=2,
        as_list=True,
    ),
    # ------------------------------------------------------------ active learning
    "qNegIntegratedPosteriorVariance": Case(lambda f, m: f(m, make_inputs(5, D)), q=2),
    "PairwiseMCPosteriorVariance": Case(
        lambda f, m: f(m, GenericMCObjective(lambda Y, X=None: Y[..., 0]), sampler()), q=2
    ),
    # ------------------------------------------------------------ entropy search
    "qMaxValueEntropy": Case(
        lambda f, m: f(m, make_inputs(20, D), num_fantasies=4, num_mv_samples=4, num_y_samples=8)
    ),
    "qLowerBoundMaxValueEntropy": Case(lambda f, m: f(m, make_inputs(20, D), num_mv_samples=4)),
    "qMultiFidelityMaxValueEntropy": Case(
        lambda f, m: f(
            m,
            make_inputs(20, D),
            num_fantasies=4,
            num_mv_samples=4,
            num_y_samples=8,
            cost_aware_utility=cost_aware(),
            project=project,
        )
    ),
    "qMultiFidelityLowerBoundMaxValueEntropy": Case(
        lambda f, m: f(
            m,
            make_inputs(20, D),
            num_mv_samples=4,
            cost_aware_utility=cost_aware(),
            project=project,
        )
    ),
    "qJointEntropySearch": Case(
        lambda f, m: f(m, make_inputs(3, D), torch.tensor([[0.9], [1.1], [0.8]])),
        q=2,
        fixed_noise=True,
        note="Compared with known noise. With inferred noise, the mean of a `SingleTaskGP` that is "
        "conditioned on optimal values is that of values with this noise.",
    ),
    "qPredictiveEntropySearch": Case(lambda f, m: f(m, make_inputs(3, D)), q=2, tol=1e-4),
    # ------------------------------------------------------------ several objectives
    "ExpectedHypervolumeImprovement": Case(
        lambda f, m: f(m, [-1.0, -1.0], partitioning()), outputs=2
    ),
    "qExpectedHypervolumeImprovement": Case(
        lambda f, m: f(m, [-1.0, -1.0], partitioning(), sampler()), q=2, outputs=2
    ),
    "qNoisyExpectedHypervolumeImprovement": Case(
        lambda f, m: f(m, [-1.0, -1.0], baseline(), sampler()), q=2, outputs=2
    ),
    "qLogExpectedHypervolumeImprovement": Case(
        lambda f, m: f(m, [-1.0, -1.0], partitioning(), sampler()), q=2, outputs=2
    ),
    "qLogNoisyExpectedHypervolumeImprovement": Case(
        lambda f, m: f(m, [-1.0, -1.0], baseline(), sampler()), q=2, outputs=2
    ),
    "MOMF": Case(lambda f, m: f(m, [-1.0, -1.0], partitioning(), sampler()), q=2, outputs=2),
    "qLogNParEGO": Case(
        lambda f, m: f(m, baseline(), torch.tensor([0.4, 0.6]), sampler()), q=2, outputs=2
    ),
    "qLowerBoundMultiObjectiveJointEntropySearch": Case(lambda f, m: f(m, **pareto()), outputs=2),
    "qLowerBoundMultiObjectiveMaxValueEntropySearch": Case(
        lambda f, m: f(m, hypercell_bounds=pareto()["hypercell_bounds"]), outputs=2
    ),
    "qMultiObjectivePredictiveEntropySearch": Case(
        lambda f, m: f(m, pareto()["pareto_sets"]), outputs=2, tol=1e-4
    ),
    "MultiOutputPosteriorMean": Case(lambda f, m: f(m), outputs=2),
    "MultiOutputAcquisitionFunctionWrapper": Case(
        lambda f, m: f([PosteriorMean(m), UpperConfidenceBound(m, 2.0)])
    ),
    # ------------------------------------------------------------ preferences
    "qExpectedUtilityOfBestOption": Case(lambda f, m: f(m, sampler=sampler()), q=2),
    "PairwiseBayesianActiveLearningByDisagreement": Case(lambda f, m: f(m, num_samples=64), q=2),
    # ------------------------------------------------------------ around another one
    "FixedFeatureAcquisitionFunction": Case(lambda f, m: fixed_feature(f, m), q=1),
    "PenalizedAcquisitionFunction": Case(
        lambda f, m: f(LogExpectedImprovement(m, 0.3), module(prior_at), 0.1)
    ),
    "PriorGuidedAcquisitionFunction": Case(
        lambda f, m: f(ExpectedImprovement(m, 0.3), module(lambda X: (-X.square().sum(-1)).exp()))
    ),
    "ProximalAcquisitionFunction": Case(
        lambda f, m: f(ExpectedImprovement(m, 0.3), torch.tensor([0.5, 0.8]))
    ),
    # ------------------------------------------------------------ sample functions
    "PathwiseThompsonSampling": Case(
        lambda f, m: f(m),
        q=1,
        compares=False,
        note="Draws functions of its own; their moments are checked elsewhere.",
    ),
}

#: Not for a single Gaussian process: what BoTorch asks for instead.
OTHER_MODELS = {
    "qBayesianActiveLearningByDisagreement": "a fully Bayesian model",
    "AnalyticExpectedUtilityOfBestOption": "a model of comparisons, such as `PreferenceGP`",
}


def fixed_feature(kind: Any, model: Any) -> AcquisitionFunction:
    inner = kind(UpperConfidenceBound(model, 2.0), d=D, columns=[1], values=[0.4])

    class Full(AcquisitionFunction):
        """The fixed column is dropped here, so that inputs are those of all other cases."""

        def forward(self, X: Tensor) -> Tensor:
            return inner(X[..., :1])

    return Full(model)


def acquisition_functions() -> Iterator[type[AcquisitionFunction]]:
    """All that BoTorch has, abstract ones left out."""
    package = botorch.acquisition
    for info in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
        for kind in vars(import_module(info.name)).values():
            if (
                inspect.isclass(kind)
                and issubclass(kind, AcquisitionFunction)
                and kind.__module__ == info.name
                and not inspect.isabstract(kind)
            ):
                yield kind
