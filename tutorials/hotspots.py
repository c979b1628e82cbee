"""Which village to survey next?
=============================

Finding hotspots of a disease with few surveys.

Run ``python -m tutorials.hotspots``. With ``--short``, this is ``make demo``. You need not know
anything about Gaussian processes.

A country has 1,500 villages. For each of them we know its position, temperature, rainfall,
elevation and distance to water. We want to know where more than one person in ten carries a
parasite that is transmitted in fresh water. To find out, a team drives to a village and tests 100
people, which takes a day. After surveys in 100 villages there is money for 100 more. Which villages
should they be?

The answer has two parts: a model that predicts the prevalence in all villages *and how certain each
prediction is*, and a score for each village: how much a survey there is expected to reduce the
uncertainty about that village and all similar ones.

Figures are saved in ``figures/``. The country is simulated by
`seqgp.simulated_survey.make_country`. If the data of Cote d'Ivoire (Andrade-Pacheco et al., 2020)
are in ``$SEQGP_DATA/hotspots/civ_data.csv``, the full version uses these instead.
"""

from __future__ import annotations

import time
from typing import NamedTuple

import torch
from botorch.fit import fit_gpytorch_mll
from gpytorch.kernels import MaternKernel, ScaleKernel
from gpytorch.priors import GammaPrior
from torch import Tensor

from benchmarks.data import find
from seqgp import DualELBO, OverdispersedBinomialLikelihood, SequentialGP
from seqgp.acquisition import exceedance, prevalence, select_from_pool
from seqgp.progress import progress_bar
from seqgp.simulated_survey import Country, make_country, read_country
from seqgp.streaming import MemoryOptions
from tutorials import common
from tutorials import hotspot_figures as figures

TESTS = 100  # people tested in a village
THRESHOLD = 0.1  # a hotspot: more than one in ten
#: What a survey should reduce: the uncertainty about hotspots, and about the prevalence.
CRITERION = ("misclassification", "variance")


class Plan(NamedTuple):
    """How large the example is."""

    villages: int  # in the simulated country
    initial: int  # surveys before the first step
    steps: int  # further surveys
    memory: int  # surveys that the model keeps as they are


FULL, SHORT, TINY = Plan(1500, 100, 100, 150), Plan(600, 50, 50, 80), Plan(150, 25, 8, 28)


class State(NamedTuple):
    """What is known at a step: the surveys, and the predictions for all villages."""

    surveyed: Tensor  # indices of villages, in the order of the surveys
    estimate: Tensor  # expected prevalence
    spread: Tensor  # its standard deviation
    hotspot: Tensor  # probability that prevalence is above the threshold


# %%
# 1. The country
# --------------


def open_country(plan: Plan, made: bool) -> Country:
    """The real country if its data are available, otherwise a simulated one."""
    if not made:
        try:
            return read_country(find("hotspots/civ_data.csv"))
        except FileNotFoundError:
            print(
                "The data of Cote d'Ivoire were not found (set SEQGP_DATA): simulating a country."
            )
    return make_country(plan.villages)


# %%
# 2. The model
# ------------


def first_model(X: Tensor, counts: Tensor) -> SequentialGP:
    """A model of prevalence, learnt from the first surveys.

    A Gaussian process is a distribution over functions, here of the log odds of carrying the
    parasite. The *kernel* says how similar two villages are: the closer their positions,
    temperatures, rainfall and so on, the more similar. How much each of these matters, its
    *lengthscale*, is learnt. The *likelihood* says how counts arise: 100 tests, each positive with
    the prevalence of the village. This prevalence varies around the function, since no two villages
    are the same. Without that variation (with a plain binomial likelihood) the model would mistake
    it for an effect of the covariates.
    """
    lengthscales = GammaPrior(3.0, 6.0)  # around half the range of each covariate
    kernel = ScaleKernel(
        MaternKernel(nu=1.5, ard_num_dims=X.shape[-1], lengthscale_prior=lengthscales),
        outputscale_prior=GammaPrior(2.0, 0.15),
    )
    model = SequentialGP(
        X,
        counts.unsqueeze(-1),
        likelihood=OverdispersedBinomialLikelihood(TESTS),
        covar_module=kernel,
        inducing_points=len(X),  # one for each survey
    )
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    return model


@torch.no_grad()
def look(model: SequentialGP, X: Tensor, surveyed: Tensor) -> State:
    """Predictions for all villages.

    The *expected* prevalence is not the prevalence at the expected log odds: where little is known,
    a high prevalence is possible, and this increases the expectation.
    """
    f = model(X)
    estimate, variance = prevalence(model.likelihood, f.mean, f.variance)
    hotspot = exceedance(model.likelihood, THRESHOLD, f.mean, f.variance)
    return State(surveyed, estimate, variance.sqrt(), hotspot)


# %%
# 3. Which village to survey next
# -------------------------------


def next_village(
    model: SequentialGP, X: Tensor, surveyed: Tensor, q: int = 1
) -> tuple[Tensor, ...]:
    """The best village, or the best ``q`` for one trip, and the scores of all.

    For each candidate, 16 possible results of a survey are imagined, and the predictions for all
    remaining villages are computed given each result. The score is the average reduction of
    uncertainty. A batch is not simply the ``q`` highest scores, which may all be neighbours: each
    village is chosen as if the results of the previous ones were known.
    """
    return select_from_pool(
        model, X, q, criterion=CRITERION, threshold=THRESHOLD, surveyed=surveyed
    )


# %%
# 4. The loop: choose, survey, learn, repeat
# ------------------------------------------


