"""Element-wise arithmetic on MeshTensors: what torch gives on whole tensors, for whatever layout."""

import copy
import operator
import pickle

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mesh_tensor import Mesh, MeshTensor, distribute
from mesh_tensor.runtime.virtual.mesh_arithmetic import ELEMENTWISE

MESH = Mesh({"x": 2, "y": 3})
LAYOUTS = [{}, {"x": 0}, {"x": 0, "y": 1}, {"x": 1, "y": 1}]
SHAPES = [(6, 12), (5, 7), (1, 2), (3, 0)]
PARTIAL = "P[sum], S[0]"


def tensors(shape, dtype, count):
    """Whole tensors; those of integers have no 0, so that all can be divided by."""
    if dtype.is_floating_point:
        return [torch.rand(shape, dtype=dtype) * 0.9 + 0.05 for _ in range(count)]
    if dtype == torch.bool:
        return [torch.rand(shape) > 0.5 for _ in range(count)]
    return [torch.randint(1, 5, shape, dtype=dtype) for _ in range(count)]


def expected_of(function):
    """How many operands the function takes, of which dtype: the first with which torch takes it."""
    for dtype in (torch.float32, torch.int32, torch.bool):
        for count in (1, 2, 3):
            for dtypes in ((dtype,) * count, (torch.bool, *[dtype] * (count - 1))):
                try:
                    result = function(*(tensors((2, 2), one, 1)[0] for one in dtypes))
                except (TypeError, RuntimeError, IndexError):
                    continue
                if isinstance(result, torch.Tensor) and result.shape == (2, 2):
                    return dtypes
    raise AssertionError(f"torch does not take {function}")


def called(function, first, *rest):
    """Methods of torch's tensors take no other class's; MeshTensors have their own."""
    if type(function).__name__ in ("method_descriptor", "wrapper_descriptor"):
        return getattr(first, function.__name__)(*rest)
    return function(first, *rest)


@pytest.mark.parametrize(
    ("function", "name"), ELEMENTWISE.items(), ids=[f"{n}{i}" for i, n in enumerate(ELEMENTWISE.values())]
)
def test_every_function_of_the_table(function, name):
    dtypes = expected_of(function)
    for shape, layout in ((SHAPES[0], LAYOUTS[2]), (SHAPES[1], LAYOUTS[3])):
        whole = [tensors(shape, dtype, 1)[0] for dtype in dtypes]
        result = called(function, *(distribute(tensor, MESH, layout) for tensor in whole))
        expected = function(*whole)
        assert isinstance(result, MeshTensor)
        assert result.dtype == expected.dtype
        assert result.sharding.as_dict() == layout
        torch.testing.assert_close(result.full(), expected, equal_nan=True)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_operators_with_numbers_on_either_side(shape, layout):
    (whole,) = tensors(shape, torch.float32, 1)
    tensor = distribute(whole, MESH, layout)
    names = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "lt", "le", "gt", "ge", "eq", "ne"]
    for op in (getattr(operator, name) for name in names):
        for number in (3, 0.25, np.float32(0.5), torch.tensor(2.0)):
            torch.testing.assert_close(op(tensor, number).full(), op(whole, number))
            torch.testing.assert_close(op(number, tensor).full(), op(torch.as_tensor(number), whole), check_dtype=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64, torch.int8, torch.int64])
def test_dtypes_are_those_of_torch(dtype):
    whole = tensors((5, 7), dtype, 2)
    first, second = (distribute(tensor, MESH, {"x": 0, "y": 1}) for tensor in whole)
    for op in (operator.add, operator.truediv, operator.floordiv, operator.eq, operator.pow):
        result, expected = op(first, second), op(*whole)
        assert result.dtype == expected.dtype
        torch.testing.assert_close(result.full(), expected)
    result = first * distribute(whole[1].double(), MESH, {"x": 0, "y": 1})
    torch.testing.assert_close(result.full(), whole[0] * whole[1].double())


