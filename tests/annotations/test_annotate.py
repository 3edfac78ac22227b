"""What annotating stores, by the helpers or from outside, and what reads it back."""

import copy

import pytest
import tilelang
import tilelang.language as T
import tvm
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import INFO_ATTR, read_annotations
from mesh_tensor.annotations.annotation import BufferAnnotation

from .kernels import bare, matmul_by_hand, matmul_by_helpers, state

MESH = mt.Mesh({"x": 2, "y": 3})


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
        "A": BufferAnnotation(mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}), (32, 8), 0),
        "B": BufferAnnotation(mt.Sharding.make(MESH, 2, {"y": 0}), (8, 16), None),
        "C": BufferAnnotation(mt.Sharding.make(MESH, 2, {"x": 0}), (32, 16), (0, 1)),
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
                A: state(2, sharding={"x": 1}, replicate=("y",), program_id=bias + 1, _note={"why": ["a", 1]}),
                B: state(1, partial={"y": "sum"}, block_shape=None, program_id=[bias]),
            }
        )
        with T.Kernel(1):
            B[0] = A[0, 0]

    _, annotations = read_annotations(kernel)
    assert str(annotations["A"].sharding) == "S[1], R"
    assert str(annotations["B"].sharding) == "R, P[sum]"
    assert annotations["B"].block_shape is None
    tvm.ir.assert_structural_equal(annotations["A"].program_id, bias + 1)
    assert annotations["B"].program_id[0].same_as(bias)
    A = kernel.buffer_map[kernel.params[0]]
    assert list(kernel.attrs[INFO_ATTR][A.data]["_note"]["why"]) == ["a", 1]


def test_what_was_stated_is_copied():
    fns = mt.mesh_tensor_functions({"x": 2})
    A = tirx.decl_buffer((64,), name="A")
    metadata = state(1, block_shape=[16], sharding={"x": 0}, _note=[[1]])
    attrs = fns["annotate_mesh_tensor_info"]({A: metadata})
    before = copy.deepcopy(attrs[INFO_ATTR][A.data])
    metadata["block_shape"][0] = 99
    metadata["sharding"]["x"] = None
    metadata["_note"][0].append(2)
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
    assert read_annotations(func) == (MESH, {"A": BufferAnnotation(mt.Sharding.make(MESH, 2, {"x": 0, "y": 1}))})
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
    assert annotations == {"C": BufferAnnotation(mt.Sharding.make(MESH, 2, {"x": 1}, partial={"y": "max"}), (8, 8))}


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
    assert read_annotations(other) == (
        mt.Mesh({"d": 4}),
        {"B": BufferAnnotation(mt.Sharding.make({"d": 4}, 2, {"d": 1}))},
    )
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
