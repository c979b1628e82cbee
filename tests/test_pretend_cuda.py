"""The pretended device is as strict as CUDA, and its values are those of the CPU."""

from __future__ import annotations

import copy
import io
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from gpytorch.kernels import RBFKernel
from torch import Tensor

from tests.pretend_cuda import DEVICE, PretendCUDA, PretendTensor

CPU = torch.device("cpu")
A, B = torch.arange(6.0).reshape(2, 3), torch.linspace(-1, 1, 6).reshape(2, 3)


@pytest.fixture(autouse=True)
def device() -> Iterator[PretendCUDA]:
    with PretendCUDA() as device:
        yield device


def there(tensor: Tensor) -> Tensor:
    return tensor.to(DEVICE)


def assert_same(actual: Any, expected: Tensor) -> None:
    assert isinstance(actual, PretendTensor)
    assert actual.device == DEVICE
    assert actual.dtype == expected.dtype
    assert torch.equal(actual.cpu(), expected)


def waits(device: PretendCUDA) -> dict[str, int]:
    found: dict[str, int] = {}
    for source, number in device.waits.items():
        found[source.operation] = found.get(source.operation, 0) + number
    return found


# -------------------------------------------------------------------- values


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "elementwise": lambda a, b: a.exp() + b * a - 2.0,
    "matrix product": lambda a, b: a @ b.mT,
    "view": lambda a, b: a.mT.reshape(-1)[1:4].unsqueeze(0).expand(2, -1),
    "reduction": lambda a, b: a.sum(-1).max() + b.mean(),
    "concatenation": lambda a, b: torch.cat([a, b.squeeze(0)], -1),
    "where": lambda a, b: torch.where(b > 0, a, -torch.inf),
    "factorisation": lambda a, b: torch.linalg.cholesky(a @ a.mT + b @ b.mT),
    "solution": lambda a, b: torch.linalg.solve(a @ a.mT + b @ b.mT, b),
    "zeros": lambda a, b: torch.zeros_like(a) + a.new_zeros(3) + torch.zeros(3, device=b.device),
    "zeros like the CPU's": lambda a, b: torch.zeros_like(A, device=a.device) + b,
    "split": lambda a, b: torch.stack(a.unbind(-1)[:2]) @ b,
    "from a list": lambda a, b: torch.tensor([1.0, 2.0, 3.0], device=a.device) * b,
    "from a number": lambda a, b: torch.as_tensor(3.5, device=a.device) * b,
    "new tensor": lambda a, b: a.new_tensor([[1.0], [2.0]]) * b,
    "range": lambda a, b: torch.arange(3, device=a.device) + b,
    "other dtype": lambda a, b: a.double() + b.to(torch.float64),
    "tensor of the CPU": lambda a, b: a + A.to(a),
    "number of the CPU": lambda a, b: torch.maximum(a * torch.tensor(2.0), torch.tensor(1.0)),
    "random": lambda a, b: torch.rand(2, 3, device=a.device) + torch.randn_like(b),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_values_are_those_of_the_cpu(name: str) -> None:
    torch.manual_seed(0)
    expected = FUNCTIONS[name](A, B)
    torch.manual_seed(0)
    assert_same(FUNCTIONS[name](there(A), there(B)), expected)


@pytest.mark.parametrize("name", ["elementwise", "matrix product", "view", "where", "solution"])
def test_gradients_are_those_of_the_cpu(name: str) -> None:
    host, other = (copy.deepcopy(t).requires_grad_() for t in (A, there(A)))
    FUNCTIONS[name](host, B).square().sum().backward()
    FUNCTIONS[name](other, there(B)).square().sum().backward()
    assert host.grad is not None
    assert_same(other.grad, host.grad)


@pytest.mark.parametrize(
    "move", [there, lambda t: t.to(there(B)), lambda t: torch.as_tensor(t, device=DEVICE)]
)
def test_gradients_cross_devices(move: Callable[[Tensor], Tensor]) -> None:
    host = A.clone().requires_grad_()
    (there(B) * move(host)).sum().backward()
    assert host.grad is not None
    assert host.grad.device == CPU
    assert torch.equal(host.grad, B)


ASSIGNMENTS: dict[str, Callable[[Tensor], object]] = {
    "a number": lambda t: t.__setitem__(0, 7.0),
    "a list of indices": lambda t: t.__setitem__([1, 0], 0.0),
    "a range of indices": lambda t: t.__setitem__((range(2), [0, 2]), 0.0),
    "a list of indices, one of several": lambda t: t.__setitem__((0, [0, 2]), 0.0),
    "an empty list": lambda t: t.__setitem__([], 0.0),
    "a list of booleans": lambda t: t.__setitem__([True, False], 9.0),
    "a tensor by a list": lambda t: t.__setitem__([1, 0], torch.ones(2, 3, device=t.device)),
    "a mask": lambda t: t.__setitem__(t > 2, -1.0),
    "a slice": lambda t: t.__setitem__((slice(None), slice(1, None)), 5.0),
    "a slice from the CPU": lambda t: t.__setitem__(slice(0, 1), B[:1]),
    "through a view": lambda t: t.mT[1].fill_(4.0),
    "in place": lambda t: t.add_(1.0).mul_(t),
    "another shape": lambda t: t.unsqueeze_(0).mT.transpose_(-1, -2).add_(1.0),
    "through data": lambda t: t.data.copy_(B),
    "an output": lambda t: torch.maximum(t, t.new_zeros(()) + 2, out=t),
}


