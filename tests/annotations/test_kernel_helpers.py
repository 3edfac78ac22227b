"""The helpers inside of kernels: the TIR that mesh_tensor_copy makes, and what get_tile_shape gives."""

import pytest
import tilelang
import tilelang.language as T
import torch
import tvm
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import INFO_ATTR, MESH_ATTR

from .kernels import bare, matmul_by_hand, matmul_by_helpers, state

MESH = mt.Mesh({"x": 2, "y": 3})


@pytest.mark.parametrize("sizes", [(64, 64, 64), (60, 50, 30), (5, 3, 2), (1, 1, 1)])
def test_a_kernel_with_the_helpers_is_the_one_written_by_hand(sizes):
    func = matmul_by_helpers(*sizes, mt.mesh_tensor_functions(MESH))
    tvm.ir.assert_structural_equal(bare(func), matmul_by_hand(*sizes))


def test_symbolic_sizes_are_the_same_too():
    M, K = T.dynamic("M"), T.dynamic("K")
    func = matmul_by_helpers(M, 64, K, mt.mesh_tensor_functions(MESH))
    tvm.ir.assert_structural_equal(bare(func), matmul_by_hand(M, 64, K))


@pytest.mark.parametrize(
    ("shape", "blocks", "local"),
    [
        ((40,), (16,), (16,)),
        ((7, 40), (1, 16), (16,)),
        ((3, 7, 40), (1, 4, 8), (4, 8)),
        ((2, 3, 7, 9), (1, 1, 4, 16), (4, 16)),
    ],
)
def test_one_to_four_dims(shape, blocks, local):
    """Blocks of any rank, also larger than their dim, in and out, with expressions as coordinates."""
    fns = mt.mesh_tensor_functions({"x": 2})
    annotate, move = fns["annotate_mesh_tensor_info"], fns["mesh_tensor_copy"]

    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        annotate({A: state(0, block_shape=blocks), B: state(0, block_shape=blocks)})
        with T.Kernel(4) as bx:
            s = T.alloc_shared(local, "float32")
            for i in T.serial(2):
                place = [bx * 2 + i, i, bx, bx - i][: len(shape)]
                move(A, s, src_coord=place)
                move(s, B, dst_coord=tuple(place))

    by_helpers = kernel

    @T.prim_func
    def kernel(A: T.Tensor(shape, "float32"), B: T.Tensor(shape, "float32")):
        with T.Kernel(4) as bx:
            s = T.alloc_shared(local, "float32")
            for i in T.serial(2):
                place = [bx * 2 + i, i, bx, bx - i][: len(shape)]
                start = tuple(at * size for at, size in zip(place, blocks, strict=True))
                T.copy(A[start], s)
                T.copy(s, B[start])

    tvm.ir.assert_structural_equal(bare(by_helpers), kernel)


