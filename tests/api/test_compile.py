"""Calling a MeshKernel: what goes in, what comes out, what is written where. Programs are made by hand."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from mesh_tensor import Mesh
from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.base.errors import refuse
from mesh_tensor.program.steps import AllocStep, KernelStep
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute
from mesh_tensor.targets.kernels import find_target
from tests.runtime.programs import (
    accumulate_kernel,
    add_one_kernel,
    add_one_program,
    kernel_by,
    kernel_of,
    matmul_k_split,
    matmul_kernel,
    program,
    value,
)

TARGETS = ["interpret", "c"]
LAYOUTS = [{}, {"x": 0}]


@pytest.fixture(params=TARGETS)
def target(request):
    return request.param


@pytest.fixture(params=[1, 2, 3])
def devices(request):
    return request.param


def accumulate(layout, devices, target, size=9, in_place=True):
    """B += A."""
    mesh = Mesh({"x": devices})
    values = [value(name, (size,), mesh, layout) for name in ("A", "B", "B_new")]
    func = accumulate_kernel(values[0].tile_shape[0])
    steps = [KernelStep("k", func, ("A", "B"), (), ("B",), 0)]
    if not in_place:
        add = add_one_kernel(values[0].tile_shape[0])
        steps += [AllocStep("B_new"), KernelStep("k", add, ("B", "B_new"), (), ("B_new",), 0)]
    parameters = ["A", "B>B" if in_place else "B>B_new"]
    made = program(mesh, values, steps, parameters)
    return kernel_of(accumulate_kernel(size), made, target)


def test_results_are_made_or_written_into_what_is_given(target, devices):
    kern = kernel_of(add_one_kernel(9), add_one_program(9, devices), target)
    a, out = torch.randn(9), torch.zeros(9)
    assert torch.equal(kern(a), a + 1)
    assert kern(a, out) is out
    assert torch.equal(out, a + 1)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("in_place", [True, False])
def test_what_is_read_and_written_is_updated(target, devices, layout, in_place):
    kern = accumulate(layout, devices, target, in_place=in_place)
    a, b = torch.randn(9), torch.randn(9)
    a_before, b_before = a.clone(), b.clone()
    assert kern(a, b) is b
    torch.testing.assert_close(b, a + b_before + (0 if in_place else 1))
    assert torch.equal(a, a_before)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_mesh_tensors_are_updated_too(target, devices, layout):
    kern = accumulate(layout, devices, target)
    a, b = torch.randn(9), torch.randn(9)
    tiles = distribute(b, kern.mesh, layout)
    assert kern(a, tiles) is tiles
    torch.testing.assert_close(tiles.full(), a + b)
    again = kern(distribute(a, kern.mesh, layout), tiles)
    torch.testing.assert_close(again.full(), 2 * a + b)


def test_a_plain_tensor_among_mesh_tensors_is_updated_and_its_result_is_a_mesh_tensor(target, devices):
    kern = accumulate({"x": 0}, devices, target)
    a, b = torch.randn(9), torch.randn(9)
    expected = a + b
    result = kern(distribute(a, kern.mesh, {"x": 0}), b)
    assert isinstance(result, MeshTensor)
    assert torch.equal(result.full(), expected)
    assert torch.equal(b, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_mesh_tensor_in_another_layout_is_updated_in_that_layout(target, layout):
    kern = accumulate(layout, 3, target)
    other = {} if layout else {"x": 0}
    a, b = torch.randn(9), torch.randn(9)
    tiles = distribute(b, kern.mesh, other)
    kern(distribute(a, kern.mesh, other), tiles)
    assert tiles.sharding.as_dict() == other
    torch.testing.assert_close(tiles.full(), a + b)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_one_tensor_for_two_parameters(target, devices, layout):
    """B += A with both the same: as if A were another tensor with the same contents."""
    kern = accumulate(layout, devices, target)
    a = torch.randn(9)
    expected = 2 * a
    kern(a, a)
    torch.testing.assert_close(a, expected)
    add = kernel_of(add_one_kernel(9), add_one_program(9, devices, layout), target)
    add(a, a)
    torch.testing.assert_close(a, expected + 1)
    tiles = distribute(a, add.mesh, layout)
    add(tiles, tiles)
    torch.testing.assert_close(tiles.full(), expected + 2)


def test_chained_kernels_pass_tiles_on(target):
    kern = kernel_of(add_one_kernel(9), add_one_program(9, 3), target)
    a = torch.randn(9)
    first = kern(distribute(a, kern.mesh, {"x": 0}))
    second = kern(first)
    assert isinstance(second, MeshTensor)
    torch.testing.assert_close(second.full(), a + 2)
    torch.testing.assert_close(first.full(), a + 1)


def test_mesh_tensors_in_another_layout_are_resharded(target):
    kern = kernel_of(add_one_kernel(9), add_one_program(9, 3), target)
    a = torch.randn(9)
    assert torch.equal(kern(distribute(a, kern.mesh, {})).full(), a + 1)
    assert torch.equal(kern(distribute(a, kern.mesh, "P[sum]")).full(), a + 1)


def test_tensors_that_start_anywhere_in_memory(target):
    """Tiles are views into the caller's tensors only where they are aligned."""
    kern = kernel_of(add_one_kernel(32), add_one_program(32, 2), target)
    memory = torch.randn(64)
    for start in (0, 1, 3, 16):
        a = memory[start : start + 32]
        out = torch.zeros(64)[start : start + 32]
        kern(a, out)
        assert torch.equal(out, a + 1)


