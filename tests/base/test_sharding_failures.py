"""What a Sharding refuses, and how it says so."""

import pytest

from mesh_tensor import Mesh, MeshTensorError, Partial, Shard, Sharding
from tests.refusals import refusal

MESH = Mesh({"x": 2, "y": 3})


def test_unknown_axis():
    message = refusal(Sharding.make, MESH, 2, {"z": 0}, name="A")
    assert "unknown mesh axis 'z' (the mesh has 'x', 'y')" in message
    assert 'where: buffer \'A\' (2 dims) on Mesh({"x": 2, "y": 3})' in message
    assert "fix: give each axis ('x', 'y') one dim of 0..1" in message


@pytest.mark.parametrize("dim", [2, -3])
def test_dim_out_of_range(dim):
    assert f"axis 'x' splits dim {dim}, but there are 2 dims" in refusal(Sharding.make, MESH, 2, {"x": dim})


def test_a_scalar_has_no_dim():
    assert "axis 'x' splits dim 0, but there are 0 dims" in refusal(Sharding.make, MESH, 0, {"x": 0})


@pytest.mark.parametrize("dim", [(0, 1), "0", 1.0, True])
def test_one_axis_on_two_dims_or_on_none(dim):
    message = refusal(Sharding.make, MESH, 2, {"x": dim})
    assert f"axis 'x' is given dim {dim!r}; an axis splits one dim" in message


def test_replicate_that_contradicts():
    message = refusal(Sharding.make, MESH, 2, {"x": 1}, replicate=("x",), name="B")
    assert "axis 'x' splits dim 1, but also is replicated" in message
    assert "buffer 'B'" in message


def test_partial_that_contradicts():
    assert "axis 'x' splits dim 1, but also is partial (sum)" in refusal(
        Sharding.make, MESH, 2, {"x": 1}, partial={"x": "sum"}
    )
    assert "axis 'y' is replicated, but also is partial (max)" in refusal(
        Sharding.make, MESH, 2, replicate="y", partial={"y": "max"}
    )


def test_several_ops():
    message = refusal(Sharding.make, MESH, 2, partial={"x": "sum", "y": "max"}, name="B")
    assert "partial by several ops (axis 'x' by sum, axis 'y' by max): in which order" in message
    assert "buffer 'B'" in message
    assert "one op for all" in message
    assert "partial by several ops" in refusal(Sharding.parse, MESH, 2, "P[sum], P[max]")
    assert "partial by several ops" in refusal(Sharding, MESH, 1, ((),), (("x", "sum"), ("y", "min")))


def test_unknown_op():
    message = refusal(Sharding.make, MESH, 2, partial={"y": "mean"})
    assert "axis 'y' is partial with unknown op 'mean' (known: 'sum', 'max', 'min', 'prod'" in message


def test_unknown_axis_in_replicate_and_partial():
    message = refusal(Sharding.make, MESH, 2, replicate=("u",), partial={"v": "sum"})
    assert "unknown mesh axis 'u'" in message
    assert "unknown mesh axis 'v'" in message


@pytest.mark.parametrize(("argument", "value"), [("partial", "sum"), ("replicate", 5)])
def test_arguments_of_the_wrong_kind(argument, value):
    assert f"`{argument}` is {value!r}" in refusal(Sharding.make, MESH, 2, **{argument: value})


def test_sharding_is_no_dict():
    assert "`sharding` is 5, which is not a dict" in refusal(Sharding.make, MESH, 2, 5)


def test_a_list_of_another_length():
    message = refusal(Sharding.make, MESH, 2, [Shard(0)], name="A")
    assert "the sharding [Shard(dim=0)] has 1 placements, but the mesh has 2 axes ('x', 'y')" in message
    assert "buffer 'A'" in message


def test_a_list_of_axes_is_no_list_of_placements():
    message = refusal(Sharding.make, MESH, 2, ("y", None))
    assert "the sharding ('y', None) has 'y', but a list has one placement per mesh axis" in message
    assert "an axis per dim is written {'y': 0}" in message


