"""The helpers and annotate: the TIR they make, what they store, what reads it back."""

import copy

import pytest
import tilelang
import tilelang.language as T
import torch
import tvm
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.frontend import INFO_ATTR, MESH_ATTR, Annotation, read_annotations

MESH = mt.Mesh({"x": 2, "y": 3})


def bare(func):
    """The function without what annotating adds to it."""
    return func.without_attr(INFO_ATTR).without_attr(MESH_ATTR)


def state(ndim, **metadata):
    return {"block_shape": (1,) * ndim, "program_id": None, "sharding": {}, **metadata}


def matmul_by_hand(M, N, K, block_M=32, block_N=16, block_K=8):
    @T.prim_func
    def matmul(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                T.copy(A[by * block_M, ko * block_K], A_shared)
                T.copy(B[ko * block_K, bx * block_N], B_shared)
                T.gemm(A_shared, B_shared, C_local)
            T.copy(C_local, C[by * block_M, bx * block_N])

    return matmul


def matmul_by_helpers(M, N, K, fns, block_M=32, block_N=16, block_K=8):
    copy_block = fns["mesh_tensor_copy"]

    @T.prim_func
    def matmul(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                A: {"block_shape": (block_M, block_K), "program_id": 0, "sharding": {"x": 0, "y": 1}},
                B: {"block_shape": (block_K, block_N), "program_id": None, "sharding": {"y": 0}},
                C: {"block_shape": (block_M, block_N), "program_id": (0, 1), "sharding": {"x": 0, "y": None}},
            }
        )
        with T.Kernel(T.ceildiv(N, block_N), T.ceildiv(M, block_M), threads=128) as (bx, by):
            A_shared = T.alloc_shared((block_M, block_K), "float32")
            B_shared = T.alloc_shared((block_K, block_N), "float32")
            C_local = T.alloc_fragment((block_M, block_N), "float32")
            T.clear(C_local)
            for ko in T.Pipelined(T.ceildiv(K, block_K), num_stages=2):
                fns["mesh_tensor_copy"](A, A_shared, src_coord=(by, ko))
                copy_block(B, B_shared, src_coord=(ko, bx))
                T.gemm(A_shared, B_shared, C_local)
            copy_block(C_local, C, dst_coord=(by, bx))

    return matmul


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


def test_the_attribute_holds_what_was_stated_by_data_variable():
    func = matmul_by_helpers(64, 64, 64, mt.mesh_tensor_functions(MESH))
    buffers = {buffer.name: buffer for buffer in func.buffer_map.values()}
    info = func.attrs["mesh_tensor_info"]
    assert len(info) == 3
    assert tuple(info[buffers["A"].data]["block_shape"]) == (32, 8)
    assert dict(info[buffers["A"].data]["sharding"]) == {"x": 0, "y": 1}
    assert info[buffers["B"].data]["program_id"] is None
    assert dict(info[buffers["C"].data]["sharding"]) == {"x": 0, "y": None}


def test_read_annotations():
    mesh, annotations = read_annotations(matmul_by_helpers(64, 64, 64, mt.mesh_tensor_functions(MESH)))
    assert mesh == MESH
    assert annotations == {
        "A": Annotation(mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}), (32, 8), 0),
        "B": Annotation(mt.Sharding.make(MESH, 2, {"y": 0}), (8, 16), None),
        "C": Annotation(mt.Sharding.make(MESH, 2, {"x": 0}), (32, 16), (0, 1)),
    }
    assert list(annotations) == ["A", "B", "C"]


def test_the_order_of_the_axes_survives():
    axes = {"y": 2, "b": 3, "x": 4, "a": 5, "z": 1, "data-parallel": 2}
    func = mt.annotate(matmul_by_hand(64, 64, 64), axes, {"A": dict.fromkeys(reversed(axes), 0)})
    mesh, annotations = read_annotations(tvm.ir.load_json(tvm.ir.save_json(func)))
    assert list(mesh.shape.items()) == list(axes.items())
    assert annotations["A"].sharding.axes_of(0) == tuple(axes)


def test_annotations_survive_attributes_modules_and_printing():
    func = matmul_by_helpers(64, 64, 64, mt.mesh_tensor_functions(MESH))
    expected = read_annotations(func)
    assert read_annotations(func.with_attr("other", 1)) == expected
    assert read_annotations(tvm.IRModule({"main": func})["main"]) == expected
    assert read_annotations(tvm.ir.load_json(tvm.ir.save_json(func))) == expected
    assert '"mesh_tensor_mesh": [["x", 2], ["y", 3]]' in func.script()
    assert read_annotations(func) == expected


