"""Kernels that are written over tiles: their author sized the grid with `get_tile_shape`."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt


def tiled_matmul(mesh, M, N, K, shardings, block=8):
    fns = mt.mesh_tensor_functions(mesh)
    annotate, copy, tile_shape = (
        fns[name] for name in ("annotate_mesh_tensor_info", "mesh_tensor_copy", "get_tile_shape")
    )

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        annotate(
            {
                A: {"block_shape": (block, block), "program_id": 0, "sharding": shardings["A"]},
                B: {"block_shape": (block, block), "program_id": 0, "sharding": shardings["B"]},
                C: {"block_shape": (block, block), "program_id": 0, "sharding": shardings["C"]},
            }
        )
        tile_m, tile_k = tile_shape(A)
        tile_n = tile_shape(B)[1]
        with T.Kernel(T.ceildiv(tile_n, block), T.ceildiv(tile_m, block), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block, block), "float32")
            B_shared = T.alloc_shared((block, block), "float32")
            C_local = T.alloc_fragment((block, block), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(tile_k, block), num_stages=2):
                copy(A, A_shared, src_coord=(by, ko))
                copy(B, B_shared, src_coord=(ko, bx))
                T.gemm(A_shared, B_shared, C_local)
            copy(C_local, C, dst_coord=(by, bx))

    return kernel


@pytest.mark.parametrize(
    ("mesh", "shardings"),
    [
        ({"x": 2}, {"A": {"x": 0}, "B": {}, "C": {"x": 0}}),
        ({"x": 2}, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}),
        ({"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}),
        ({"x": 3, "y": 2}, {"A": {"x": 0}, "B": {"y": 1}, "C": {"x": 0, "y": 1}}),
    ],
)
@pytest.mark.parametrize("sizes", [(48, 32, 64), (46, 31, 60), (5, 40, 33)])
@pytest.mark.parametrize("view", ["auto", "local"])
def test_a_kernel_over_tiles_gives_the_whole_product(mesh, shardings, sizes, view):
    M, N, K = sizes
    func = tiled_matmul(mesh, M, N, K, shardings)
    kernel = mt.compile(func, target="interpret", poison=True, view=view)
    a, b = torch.randn(M, K), torch.randn(K, N)
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=1e-4, atol=1e-4)


def test_a_kernel_over_tiles_is_not_split_again():
    func = tiled_matmul({"x": 2}, 64, 32, 32, {"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    grid = [step.func.script() for step in mt.compile(func, target="interpret").program.steps if hasattr(step, "func")]
    assert 'T.thread_binding(4, thread="blockIdx.y")' in grid[0]


def test_a_kernel_over_tiles_gathers_nothing():
    func = tiled_matmul({"x": 2}, 64, 32, 32, {"A": {"x": 0}, "B": {"x": 1}, "C": {"x": 0}})
    with pytest.raises(mt.MeshTensorError) as error:
        mt.lower(func, view="local")
    assert "buffer 'B' is annotated 'S[1]'" in str(error.value)
    assert "written over tiles" in str(error.value)


@pytest.mark.parametrize("view", ["auto", "local"])
def test_an_output_that_is_not_walked_by_its_tile_is_refused(view):
    func = tiled_matmul({"y": 2}, 64, 32, 32, {"A": {"y": 1}, "B": {"y": 0}, "C": {"y": 1}})
    with pytest.raises(mt.MeshTensorError, match=r"tile by tile: A\[1\], B\[0\]; walked otherwise: C\[1\]"):
        mt.lower(func, view=view)


def copy_of_the_first_half(mesh):
    """A kernel over whole tensors that writes what happens to be one device's tile."""

    @T.prim_func
    def kernel(A: T.Tensor((32, 8), "float32"), B: T.Tensor((32, 8), "float32")):
        with T.Kernel(2, threads=128) as by:
            tile = T.alloc_fragment((8, 8), "float32")
            T.copy(A[by * 8, 0], tile)
            T.copy(tile, B[by * 8, 0])

    return mt.annotate(kernel, mesh, {"A": {"x": 0}, "B": {"x": 0}})


def test_a_kernel_that_walks_half_a_dim_is_not_taken_for_one_over_tiles():
    a, b = torch.randn(32, 8), torch.zeros(32, 8)
    mt.compile(copy_of_the_first_half({"x": 2}), target="interpret", poison=True)(a, b)
    assert torch.equal(b[:16], a[:16])
    assert not b[16:].any()