@pytest.mark.parametrize(
    ("stated", "wanted"), [({0: "x"}, "{'x': 0}"), ({1: ("x", "y")}, "{'x': 1, 'y': 1}")], ids=["one", "two"]
)
def test_axis_and_dim_the_other_way_round(stated, wanted):
    message = refusal(Sharding.make, MESH, 2, stated)
    assert f"{stated}: axis and dim are the other way round; write {wanted}" in message
    assert "(the mesh has 'x', 'y')" in message


def test_a_name_that_is_nearly_right():
    assert "unknown mesh axis 'X' (the mesh has 'x', 'y'); did you mean 'x'?" in refusal(
        Sharding.make, MESH, 2, {"X": 0}
    )
    message = refusal(Sharding.make, MESH, 2, partial={"x": "summ"})
    assert "unknown op 'summ'" in message
    assert "did you mean 'sum'?" in message


def test_all_offenders_are_listed():
    message = refusal(Sharding.make, MESH, 2, {"x": 5, "z": 0}, partial={"y": "mean"})
    assert message.startswith("3 problems:")
    assert all(part in message for part in ("dim 5", "'z'", "'mean'"))


def test_the_constructor_checks_too():
    message = refusal(Sharding, MESH, 2, (("x",), ("x", "z")))
    assert "axis 'x' splits dim 0, but also splits dim 1" in message
    assert "unknown mesh axis 'z'" in message
    assert "are not those of 2 dims" in refusal(Sharding, MESH, 2, (("x",),))


@pytest.mark.parametrize("placement", [Shard(4), Partial("mean")])
def test_placements_are_checked(placement):
    assert "axis 'x'" in refusal(Sharding.of, MESH, 2, {"x": placement})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("S[0]", "the mesh has 2 axes ('x', 'y'), but placements: 1"),
        ("S[0], R, R", "but placements: 3"),
        ("S[0], Q", "'Q' is none of S[dim], R, P[op]"),
        ("S[a], R", "'S[a]' is none of"),
        ("", "'' is none of"),
        ("{x: 0}", "it is not a dict"),
        ("{1, 2}", "it is not a dict"),
    ],
)
def test_texts_that_say_nothing(text, why):
    message = refusal(Sharding.parse, MESH, 2, text, name="A")
    assert f"can't read the sharding {text!r}: " in message
    assert why in message
    assert "buffer 'A'" in message
    assert 'as in "S[0], R", or a dict, as in {"x": 0}' in message


def test_texts_that_are_wrong():
    assert "axis 'y' splits dim 7" in refusal(Sharding.parse, MESH, 2, "R, S[7]", name="A")
    assert "unknown op 'mean'" in refusal(Sharding.parse, MESH, 2, "R, P[mean]", name="A")
    assert "unknown mesh axis 'q'" in refusal(Sharding.parse, MESH, 2, '{"q": 0}', name="A")


@pytest.mark.parametrize("name", ["dim_of", "partial_op", "placement", "with_replicate"])
def test_questions_about_an_unknown_axis(name):
    assert "'z'" in refusal(getattr(Sharding.make(MESH, 2), name), "z")


@pytest.mark.parametrize("shape", [(4,), (4, 4, 4)])
def test_shape_of_another_rank(shape):
    sharding = Sharding.make(MESH, 2, {"x": 0})
    for message in (
        refusal(sharding.tile_shape, shape),
        refusal(sharding.tile_offset, shape, 0),
        refusal(sharding.valid_extent, shape, 0),
    ):
        assert f"shape {shape} has {len(shape)} dims, but the sharding 'S[0], R' is for 2" in message


def test_rank_out_of_range():
    assert "no device has rank 6" in refusal(Sharding.make(MESH, 1, {"x": 0}).tile_offset, (4,), 6)


def test_a_text_that_puts_one_axis_on_two_dims():
    with pytest.raises(MeshTensorError, match="axis 'x' is on two dims, 0 and 1"):
        Sharding.parse(Mesh({"x": 2}), 2, '{"x": 0, "x": 1}')