def test_padding_divides_nothing():
    """Integers: a division by the 0 of padding would raise."""
    whole = torch.arange(1, 6, dtype=torch.int32)
    tensor = distribute(whole, MESH, {"x": 0, "y": 0})
    assert torch.equal((7 // tensor).full(), 7 // whole)
    assert torch.equal((tensor % tensor).full(), whole % whole)


def test_several_operands_and_options():
    whole = tensors((5, 7), torch.float32, 3)
    a, b, c = (distribute(tensor, MESH, {"y": 1}) for tensor in whole)
    x, y, z = whole
    pairs = [
        (torch.where(a < b, a, 0.0), torch.where(x < y, x, 0.0)),
        (torch.add(a, b, alpha=3), torch.add(x, y, alpha=3)),
        (torch.div(a, b, rounding_mode="floor"), torch.div(x, y, rounding_mode="floor")),
        (torch.clamp(a, min=b, max=c), torch.clamp(x, min=y, max=z)),
        (a.clamp(0.2, 0.5), x.clamp(0.2, 0.5)),
        (F.gelu(a, approximate="tanh"), F.gelu(x, approximate="tanh")),
        (F.leaky_relu(a - b, 0.3), F.leaky_relu(x - y, 0.3)),
        (a.exp().add(b), x.exp().add(y)),
        ((a > 0.5) & ~(b > 0.5), (x > 0.5) & ~(y > 0.5)),
        (torch.addcmul(a, b, c, value=0.5), torch.addcmul(x, y, z, value=0.5)),
    ]
    for result, expected in pairs:
        torch.testing.assert_close(result.full(), expected)


def test_a_replicated_scalar():
    whole, scale = torch.randn(5, 7), torch.tensor(3.0)
    tensor, factor = distribute(whole, MESH, {"x": 0}), distribute(scale, MESH, {})
    torch.testing.assert_close((tensor * factor).full(), whole * scale)
    torch.testing.assert_close((factor - tensor).full(), scale - whole)
    torch.testing.assert_close((factor + factor).full(), scale + scale)


def test_what_torch_was_told_elsewhere_changes_nothing():
    tensor = distribute(torch.rand(6, 6), MESH, {"x": 0})
    expected = torch.exp(tensor).full()
    with torch.autocast("cpu"), torch.device("meta"):
        result = torch.exp(tensor) * 1
    assert result.dtype == torch.float32
    assert torch.equal(result.full(), expected)


def test_large_tensors_on_the_devices_threads():
    whole = torch.randn(700, 300)
    tensor = distribute(whole, MESH, {"x": 0, "y": 1})
    assert torch.equal((tensor * 2 - tensor).full(), whole * 2 - whole)


def test_results_have_memory_of_their_own():
    """Replicas share one memory among themselves, never with the operands."""
    tensor = distribute(torch.randn(6, 4), MESH, {"x": 0})
    for result in (tensor + 0, abs(tensor), tensor.clamp(-9, 9), tensor.round()):
        assert not {t.data_ptr() for t in result.tiles()} & {t.data_ptr() for t in tensor.tiles()}
        assert len({t.data_ptr() for t in result.tiles()}) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.int32])
def test_what_is_linear_of_partial_tensors(dtype):
    whole, other = torch.randint(-9, 9, (5, 7)).to(dtype), torch.randint(-9, 9, (5, 7)).to(dtype)
    a, b = (distribute(tensor, MESH, PARTIAL) for tensor in (whole, other))
    results = [(a + b, whole + other), (a - b, whole - other), (-a, -whole), (a * 3, whole * 3), (3 * a, whole * 3)]
    results += [(torch.add(a, b, alpha=2), torch.add(whole, other, alpha=2)), (a.neg(), -whole)]
    if dtype.is_floating_point:
        results += [(a / 2, whole / 2), (a * 0.5, whole * 0.5), (torch.sub(a, b, alpha=0.5), whole - other * 0.5)]
    for result, expected in results:
        assert result.sharding == a.sharding
        torch.testing.assert_close(result.full(), expected)


def test_truth_hash_and_copies():
    tensor = distribute(torch.randn(4, 4), MESH, {"x": 0})
    assert tensor in {tensor: 1}
    for again in (copy.copy(tensor), copy.deepcopy(tensor), pickle.loads(pickle.dumps(tensor))):
        assert (again == tensor).full().all()
        assert again.sharding == tensor.sharding
