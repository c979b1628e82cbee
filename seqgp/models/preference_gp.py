"""`PreferenceGP`: a utility that is learnt from comparisons, as a BoTorch model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from botorch.acquisition.objective import PosteriorTransform
from botorch.models.likelihoods.pairwise import PairwiseLogitLikelihood
from botorch.models.pairwise_gp import PairwiseGP
from botorch.models.transforms.input import InputTransform
from botorch.models.utils.assorted import fantasize as fantasize_flag
from botorch.models.utils.inducing_point_allocators import InducingPointAllocator
from botorch.posteriors import GPyTorchPosterior, Posterior
from botorch.sampling.base import MCSampler
from botorch.utils.datasets import SupervisedDataset
from gpytorch.distributions import MultivariateNormal
from gpytorch.kernels import Kernel
from gpytorch.likelihoods import Likelihood
from gpytorch.means import ConstantMean, Mean
from torch import Tensor
from torch.nn.modules.module import _IncompatibleKeys

from seqgp.distributed import Ranks
from seqgp.likelihoods import ChoiceLikelihood, TieLikelihood, log_predictive
from seqgp.likelihoods.choices import choices_among, first_parts
from seqgp.models.comparisons import (
    Answers,
    check_comparisons,
    check_ratings,
    comparison_likelihood,
    default_kernel,
    difference_coefficients,
    likelihood_of_comparisons,
    likelihood_of_ratings,
    with_ratings,
)
from seqgp.models.construction import choose_inducing_points, distinct, frozen
from seqgp.models.posteriors import ObservationPosterior
from seqgp.models.sequential_gp import SequentialGP
from seqgp.observations import Observations
from seqgp.streaming.guard import reads, writes
from seqgp.streaming.inducing_points import DEFAULT_LIMIT
from seqgp.validation import check_finite, check_inputs, check_instance, check_points


class PreferenceGP(SequentialGP):
    r"""A Gaussian process over utilities, learnt from comparisons of items.

    It is a drop-in replacement for `botorch.models.PairwiseGP`: the same arguments come first, and
    kernel, priors and likelihoods are the same, so it can load the states of a `PairwiseGP`. The
    posterior is a variational approximation with inducing points, instead of a Laplace
    approximation at the items. It can therefore be updated at constant cost. It can also forget,
    be saved and merged, and be conditioned on fantasies. Differences:

    * Fit it with `fit_gpytorch_mll` and a `seqgp.DualELBO`, or with a
      `PairwiseLaplaceMarginalLogLikelihood`, which is replaced by the `DualELBO`. In your own
      training loop, maximise ``model.bound()[0]``, or, with the priors,
      ``DualELBO(model.likelihood, model).with_priors(model.bound()[0], 1)``.
    * ``datapoints`` cannot be ``None``. To begin without comparisons, pass items that could be
      compared. Attributes of the Laplace approximation (``utility``, ``covar_chol``, ...) do not
      exist; `posterior` returns the utilities.
    * ``likelihood`` is that of a difference of utilities, such as a `BernoulliLikelihood`, and has
      no methods ``p`` and ``log_p``; `answers` has the probabilities.
    * ``datapoints`` and ``comparisons`` return the comparisons in the memory, and their items.
    * `condition_on_observations`, `update`, `forget`, `leverage` and `log_predictive_density` take
      items ``X`` and comparisons ``Y``, which are indices of the rows of this ``X``. Earlier items
      are recognised by their inputs.

    Args:
        datapoints: ``batch_shape x n x d`` items.
        comparisons: ``batch_shape x k x 2`` indices of items, the preferred one first. If ``None``,
            nothing has been compared yet, and the posterior is the prior.
        likelihood: BoTorch's `PairwiseProbitLikelihood` (the default) or `PairwiseLogitLikelihood`,
            a `seqgp.TieLikelihood` if items can be equally good, or a `seqgp.ChoiceLikelihood` for
            choices among more than two items.
        covar_module: The kernel of the utility. By default that of `PairwiseGP`.
        input_transform: Applied to all items. Statistics that it learns are frozen at construction.
        mean_module: The mean. By default zero, since comparisons do not depend on it.
        inducing_points: As for `SequentialGP`. By default the items, up to a thousand of them.
        inducing_point_allocator: As for `SequentialGP`.
        learn_inducing_points: As for `SequentialGP`.
        ties: ``batch_shape x k`` booleans that say which comparisons were ties. The default
            likelihood is then a `TieLikelihood`. `update`, `forget`, `leverage`,
            `condition_on_observations` and `log_predictive_density` also take ``ties=``.
        choices: ``c x k`` indices of items, for choices of the best one of several items. The
            chosen item comes first in each row, and rows with fewer items end with -1. The default
            likelihood is then a `ChoiceLikelihood`, and the methods above also take ``choices=``.
            A choice counts as one answer for the capacity of the memory. Everywhere else, it counts
            as one observation for each pair of its items.
        ratings: ``n`` ratings of the items, with NaN for items that were not rated. The methods
            above then also take ``ratings=``, one for each of the items that are passed. Items can
            be rated, compared, or both.
        rating_likelihood: The likelihood of a rating, given the utility of the item. By default a
            `RatingLikelihood`. Use an `OrdinalLikelihood` for a few grades.
        process_group: As for `SequentialGP`. Each process passes its own comparisons and their
            items. Items of several processes count once.
        options: ``jitter``, ``xtol``, ``maxfev``, ``consolidate_rtol`` and ``consolidate_atol`` of
            `PairwiseGP` are accepted and ignored.

    Example:
        >>> import torch
        >>> from botorch.fit import fit_gpytorch_mll
        >>> from seqgp import DualELBO, PreferenceGP
        >>> items = torch.linspace(0, 1, 6, dtype=torch.double).unsqueeze(-1)
        >>> model = PreferenceGP(items, torch.tensor([[3, 0], [3, 5], [2, 1], [4, 5]]))
        >>> _ = fit_gpytorch_mll(DualELBO(model.likelihood, model))
        >>> record = model.update(items, torch.tensor([[3, 1], [2, 0]]))  # two more answers
        >>> record.num_memory, int(model.posterior(items).mean.argmax())
        (6, 3)
    """

    def __init__(
        self,
        datapoints: Tensor,
        comparisons: Tensor | None = None,
        likelihood: Likelihood | None = None,
        covar_module: Kernel | None = None,
        input_transform: InputTransform | None = None,
        *,
        mean_module: Mean | None = None,
        inducing_points: Tensor | int | None = None,
        inducing_point_allocator: InducingPointAllocator | None = None,
        learn_inducing_points: bool | None = None,
        ties: Tensor | None = None,
        choices: Tensor | None = None,
        ratings: Tensor | None = None,
        rating_likelihood: Likelihood | None = None,
        process_group: torch.distributed.ProcessGroup | None = None,
        **options: Any,
    ) -> None:
        ranks = Ranks(process_group)
        with ranks.together():
            unknown = options.keys() - {"jitter", "xtol", "maxfev"}
            unknown -= {"consolidate_rtol", "consolidate_atol"}
            if unknown:
                raise TypeError(f"{min(unknown)}: not an argument of PreferenceGP.")
            if datapoints is None:
                raise ValueError(
                    "datapoints: expected items, got None; to begin without comparisons, pass "
                    "items that could be compared and comparisons=None."
                )
            check_inputs(datapoints, name="datapoints")
            if ranks.total(datapoints.shape[-2]) == 0:
                raise ValueError("datapoints: expected at least one item, got none.")
            check_instance(input_transform, InputTransform, "input_transform")
            check_instance(covar_module, Kernel, "covar_module")
            check_instance(rating_likelihood, Likelihood, "rating_likelihood")
            datapoints, n = datapoints.detach(), datapoints.shape[-2]
            if comparisons is None:
                comparisons = torch.empty(
                    *datapoints.shape[:-2], 0, 2, dtype=torch.long, device=datapoints.device
                )
            comparisons = check_comparisons(comparisons, n)
            if likelihood is None and ties is not None:
                likelihood = TieLikelihood()
            if choices is not None and isinstance(likelihood, PairwiseLogitLikelihood | None):
                likelihood = ChoiceLikelihood()
            rated: Likelihood | Tensor | None = rating_likelihood
            if rated is None and ratings is not None:
                rated = ranks.gather(check_ratings(ratings, datapoints))
            likelihood = with_ratings(comparison_likelihood(likelihood), rated).to(datapoints)
            answers = Answers.of(likelihood, datapoints, comparisons, ties, ratings, choices)
            items = ranks.gather(datapoints, -2)
            if not ranks.alone and items.dim() == 2:
                items = distinct(items)[0]
            if input_transform is not None:
                with torch.no_grad():  # statistics are those of the items, each counted once
                    items = input_transform.to(datapoints).train()(items)
                input_transform = frozen(input_transform)
            if covar_module is None:
                covar_module = default_kernel(items.shape[-1], items.shape[:-2])
            covar_module = covar_module.to(datapoints)
            if mean_module is None:
                mean_module = ConstantMean(batch_shape=items.shape[:-2])
                mean_module.requires_grad_(False)
            distinct_items = distinct(items)[0] if items.dim() == 2 else items
            Z = choose_inducing_points(
                distinct_items, inducing_points, covar_module, inducing_point_allocator
            )
            super().__init__(
                answers.inputs,
                answers.targets.unsqueeze(-1),
                likelihood=likelihood,
                covar_module=covar_module,
                mean_module=mean_module,
                outcome_transform=None,
                input_transform=input_transform,
                inducing_points=Z,
                inducing_point_allocator=inducing_point_allocator,
                learn_inducing_points=learn_inducing_points,
                coefficients=answers.coefficients,
                likelihood_arguments=answers.arguments,
                process_group=process_group,
            )
        if not isinstance(inducing_points, Tensor):  # they are the model's to choose
            self.keeps_inducing_points = False
            self.max_inducing = DEFAULT_LIMIT if inducing_points is None else inducing_points

    @property
    def comparison_likelihood(self) -> Likelihood:
        """The likelihood of a comparison, given the difference that is compared."""
        return likelihood_of_comparisons(self.likelihood)

    @property
    def rating_likelihood(self) -> Likelihood | None:
        """The likelihood of a rating, given the utility; ``None`` for comparisons alone."""
        return likelihood_of_ratings(self.likelihood)

    # ---------------------------------------------------------------- data

    @property
    def datapoints(self) -> Tensor:
        """``n x d``, the different items of the answers in the memory."""
        return self._held()[0]

    @property
    def comparisons(self) -> Tensor:
        """``k x 2``, the comparisons that the model holds, as indices of `datapoints`."""
        return self._held()[1]

    @property
    def ties(self) -> Tensor:
        """``k``, which of the `comparisons` are ties; the order of their items means nothing."""
        held = self.stream.observations
        targets = held.targets[..., self._choice_sizes(held) == 2]
        if not isinstance(self.comparison_likelihood, TieLikelihood):
            return torch.zeros_like(targets, dtype=torch.bool)
        return targets == 1

    @property
    def ratings(self) -> tuple[Tensor, Tensor]:
        """The ratings that the model holds: ``k`` indices of `datapoints`, and ``k`` numbers."""
        return self._held()[2:]

    @property
    @reads
    def choices(self) -> Tensor:
        """``c x k``, the choices among more than two, as indices of `datapoints`; -1 for none."""
        held = self.stream.observations
        pairs = distinct(held.points.detach())[1].reshape(-1, 2)
        found: list[tuple[int, list[int]]] = []
        sizes = self._choice_sizes(held)
        for k, index in choices_among(sizes[sizes > 2]):
            of = (sizes > 2).nonzero().squeeze(-1)[index]
            among = torch.cat([pairs[of[:, 0], :1], pairs[of[:, : k - 1], 1]], -1)
            found += zip(of[:, 0].tolist(), among.tolist(), strict=True)
        width = max((len(row) for _, row in found), default=2)
        rows = [row + [-1] * (width - len(row)) for _, row in sorted(found)]
        return torch.tensor(rows, dtype=torch.long, device=pairs.device).reshape(-1, width)

    def _choice_sizes(self, held: Observations) -> Tensor:
        """``k``: of how many items each observation is a choice; 0 for a rating."""
        sizes = held.arguments.get("choice_size")
        if sizes is None:
            sizes = held.inputs.new_full((len(held),), 2.0)
        if self.rating_likelihood is not None:
            sizes = sizes.where(held.arguments["task"] == 0, 0.0)
        return sizes

    @reads
    def _held(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Items, comparisons of them, indices of those that were rated, and ratings."""
        held = self.stream.observations
        points, sizes = held.points.detach(), self._choice_sizes(held)
        compared, rated = sizes == 2, sizes == 0
        if points.dim() > 2:  # in a batch each may have another number of items
            indices = torch.arange(points.shape[-2], device=points.device)
            pairs = indices.reshape(-1, 2).expand(*held.inputs.shape[:-1])
            return points.clone(), pairs, indices[:0], held.targets[..., :0]
        items, indices = distinct(points)
        pairs = indices.reshape(-1, 2)
        wins = held.targets[compared].unsqueeze(-1) > 0.5  # fantasies may prefer the second item
        comparisons = torch.where(wins, pairs[compared], pairs[compared].flip(-1))
        return items, comparisons, pairs[rated, 0], held.targets[rated].clone()

    @property
    def train_inputs(self) -> tuple[Tensor]:
        """The `datapoints`; after the input transform in eval mode, as in BoTorch."""
        items = self.datapoints
        return (items if self.training else self.transform_train_inputs(items),)

    @train_inputs.setter
    def train_inputs(self, inputs: tuple[Tensor]) -> None:
        raise AttributeError("train_inputs: items come with comparisons; use set_train_data.")

    @property
    def train_targets(self) -> Tensor:
        """The `comparisons`."""
        return self.comparisons

    @train_targets.setter
    def train_targets(self, targets: Tensor) -> None:
        raise AttributeError("train_targets: comparisons come with items; use set_train_data.")

    def checked(
        self, X: Tensor, Y: Tensor, noise: Tensor | None, arguments: dict[str, Any]
    ) -> Observations:
        """New comparisons as the model stores them; raises if anything is wrong with them.

        Args:
            X: ``batch_shape x n x d`` items.
            Y: ``batch_shape x k x 2`` indices of these, the preferred item first.
            noise: Not for comparisons.
            arguments: ``ties``, ``ratings`` and ``choices``, if there are any.
        """
        if noise is not None:
            raise ValueError("noise: comparisons have no noise variances.")
        arguments = dict(arguments)
        names = ("ties", "ratings", "choices")
        answers = self._answers(X, Y, *(arguments.pop(name, None) for name in names))
        arguments = {**arguments, **answers.arguments, "coefficients": answers.coefficients}
        return super().checked(answers.inputs, answers.targets.unsqueeze(-1), None, arguments)

    def _answers(
        self,
        X: Tensor,
        Y: Tensor,
        ties: Tensor | None = None,
        ratings: Tensor | None = None,
        choices: Tensor | None = None,
    ) -> Answers:
        """Comparisons, choices and ratings of items, checked."""
        check_points(X, self.num_inputs, "X")
        check_finite(X, "X", -2)
        X = self.in_precision(X)
        Y = check_comparisons(Y, X.shape[-2], "Y")
        return Answers.of(self.likelihood, X, Y, ties, ratings, choices)

    @writes
    def set_train_data(
        self,
        datapoints: Tensor | None = None,
        comparisons: Tensor | None = None,
        strict: bool = False,
        update_model: bool = True,
        ties: Tensor | None = None,
        ratings: Tensor | None = None,
        choices: Tensor | None = None,
    ) -> None:
        """Replace all comparisons, choices and ratings.

        Args:
            datapoints: ``batch_shape x n x d`` items.
            comparisons: ``batch_shape x k x 2`` indices of them. If either is ``None``, nothing
                happens, as in `PairwiseGP`.
            strict: Whether there must be as many observations as before.
            update_model: Whether to compute the posterior.
            ties: ``batch_shape x k``, which of the comparisons are ties.
            ratings: ``n`` ratings of the items, NaN for those that were not rated.
            choices: ``c x k`` indices of items, the chosen one first.
        """
        if datapoints is None or comparisons is None:
            return
        ranks = self.variational_strategy.ranks
        with ranks.together():
            given = {"ties": ties, "ratings": ratings, "choices": choices}
            data = self.checked(datapoints, comparisons, None, given)
            number = ranks.total(len(data))
            if strict and number != self.num_data:
                raise ValueError(f"comparisons: expected {self.num_data}, got {number}.")
        self.stream = type(self.stream).begin(data, ranks)
        Z = self.choose_inducing_points(max(self.max_inducing, 1))
        if not self.keeps_inducing_points:
            self.variational_strategy.start_from(Z)
        if update_model:
            self.refresh()

    # ---------------------------------------------------------------- predictions

    def posterior(  # type: ignore[override]
        self,
        X: Tensor,
        output_indices: list[int] | None = None,
        observation_noise: bool | Tensor = False,
        posterior_transform: PosteriorTransform | None = None,
        **arguments: Any,
    ) -> Posterior:
        """The posterior of utilities at ``... x q x d`` items; Gaussian.

        Args:
            X: The items.
            output_indices: There is one output.
            observation_noise: Ignored, as in `PairwiseGP`: a utility is not observed. `answers` has
                the probabilities of comparisons.
            posterior_transform: Applied to the posterior.
            arguments: There are none.
        """
        return super().posterior(X, output_indices, False, posterior_transform, **arguments)

    @reads
    def answers(self, X: Tensor) -> ObservationPosterior:
        """The answers to questions "do you prefer the first item to the second?".

        Args:
            X: ``... x 2k x d`` items: each row of an even number is compared with the next one.

        Returns:
            A posterior over ``... x k x 1`` answers, jointly, 1 if the first item is preferred, and
            0 otherwise. Its mean is the probability of a 1. With a `TieLikelihood`, answers are 2
            if the first item is preferred, 1 for a tie, and 0 otherwise.

        Example:
            >>> import torch
            >>> from seqgp import PreferenceGP
            >>> items = torch.linspace(0, 1, 3, dtype=torch.double).unsqueeze(-1)
            >>> model = PreferenceGP(items, torch.tensor([[1, 0], [1, 2]]))
            >>> bool(model.answers(items[:2]).mean < 0.5)
            True
        """
        return ObservationPosterior(
            GPyTorchPosterior(self._differences(X)), self.comparison_likelihood, {}, False
        )

    @reads
    def predicted_ratings(self, X: Tensor) -> ObservationPosterior:
        """The posterior over ratings of ``... x q x d`` items, jointly.

        Args:
            X: The items.

        Example:
            >>> import torch
            >>> from seqgp import PreferenceGP
            >>> items = torch.linspace(0, 1, 4, dtype=torch.double).unsqueeze(-1)
            >>> pairs = torch.tensor([[1, 0], [2, 1]])
            >>> ratings = torch.tensor([1.0, 2.0, torch.nan, torch.nan])
            >>> model = PreferenceGP(items, pairs, ratings=ratings)
            >>> rating = model.predicted_ratings(items).mean.squeeze(-1)
            >>> bool(rating[2] > rating[1] > rating[0])
            True
        """
        likelihood = self.rating_likelihood
        if likelihood is None:
            raise RuntimeError(
                "The model has no likelihood of ratings; build it with "
                "rating_likelihood=seqgp.RatingLikelihood()."
            )
        utilities: Any = self.posterior(X)
        return ObservationPosterior(utilities, likelihood, {}, False)

    def _differences(self, X: Tensor) -> MultivariateNormal:
        """The posterior of the differences that are compared, ``... x k``, as `answers` has them.

        With the coefficients as a matrix ``C``, mean and covariance are ``C m`` and ``C S C^T``.
        """
        check_points(X, self.num_inputs, "X")
        if X.shape[-2] % 2:
            raise ValueError(
                f"X: expected pairs of items, an even number of rows, got {X.shape[-2]}."
            )
        posterior: Any = self.posterior(X)
        f = posterior.distribution
        k = X.shape[-2] // 2
        c = difference_coefficients(self.comparison_likelihood, f.mean.new_empty(k, 2, 1))
        mean = (f.mean.unflatten(-1, (k, 2)) * c).sum(-1)
        S = f.covariance_matrix.unflatten(-1, (k, 2)).unflatten(-3, (k, 2))  # k x 2 x k x 2
        covariance = torch.einsum("...iajb,ia,jb->...ij", S, c, c)
        return MultivariateNormal(mean, covariance)

    @torch.no_grad()
    @reads
    def log_predictive_density(
        self,
        X: Tensor,
        targets: Tensor,
        ties: Tensor | None = None,
        choices: Tensor | None = None,
        **arguments: Any,
    ) -> Tensor:
        """``... x k``, the log probability of comparisons, and then of choices.

        Args:
            X: ``... x n x d`` items.
            targets: ``... x k x 2`` indices of these, the preferred item first.
            ties: ``... x k``, which of the comparisons are ties.
            choices: ``c x k'`` indices of items, the chosen one first.
            arguments: There are none.
        """
        answers = self._answers(X, targets, ties, None, choices)
        # Each by itself: pairs are a batch, so that covariances between them are not formed.
        h = self._differences(answers.inputs)
        mean, variance = h.mean.squeeze(-1), h.variance.squeeze(-1)
        size = answers.arguments.get("choice_size")
        if size is not None:
            arguments["choice_size"] = size
        result = log_predictive(
            self.comparison_likelihood, answers.targets, mean, variance, **arguments
        )
        return result if size is None else result[..., first_parts(size).unique()]

    # ---------------------------------------------------------------- conditioning

    @reads
    def condition_on_observations(
        self,
        X: Tensor,
        Y: Tensor,
        noise: Tensor | None = None,
        ties: Tensor | None = None,
        ratings: Tensor | None = None,
        choices: Tensor | None = None,
        **kwargs: Any,
    ) -> PreferenceGP:
        """Return a model that is conditioned on more comparisons. This model is unchanged.

        Args:
            X: ``batch_shape x n x d`` items.
            Y: ``batch_shape' x k x 2`` indices of these, the preferred item first; batch shapes
                broadcast.
            noise: Not for comparisons.
            ties: ``... x k``, which of the comparisons are ties.
            ratings: ``n`` ratings of the items, NaN for those that were not rated.
            choices: ``c x k`` indices of items, the chosen one first.
            kwargs: ``fixed_inducing``, ``tol`` and ``max_steps`` as for `SequentialGP`.

        Example:
            >>> import torch
            >>> from seqgp import PreferenceGP
            >>> items = torch.linspace(0, 1, 4, dtype=torch.double).unsqueeze(-1)
            >>> model = PreferenceGP(items, torch.tensor([[1, 0]]))
            >>> known = model.condition_on_observations(items, torch.tensor([[2, 3]]))
            >>> int(known.posterior(items).mean.argmin())
            3
        """
        if noise is not None:
            raise ValueError("noise: comparisons have no noise variances.")
        return self._conditioned(self._answers(X, Y, ties, ratings, choices), **kwargs)

    def _conditioned(self, answers: Answers, **kwargs: Any) -> PreferenceGP:
        """Conditioned on answers."""
        self._leave_train_mode()
        points = answers.inputs.flatten(-3, -2)
        inputs = self._observed_at(points).unflatten(-2, answers.inputs.shape[-3:-1])
        options: dict[str, Any] = {**answers.arguments, **kwargs}
        model: PreferenceGP = self.variational_strategy.get_fantasy_model(
            inputs, answers.targets, coefficients=answers.coefficients, **options
        )
        model.conditioned_inputs = (*self.conditioned_inputs, points.detach())
        self.guard.sharers.add(model)
        return model

    @reads
    def fantasize(
        self,
        X: Tensor,
        sampler: MCSampler,
        observation_noise: Tensor | None = None,
        propagate_grads: bool = False,
        **kwargs: Any,
    ) -> PreferenceGP:
        """Return the model conditioned on answers that are sampled from its posterior.

        Args:
            X: ``batch_shape x 2k x d`` items, compared as in `answers`.
            sampler: Draws answers to the ``k`` comparisons, jointly.
            observation_noise: Ignored; answers are as noisy as the likelihood has them.
            propagate_grads: Whether answers have gradients; they are whole numbers, and have none.
            kwargs: As for `condition_on_observations`.

        Returns:
            A model with batch shape ``sample_shape x batch_shape``.

        Example:
            >>> import torch
            >>> from botorch.sampling import SobolQMCNormalSampler
            >>> from seqgp import PreferenceGP
            >>> items = torch.linspace(0, 1, 4, dtype=torch.double).unsqueeze(-1)
            >>> model = PreferenceGP(items, torch.tensor([[1, 0]]))
            >>> duels = torch.rand(3, 2, 1, dtype=torch.double)
            >>> fantasies = model.fantasize(duels, SobolQMCNormalSampler(torch.Size([16])))
            >>> fantasies.posterior(items).mean.shape
            torch.Size([16, 3, 4, 1])
        """
        check_instance(sampler, MCSampler, "sampler", optional=False)
        with fantasize_flag(), torch.no_grad():
            drawn = sampler(self.answers(X)).squeeze(-1)
        X = self.in_precision(X)
        duels = torch.arange(X.shape[-2], device=X.device).reshape(-1, 2)
        answers = Answers.of(self.likelihood, X, duels)
        return self._conditioned(replace(answers, targets=drawn), **kwargs)

    # ---------------------------------------------------------------- housekeeping

    @classmethod
    def construct_inputs(cls, training_data: SupervisedDataset, **kwargs: Any) -> dict[str, Any]:
        """Constructor arguments from a `RankingDataset`, as for `PairwiseGP`.

        Args:
            training_data: The data set.
            kwargs: Further arguments of the constructor.
        """
        return {**PairwiseGP.construct_inputs(training_data), **kwargs}

    def load_state_dict(  # type: ignore[override]
        self,
        state_dict: Mapping[str, Any],
        strict: bool = False,
        keep_transforms: bool = True,
        assign: bool = False,
    ) -> _IncompatibleKeys:
        """Load hyperparameters; the posterior is that of the comparisons at hand.

        Args:
            state_dict: The state of a `PreferenceGP`, or of a `PairwiseGP` with the same modules.
            strict: Whether its keys must be those of this model, except for data and strategy.
            keep_transforms: As for `SequentialGP`.
            assign: Whether to convert the model to the precision and device of the state.

        Returns:
            The keys that were missing, and those that were not expected, as in PyTorch.
        """
        # Tensors of modules have a dot in their names; those of a `PairwiseGP` itself are data.
        state = {k: v for k, v in state_dict.items() if "." in k}
        own = {k for k in self.state_dict() if not k.startswith("variational_strategy.")}
        super().load_state_dict(state, strict, keep_transforms, assign)
        given = {k for k in state if not k.startswith("variational_strategy.")}
        return _IncompatibleKeys(sorted(own - given), sorted(given - own))
