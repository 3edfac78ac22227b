"""What the helpers, annotate and read_annotations refuse, and how they say so."""

import pytest
import tilelang.language as T
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import INFO_ATTR, MESH_ATTR, read_annotations
from tests.refusals import refusal

MESH = mt.Mesh({"x": 2, "y": 3})


@pytest.fixture
def fns():
    return mt.mesh_tensor_functions(MESH)


@pytest.fixture
def A():
    return tirx.decl_buffer((64, 32), name="A")


@pytest.fixture
def B():
    return tirx.decl_buffer((16, 8), name="B")


@pytest.fixture
def kernel():
    @T.prim_func
    def scale(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64,), "float32")):
        with T.Kernel(64) as bx:
            B[bx] = A[bx, 0]

    return scale


def state(**metadata):
    return {"block_shape": (16, 8), "program_id": 0, "sharding": {"x": 0}, **metadata}


def without(*keys):
    return {key: value for key, value in state().items() if key not in keys}


@pytest.mark.parametrize("mesh", [{}, {"x": 0}, {"x": 1.5}, None, 4])
def test_factory_of_no_mesh(mesh):
    assert "mesh" in refusal(mt.mesh_tensor_functions, mesh)


@pytest.mark.parametrize("key", ["block_shape", "program_id", "sharding"])
def test_missing_key(fns, A, key):
    message = refusal(fns["annotate_mesh_tensor_info"], {A: without(key)})
    assert f"buffer 'A': missing `{key}`" in message
    assert 'where: Mesh({"x": 2, "y": 3})' in message
    assert 'fix: annotate a buffer with {"block_shape": (a size per dim), "program_id":' in message


def test_missing_keys_of_several_buffers_are_all_named(fns, A, B):
    message = refusal(fns["annotate_mesh_tensor_info"], {A: without("program_id", "sharding"), B: without("sharding")})
    assert message.startswith("2 problems:")
    assert "buffer 'A': missing `program_id`, `sharding`" in message
    assert "buffer 'B': missing `sharding`" in message


def test_all_offenders_of_all_buffers_are_listed(fns, A, B):
    wrong = {
        A: state(block_shape=(16,), sharding={"x": 2, "z": 0}, replicate=("x", "y"), partial={"y": "mean"}),
        B: state(program_id="0"),
    }
    message = refusal(fns["annotate_mesh_tensor_info"], wrong)
    for part in (
        "buffer 'A': `block_shape` (16,) has 1 sizes, but the buffer has 2 dims",
        "buffer 'A': axis 'x' splits dim 2, but there are 2 dims",
        "buffer 'A': unknown mesh axis 'z' (the mesh has 'x', 'y')",
        "buffer 'A': axis 'y' is partial with unknown op 'mean'",
        "buffer 'B': `program_id` is '0', which is no int, coordinate, expression or None",
    ):
        assert part in message


@pytest.mark.parametrize(
    ("metadata", "problem"),
    [
        ({"sharding": {"z": 0}}, "unknown mesh axis 'z'"),
        ({"sharding": {"x": 2}}, "axis 'x' splits dim 2, but there are 2 dims"),
        ({"sharding": {"x": (0, 1)}}, "axis 'x' is given dim (0, 1); an axis splits one dim"),
        ({"sharding": [0]}, "the sharding [0] has 1 placements, but the mesh has 2 axes ('x', 'y')"),
        ({"sharding": 5}, "`sharding` is 5, which is not a dict"),
        ({"sharding": "S[0]"}, "can't read the sharding 'S[0]'"),
        ({"replicate": "x"}, "axis 'x' splits dim 0, but also is replicated"),
        ({"replicate": 1}, "`replicate` is 1"),
        ({"partial": {"x": "sum"}}, "axis 'x' splits dim 0, but also is partial (sum)"),
        ({"partial": {"y": "mean"}}, "unknown op 'mean'"),
        ({"sharding": "R, P[sum]", "partial": {"y": "max"}}, "axis 'y' is partial (max), but also is partial (sum)"),
        ({"sharding": mt.Sharding.make({"x": 2}, 2)}, 'is for Mesh({"x": 2}), not Mesh({"x": 2, "y": 3})'),
        ({"sharding": mt.Sharding.make(MESH, 3)}, "is for 3 dims, but the buffer has 2"),
        ({"block_shape": (16, 8, 4)}, "`block_shape` (16, 8, 4) has 3 sizes, but the buffer has 2 dims"),
        ({"block_shape": (16, 0)}, "`block_shape` has the size 0, which is no int of at least 1"),
        ({"block_shape": (16, 1.5)}, "`block_shape` has the size 1.5"),
        ({"block_shape": 16}, "`block_shape` is 16, which is no sequence of sizes"),
        ({"program_id": 1.5}, "`program_id` is 1.5"),
        ({"program_id": -1}, "`program_id` is -1, which has the index -1: indices start at 0"),
        ({"program_id": (-1, 0)}, "`program_id` is (-1, 0), which has the index -1: indices start at 0"),
        ({"program_id": (1,)}, "`program_id` (1,) has 1 index, but the buffer has 2 dims"),
        ({"program_id": [0, 1, 2]}, "`program_id` (0, 1, 2) has 3 indices, but the buffer has 2 dims"),
        ({"program_id": (0, "y")}, "`program_id` is (0, 'y')"),
    ],
)
def test_every_kind_of_wrong_metadata_through_every_door(fns, A, kernel, metadata, problem):
    message = refusal(fns["annotate_mesh_tensor_info"], {A: state(**metadata)})
    assert message.startswith("buffer 'A': ")
    assert problem in message
    message = refusal(mt.annotate, kernel, MESH, {"A": state(**metadata)})
    assert problem in message
    assert 'where: kernel \'scale\' on Mesh({"x": 2, "y": 3})' in message