def test_out_idx():
    made = add_one_program(9, 3)
    a, out = torch.randn(9), torch.zeros(9)
    for index in (1, -1, [1], (-1,)):
        kern = kernel_of(add_one_kernel(9), made, out_idx=index)
        assert torch.equal(kern(a), a + 1)
    kern = kernel_of(add_one_kernel(9).with_attr("tilelang_out_idx", [-1]), made)
    assert torch.equal(kern(a), a + 1)
    kern = kernel_of(add_one_kernel(9), made, out_idx=[])
    assert kern(a, out) == ()
    assert torch.equal(out, a + 1)


@pytest.mark.parametrize("as_tiles", [False, True])
def test_out_idx_of_what_is_read_too_starts_from_zero(as_tiles):
    mesh = Mesh({"x": 3})
    values = [value(name, (9,), mesh, {"x": 0}) for name in ("A", "B")]
    steps = [KernelStep("k", accumulate_kernel(3), ("A", "B"), (), ("B",), 0)]
    kern = kernel_of(accumulate_kernel(9), program(mesh, values, steps, ["A", "B>B"]), out_idx=[1])
    a = torch.randn(9)
    result = kern(distribute(a, mesh, {"x": 0})).full() if as_tiles else kern(a)
    assert torch.equal(result, a)


def test_gradients_that_nobody_records(target):
    kern = kernel_of(add_one_kernel(9), add_one_program(9, 3), target)
    a = torch.randn(9, requires_grad=True)
    with torch.no_grad():
        result = kern(a)
    assert torch.equal(result, a.detach() + 1)
    assert not result.requires_grad


def test_a_partial_result_is_reduced(target):
    made = matmul_k_split(16, 16, 32)
    values = {name: v for name, v in made.values.items() if name != "C"}
    made = program(made.mesh, list(values.values()), made.steps[:2], ["A", "B", "C>C_part"])
    made = program(made.mesh, list(values.values()), made.steps, ["A", "B", ">C_part"])
    kern = kernel_of(renamed(), made, target)
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    torch.testing.assert_close(kern(a, b), a @ b)
    tiles = kern(distribute(a, made.mesh, {"x": 1}), b)
    assert str(tiles.sharding) == "P[sum]"
    torch.testing.assert_close(tiles.full(), a @ b)


def renamed():
    @T.prim_func
    def matmul(
        A: T.Tensor((16, 32), "float32"), B: T.Tensor((32, 16), "float32"), C_part: T.Tensor((16, 16), "float32")
    ):
        with T.Kernel(1, threads=128):
            T.evaluate(0)

    return matmul


def test_what_it_says_of_itself():
    made = add_one_program(9, 3)
    kern = kernel_of(add_one_kernel(9), made)
    assert kern.program is made
    assert kern.mesh == made.mesh
    assert repr(kern) == "MeshKernel(add_one(A, B), Mesh({\"x\": 3}), target='interpret')"


def test_auto_is_c_without_a_gpu():
    assert find_target("auto").name == ("cuda" if torch.cuda.is_available() else "c")


def test_kernels_that_are_lowered_size_by_size(target):
    """What can't be lowered for all sizes at once is lowered once for each."""
    size = T.dynamic("size")

    @T.prim_func
    def add_one(A: T.Tensor((size,), "float32"), B: T.Tensor((size,), "float32")):
        with T.Kernel(T.ceildiv(size, 128), threads=128) as bx:
            for i in T.Parallel(128):
                if bx * 128 + i < size:
                    B[bx * 128 + i] = A[bx * 128 + i] + 1.0

    lowered = []

    def build(func, symbols):
        length = func.buffer_map[func.params[0]].shape[0]
        if not isinstance(length, tirx.IntImm):
            refuse("made for sizes only")
        lowered.append(int(length))
        return add_one_program(int(length), 2)

    func = annotate(add_one, Mesh({"x": 2}), {"A": {"x": 0}, "B": {"x": 0}})
    kern = kernel_by(func, build, target)
    assert (kern.mesh, lowered) == (Mesh({"x": 2}), [])
    for length in (5, 8, 5, 8):
        a = torch.randn(length)
        assert torch.equal(kern(a), a + 1)
        assert torch.equal(kern(a, torch.empty(length)), a + 1)
        assert kern.program.values["A"].shape == (length,)
    assert lowered == [5, 8]


def test_matmul_runs_agree_bit_for_bit(target):
    kern = kernel_of(matmul_kernel(16, 16, 64), matmul_k_split(16, 16, 64, 4), target)
    a, b = torch.randn(16, 64), torch.randn(64, 16)
    first = kern(a, b)
    assert all(torch.equal(kern(a, b), first) for _ in range(5))
