"""init_mesh_tensor_info fills in what isn't given; a program_id that is a coordinate names the block of copies."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import read_annotations
from tests.refusals import refusal

MESH = mt.Mesh({"x": 2, "y": 3})


def test_what_is_not_given():
    assert mt.init_mesh_tensor_info() == {"sharding": {}, "block_shape": None, "program_id": None}
    assert mt.init_mesh_tensor_info(sharding={"x": 0}, program_id=3)["block_shape"] is None
    info = mt.init_mesh_tensor_info({"x": 0}, (16, 8), (0, 1), partial={"y": "sum"}, replicate=())
    assert info == {
        "sharding": {"x": 0},
        "block_shape": (16, 8),
        "program_id": (0, 1),
        "partial": {"y": "sum"},
        "replicate": (),
    }


def test_the_helpers_have_it():
    info = mt.mesh_tensor_functions(MESH)["init_mesh_tensor_info"]
    assert info(sharding=(0, 1), block_shape=(1, 8)) == mt.init_mesh_tensor_info((0, 1), (1, 8))


@pytest.mark.parametrize(("typo", "wanted"), [("partials", "partial"), ("blockshape", "block_shape")])
def test_what_it_does_not_know(typo, wanted):
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.init_mesh_tensor_info({"x": 0}, **{typo: None})
    message = str(caught.value)
    assert f"unknown key {typo!r}" in message
    assert f"did you mean {wanted!r}?" in message
    assert "where: init_mesh_tensor_info" in message


@pytest.mark.parametrize("sharding", [5, 0.5, True, {"x"}, iter(())], ids=lambda value: type(value).__name__)
def test_what_is_no_sharding(sharding):
    with pytest.raises(mt.MeshTensorError, match="which is not a dict, list, text or Sharding") as caught:
        mt.init_mesh_tensor_info(sharding=sharding)
    assert f"`sharding` is {sharding!r}" in str(caught.value)
    assert "where: init_mesh_tensor_info" in str(caught.value)


@pytest.mark.parametrize("sharding", [{}, [0, None], "x: S[0]", mt.Sharding.make(MESH, 2, {"x": 0})], ids=str)
def test_every_form_of_a_sharding(sharding):
    assert mt.init_mesh_tensor_info(sharding=sharding)["sharding"] is sharding


def build(mesh, program_id, blocks=(16, 8)):
    """B[rows of a block] = A's block `program_id`, whatever the grid."""
    fns = mt.mesh_tensor_functions(mesh)
    info, copy = fns["init_mesh_tensor_info"], fns["mesh_tensor_copy"]

    @T.prim_func
    def spread_block(A: T.Tensor((64, 32), "float32"), B: T.Tensor((48, 8), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                A: info(block_shape=blocks, program_id=program_id),
                B: info(sharding={"x": 0}, block_shape=(16, 8)),
            }
        )
        with T.Kernel(3) as bx:
            tile = T.alloc_shared((16, 8), "float32")
            copy(A, tile)
            copy(tile, B, dst_coord=(bx, 0))

    return spread_block


@pytest.mark.parametrize("program_id", [(0, 0), (2, 3), [3, 1]])
@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 3}, {"x": 2}])
def test_a_coordinate_is_the_block_of_copies_that_name_none(mesh, program_id):
    kernel = mt.compile(build(mesh, program_id), target="interpret", poison=True)
    a = torch.randn(64, 32)
    row, column = program_id
    block = a[row * 16 : row * 16 + 16, column * 8 : column * 8 + 8]
    torch.testing.assert_close(kernel(a), block.repeat(3, 1))