@pytest.mark.parametrize("name", ASSIGNMENTS)
def test_assignment(name: str) -> None:
    host, other = A.clone(), there(A)
    ASSIGNMENTS[name](host)
    ASSIGNMENTS[name](other)
    assert_same(other, host)


@pytest.mark.parametrize(
    "index",
    [
        1,
        [1, 0],
        range(2),
        (slice(None), [0, 2]),
        ([0, 1], [2, 0]),
        (range(2), [2, 0]),
        [True, False],
        (..., None),
        [],
    ],
)
def test_reading_by_index(index: Any) -> None:
    assert_same(there(A)[index], A[index])


def test_indices_on_the_cpu() -> None:
    assert_same(there(A)[torch.tensor([1])], A[1:])
    assert_same(there(A)[A > 2], A[A > 2])


def test_back_to_the_host() -> None:
    tensor = there(A)
    assert tensor.tolist() == A.tolist()
    assert tensor[1, 2].item() == float(tensor.max()) == 5.0
    assert tensor.any()
    assert type(tensor.cpu()) is Tensor
    assert type(tensor.to("cpu")) is Tensor
    assert torch.tensor([tensor[0, 1], tensor[1, 0]]).tolist() == [1.0, 3.0]
    assert "4." in repr(tensor)


def test_versions_count_changes() -> None:
    """As caches need them."""
    tensor = there(A)
    before = tensor._version, tensor.data_ptr()
    tensor[0].add_(1.0)
    assert tensor._version > before[0]
    assert tensor.data_ptr() == before[1] != there(A).data_ptr()


# -------------------------------------------------------------------- mistakes


MIXED: dict[str, Callable[[Tensor], object]] = {
    "elementwise": lambda t: t + A,
    "the other way round": lambda t: A * t,
    "matrix product": lambda t: t @ A.mT,
    "concatenation": lambda t: torch.cat([t, A]),
    "stack of numbers": lambda t: torch.stack([t.sum(), torch.tensor(1.0)]),
    "where": lambda t: torch.where(A > 0, t, 0.0),
    "comparison": lambda t: torch.equal(t, A),
    "comparison of numbers": lambda t: torch.equal(t.sum(), torch.tensor(1.0)),
    "index of the wrong device": lambda t: A[t.long()[0, :2]],
    "selection": lambda t: t.index_select(0, torch.tensor([0])),
    "gathering": lambda t: t.gather(0, torch.zeros(1, 3).long()),
    "assignment by mask": lambda t: t.__setitem__(t > 2, torch.ones(3)),
    "output on the CPU": lambda t: torch.add(t, t, out=torch.empty(2, 3)),
    "in place on the CPU": lambda t: torch.tensor(1.0).add_(t.sum()),
    "solution": lambda t: torch.linalg.solve(t @ t.mT, A),
    "default device": lambda t: t + torch.zeros(3),
    "clamp": lambda t: t.clamp(min=torch.zeros(3)),
}


@pytest.mark.parametrize("name", MIXED)
def test_mixing_devices_raises(name: str) -> None:
    with pytest.raises(RuntimeError, match=r"same device"):
        MIXED[name](there(A))


def test_generators_belong_to_a_device() -> None:
    generator = torch.Generator().manual_seed(0)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, generator=generator, device=DEVICE)
    with pytest.raises(RuntimeError, match="generator"):
        torch.multinomial(there(A), 1, generator=generator)
    assert torch.rand(3, generator=generator).device == CPU


def test_numpy_needs_the_host() -> None:
    with pytest.raises(TypeError, match="to numpy"):
        there(A).numpy()


def test_outside_nothing_is_computed(device: PretendCUDA) -> None:
    tensor = there(A)
    device.__exit__(None, None, None)
    with pytest.raises(RuntimeError, match="outside of PretendCUDA"):
        tensor + 1
    assert repr(tensor) == f"PretendTensor({A!r})"


# -------------------------------------------------------------------- modules


def fitted() -> RBFKernel:
    """A kernel on the device whose parameters have gradients."""
    kernel = RBFKernel(ard_num_dims=3).to(DEVICE)
    kernel(there(A)).to_dense().sum().backward()
    assert kernel.raw_lengthscale.grad is not None
    return kernel