def test_slices_are_the_blocks_own():
    """Coordinates that no analyzer simplifies still copy exactly one block; constants and variables work too."""
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((64, 64), "float32"), P: T.Tensor((8,), "int32")):
        fns["annotate_mesh_tensor_info"]({A: state(0, block_shape=(16, 8))})
        with T.Kernel(4) as bx:
            s = T.alloc_shared((16, 8), "float32")
            v = T.alloc_var("int32")
            v = bx + 1
            fns["mesh_tensor_copy"](A, s, src_coord=(P[bx], v))
            fns["mesh_tensor_copy"](A, s, src_coord=(3, 0))
            fns["mesh_tensor_copy"](A, A, src_coord=(bx % 3, 1), dst_coord=(bx // 2, 2))

    regions = [[str(arg) for arg in call.args] for call in _copies(kernel)]
    assert regions == [
        ["T.region(A[P[bx] * 16, v[0] * 8], 1, 16, 8)", "T.region(s[0, 0], 2, 16, 8)"],
        ["T.region(A[48, 0], 1, 16, 8)", "T.region(s[0, 0], 2, 16, 8)"],
        ["T.region(A[bx % 3 * 16, 8], 1, 16, 8)", "T.region(A[bx // 2 * 16, 16], 2, 16, 8)"],
    ]


def _copies(func):
    found = []

    def visit(node):
        if isinstance(node, tirx.Call) and isinstance(node.op, tvm.ir.Op) and node.op.name == "tl.tileop.copy":
            found.append(node)

    tirx.stmt_functor.post_order_visit(func.body, visit)
    return found


def test_without_coordinates_it_is_a_plain_copy():
    fns = mt.mesh_tensor_functions({"x": 2})

    def build(move):
        @T.prim_func
        def kernel(A: T.Tensor((16, 8), "float32")):
            with T.Kernel(1):
                s = T.alloc_shared((16, 8), "float32")
                t = T.alloc_shared((2, 16, 8), "float32")
                move(A, s)
                move(s, A)
                move(t[1, :, :], A)

        return kernel

    tvm.ir.assert_structural_equal(build(fns["mesh_tensor_copy"]), build(T.copy))


def test_copies_survive_in_functions_and_macros_that_return_nothing():
    fns = mt.mesh_tensor_functions({"x": 2})

    def load(A, s, at):
        fns["mesh_tensor_copy"](A, s, src_coord=at)

    @T.macro
    def store(s, A, at):
        fns["mesh_tensor_copy"](s, A, dst_coord=(at,))

    @T.prim_func
    def kernel(A: T.Tensor((64,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(1, block_shape=[16])})
        with T.Kernel(4) as bx:
            s = T.alloc_shared((16,), "float32")
            load(A, s, bx)
            store(s, A, bx)

    assert len(_copies(kernel)) == 2


def test_outside_of_a_kernel_the_call_and_the_attributes_come_back():
    A, s = tirx.decl_buffer((64,), name="A"), tirx.decl_buffer((16,), name="s")
    fns = mt.mesh_tensor_functions({"x": 2})
    attrs = fns["annotate_mesh_tensor_info"]({A: state(1, block_shape=(16,), sharding={"x": 0})})
    assert attrs[INFO_ATTR] == {A.data: {"block_shape": [16], "program_id": None, "sharding": {"x": 0}}}
    assert attrs[MESH_ATTR] == [["x", 2]]
    assert fns["get_tile_shape"](A) == (32,)
    call = fns["mesh_tensor_copy"](A, s, src_coord=(2,))
    assert [str(arg) for arg in call.args] == ["T.region(A[32], 1, 16)", "T.region(s[0], 2, 16)"]


@pytest.mark.parametrize(
    ("mesh", "sharding", "shape", "tile"),
    [
        ({"x": 2, "y": 3}, {"x": 0, "y": 1}, (8, 9), (4, 3)),
        ({"x": 2, "y": 3}, {"x": 0, "y": 1}, (7, 10), (4, 4)),
        ({"x": 2, "y": 3}, {"x": 1}, (7, 10), (7, 5)),
        ({"x": 2, "y": 3}, {"x": None, "y": None}, (7, 10), (7, 10)),
        ({"x": 2, "y": 3}, {"x": 0, "y": 0}, (7, 10), (2, 10)),
        ({"data": 4}, {"data": -1}, (3, 2), (3, 1)),
        ({"a": 2, "b": 2, "c": 2}, {"a": 0, "b": 1, "c": 2}, (4, 5, 6), (2, 3, 3)),
        ({"x": 1}, {"x": 0}, (5,), (5,)),
        ({"x": 8}, {"x": 0}, (3,), (1,)),
        ({"x": 8}, {"x": 0}, (0,), (0,)),
    ],
)
def test_tile_shape(mesh, sharding, shape, tile):
    fns = mt.mesh_tensor_functions(mesh)
    A = tirx.decl_buffer(shape, name="A")
    fns["annotate_mesh_tensor_info"]({A: state(len(shape), sharding=sharding)})
    assert fns["get_tile_shape"](A) == tile
    assert all(type(size) is int for size in fns["get_tile_shape"](A))


def test_the_default_mesh_is_the_seeds():
    fns = mt.mesh_tensor_functions()
    A = tirx.decl_buffer((16, 17), name="A")
    fns["annotate_mesh_tensor_info"]({A: state(2, sharding={"x": 0, "y": 1})})
    assert fns["get_tile_shape"](A) == (4, 5)


@pytest.mark.parametrize("dtype", ["int32", "int64"])
def test_tile_shape_of_symbolic_dims_is_symbolic(dtype):
    M = T.dynamic("M", dtype)
    fns = mt.mesh_tensor_functions(MESH)
    A = tirx.decl_buffer((M, M, 10, M * 2), name="A")
    fns["annotate_mesh_tensor_info"]({A: state(4, sharding={"x": 0, "y": 3})})
    tile = fns["get_tile_shape"](A)
    tvm.ir.assert_structural_equal(tile[0], T.ceildiv(M, 2))
    assert tile[1].same_as(M)
    assert tile[2] == 10
    tvm.ir.assert_structural_equal(tile[3], T.ceildiv(M * 2, 3))


def test_a_kernel_may_size_its_grid_by_its_tile():
    fns = mt.mesh_tensor_functions(MESH)

    def build(M, rows_of):
        @T.prim_func
        def kernel(A: T.Tensor((M, 64), "float32")):
            fns["annotate_mesh_tensor_info"]({A: state(2, block_shape=(16, 64), sharding={"y": 0})})
            rows, columns = rows_of(A)
            with T.Kernel(T.ceildiv(rows, 16)) as bx:
                s = T.alloc_shared((16, columns), "float32")
                fns["mesh_tensor_copy"](A, s, src_coord=(bx, 0))

        return kernel

    M = T.dynamic("M")
    for size, tile in ((100, 34), (M, T.ceildiv(M, 3))):
        by_hand = build(size, lambda A, tile=tile: (tile, 64))
        tvm.ir.assert_structural_equal(bare(build(size, fns["get_tile_shape"])), bare(by_hand))


def test_an_annotated_kernel_computes_what_it_did():
    """Unsharded, by TileLang itself: helpers and annotations change nothing in what a kernel computes."""
    M, N, rows, columns = 37, 50, 8, 16
    fns = mt.mesh_tensor_functions(MESH)

    @T.prim_func
    def transpose(A: T.Tensor((M, N), "float32"), B: T.Tensor((N, M), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                A: state(2, block_shape=(rows, columns), sharding={"x": 0, "y": 1}),
                B: state(2, block_shape=(columns, rows), sharding={"x": 1, "y": 0}),
            }
        )
        with T.Kernel(T.ceildiv(N, columns), T.ceildiv(M, rows)) as (bx, by):
            a = T.alloc_shared((rows, columns), "float32", scope="shared")
            b = T.alloc_shared((columns, rows), "float32", scope="shared")
            fns["mesh_tensor_copy"](A, a, src_coord=(by, bx))
            for i, j in T.grid(columns, rows):
                b[i, j] = a[j, i]
            fns["mesh_tensor_copy"](b, B, dst_coord=(bx, by))

    a, b = torch.randn(M, N), torch.empty(N, M)
    tilelang.compile(transpose, target="c", execution_backend="cython")(a, b)
    torch.testing.assert_close(b, a.T, rtol=0, atol=0)
