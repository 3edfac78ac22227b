"""Clause 11: a kernel over tiles gives on every mesh what it gives on one device, and what its twin over whole tensors
gives."""

import re

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from mesh_tensor.lowering.pipeline import lower_kernel
from mesh_tensor.program.steps import KernelStep
from tests.styles import Style, results

from .support import coordinates, text
from .tile_kernels import CASES, as_far_as_valid, by_axis_index, causal_softmax, masked_matmul, sum_of_valid

#: Meshes, and how a tensor of two dims lies on them.
LAYOUTS = [
    ({"x": 1}, {"x": 0}),
    ({"x": 2}, {"x": 0}),
    ({"x": 3}, {"x": 0}),
    ({"x": 2, "y": 2}, {"x": 0, "y": 1}),
    ({"x": 2, "y": 2}, {"x": 0, "y": 0}),
    ({"x": 2, "y": 3}, {"x": 0, "y": 0}),
]


@pytest.mark.parametrize(
    ("sizes", "mesh", "layout"),
    [((43, 13), *on) for on in LAYOUTS] + [((32, 12), *LAYOUTS[1]), ((9, 5), *LAYOUTS[4]), ((5, 3), *LAYOUTS[5])],
    ids=str,
)
@pytest.mark.parametrize("name", CASES)
def test_twins(name, sizes, mesh, layout):
    case = CASES[name]
    inputs, layouts = case.inputs(*sizes), CASES[name].layouts(layout)
    expected = case.reference(*inputs)
    for kind in ("global", "tiles"):
        result = results(case.make(*sizes), kind, mesh, layouts, *inputs)
        torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("sizes", [(43, 13), (5, 3), (1, 4)], ids=str)
def test_a_grid_may_go_as_far_as_rows_are_valid(mesh, layout, sizes):
    a = torch.randn(sizes)
    result = results(as_far_as_valid(*sizes), "tiles", mesh, dict.fromkeys("AB", layout), a)
    torch.testing.assert_close(result, a * 2)


