"""Which village to survey next? Finding hotspots of a disease with few surveys.

Run ``python -m tutorials.hotspots``; ``--short`` is ``make demo``, ``--tiny`` is shorter still. No
knowledge of Gaussian processes is needed.

A country has 1,500 villages. Of each we know where it is, how warm and wet it is there, how high,
how far from water. What we want to know is where more than one person in ten carries a parasite
that is passed on in fresh water. To find out, a team drives to a village and tests 100 people,
which takes a day. After 100 villages there is money for 100 more. Which?

The answer here: a model that predicts the prevalence everywhere *and knows how sure it is*, and a
score for each village: by how much a survey there would reduce what we do not know, about that
village and about all that resemble it.

Figures are saved in ``figures/``. With the data of Cote d'Ivoire (Andrade-Pacheco et al., 2020) in
``$SEQGP_DATA/hotspots/civ_data.csv`` the country is a real one; otherwise it is made up, villages,
rivers, disease and all, by `seqgp.simulated_survey.make_country`.
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
#: What a survey should tell us more about: which villages are hotspots, and the prevalence.
CRITERION = ("misclassification", "variance")


class Plan(NamedTuple):
    """How large the example is."""

    villages: int  # of the made country
    initial: int  # surveys that have been made
    steps: int  # surveys to come
    memory: int  # surveys that the model keeps as they are


FULL, SHORT, TINY = Plan(1500, 100, 100, 150), Plan(600, 50, 50, 80), Plan(150, 25, 8, 28)


class State(NamedTuple):
    """What is known at some point: the surveys, and what the model says about all villages."""

    surveyed: Tensor  # indices of villages, in the order of the surveys
    estimate: Tensor  # expected prevalence
    spread: Tensor  # its standard deviation
    hotspot: Tensor  # probability that prevalence is above the threshold


# ------------------------------------------------------------------------------------------------
# 1. The country


def open_country(plan: Plan, made: bool) -> Country:
    """The real one if it is there, else a made one."""
    if not made:
        try:
            return read_country(find("hotspots/civ_data.csv"))
        except FileNotFoundError:
            print("The data of Cote d'Ivoire are not here (set SEQGP_DATA): a made country.")
    return make_country(plan.villages)


# ------------------------------------------------------------------------------------------------
# 2. The model


def first_model(X: Tensor, counts: Tensor) -> SequentialGP:
    """A model of prevalence, learnt from the first surveys.

    A Gaussian process is a distribution over functions, here of the log odds of carrying the
    parasite. The *kernel* says how alike two villages are: the closer in place, warmth, rainfall
    and so on, the more alike. How much each of these matters, its *lengthscale*, is learnt. The
    *likelihood* says how counts come about: 100 tests, each positive with the village's own
    probability, which scatters around the function, since no two villages are the same. Without
    that scatter (a plain binomial likelihood) the model would try to explain it, and would take
    noise for knowledge.
    """
    lengthscales = GammaPrior(3.0, 6.0)  # about half the range of each covariate, give or take
    kernel = ScaleKernel(
        MaternKernel(nu=1.5, ard_num_dims=X.shape[-1], lengthscale_prior=lengthscales),
        outputscale_prior=GammaPrior(2.0, 0.15),
    )
    model = SequentialGP(
        X,
        counts.unsqueeze(-1),
        likelihood=OverdispersedBinomialLikelihood(TESTS),
        covar_module=kernel,
        inducing_points=len(X),  # one for each survey: as exact as it gets
    )
    fit_gpytorch_mll(DualELBO(model.likelihood, model))
    return model


@torch.no_grad()
def look(model: SequentialGP, X: Tensor, surveyed: Tensor) -> State:
    """What the model says about every village.

    The *expected* prevalence is not the prevalence at the expected log odds: where little is known
    a village may well have a lot of the disease, and that counts.
    """
    f = model(X)
    estimate, variance = prevalence(model.likelihood, f.mean, f.variance)
    hotspot = exceedance(model.likelihood, THRESHOLD, f.mean, f.variance)
    return State(surveyed, estimate, variance.sqrt(), hotspot)


# ------------------------------------------------------------------------------------------------
# 3. Where to go next


def next_village(
    model: SequentialGP, X: Tensor, surveyed: Tensor, q: int = 1
) -> tuple[Tensor, ...]:
    """The best village, or the best ``q`` for one trip, and the scores of all.

    For each candidate, 16 possible results of a survey are imagined, and for each of them what the
    model would then say about all villages that are left. The score is how much uncertainty would
    vanish on average. A batch is not simply the ``q`` highest scores, which may all be neighbours:
    each is chosen as if the results of those before it were known.
    """
    return select_from_pool(
        model, X, q, criterion=CRITERION, threshold=THRESHOLD, surveyed=surveyed
    )


# ------------------------------------------------------------------------------------------------
# 4. The loop: choose, survey, learn, repeat


def learn(
    country: Country, X: Tensor, first: Tensor, plan: Plan, active: bool
) -> tuple[list[State], SequentialGP, float]:
    """All surveys one after the other; the states after each, and the seconds of one step.

    `update` learns one more survey. The model is not fitted again from the start: it keeps what it
    knows, at most ``plan.memory`` surveys as they are and a summary of all others, and goes on from
    its present hyperparameters, at every fifth survey.
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