def learn(
    country: Country, X: Tensor, first: Tensor, plan: Plan, active: bool
) -> tuple[list[State], SequentialGP, float]:
    """Do all surveys, and return the states after each, the model and the seconds per step.

    `update` learns from one more survey. The model is not fitted from scratch: it keeps at most
    ``plan.memory`` surveys as they are (the memory), and a summary of all others. Every fifth
    survey it also learns hyperparameters, starting from the present ones.
    """
    model = first_model(X[first], country.survey(first, TESTS))
    surveyed, states = first, [look(model, X, first)]
    generator = torch.Generator().manual_seed(1)
    start = time.perf_counter()
    steps = progress_bar(range(plan.steps), desc="chosen" if active else "random", leave=False)
    for step in steps:
        if active:
            village = next_village(model, X, surveyed)[0]
        else:
            left = torch.ones(len(X), dtype=torch.bool)
            left[surveyed] = False
            rest = left.nonzero().squeeze(-1)
            village = rest[torch.randint(len(rest), (1,), generator=generator)]
        record = model.update(
            X[village],
            country.survey(village, TESTS).unsqueeze(-1),
            memory=MemoryOptions(capacity=plan.memory),
            learn=step % 5 == 4,
            steps=10,
            inducing="adapt",
            max_inducing=len(first) + plan.steps,
        )
        surveyed = torch.cat([surveyed, village])
        states.append(look(model, X, surveyed))
        steps.set_postfix(memory=record.num_memory)
    return states, model, (time.perf_counter() - start) / plan.steps


# %%
# 5. How well it went
# -------------------


def scores(country: Country, states: list[State]) -> dict[str, list[float]]:
    """Compare predictions with the truth, in villages that have not been surveyed.

    Accuracy: the share of villages that are correctly classified. Sensitivity: the share of
    hotspots that are found. MSE: mean square error of the prevalence.
    """
    result: dict[str, list[float]] = {"accuracy": [], "sensitivity": [], "MSE": []}
    for state in states:
        left = torch.ones(len(country.prevalence), dtype=torch.bool)
        left[state.surveyed] = False
        truth, called = country.prevalence[left] > THRESHOLD, state.hotspot[left] > 0.5
        result["accuracy"].append(float((truth == called).double().mean()))
        result["sensitivity"].append(float((truth & called).sum() / truth.sum().clamp_min(1)))
        error = country.prevalence[left] - state.estimate[left]
        result["MSE"].append(float(error.square().mean()))
    return result


def print_table(chosen: dict[str, list[float]], random: dict[str, list[float]]) -> None:
    """Print the scores of both strategies at several steps."""
    last = len(chosen["MSE"]) - 1
    print("\nsurveys   accuracy          sensitivity       MSE")
    print("          chosen   random   chosen   random   chosen   random")
    for step in sorted({0, last // 4, last // 2, 3 * last // 4, last}):
        cells = [f"{way[key][step]:9.4f}" for key in chosen for way in (chosen, random)]
        print(f"{step:7}{''.join(cells)}")


def main(arguments: list[str] | None = None) -> None:
    """Run the example."""
    cli = common.parser(__doc__)
    cli.add_argument("--tiny", action="store_true", help="a handful of villages, as in the tests")
    cli.add_argument(
        "--made", action="store_true", help="simulate the country, even if data are available"
    )
    given = cli.parse_args(arguments)
    common.begin(given)
    plan = TINY if given.tiny else SHORT if given.short else FULL

    country = open_country(plan, given.made or given.short or given.tiny)
    generator = torch.Generator().manual_seed(0)
    first = torch.randperm(len(country.inputs), generator=generator)[: plan.initial]
    X = country.scaled(first)  # all covariates about 0 to 1
    hot = (country.prevalence > THRESHOLD).double().mean()
    print(
        f"{len(X)} villages, {len(first)} of them surveyed. In {hot:.0%} of all villages the "
        f"prevalence is above {THRESHOLD:.0%}, but we do not know in which."
    )

    # The predictions after the first surveys, and the villages to survey next.
    model = first_model(X[first], country.survey(first, TESTS))
    start = look(model, X, first)
    chosen, all_scores = next_village(model, X, first, q=3 if given.tiny else 5)
    paths = [
        figures.first_map(country, start, THRESHOLD),
        figures.next_map(country, start, all_scores[0], chosen),
    ]
    best = int(chosen[0])
    print(
        f"The first batch: villages {chosen.tolist()}. Village {best} has an expected prevalence "
        f"of {start.estimate[best]:.0%} with a standard deviation of {start.spread[best]:.0%}, and "
        f"is a hotspot with probability {start.hotspot[best]:.2f}."
    )

    # Surveys in villages chosen by score and, for comparison, at random.
    ways = {name: learn(country, X, first, plan, name == "chosen") for name in ("chosen", "random")}
    results = {name: scores(country, states) for name, (states, _, _) in ways.items()}
    print_table(results["chosen"], results["random"])
    states, model, seconds = ways["chosen"]
    print(f"\nA step (the scores of all villages, and an update) took {seconds:.2f} s.")
    paths += [
        figures.maps(country, states, THRESHOLD),
        figures.curves(results),
        figures.memory_map(country, states[-1], X, model),
        figures.summary(country, states, results, THRESHOLD),
    ]
    memory = model.memory
    print(
        f"The memory holds {len(memory.inputs)} of {len(states[-1].surveyed)} surveys, a "
        "sample of all. The summary holds the others."
    )
    print("Figures: " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    main()