@pytest.mark.parametrize(("mesh", "layout"), LAYOUTS[1:], ids=str)
@pytest.mark.parametrize("sizes", [(43, 13), (5, 3), (1, 4)], ids=str)
def test_a_sum_may_go_as_far_as_rows_are_valid(mesh, layout, sizes):
    rows = {axis: dim for axis, dim in layout.items() if dim == 0}
    a = torch.randn(sizes)
    result = results(sum_of_valid(*sizes), "tiles", mesh, {"A": rows}, a)
    torch.testing.assert_close(result, a.exp().sum(0), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("axes", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
def test_an_offset_may_be_worked_out_by_hand(axes):
    a = torch.randn(24, 5)
    result = results(by_axis_index(24, 5, axes), "tiles", axes, dict.fromkeys("AB", dict.fromkeys(axes, 0)), a)
    torch.testing.assert_close(result, a + torch.arange(24)[:, None])


@pytest.mark.parametrize("kind", ["global", "tiles"])
@pytest.mark.parametrize(
    ("mesh", "layout"), [*LAYOUTS[1:], ({"x": 2}, {"x": 1}), ({"x": 2, "y": 3}, {"x": 1, "y": 0})], ids=str
)
@pytest.mark.parametrize("sizes", [(13, 11)], ids=str)
def test_positions_in_what_is_completed_in_the_middle(kind, mesh, layout, sizes):
    a = torch.randn(sizes)
    kept = torch.arange(sizes[1]) <= torch.arange(sizes[0])[:, None]
    result = results(causal_softmax(*sizes), kind, mesh, dict.fromkeys("AB", layout), a)
    torch.testing.assert_close(result, torch.where(kept, a, -torch.inf).softmax(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", ["global", "tiles"])
@pytest.mark.parametrize(
    ("mesh", "layouts"),
    [
        ({"x": 2}, {"A": {"x": 1}, "W": {"x": 0}}),
        ({"x": 3}, {"W": {"x": 1}, "B": {"x": 1}}),
        ({"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "W": {"y": 0}, "B": {"x": 0}}),
        ({"x": 2, "y": 3}, {"A": {"x": 1}, "W": {"x": 0, "y": 1}, "B": {"y": 1}}),
        ({"x": 2, "y": 2}, {"A": {"x": 1, "y": 1}, "W": {"x": 0, "y": 0}}),
    ],
    ids=str,
)
@pytest.mark.parametrize("sizes", [(16, 24), (9, 23)], ids=str)
def test_positions_in_a_product(kind, mesh, layouts, sizes):
    M, N = sizes
    a, w = torch.randn(M, N), torch.randn(N, N)
    result = results(masked_matmul(M, N), kind, mesh, layouts, a, w)
    torch.testing.assert_close(result, a.tril() @ w, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["causal", "add_copied_table", "weighted_sum", "prefix"])
@pytest.mark.parametrize(("mesh", "layout"), [LAYOUTS[2], LAYOUTS[4]], ids=str)
def test_compiled(name, mesh, layout):
    case = CASES[name]
    inputs = case.inputs(43, 13)
    result = results(case.make(43, 13), "tiles", mesh, CASES[name].layouts(layout), *inputs, target="c")
    torch.testing.assert_close(result, case.reference(*inputs), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("name", ["causal", "add_table", "weighted_sum", "through_a_buffer"])
@pytest.mark.parametrize(("mesh", "layout"), [LAYOUTS[1], LAYOUTS[2], LAYOUTS[4]], ids=str)
def test_symbolic_sizes(name, mesh, layout):
    case, M = CASES[name], T.dynamic("M")
    kernel = mt.compile(
        case.make(M, 6)(Style("tiles", mesh, CASES[name].layouts(layout))), target="interpret", poison=True
    )
    for rows in (48, 43, 5, 1):
        inputs = case.inputs(rows, 6)
        torch.testing.assert_close(kernel(*inputs), case.reference(*inputs), rtol=1e-5, atol=2e-3)


@pytest.mark.parametrize("slabs", [2, 3])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"y": 2, "x": 2}], ids=str)
def test_slabs_keep_positions(mesh, slabs):
    """Rows in slabs, each summed over x while the next one is computed."""
    a, w = torch.randn(192, 32), torch.randn(32, 32)
    rows = {"y": 0} if "y" in mesh else {}
    layouts = {"A": {**rows, "x": 1}, "W": {"x": 0}, "B": rows}
    func = masked_matmul(192, 32)(Style("tiles", mesh, layouts))
    kernel = mt.compile(func, target="interpret", poison=True, overlap=slabs)
    assert sum(isinstance(step, KernelStep) for step in kernel.program.steps) == slabs
    torch.testing.assert_close(kernel(a, w), a.tril() @ w, rtol=1e-4, atol=1e-4)


def test_a_device_sees_only_its_coordinates():
    func = CASES["causal"].make(43, 13)(Style("tiles", {"x": 2, "y": 2}, dict.fromkeys("AB", {"x": 0, "y": 0})))
    (step,) = lower_kernel(func).steps
    assert coordinates(step.func) == ["x", "y"]
    assert "x * 22 + y * 11 + bx * 4 + i" in text(step.func)
    assert "mesh." not in text(step.func)


def test_explain_says_how_it_was_read():
    build, layouts = CASES["causal"].make(43, 13), dict.fromkeys("AB", {"x": 0})
    over_tiles = mt.compile(build(Style("tiles", {"x": 2}, layouts)), target="interpret").explain()
    assert "read as written over tiles: it asks for tiles, and its loops walk the tiles of B[0], A[0]" in over_tiles
    assert re.search(r"m +43 +parallel +x +22 ", over_tiles)
    whole = build(Style("global", {"x": 2}, layouts))
    assert "read as written over whole tensors: it asks for no tiles" in mt.compile(whole, target="interpret").explain()
    said = mt.compile(whole, target="interpret", view="global").explain()
    assert "read as written over whole tensors: view='global'" in said


@pytest.mark.parametrize("sizes", [(7, 8), (8, 8)], ids=str)
def test_a_grid_over_rows_carries_a_row_over_the_cut(sizes):
    """What lives in one program goes through a tensor with a dim for the grid: that one is a tile's, too."""

    def build(style):
        @T.prim_func
        def kernel(A: T.Tensor(sizes, "float32"), B: T.Tensor(sizes, "float32")):
            style.annotate(A, B)
            rows, columns = style.shape(A)
            with T.Kernel(rows, threads=32) as by:
                tile = T.alloc_fragment((1, columns), "float32")
                largest = T.alloc_fragment((1,), "float32")
                T.copy(A[by, 0], tile)
                for i, j in T.Parallel(1, columns):
                    tile[i, j] = tile[i, j] * 2.0
                T.reduce_max(tile, largest, dim=1)
                for i, j in T.Parallel(1, columns):
                    tile[i, j] = tile[i, j] - largest[i]
                T.copy(tile, B[by, 0])

        return kernel

    a = torch.randn(sizes)
    layouts = dict.fromkeys("AB", {"x": 1, "y": 0})
    for kind in ("global", "tiles"):
        result = results(build, kind, {"x": 2, "y": 2}, layouts, a)
        torch.testing.assert_close(result, a * 2 - (a * 2).amax(1, keepdim=True))
