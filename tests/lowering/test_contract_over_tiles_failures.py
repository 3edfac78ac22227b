"""Clause 11: what a kernel over tiles may not do, and how it is told. Each would give a wrong result without a word."""

import re
from functools import partial

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.refusals import refusal
from tests.styles import Style

from .tile_kernels import CASES

ROWS = {"x": 0}


def state(sharding, ndim=2):
    return {"block_shape": (1,) * ndim, "program_id": None, "sharding": sharding}


refused = partial(refusal, mt.lower)


@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}], ids=str)
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_a_position_without_its_offset_is_refused(name, mesh, strict):
    case = CASES[name]
    layouts = case.layouts(dict.fromkeys(mesh, 0))
    message = refused(case.make(43, 13)(Style("forgotten", mesh, layouts)), strict=strict)
    assert case.misused in message
    assert re.search(rf"walks? the tile of A\[0\], split over {', '.join(mesh)}:", message)
    assert "where: kernel 'kernel', written over tiles" in message
    assert "get_tile_offset(buffer)[dim] + position" in message


@pytest.mark.parametrize("name", CASES)
def test_on_one_device_nothing_is_forgotten(name):
    case = CASES[name]
    mt.lower(case.make(43, 13)(Style("forgotten", {"x": 1}, case.layouts(ROWS))))


# -- what the grid covers ----------------------------------------------------------------------------------------------


def copied(mesh, rows_of, M=86, block=32, sharding=ROWS, view_fns=None):
    """B = A, over rows_of(tile) blocks."""
    fns = view_fns or mt.mesh_tensor_functions(mesh)

    @T.prim_func
    def kernel(A: T.Tensor((M, 8), "float32"), B: T.Tensor((M, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(sharding), B: state(sharding)})
        with T.Kernel(rows_of(fns["get_tile_shape"](A)[0]), threads=32) as by:
            tile = T.alloc_fragment((block, 8), "float32")
            T.copy(A[by * block, 0], tile)
            T.copy(tile, B[by * block, 0])

    return kernel


def test_a_grid_that_covers_less_than_the_tile_is_refused():
    message = refused(copied({"x": 2}, lambda tile: tile // 32))
    assert "walked otherwise: A[0], B[0]" in message
    assert "A[0], a tile of 43 in a dim of 86: loop bx of 1 blocks of 32 does not walk a dim of 43" in message
    assert "T.ceildiv" in message


@pytest.mark.parametrize("view", ["auto", "global", "local"])
def test_in_whichever_view(view):
    assert "a tile of 43 in a dim of 86" in refused(copied({"x": 2}, lambda tile: tile // 32), view=view)


def test_a_grid_that_covers_more_than_the_tile_is_refused():
    message = refused(copied({"x": 2}, lambda tile: T.ceildiv(tile, 32) + 3))
    assert "loop bx of 5 blocks of 32 does not walk a dim of 43" in message


def test_a_kernel_sized_by_tiles_is_not_over_whole_tensors():
    message = refused(copied({"x": 2}, lambda tile: T.ceildiv(tile, 32)), view="global")
    assert "view='global', but the kernel asks for tiles and walks no whole dims: A[0], B[0]" in message
    assert "say view='local'" in message


# -- kernels sized by tiles without saying so --------------------------------------------------------------------------


def test_asking_inside_of_the_grid_counts():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32, 8), "float32"), B: T.Tensor((32, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS), B: state(ROWS)})
        with T.Kernel(1, threads=32):
            rows = fns["get_tile_shape"](A)[0]
            for i, j in T.Parallel(rows, 8):
                B[i, j] = A[i, j] + T.Cast("float32", i)

    assert "uses the position as a value" in refused(kernel)


def test_asking_in_a_macro_counts():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.macro
    def add(A, B):
        for i, j in T.Parallel(fns["get_tile_shape"](A)[0], 8):
            B[i, j] = A[i, j] + T.Cast("float32", i)

    @T.prim_func
    def kernel(A: T.Tensor((32, 8), "float32"), B: T.Tensor((32, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS), B: state(ROWS)})
        with T.Kernel(1, threads=32):
            add(A, B)

    assert "uses the position as a value" in refused(kernel)


def test_asking_before_the_kernel_counts():
    fns = mt.mesh_tensor_functions({"x": 2})
    first = copied({"x": 2}, lambda tile: T.ceildiv(tile, 32), view_fns=fns)
    rows = fns["get_tile_shape"](first.buffer_map[first.params[0]])[0]

    @T.prim_func
    def kernel(A: T.Tensor((86, 8), "float32"), B: T.Tensor((86, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS), B: state(ROWS)})
        with T.Kernel(rows, threads=32) as m:
            for j in T.Parallel(8):
                B[m, j] = A[m, j] + T.Cast("float32", m)

    assert "uses the position as a value" in refused(kernel)


def test_what_another_kernel_asked_inside_of_it_does_not_count():
    fns = mt.mesh_tensor_functions({"x": 2})
    copied({"x": 2}, lambda tile: T.ceildiv(tile, 32), view_fns=fns)

    @T.prim_func
    def kernel(A: T.Tensor((86, 8), "float32"), B: T.Tensor((86, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS), B: state(ROWS)})
        with T.Kernel(86, threads=32) as m:
            for j in T.Parallel(8):
                B[m, j] = A[m, j] + T.Cast("float32", m)

    mt.lower(kernel)


@pytest.mark.parametrize(("mesh", "layout", "tiles"), [({"x": 4}, ROWS, "22 x 8"), ({"x": 2}, {}, "86 x 8")], ids=str)
@pytest.mark.parametrize("view", ["auto", "global", "local"])
def test_tiles_of_another_annotation(mesh, layout, tiles, view):
    func = copied({"x": 2}, lambda tile: T.ceildiv(tile, 32))
    message = refused(mt.annotate(func, mesh, {"A": layout, "B": layout}), view=view)
    assert f"get_tile_shape(A) was 43 x 8, but as annotated tiles are {tiles}" in message


def test_a_symbolic_one_too():
    M = T.dynamic("M")
    func = copied({"x": 2}, lambda tile: T.ceildiv(tile, 32), M=M)
    assert "get_tile_shape(A) was (M + 1) // 2 x 8" in refused(mt.annotate(func, {"x": 2}, {"A": {}, "B": {}}))
    kernel = mt.compile(mt.annotate(func, {"x": 2}, {"A": {}, "B": {}}), target="interpret")
    with pytest.raises(mt.MeshTensorError, match="get_tile_shape\\(A\\) was 20 x 8, but as annotated tiles are 40 x 8"):
        kernel(torch.zeros(40, 8))


def test_a_walk_that_cant_be_told_is_refused():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(At: T.Tensor((8,), "int32"), A: T.Tensor((32,), "float32"), B: T.Tensor((8,), "float32")):
        fns["annotate_mesh_tensor_info"]({At: state({}, 1), A: state(ROWS, 1), B: state({}, 1)})
        _ = fns["get_tile_shape"](A)
        with T.Kernel(1, threads=32):
            for i in T.Parallel(8):
                B[i] = A[At[i]]

    message = refused(kernel)
    assert "walked tile by tile: none; walked otherwise: A[0]" in message
    assert "it is no sum of loop variables and constants" in message
    mt.lower(kernel, view="global")


# -- helpers where they don't belong -----------------------------------------------------------------------------------


@pytest.mark.parametrize("view", ["auto", "global"])
@pytest.mark.parametrize("helper", ["get_tile_offset", "get_tile_extent", "mesh_axis_index"])
def test_a_kernel_over_whole_tensors_has_no_tiles(helper, view):
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32, 8), "float32"), B: T.Tensor((32, 8), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS), B: state(ROWS)})
        added = fns[helper]("x") if helper == "mesh_axis_index" else fns[helper](A)[0]
        with T.Kernel(32, threads=32) as m:
            for j in T.Parallel(8):
                B[m, j] = A[m, j] + T.Cast("float32", added + m)

    message = refused(kernel, view=view)
    assert ('mesh_axis_index("x")' if helper == "mesh_axis_index" else f"{helper}(A)[0]") in message
    assert "written over whole tensors" in message