def test_replicate_partial_and_more_are_kept():
    bias = T.dynamic("bias")
    fns = mt.mesh_tensor_functions(MESH)

    @T.prim_func
    def kernel(A: T.Tensor((64, bias), "float32"), B: T.Tensor((64,), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                A: state(2, sharding={"x": 1}, replicate=("y",), program_id=bias + 1, note={"why": ["a", 1]}),
                B: state(1, partial={"y": "sum"}, block_shape=None, program_id=[1, bias]),
            }
        )
        with T.Kernel(1):
            B[0] = A[0, 0]

    _, annotations = read_annotations(kernel)
    assert str(annotations["A"].sharding) == "S[1], R"
    assert str(annotations["B"].sharding) == "R, P[sum]"
    assert annotations["B"].block_shape is None
    tvm.ir.assert_structural_equal(annotations["A"].program_id, bias + 1)
    assert annotations["B"].program_id[1].same_as(bias)
    A = kernel.buffer_map[kernel.params[0]]
    assert list(kernel.attrs[INFO_ATTR][A.data]["note"]["why"]) == ["a", 1]


def test_what_was_stated_is_copied():
    fns = mt.mesh_tensor_functions({"x": 2})
    A = tirx.decl_buffer((64,), name="A")
    metadata = state(1, block_shape=[16], sharding={"x": 0}, note=[[1]])
    attrs = fns["annotate_mesh_tensor_info"]({A: metadata})
    before = copy.deepcopy(attrs[INFO_ATTR][A.data])
    metadata["block_shape"][0] = 99
    metadata["sharding"]["x"] = None
    metadata["note"][0].append(2)
    assert attrs[INFO_ATTR][A.data] == before
    assert fns["get_tile_shape"](A) == (32,)


def test_a_mesh_that_changes_later_changes_nothing():
    axes = {"x": 2}
    fns = mt.mesh_tensor_functions(axes)
    axes["x"] = 8
    A = tirx.decl_buffer((64,), name="A")
    fns["annotate_mesh_tensor_info"]({A: state(1, sharding={"x": 0})})
    assert fns["get_tile_shape"](A) == (32,)


def test_two_kernels_from_one_factory_share_nothing():
    fns = mt.mesh_tensor_functions(MESH)
    first = matmul_by_helpers(64, 64, 64, fns)
    second = matmul_by_helpers(128, 128, 128, fns, block_M=64)
    assert read_annotations(first)[1]["A"].block_shape == (32, 8)
    assert read_annotations(second)[1]["A"].block_shape == (64, 8)
    assert len(first.attrs[INFO_ATTR]) == len(second.attrs[INFO_ATTR]) == 3
    assert fns["get_tile_shape"](first.buffer_map[first.params[0]]) == (32, 22)
    assert fns["get_tile_shape"](second.buffer_map[second.params[0]]) == (64, 43)


def test_annotating_a_buffer_again_replaces_what_was_stated():
    fns = mt.mesh_tensor_functions(MESH)
    A = tirx.decl_buffer((64,), name="A")
    fns["annotate_mesh_tensor_info"]({A: state(1, sharding={"x": 0}, partial={"y": "sum"})})
    attrs = fns["annotate_mesh_tensor_info"]({A: state(1, sharding={"y": 0})})
    assert fns["get_tile_shape"](A) == (22,)
    assert "partial" not in attrs[INFO_ATTR][A.data]


def test_two_factories_share_nothing():
    A = tirx.decl_buffer((64,), name="A")
    two, four = mt.mesh_tensor_functions({"x": 2}), mt.mesh_tensor_functions({"x": 4})
    two["annotate_mesh_tensor_info"]({A: state(1, sharding={"x": 0})})
    with pytest.raises(mt.MeshTensorError, match="no mesh metadata"):
        four["get_tile_shape"](A)
    four["annotate_mesh_tensor_info"]({A: state(1, sharding={"x": 0})})
    assert (two["get_tile_shape"](A), four["get_tile_shape"](A)) == ((32,), (16,))


@pytest.mark.parametrize(
    "stated",
    [
        {"x": 0, "y": 1},
        "S[0], S[1]",
        '{"y": 1, "x": 0}',
        mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}),
        {"sharding": {"x": 0, "y": 1}},
        {"sharding": "S[0], S[1]", "program_id": None},
        {"sharding": mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}), "replicate": ()},
    ],
)
def test_annotate_takes_a_sharding_in_every_form(stated):
    original = matmul_by_hand(64, 64, 64)
    func = mt.annotate(original, {"x": 2, "y": 3}, {"A": stated})
    assert read_annotations(func) == (MESH, {"A": Annotation(mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}))})
    tvm.ir.assert_structural_equal(bare(func), original)
    assert INFO_ATTR not in original.attrs


