"""One thread learns, others read: they see the model before or after an update."""

from __future__ import annotations

import copy
import itertools
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from gpytorch.kernels import RBFKernel, ScaleKernel
from gpytorch.likelihoods import BernoulliLikelihood, Likelihood, StudentTLikelihood
from torch import Tensor

import seqgp
from seqgp import SequentialGP
from seqgp.variational.frozen import frozen
from tests.helpers import latent, make_inputs
from tests.reliability.subjects import SUBJECTS

pytestmark = pytest.mark.usefixtures("float64")

#: The third of them does not learn.
UPDATES = 4


def make_model(likelihood: Likelihood | None) -> SequentialGP:
    X, kernel = make_inputs(12, 2), None
    if isinstance(likelihood, BernoulliLikelihood):
        # Of one input each: to evaluate them, GPyTorch changes them for a moment.
        parts = [ScaleKernel(RBFKernel(active_dims=(i,))) for i in range(2)]
        kernel = parts[0] + parts[1]
    return SequentialGP(
        X,
        observe(X, likelihood),
        likelihood=likelihood,
        covar_module=kernel,
        inducing_points=6,
    )


def observe(X: Tensor, likelihood: Likelihood | None) -> Tensor:
    f = latent(X).unsqueeze(-1)
    return (f > 1).double() if isinstance(likelihood, BernoulliLikelihood) else f.exp()


def updates(model: SequentialGP, likelihood: Likelihood | None) -> Iterator[None]:
    """Updates that learn hyperparameters, move inducing points and change the standardisation."""
    X = make_inputs(12 + 6 * UPDATES, 2)[12:]
    for k, part in enumerate(X.split(6)):
        model.update(part, observe(part, likelihood), steps=2, memory=10, learn=k % 3 != 2)
        yield


#: Where readers look.
AT = torch.linspace(0.05, 0.9, 140, dtype=torch.double).reshape(70, 2)


def moments(model: SequentialGP) -> Tensor:
    """Of a posterior whose covariance is lazy: it is evaluated when the model may have moved on."""
    posterior = model.posterior(AT)
    return torch.cat([posterior.mean, posterior.variance]).detach()


def joint(model: SequentialGP) -> Tensor:
    with torch.no_grad():
        return model.posterior(AT[:5]).distribution.covariance_matrix


def observations(model: SequentialGP) -> Tensor:
    posterior = model.posterior(AT[:7], observation_noise=True)
    return torch.cat([posterior.mean, posterior.variance]).detach()


def gradient(model: SequentialGP) -> Tensor:
    X = AT[:3].clone().requires_grad_(True)
    posterior = model.posterior(X)
    (result,) = torch.autograd.grad(posterior.mean.sum() + posterior.variance.sum(), X)
    return result


def conditioned(model: SequentialGP) -> Tensor:
    fantasy = model.condition_on_observations(AT[:1], torch.ones(1, 1))
    posterior = fantasy.posterior(AT[:4])
    return torch.cat([posterior.mean, posterior.variance]).detach()


def state(model: SequentialGP) -> Tensor:
    return torch.cat([value.flatten().double() for value in model.state_dict().values()])


def copied(model: SequentialGP) -> Tensor:
    return moments(copy.deepcopy(model))


READS = (moments, joint, observations, gradient, conditioned, state, copied)
LIKELIHOODS: dict[str, Callable[[], Likelihood | None]] = {
    "gaussian": lambda: None,
    "bernoulli": BernoulliLikelihood,
    "student-t": StudentTLikelihood,
}