def test_unless_it_is_said_to_be_one():
    a, b = torch.randn(32, 8), torch.zeros(32, 8)
    mt.compile(copy_of_the_first_half({"x": 2}), target="interpret", poison=True, view="local")(a, b)
    assert torch.equal(b, a)


def test_views_may_not_be_mixed():
    fns = mt.mesh_tensor_functions({"x": 2, "y": 2})
    annotate, tile_shape = fns["annotate_mesh_tensor_info"], fns["get_tile_shape"]

    @T.prim_func
    def kernel(A: T.Tensor((32, 32), "float32"), B: T.Tensor((32, 32), "float32")):
        annotate({A: {"block_shape": (8, 8), "program_id": None, "sharding": {"x": 0, "y": 1}}})
        with T.Kernel(4, T.ceildiv(tile_shape(A)[0], 8), threads=128) as (bx, by):
            tile = T.alloc_fragment((8, 8), "float32")
            T.copy(A[by * 8, bx * 8], tile)
            T.copy(tile, B[by * 8, bx * 8])

    with pytest.raises(mt.MeshTensorError) as error:
        mt.lower(kernel)
    assert "tile by tile: A[0]; walked otherwise: A[1]" in str(error.value)
    assert "view='global'" in str(error.value)


def test_an_unknown_view_is_refused():
    func = tiled_matmul({"x": 2}, 64, 32, 32, {"A": {"x": 0}, "B": {}, "C": {"x": 0}})
    with pytest.raises(mt.MeshTensorError, match="view 'tile' is unknown"):
        mt.lower(func, view="tile")


def doubled_row(rows, columns, sharding):
    """Twice a tile, as one row of it."""
    fns = mt.mesh_tensor_functions({"x": 2})
    state = {"block_shape": (1, columns), "program_id": 0, "sharding": sharding}

    @T.prim_func
    def kernel(A: T.Tensor((rows, columns), "float32"), B: T.Tensor((rows, columns), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state, B: state})
        m, n = fns["get_tile_shape"](A)
        a, b = T.Tensor((m * n,), "float32", A.data), T.Tensor((m * n,), "float32", B.data)
        with T.Kernel(m, threads=32) as bx:
            for j in T.Parallel(n):
                b[bx * n + j] = a[bx * n + j] * 2.0

    return kernel


@pytest.mark.parametrize("rows", [4, 6, 8])
def test_a_view_of_a_tile_of_whole_rows(rows):
    a = torch.randn(rows, 6)
    for target in ("interpret", "c"):
        torch.testing.assert_close(mt.compile(doubled_row(rows, 6, {"x": 0}), target=target)(a), 2 * a)


@pytest.mark.parametrize("view", ["auto", "local"])
def test_a_view_of_a_tile_with_shorter_rows_is_refused(view):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.lower(doubled_row(4, 6, {"x": 1}), view=view)
    for fact in (
        "2 problems:",
        "buffer 'a' (12) float32, ",
        "test_view.py:",
        "is a view of 'A', whose dim 1 is split",
        "buffer 'b' (12) float32, ",
        "the tile's rows are not the tensor's",
        "split its first dim only",
    ):
        assert fact in str(error.value)


def guarded(compared_with):
    """A block as large as the dim, so that its loops walk tiles as well as whole dims, with a test of positions."""
    fns = mt.mesh_tensor_functions({"x": 2})
    state = {"block_shape": (8,), "program_id": 0, "sharding": {"x": 0}}

    @T.prim_func
    def kernel(A: T.Tensor((6,), "float32"), B: T.Tensor((6,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state, B: state})
        size, extent = fns["get_tile_shape"](A)[0], fns["get_tile_extent"](A)[0]
        with T.Kernel(T.ceildiv(size, 8), threads=32) as bx:
            for i in T.Parallel(8):
                if compared_with == "extent":
                    B[bx * 8 + i] = T.if_then_else(bx * 8 + i < extent, A[bx * 8 + i], 0.0) + 1.0
                else:
                    B[bx * 8 + i] = T.if_then_else(bx * 8 + i < size, A[bx * 8 + i], 0.0) + 1.0

    return kernel


def test_positions_that_count_are_those_of_the_tile_that_was_asked_for():
    """Read as the tensor's, they would be past the tile's size on the second device."""
    with pytest.raises(mt.MeshTensorError) as error:
        mt.lower(guarded("size"))
    for fact in ("walk the tile of A[0], split over x", "uses the position as a value", "get_tile_extent(buffer)[dim]"):
        assert fact in str(error.value)
    a = torch.randn(6)
    for target in ("interpret", "c"):
        assert torch.equal(mt.compile(guarded("extent"), target=target)(a), a + 1)