# ------------------------------------------------------------------------------------------------
# 5. How well it went


def scores(country: Country, states: list[State]) -> dict[str, list[float]]:
    """Against the truth, in the villages that have not been surveyed, after each survey.

    Accuracy: how many villages are rightly called a hotspot or not. Sensitivity: how many of the
    hotspots are found. MSE: mean square error of the prevalence.
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
    """Every now and then, both ways beside each other."""
    last = len(chosen["MSE"]) - 1
    print("\nsurveys   accuracy          sensitivity       MSE")
    print("          chosen   random   chosen   random   chosen   random")
    for step in sorted({0, last // 4, last // 2, 3 * last // 4, last}):
        cells = [f"{way[key][step]:9.4f}" for key in chosen for way in (chosen, random)]
        print(f"{step:7}{''.join(cells)}")


def main(arguments: list[str] | None = None) -> None:
    """From the first map to the last."""
    cli = common.parser(__doc__)
    cli.add_argument("--tiny", action="store_true", help="a handful of villages, as in the tests")
    cli.add_argument("--made", action="store_true", help="the made country, even if data are here")
    given = cli.parse_args(arguments)
    common.begin(given)
    plan = TINY if given.tiny else SHORT if given.short else FULL

    country = open_country(plan, given.made or given.short or given.tiny)
    generator = torch.Generator().manual_seed(0)
    first = torch.randperm(len(country.inputs), generator=generator)[: plan.initial]
    X = country.scaled(first)  # all covariates about 0 to 1
    hot = (country.prevalence > THRESHOLD).double().mean()
    print(
        f"{len(X)} villages, {len(first)} of them surveyed; in {hot:.0%} prevalence is above "
        f"{THRESHOLD:.0%}, which we do not know."
    )

    # What does the model know from the first surveys, and where would it go?
    model = first_model(X[first], country.survey(first, TESTS))
    start = look(model, X, first)
    chosen, all_scores = next_village(model, X, first, q=3 if given.tiny else 5)
    paths = [
        figures.first_map(country, start, THRESHOLD),
        figures.next_map(country, start, all_scores[0], chosen),
    ]
    best = int(chosen[0])
    print(
        f"The first to visit: villages {chosen.tolist()}. Village {best} has an expected "
        f"prevalence of {start.estimate[best]:.0%}, give or take {start.spread[best]:.0%}; it is a "
        f"hotspot with probability {start.hotspot[best]:.2f}."
    )

    # The surveys, chosen and, for comparison, at random.
    ways = {name: learn(country, X, first, plan, name == "chosen") for name in ("chosen", "random")}
    results = {name: scores(country, states) for name, (states, _, _) in ways.items()}
    print_table(results["chosen"], results["random"])
    states, model, seconds = ways["chosen"]
    print(f"\nA step, scores of all villages and update, took {seconds:.2f} s.")
    paths += [
        figures.maps(country, states, THRESHOLD),
        figures.curves(results),
        figures.memory_map(country, states[-1], X, model),
        figures.summary(country, states, results, THRESHOLD),
    ]
    memory = model.memory
    print(
        f"The model holds {len(memory.inputs)} of {len(states[-1].surveyed)} surveys as they are, "
        "those that say most about the rest, and a summary of the others."
    )
    print("Figures: " + ", ".join(str(path) for path in paths))


if __name__ == "__main__":
    main()