def test_a_refused_annotation_stores_nothing(fns, A, B):
    annotate = fns["annotate_mesh_tensor_info"]
    annotate({A: state()})
    refusal(annotate, {A: state(sharding={"y": 0}), B: state(block_shape=(1,))})
    assert fns["get_tile_shape"](A) == (32, 32)
    refusal(fns["get_tile_shape"], B)


@pytest.mark.parametrize("info", [None, [1], "A"])
def test_annotation_is_no_dict(fns, info):
    assert f"the annotation is {info!r}, which is not a dict" in refusal(fns["annotate_mesh_tensor_info"], info)


def test_metadata_is_no_dict(fns, A):
    assert "buffer 'A': the metadata is 5, which is not a dict" in refusal(fns["annotate_mesh_tensor_info"], {A: 5})


def test_key_is_no_buffer(fns):
    assert "'A' is annotated, but it is no buffer" in refusal(fns["annotate_mesh_tensor_info"], {"A": state()})


def test_tile_shape_of_a_buffer_without_metadata(fns, A, B):
    fns["annotate_mesh_tensor_info"]({A: state()})
    message = refusal(fns["get_tile_shape"], B)
    assert "buffer 'B' has no mesh metadata" in message
    assert "annotate_mesh_tensor_info of the same mesh_tensor_functions(...)" in message
    assert all(f'"{key}"' in message for key in ("block_shape", "program_id", "sharding"))


def test_tile_shape_of_no_buffer(fns):
    assert "'A' is no buffer" in refusal(fns["get_tile_shape"], "A")


@pytest.mark.parametrize("argument", ["src_coord", "dst_coord"])
class TestCopy:
    """Each with the coordinate on either side."""

    def copy(self, fns, argument, block, other, coordinate):
        src, dst = (block, other) if argument == "src_coord" else (other, block)
        return refusal(fns["mesh_tensor_copy"], src, dst, **{argument: coordinate})

    def test_buffer_without_metadata(self, fns, A, B, argument):
        message = self.copy(fns, argument, A, B, (0, 0))
        assert "buffer 'A' has no mesh metadata" in message
        assert "fix: annotate it with" in message

    def test_buffer_without_blocks(self, fns, A, B, argument):
        fns["annotate_mesh_tensor_info"]({A: state(block_shape=None)})
        message = self.copy(fns, argument, A, B, (0, 0))
        assert f"`{argument}` is given, but the `block_shape` is None" in message
        assert "buffer 'A'" in message

    @pytest.mark.parametrize("coordinate", [(0,), (0, 0, 0), (), 0])
    def test_wrong_rank(self, fns, A, B, argument, coordinate):
        fns["annotate_mesh_tensor_info"]({A: state()})
        message = self.copy(fns, argument, A, B, coordinate)
        assert f"`{argument}`" in message
        assert "coordinates, but the buffer has 2 dims" in message
        assert "where: mesh_tensor_copy, buffer 'A'" in message
        assert "fix: give one block coordinate per dim (block_shape is (16, 8))" in message

    @pytest.mark.parametrize("coordinate", [(0, 4), (-1, 0)])
    def test_a_block_that_does_not_exist(self, fns, A, B, argument, coordinate):
        fns["annotate_mesh_tensor_info"]({A: state()})
        message = self.copy(fns, argument, A, B, coordinate)
        dim = 1 if coordinate[1] else 0
        assert f"`{argument}`, dim {dim}: there is no block {coordinate[dim]}" in message
        assert ("blocks of 8 go from 0 to 3" if dim else "blocks of 16 go from 0 to 3") in message

    @pytest.mark.parametrize("coordinate", [("0", 0), (0.5, 0), (None, 0)])
    def test_a_coordinate_of_the_wrong_kind(self, fns, A, B, argument, coordinate):
        fns["annotate_mesh_tensor_info"]({A: state()})
        message = self.copy(fns, argument, A, B, coordinate)
        assert f"`{argument}`, dim 0: {coordinate[0]!r} is no int or expression" in message

    def test_a_block_of_another_shape(self, fns, A, B, argument):
        fns["annotate_mesh_tensor_info"]({A: state(block_shape=(8, 16))})
        message = self.copy(fns, argument, A, B, (0, 0))
        assert "[8, 16] elements of 'A'" in message
        assert "[16, 8] elements of 'B'" in message
        assert "a `block_shape` like the other side's shape" in message