def test_deep_copies_of_parameters_with_gradients() -> None:
    kernel = fitted()
    copied = copy.deepcopy(kernel)
    parameter = copied.raw_lengthscale
    assert isinstance(parameter, torch.nn.Parameter)
    assert parameter.grad is None  # as torch does it
    assert_same(parameter.detach(), kernel.raw_lengthscale.detach().cpu())
    with torch.no_grad():
        parameter.add_(1.0)
    assert not torch.equal(parameter, kernel.raw_lengthscale)


def test_deep_copies_of_tensors() -> None:
    leaf = there(A).requires_grad_()
    leaf.square().sum().backward()
    one, other = copy.deepcopy([leaf, leaf])
    assert one is other
    assert one.requires_grad
    assert_same(one.grad, 2 * A)
    assert_same(copy.deepcopy(there(A)), A)
    with pytest.raises(RuntimeError, match="graph leaves"):
        copy.deepcopy(leaf * 2)


def test_modules_keep_their_parameters() -> None:
    kernel = RBFKernel()
    parameter = kernel.raw_lengthscale
    optimizer = torch.optim.Adam([parameter], lr=0.1)
    kernel.to(DEVICE)
    assert kernel.raw_lengthscale is parameter
    assert isinstance(parameter, torch.nn.Parameter)
    assert_same(kernel.lengthscale.detach(), RBFKernel().lengthscale.detach())
    kernel.double()
    kernel(there(A).double()).to_dense().sum().backward()
    optimizer.step()
    assert kernel.raw_lengthscale.dtype == torch.float64
    assert kernel.raw_lengthscale.item() != 0.0
    kernel.cpu()
    assert kernel.raw_lengthscale is parameter
    assert type(parameter) is torch.nn.Parameter
    assert parameter.item() != 0.0


def test_modules_whose_parameters_are_in_use() -> None:
    kernel = RBFKernel()
    covariance = kernel(A).to_dense()
    kernel.to(DEVICE)
    assert_same(kernel(there(A)).to_dense().detach(), covariance.detach())
    covariance.sum().backward()


def test_data_can_be_replaced() -> None:
    host, other = A.clone(), there(A)
    other.data = there(B)
    assert_same(other, B)
    other.data = there(B[:1])
    assert_same(other, B[:1])
    host.data = there(B)
    assert_same(host, B)
    host.data = B
    assert type(host) is Tensor
    assert torch.equal(host, B)


def test_state_dicts_between_devices(recwarn: pytest.WarningsRecorder) -> None:
    kernel, other = fitted(), RBFKernel(ard_num_dims=3)
    with torch.no_grad():
        kernel.raw_lengthscale.fill_(2.0)
    other.load_state_dict(kernel.state_dict())
    assert torch.equal(other.raw_lengthscale, torch.full((1, 3), 2.0))
    again = RBFKernel(ard_num_dims=3).to(DEVICE)
    again.load_state_dict(other.state_dict())
    assert_same(again.raw_lengthscale.detach(), torch.full((1, 3), 2.0))
    assert not [w for w in recwarn if "no-op" in str(w.message)]


def test_files() -> None:
    file = io.BytesIO()
    torch.save({"tensor": there(A), "parameter": fitted().raw_lengthscale}, file)
    file.seek(0)
    loaded = torch.load(file, map_location="cpu", weights_only=True)
    assert type(loaded["tensor"]) is Tensor
    assert torch.equal(loaded["tensor"], A)
    assert type(loaded["parameter"]) is torch.nn.Parameter


# -------------------------------------------------------------------- waiting


WAITS: dict[str, tuple[Callable[[Tensor], object], dict[str, int]]] = {
    "nothing": (lambda t: (t + 1.0) @ t.mT, {}),
    "item": (lambda t: t.sum().item(), {"_local_scalar_dense": 1}),
    "bool": (lambda t: bool((t > 2).any()), {"_local_scalar_dense": 1}),
    "equal": (lambda t: torch.equal(t, t + 1), {"equal": 1}),
    "to the host": (lambda t: t.cpu(), {"copy to the host": 1}),
    "list": (lambda t: t.tolist(), {"copy to the host": 1}),
    "from a list": (lambda t: torch.tensor([1.0], device=t.device), {"copy to the device": 1}),
    "from the CPU": (lambda t: A.to(t), {"copy to the device": 1}),
    "list of indices": (lambda t: t[[0, 1]], {"copy to the device": 1}),
    "mask": (lambda t: t[t > 2], {"index": 1}),
    "fill by mask": (lambda t: t.__setitem__(t > 2, 0.0), {}),
    "fill": (lambda t: torch.full((3,), 2.0, device=t.device), {}),
}


@pytest.mark.parametrize("name", WAITS)
def test_waiting_is_counted(name: str, device: PretendCUDA) -> None:
    action, expected = WAITS[name]
    tensor = there(A)
    device.waits.clear()
    action(tensor)
    assert waits(device) == expected
    for source in device.waits:
        assert re.match(r"tests/test_pretend_cuda.py:\d+ <lambda>", source.library), source