@pytest.fixture
def switching() -> Iterator[None]:
    """Let threads take turns as often as possible."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("name", LIKELIHOODS)
def test_readers_never_see_a_mixture(name: str) -> None:
    likelihood = LIKELIHOODS[name]()
    check_readers(make_model(likelihood), lambda model: updates(model, likelihood), READS)


@pytest.mark.usefixtures("switching")
@pytest.mark.parametrize("kind", ["tasks", "preferences"])
def test_readers_of_other_models_never_see_a_mixture(kind: str) -> None:
    """With a task that appears, and is standardised, in one of the updates."""
    subject = SUBJECTS[kind](kind, 2, torch.float64)
    batches = [subject.observe(3, seed) for seed in range(4)]
    if kind == "tasks":
        batches = [(X[X[:, -1] != 0], Y[X[:, -1] != 0], {}) for X, Y, _ in batches[:2]]
        batches += [subject.observe(4, seed) for seed in range(2)]
        X, Y = torch.cat([b[0] for b in batches[:2]]), torch.cat([b[1] for b in batches[:2]])
        first = subject.of(X, Y, inducing_points=X[:3])
    else:
        first = subject.build(4, 5, 9)

    def learn(model: SequentialGP) -> Iterator[None]:
        for k, (X, Y, _) in enumerate(batches):
            model.update(X, Y, steps=2, memory=10, learn=k % 2 == 0)
            yield

    def conditioned(model: SequentialGP) -> Tensor:
        X, Y, _ = subject.observe(2, 17)
        return moments(model.condition_on_observations(X, Y))

    check_readers(first, learn, (moments, gradient, conditioned, state, copied))


def check_readers(
    first: SequentialGP,
    learn_all: Callable[[SequentialGP], Iterator[None]],
    reads: Sequence[Callable[[SequentialGP], Tensor]],
) -> None:
    """Read a model while it is updated: all results have to be those between updates.

    But for rounding, which depends on where in memory a product finds its factors. Mixtures of two
    states are as far from both as these are from each other.
    """
    alone = copy.deepcopy(first)
    possible = {read: [read(alone)] for read in reads}
    for _ in learn_all(alone):
        for read in reads:
            possible[read].append(read(alone))
    for found in possible.values():
        assert not any(is_same(a, b, 100 * SAME) for a, b in itertools.combinations(found, 2))

    for _ in range(10):
        seen, meanwhile = read_while_learning(copy.deepcopy(first), learn_all, reads)
        states: dict[Callable[[SequentialGP], Tensor], set[int]] = {read: set() for read in reads}
        for read, result in seen:
            same = [k for k, known in enumerate(possible[read]) if is_same(result, known)]
            assert len(same) == 1, read.__name__
            states[read].update(same)
        assert states[moments] == set(range(len(possible[moments])))
        if meanwhile:
            return
    pytest.fail("No read began and ended during an update.")


#: The largest difference of what is the same but for rounding.
SAME = 1e-7


def is_same(a: Tensor, b: Tensor, tolerance: float = SAME) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=tolerance, atol=tolerance)


def read_while_learning(
    model: SequentialGP,
    learn_all: Callable[[SequentialGP], Iterator[None]],
    reads: Sequence[Callable[[SequentialGP], Tensor]],
) -> tuple[list[tuple[Callable[[SequentialGP], Tensor], Tensor]], int]:
    """What a reader has seen, and how many reads began and ended during one and the same update.

    Between updates, the learner waits until everything has been read.
    """
    seen: list[tuple[Callable[[SequentialGP], Tensor], Tensor]] = []
    updating, meanwhile, rounds, stop = 0, 0, 0, False  # `updating` is 0 between updates
    has_read = threading.Condition()
    errors: list[BaseException] = []

    def everything_is_read() -> None:
        with has_read:
            goal = rounds + 2  # the round under way may have begun before
            assert has_read.wait_for(lambda: rounds >= goal or bool(errors), timeout=300)
        if errors:
            raise errors[0]

    def read_all() -> None:
        nonlocal meanwhile, rounds
        torch.set_default_dtype(torch.float64)
        try:
            while not stop:
                for read in reads:
                    before = updating
                    seen.append((read, read(model)))
                    meanwhile += bool(before) and before == updating
                with has_read:
                    rounds += 1
                    has_read.notify()
        except BaseException as error:
            with has_read:
                errors.append(error)
                has_read.notify()

    reader = threading.Thread(target=read_all)
    reader.start()
    try:
        everything_is_read()
        steps = learn_all(model)
        for number in itertools.count(1):
            updating = number
            more = next(steps, False) is None
            updating = 0
            if not more:
                break
            everything_is_read()
    finally:
        stop = True
        reader.join()
    return seen, meanwhile


@pytest.mark.parametrize("name", LIKELIHOODS)
def test_a_posterior_that_is_evaluated_later_is_that_of_its_time(name: str) -> None:
    likelihood = LIKELIHOODS[name]()
    model = make_model(likelihood)
    expected = moments(model), observations(model), joint(model), gradient(model)
    X = AT[:3].clone().requires_grad_(True)
    early, small, points = model.posterior(AT), model.posterior(AT[:5]), model.posterior(X)
    noisy = model.posterior(AT[:7], observation_noise=True)
    list(updates(model, likelihood))
    assert not torch.equal(moments(model), expected[0])
    assert torch.equal(torch.cat([early.mean, early.variance]), expected[0])
    assert torch.equal(torch.cat([noisy.mean, noisy.variance]), expected[1])
    with torch.no_grad():
        torch.testing.assert_close(
            small.distribution.covariance_matrix, expected[2], rtol=1e-10, atol=1e-12
        )
    (now,) = torch.autograd.grad(points.mean.sum() + points.variance.sum(), X)
    assert torch.equal(now, expected[3])


def test_conditioned_models_stay_what_they_were() -> None:
    """Also those that were conditioned twice, or copied along with their parent."""
    model = make_model(None)
    once = model.condition_on_observations(AT[:1], torch.ones(1, 1))
    twice = once.condition_on_observations(AT[1:2], torch.ones(1, 1))
    models = [once, twice, *copy.deepcopy([model, once])]
    expected = [moments(each) for each in models]
    list(updates(model, None))
    list(updates(models[2], None))
    for each, before in zip(models, expected, strict=True):
        assert torch.equal(moments(each), before) == (each is not models[2])
    assert once.covar_module is twice.covar_module  # one copy for all of them


def test_no_update_is_lost() -> None:
    """Updates of several threads take turns."""
    model = make_model(None)
    parts = make_inputs(36, 2)[12:].split(3)

    def learn(k: int) -> None:
        torch.set_default_dtype(torch.float64)
        for part in parts[k::2]:
            model.update(part, observe(part, None), learn=False)

    threads = [threading.Thread(target=learn, args=(k,)) for k in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (model.num_seen, model.num_updates) == (36, 8)


def test_readers_do_not_wait_for_learning() -> None:
    """The lock of readers is free while an update learns."""
    model, free = make_model(None), []

    class Watched(RBFKernel):
        def forward(self, *args: Tensor, **kwargs: object) -> Tensor:
            thread = threading.Thread(target=attempt)
            thread.start()
            thread.join()
            return super().forward(*args, **kwargs)

    def attempt() -> None:
        free.append(model.guard.reading.acquire(blocking=False))
        if free[-1]:
            model.guard.reading.release()

    X = make_inputs(15, 2)
    model = SequentialGP(X[:12], observe(X[:12], None), covar_module=Watched())
    free.clear()
    model.update(X[12:], observe(X[12:], None), learn=True, steps=2)
    assert sum(free) >= len(free) - 2 > 10


def test_copies_and_pickles_have_a_guard_of_their_own(tmp_path: object) -> None:
    model = make_model(None)
    others = [copy.deepcopy(model), pickle.loads(pickle.dumps(model))]
    seqgp.save(model, f"{tmp_path}/model")
    others.append(seqgp.load(f"{tmp_path}/model"))
    for other in others:
        assert other.guard is not model.guard
        assert torch.equal(moments(other), moments(model))


def test_frozen_modules_share_memory_and_pass_gradients_on() -> None:
    kernel = RBFKernel()
    still = frozen(kernel)
    before = still(AT).to_dense()
    before.sum().backward()
    assert kernel.raw_lengthscale.grad is not None
    with torch.no_grad():
        kernel.raw_lengthscale.fill_(0.3)
    assert still.lengthscale == kernel.lengthscale
    kernel.raw_lengthscale.data = torch.full_like(kernel.raw_lengthscale, 2.0)
    assert still.lengthscale != kernel.lengthscale
    assert still.raw_lengthscale_constraint is not kernel.raw_lengthscale_constraint