def test_a_forgotten_coordinate(fns, A, B):
    message = refusal(fns["mesh_tensor_copy"], A, B)
    assert "can't copy [64, 32] elements of 'A' to [16, 8] elements of 'B'" in message
    assert "give `src_coord` or `dst_coord` where a block is meant, or a coordinate as `program_id`" in message


def test_two_annotations_of_one_kernel(fns):
    """From one factory or from two: what says how a kernel's buffers lie is in one place."""
    for second in (fns, mt.mesh_tensor_functions({"x": 4})):

        def build(second=second):
            @T.prim_func
            def kernel(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64, 32), "float32")):
                fns["annotate_mesh_tensor_info"]({A: state()})
                second["annotate_mesh_tensor_info"]({B: state()})
                with T.Kernel(1):
                    B[0, 0] = A[0, 0]

        message = refusal(build)
        assert "the annotation can't be attached to the kernel" in message
        assert 'Duplicate prim func annotation for key = "mesh_tensor_' in message
        assert "annotate_mesh_tensor_info once per kernel, before T.Kernel, with all the buffers" in message


def test_annotating_inside_of_the_grid(fns):
    def build():
        @T.prim_func
        def kernel(A: T.Tensor((64, 32), "float32")):
            with T.Kernel(1):
                fns["annotate_mesh_tensor_info"]({A: state()})
                A[0, 0] = 0.0

    message = refusal(build)
    assert "must be called at the top of a PrimFunc" in message
    assert "before T.Kernel" in message


def test_errors_in_a_kernel_reach_its_author(fns):
    def build():
        @T.prim_func
        def kernel(A: T.Tensor((64, 32), "float32")):
            fns["annotate_mesh_tensor_info"]({A: without("sharding")})
            with T.Kernel(1):
                A[0, 0] = 0.0

    assert "buffer 'A': missing `sharding`" in refusal(build)


def test_annotate_of_a_buffer_that_is_no_parameter(kernel):
    message = refusal(mt.annotate, kernel, MESH, {"A": {"x": 0}, "C": {"x": 0}, "D": {"z": 0}})
    assert "buffer 'C' is no parameter of the kernel (parameters: 'A', 'B')" in message
    assert "buffer 'D' is no parameter" in message
    assert 'fix: write {"A": {"x": 0}}: per buffer, the dim that each axis splits' in message


@pytest.mark.parametrize("thing", [None, "scale"])
def test_annotate_of_no_kernel(thing):
    for message in (refusal(mt.annotate, thing, MESH, {}), refusal(read_annotations, thing)):
        assert f"{thing!r} is no kernel (PrimFunc)" in message
        assert "get_tir(...)" in message


def test_annotate_with_no_dict(kernel):
    assert "the shardings are 'S[0], R', which is not a dict" in refusal(mt.annotate, kernel, MESH, "S[0], R")


def test_annotate_on_no_mesh(kernel):
    assert "the mesh has no axis" in refusal(mt.annotate, kernel, {}, {"A": {}})


def test_annotate_changes_nothing_when_it_refuses(kernel):
    annotated = mt.annotate(kernel, MESH, {"A": {"x": 0}})
    before = read_annotations(annotated)
    refusal(mt.annotate, annotated, MESH, {"A": {"y": 0}, "C": {}})
    assert read_annotations(annotated) == before
    assert INFO_ATTR not in kernel.attrs


