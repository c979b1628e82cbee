"""Which of BoTorch's acquisition functions do what with which likelihood.

`tests/models/test_acquisition.py` checks every entry; the guide shows the table.
"""

from __future__ import annotations

WORKS, RAISES, NOT_MEANINGFUL = "works", "raises", "not meaningful"

LIKELIHOODS = ("Gaussian", "Bernoulli", "Binomial", "Poisson")

#: For a Gaussian likelihood everything works; this is what happens with the others.
_OTHERS = {
    "ExpectedImprovement": WORKS,
    "LogExpectedImprovement": WORKS,
    "UpperConfidenceBound": WORKS,
    "qLogExpectedImprovement": WORKS,
    "qLogNoisyExpectedImprovement": WORKS,
    "qKnowledgeGradient": WORKS,
    "qMultiStepLookahead": WORKS,
    # They need the entropy of observations, which they take to be Gaussian.
    "qMaxValueEntropy": RAISES,
    "qLowerBoundMaxValueEntropy": RAISES,
    # It conditions on one observation, as if the variance did not depend on which.
    "botorch's qNegIntegratedPosteriorVariance": NOT_MEANINGFUL,
    "seqgp's qNegIntegratedPosteriorVariance": WORKS,
    "MaxPosteriorSampling": WORKS,
    "draw_matheron_paths": WORKS,
}

#: (acquisition function, likelihood) -> what happens.
TABLE: dict[tuple[str, str], str] = {
    (acquisition, likelihood): WORKS if likelihood == "Gaussian" else others
    for acquisition, others in _OTHERS.items()
    for likelihood in LIKELIHOODS
}


def render() -> str:
    """The table in Markdown."""
    rows = [("", *LIKELIHOODS), ("---",) * (1 + len(LIKELIHOODS))]
    for acquisition in _OTHERS:
        *owner, name = acquisition.split(" ")
        label = " ".join([*owner, f"`{name}`"])
        rows.append((label, *(TABLE[acquisition, likelihood] for likelihood in LIKELIHOODS)))
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)