@pytest.mark.parametrize(
    "stated",
    [
        {"sharding": {"x": 1}, "partial": {"y": "max"}, "block_shape": (8, 8)},
        {"sharding": "S[1], P[max]", "block_shape": [8, 8]},
        {"sharding": "S[1], P[max]", "partial": {"y": "max"}, "block_shape": [8, 8]},
        {"sharding": mt.Sharding.make(MESH, 2, {"x": 1}, partial={"y": "max"}), "block_shape": (8, 8)},
    ],
)
def test_annotate_takes_partial_and_blocks(stated):
    _, annotations = read_annotations(mt.annotate(matmul_by_hand(64, 64, 64), MESH, {"C": stated}))
    assert annotations == {"C": Annotation(mt.Sharding.make(MESH, 2, {"x": 1}, partial={"y": "max"}), (8, 8))}


def test_annotate_gives_the_attributes_that_the_helpers_give():
    by_helpers = matmul_by_helpers(64, 64, 64, mt.mesh_tensor_functions(MESH))
    outside = mt.annotate(
        matmul_by_hand(64, 64, 64),
        MESH,
        {
            "A": {"block_shape": (32, 8), "program_id": 0, "sharding": {"x": 0, "y": 1}},
            "B": {"block_shape": (8, 16), "sharding": {"y": 0}},
            "C": {"block_shape": (32, 16), "program_id": (0, 1), "sharding": {"x": 0}},
        },
    )
    assert read_annotations(outside) == read_annotations(by_helpers)


def test_annotate_replaces_what_the_kernel_stated():
    func = matmul_by_helpers(64, 64, 64, mt.mesh_tensor_functions(MESH))
    other = mt.annotate(func, {"d": 4}, {"B": {"d": 1}})
    assert read_annotations(other) == (mt.Mesh({"d": 4}), {"B": Annotation(mt.Sharding.make({"d": 4}, 2, {"d": 1}))})
    assert set(read_annotations(func)[1]) == {"A", "B", "C"}


def test_axes_may_be_named_like_metadata():
    mesh = mt.Mesh({"partial": 2, "sharding": 2})
    func = mt.annotate(matmul_by_hand(64, 64, 64), mesh, {"A": {"partial": 0, "sharding": 1}})
    assert read_annotations(func)[1]["A"].sharding == mt.Sharding.make(mesh, 2, {"partial": 0, "sharding": 1})


def test_annotate_takes_what_a_jit_function_gives():
    @tilelang.jit(out_idx=[1])
    def lazy(M):
        @T.prim_func
        def scale(A: T.Tensor((M,), "float32"), B: T.Tensor((M,), "float32")):
            with T.Kernel(T.ceildiv(M, 16)) as bx:
                for i in T.Parallel(16):
                    B[bx * 16 + i] = A[bx * 16 + i] * 2.0

        return scale

    func = lazy.get_tir(64)
    annotated = mt.annotate(func, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}})
    assert set(read_annotations(annotated)[1]) == {"A", "B"}
    tvm.ir.assert_structural_equal(bare(annotated), func)


def test_eager_jit_functions_are_annotated_from_inside_and_outside():
    fns = mt.mesh_tensor_functions({"x": 2})

    @tilelang.jit
    def eager(A, block=16):
        M = T.const("M")
        A: T.Tensor[[M], T.float32]
        B = T.empty((M,), "float32")
        fns["annotate_mesh_tensor_info"]({A: state(1, block_shape=(16,), sharding={"x": 0}), B: state(1)})
        with T.Kernel(T.ceildiv(M, block)) as bx:
            s = T.alloc_shared((block,), "float32")
            fns["mesh_tensor_copy"](A, s, src_coord=(bx,))
            T.copy(s, B[bx * block])
        return B

    func = eager.get_tir(M=64)
    _, annotations = read_annotations(func)
    assert {name: str(annotation.sharding) for name, annotation in annotations.items()} == {"A": "S[0]", "B": "R"}
    outside = mt.annotate(func, {"x": 4}, {"B": {"x": 0}})
    assert list(outside.attrs["tilelang_out_idx"]) == list(func.attrs["tilelang_out_idx"])
    assert str(read_annotations(outside)[1]["B"].sharding) == "S[0]"


def test_scalar_parameters_are_left_alone():
    @T.prim_func
    def kernel(n: T.int32, A: T.Tensor((64,), "float32")):
        with T.Kernel(1):
            A[0] = T.cast(n, "float32")

    assert list(read_annotations(mt.annotate(kernel, MESH, {"A": "R, R"}))[1]) == ["A"]


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