def test_kernel_without_annotation(kernel):
    message = refusal(read_annotations, kernel)
    assert f"no `{INFO_ATTR}` attribute" in message
    assert "where: kernel 'scale'" in message
    assert 'mesh_tensor.annotate(prim_func, mesh, {"A": {"x": 0}})' in message


def test_kernel_without_a_mesh(kernel):
    info = mt.annotate(kernel, MESH, {"A": {"x": 0}}).without_attr(MESH_ATTR)
    message = refusal(read_annotations, info)
    assert f"no `{MESH_ATTR}` attribute" in message
    assert f"`{INFO_ATTR}`" not in message


@pytest.mark.parametrize("attr", [5, "x", ["x", 2]])
def test_a_mesh_attribute_of_the_wrong_kind(kernel, attr):
    func = mt.annotate(kernel, MESH, {"A": {"x": 0}}).with_attr(MESH_ATTR, attr)
    assert f"the `{MESH_ATTR}` attribute" in refusal(read_annotations, func)


def test_an_annotated_buffer_that_is_no_parameter(fns):
    @T.prim_func
    def scale(A: T.Tensor((64, 32), "float32")):
        with T.Kernel(1):
            s = T.alloc_shared((16, 8), "float32")
            A[0, 0] = s[0, 0]

    other = tirx.decl_buffer((16, 8), name="s")
    func = scale.with_attr(fns["annotate_mesh_tensor_info"]({other: state()}))
    message = refusal(read_annotations, func)
    assert "buffer 's' is annotated, but it is no parameter (parameters: 'A')" in message
    assert 'where: kernel \'scale\' on Mesh({"x": 2, "y": 3})' in message


def test_a_view_of_a_parameter_is_annotated(fns):
    with pytest.raises(mt.MeshTensorError) as error:

        @T.prim_func
        def kernel(A: T.Tensor((64, 32), "float32")):
            wide = T.reshape(A, (32, 64))
            fns["annotate_mesh_tensor_info"]({wide: state()})
            with T.Kernel(1):
                A[0, 0] = 1.0

    assert "buffer 'wide' is a view of 'A': what lies on the mesh is the parameter, dim by dim" in str(error.value)
    assert "fix: annotate a buffer with" in str(error.value)


@pytest.mark.parametrize("helper", ["get_tile_shape", "mesh_tensor_copy"])
def test_a_helper_gets_a_view_of_an_annotated_parameter(fns, helper):
    with pytest.raises(mt.MeshTensorError) as error:

        @T.prim_func
        def kernel(A: T.Tensor((64, 32), "float32")):
            fns["annotate_mesh_tensor_info"]({A: state()})
            wide = T.reshape(A, (32, 64))
            if helper == "get_tile_shape":
                fns[helper](wide)
            with T.Kernel(1):
                s = T.alloc_shared((16, 8), "float32")
                fns["mesh_tensor_copy"](wide, s, src_coord=(0, 0))

    assert "buffer 'wide' is a view of 'A': what lies on the mesh is the parameter, dim by dim" in str(error.value)
    assert "fix: give the parameter itself" in str(error.value)


def test_attributes_that_disagree_with_the_parameters(fns, kernel):
    """Attributes of a hand's making are checked as the helpers check."""
    data = kernel.buffer_map[kernel.params[1]].data
    func = kernel.with_attr({INFO_ATTR: {data: state()}, MESH_ATTR: [["x", 2]]})
    message = refusal(read_annotations, func)
    assert "buffer 'B': `block_shape` (16, 8) has 2 sizes, but the buffer has 1 dims" in message
    func = kernel.with_attr({INFO_ATTR: {data: {"sharding": {"y": 0}}}, MESH_ATTR: [["x", 2]]})
    message = refusal(read_annotations, func)
    assert "buffer 'B': missing `block_shape`, `program_id`" in message
    assert "buffer 'B': unknown mesh axis 'y' (the mesh has 'x')" in message


def test_parameters_of_one_name():
    buffers = [tirx.decl_buffer((4,), name="A") for _ in range(2)]
    params = [tirx.Var(f"p{i}", "handle") for i in range(2)]
    func = tirx.PrimFunc(params, tirx.Evaluate(0), buffer_map=dict(zip(params, buffers, strict=True)))
    message = refusal(mt.annotate, func, MESH, {"A": {"x": 0}})
    assert "several parameters are named 'A'" in message
    assert "give every parameter's buffer a name of its own" in message