def test_an_expression_is_the_block_of_copies_that_name_none():
    """Which layer of a stack of weights, say: a number that the kernel is called with."""
    fns = mt.mesh_tensor_functions({"x": 2})
    info, copy = fns["init_mesh_tensor_info"], fns["mesh_tensor_copy"]

    @T.prim_func
    def one_layer(layer: T.int32, W: T.Tensor((5, 16, 8), "float32"), Y: T.Tensor((16, 8), "float32")):
        fns["annotate_mesh_tensor_info"](
            {
                W: info(block_shape=(1, 16, 8), program_id=(layer, 0, 0), sharding={"x": 2}),
                Y: info(block_shape=(16, 8), sharding={"x": 1}),
            }
        )
        with T.Kernel(1):
            tile = T.alloc_shared((16, 8), "float32")
            copy(W, tile)
            copy(tile, Y, dst_coord=(0, 0))

    kernel = mt.compile(one_layer, target="interpret", poison=True)
    weights = torch.randn(5, 16, 8)
    for layer in (0, 4):
        torch.testing.assert_close(kernel(layer, weights), weights[layer])


def test_a_coordinate_in_the_call_comes_first():
    fns = mt.mesh_tensor_functions(MESH)
    A, tile = tirx.decl_buffer((64, 32), name="A"), tirx.decl_buffer((16, 8), name="tile")
    fns["annotate_mesh_tensor_info"]({A: mt.init_mesh_tensor_info({}, (16, 8), (1, 1))})
    said, default = fns["mesh_tensor_copy"](A, tile, src_coord=(2, 3)), fns["mesh_tensor_copy"](A, tile)
    assert [int(index) for index in said.args[0].args[0].indices] == [32, 24]
    assert [int(index) for index in default.args[0].args[0].indices] == [16, 8]
    into = fns["mesh_tensor_copy"](tile, A)
    assert [int(index) for index in into.args[1].args[0].indices] == [16, 8]


def test_a_side_of_the_buffers_own_shape_is_a_copy_of_all_of_it():
    fns = mt.mesh_tensor_functions(MESH)
    n = T.dynamic("n")
    for shape in ((64, 32), (n, 32)):
        A, other = tirx.decl_buffer(shape, name="A"), tirx.decl_buffer(shape, name="other")
        fns["annotate_mesh_tensor_info"]({A: mt.init_mesh_tensor_info({}, (16, 8), (1, 1))})
        copy = fns["mesh_tensor_copy"](A, other)
        assert [int(index) for index in copy.args[0].args[0].indices] == [0, 0]


@pytest.mark.parametrize("program_id", [0, 1, None])
def test_what_is_no_coordinate_names_no_block(program_id):
    """A forgotten coordinate stays an error: an int says which program, in kernels that other compilers read."""
    with pytest.raises(mt.MeshTensorError) as caught:
        build({"x": 2}, program_id)
    message = str(caught.value)
    assert "can't copy [64, 32] elements of 'A' to [16, 8] elements of 'tile'" in message
    assert "give `src_coord` or `dst_coord` where a block is meant, or a coordinate as `program_id`" in message


def test_a_block_that_does_not_exist():
    message = refusal(build, {"x": 2}, (4, 0))
    assert "`program_id`, dim 0: there is no block 4" in message
    assert "blocks of 16 go from 0 to 3" in message


def test_a_block_of_another_shape():
    message = refusal(build, {"x": 2}, (0, 0), blocks=(8, 8))
    assert "can't copy [8, 8] elements of 'A' to [16, 8] elements of 'tile'" in message


def test_it_is_kept_as_it_was_stated():
    place = [1, 1]
    fns = mt.mesh_tensor_functions(MESH)

    @T.prim_func
    def kernel(A: T.Tensor((64, 32), "float32")):
        fns["annotate_mesh_tensor_info"]({A: mt.init_mesh_tensor_info([0, None], (16, 8), place)})
        with T.Kernel(1):
            A[0, 0] = 0.0

    place[0] = 3
    A, tile = kernel.buffer_map[kernel.params[0]], tirx.decl_buffer((16, 8), name="tile")
    assert [int(index) for index in fns["mesh_tensor_copy"](A, tile).args[0].args[0].indices] == [16, 8]
    assert read_annotations(kernel)[1]["A"].program_id == (1, 1)