def test_an_axis_that_the_mesh_lacks():
    with pytest.raises(mt.MeshTensorError, match="'z'"):
        mt.mesh_tensor_functions({"x": 2})["mesh_axis_index"]("z")


def test_a_kernel_annotated_anew_for_a_mesh_without_the_axis():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[m] = A[m] + T.Cast("float32", fns["mesh_axis_index"]("x") * 16 + m)

    message = refused(mt.annotate(kernel, {"y": 2}, {"A": {"y": 0}, "B": {"y": 0}}))
    assert 'mesh_axis_index("x"): the mesh Mesh({"y": 2}) has no such axis' in message


def test_an_index_into_tiles_has_no_offset():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[m] = A[fns["get_tile_offset"](A)[0] + m]

    message = refused(kernel)
    assert "A[0] has index get_tile_offset(A)[0] + bx" in message
    assert "T.mesh" not in message


def offset_of_another(other, size, position):
    """B[m] = position(offset of the other buffer, m)."""
    fns = mt.mesh_tensor_functions({"x": 2, "y": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), P: T.Tensor((size,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), P: state(other, 1), B: state(ROWS, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[m] = A[m] + T.Cast("float32", position(fns["get_tile_offset"](P)[0], m))

    return kernel


@pytest.mark.parametrize(
    ("other", "size"), [({"y": 0}, 32), ({"x": 0}, 64), ({"x": 0, "y": 0}, 32)], ids=["axis", "size", "nested"]
)
def test_the_offset_of_another_dim_makes_no_position_global(other, size):
    message = refused(offset_of_another(other, size, lambda offset, m: offset + m))
    assert "loop bx walks the tile of A[0], split over x" in message
    assert "get_tile_offset(P)[0] + bx" in message
    assert "T.mesh" not in message


def test_that_of_a_dim_split_alike_does():
    mt.lower(offset_of_another({"x": 0}, 32, lambda offset, m: offset + m))


@pytest.mark.parametrize(
    "position",
    [
        lambda offset, m: T.if_then_else(m < 3, offset, 0),
        lambda offset, m: m // 4 + m + offset,
        lambda offset, m: offset * m,
        lambda offset, m: T.max(m, 3) + offset,
    ],
    ids=["condition", "quotient", "product", "extreme"],
)
def test_an_offset_beside_a_position_is_not_added_to_it(position):
    assert "loop bx walks the tile of A[0]" in refused(offset_of_another({"x": 0}, 32, position))


def test_a_bounds_test_by_a_number():
    """`i < 16` may mean the first 16 rows of all, or the tile's."""
    fns = mt.mesh_tensor_functions({"x": 2})

    def build(rows_of):
        @T.prim_func
        def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
            fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
            rows, valid = fns["get_tile_shape"](A)[0], fns["get_tile_extent"](A)[0]
            with T.Kernel(T.ceildiv(rows, 5), threads=32) as by:
                for i in T.Parallel(5):
                    if by * 5 + i < rows_of(rows, valid):
                        B[by * 5 + i] = A[by * 5 + i]

        return kernel

    assert "the store to B uses the position as a value in bx * 5 + i < 16" in refused(build(lambda rows, valid: rows))
    mt.lower(build(lambda rows, valid: valid))
    mt.lower(build(lambda rows, valid: 32))


# -- what is walked together -------------------------------------------------------------------------------------------


def test_dims_with_tiles_of_one_length_but_other_sizes():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((43,), "float32"), B: T.Tensor((44,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[m] = A[m]

    message = refused(kernel)
    assert "A dim 0 (43) and B dim 0 (44) are walked together, but only their tiles are equally long" in message


@pytest.mark.parametrize("annotated", [True, False])
def test_a_whole_tensor_as_long_as_a_tile_is_no_tile(annotated):
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((16,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), **({B: state({}, 1)} if annotated else {})})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[m] = A[m]

    message = refused(kernel)
    assert "buffer 'B' is annotated 'R', but the kernel uses it as 'S[0]'" in message
    assert "a buffer that is not annotated is replicated" in message


def test_lanes_of_blocks_that_start_elsewhere():
    """The largest sum of every eighth element: with tiles of 12, device 1 starts in the middle of a block."""
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((24,), "float32"), B: T.Tensor((1,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state({}, 1)})
        with T.Kernel(1, threads=32):
            largest = T.alloc_fragment((1,), "float32")
            sums = T.alloc_fragment((8,), "float32")
            T.clear(sums)
            for ko in T.serial(T.ceildiv(fns["get_tile_shape"](A)[0], 8)):
                for i in T.Parallel(8):
                    sums[i] += A[ko * 8 + i]
            T.reduce_max(sums, largest)
            T.copy(largest, B)

    message = refused(kernel)
    assert "sums keeps one value per position in a block, and tiles of 12 in A[0] are not whole blocks of 8" in message


# -- what devices store ------------------------------------------------------------------------------------------------


def test_devices_store_the_same_into_what_they_share():
    fns = mt.mesh_tensor_functions({"x": 2, "y": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            value = T.alloc_fragment((1,), "float32")
            value[0] = A[m] + T.Cast("float32", fns["mesh_axis_index"]("y"))
            B[m] = value[0]

    message = refused(kernel)
    assert "buffer 'B' is not split over axis 'y', but what is stored into it depends on it" in message


def test_positions_in_a_shared_tensor_count_too():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state({}, 1)})
        with T.Kernel(fns["get_tile_shape"](A)[0], threads=32) as m:
            B[fns["get_tile_offset"](A)[0] + m] = A[m]

    assert "the store to B keeps one of many coordinates' values" in refused(kernel)


# -- loops that walk nothing -------------------------------------------------------------------------------------------


def test_a_loop_as_long_as_a_tile_that_walks_nothing():
    fns = mt.mesh_tensor_functions({"x": 2})

    @T.prim_func
    def kernel(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), B: state(ROWS, 1)})
        rows = fns["get_tile_shape"](A)[0]
        with T.Kernel(rows, threads=32) as m:
            total = T.alloc_fragment((1,), "float32")
            T.clear(total)
            for k in T.serial(rows):
                total[0] += T.Cast("float32", k)
            B[m] = A[m] + total[0]

    message = refused(kernel)
    assert "loop k walks no dim" in message
    assert "the store to total uses the position as a value in" in message


def test_a_loop_that_goes_as_far_as_another_tile():
    fns = mt.mesh_tensor_functions({"x": 2, "y": 2})

    @T.prim_func
    def kernel(A: T.Tensor((31,), "float32"), P: T.Tensor((31,), "float32"), B: T.Tensor((31,), "float32")):
        fns["annotate_mesh_tensor_info"]({A: state(ROWS, 1), P: state({"y": 0}, 1), B: state(ROWS, 1)})
        with T.Kernel(1, threads=32):
            for m in T.serial(fns["get_tile_extent"](P)[0]):
                B[m] = A[m]

    assert "loop m walks the tile of A[0], but goes as far as get_tile_extent(P)[0]" in refused(kernel)
