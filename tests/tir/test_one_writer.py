"""Stores of a value on one of several devices, and 0 on the others, are left out on the others, where it is proved that
a position is one device's, and written once."""

import pytest
import tilelang.language as T
import tvm
from tvm import ir, tirx

from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.one_writer import left_to_one
from mesh_tensor.tir.rewrite import sequence

TILE, ROWS = 5, 13  # three devices, of which the last has 3 rows


def parts(func):
    """The kernel's result, and its coordinate."""
    return func.buffer_map[func.params[2]], func.params[3]


def left(func, devices=3, apart=("table",)):
    buffer, x = parts(func)
    split = [tensor for tensor in func.buffer_map.values() if tensor.name in apart]
    return left_to_one(func, buffer, [{x: place} for place in range(devices)], split)


@T.prim_func
def before(
    ids: T.Tensor((12,), "int32"), table: T.Tensor((TILE,), "float32"), out: T.Tensor((12,), "float32"), x: T.int32
):
    for b in T.thread_binding(3, thread="blockIdx.x"):
        for i in T.parallel(4):
            out[b * 4 + i] = T.if_then_else(
                (ids[b * 4 + i] >= x * TILE and ids[b * 4 + i] < x * TILE + T.max(T.min(ROWS - x * TILE, TILE), 0))
                or (x == 0 and (ids[b * 4 + i] < 0 or ids[b * 4 + i] >= ROWS)),
                table[ids[b * 4 + i] - x * TILE],
                T.float32(0),
            )


@T.prim_func
def expected(
    ids: T.Tensor((12,), "int32"), table: T.Tensor((TILE,), "float32"), out: T.Tensor((12,), "float32"), x: T.int32
):
    for b in T.thread_binding(3, thread="blockIdx.x"):
        for i in T.parallel(4):
            if (ids[b * 4 + i] >= x * TILE and ids[b * 4 + i] < x * TILE + T.max(T.min(ROWS - x * TILE, TILE), 0)) or (
                x == 0 and (ids[b * 4 + i] < 0 or ids[b * 4 + i] >= ROWS)
            ):
                out[b * 4 + i] = T.if_then_else(
                    table[ids[b * 4 + i] - x * TILE] == T.float32(0), T.float32(0), table[ids[b * 4 + i] - x * TILE]
                )


def test_the_others_leave_it_out():
    tvm.ir.assert_structural_equal(left(before).body, expected.body, map_free_vars=True)


def test_more_devices_than_tiles_have_no_rows_of_their_own():
    assert left(before, 7) is not None


def kernel(place, here, loops=(3, 4), value=None, otherwise=0.0, around=None, more=None, dtype="int32"):
    """`for b, i: out[place(b, i)] = if_then_else(here(ids, x, b, i), value, otherwise)`."""
    ids, table, out = (
        tirx.decl_buffer((48,), dtype, name)
        for dtype, name in ((dtype, "ids"), ("float32", "table"), ("float32", "out"))
    )
    x, b, i = (tirx.Var(name, "int32") for name in "xbi")
    value = tirx.BufferLoad(table, [i]) if value is None else value(out, i)
    chosen = tirx.if_then_else(here(ids, x, b, i), value, tirx.const(otherwise, "float32"))
    body = tirx.BufferStore(out, chosen, [place(b, i, x)])
    body = body if around is None else tirx.IfThenElse(around(x, i), body, None)
    body = body if more is None else tirx.SeqStmt([body, more(out, i)])
    body = tirx.For(b, 0, loops[0], tirx.ForKind.SERIAL, tirx.For(i, 0, loops[1], tirx.ForKind.SERIAL, body))
    handles = [tirx.Var(f"{name}_handle", "handle") for name in ("ids", "table", "out")]
    return tirx.PrimFunc([*handles, x], body, None, dict(zip(handles, (ids, table, out), strict=True)))


def owner(ids, x, b, i, off=0):
    at = ids[b * 4 + i + off]
    return tirx.Or(tirx.And(at >= x * 5, at < x * 5 + 5), tirx.And(tirx.EQ(x, 0), tirx.Or(at < 0, at >= 15)))


def plain(b, i, x):
    return b * 4 + i


def test_any_places_that_are_written_once():
    assert left(kernel(plain, owner)) is not None
    assert left(kernel(lambda b, i, x: b * 8 + i * 2 + 1, owner)) is not None


@pytest.mark.parametrize(
    "func",
    [
        kernel(lambda b, i, x: i, owner),
        kernel(lambda b, i, x: b * 3 + i, owner),
        kernel(lambda b, i, x: tirx.floordiv(b * 4 + i, 2), owner),
        kernel(lambda b, i, x: b * 4 + i + x, owner),
        kernel(plain, lambda ids, x, b, i: tirx.And(ids[b * 4 + i] >= x * 5, ids[b * 4 + i] < x * 5 + 5)),
        kernel(plain, lambda ids, x, b, i: tirx.Or(owner(ids, x, b, i), ids[b * 4 + i] < 0)),
        kernel(plain, lambda ids, x, b, i: tirx.GE(ids[b * 4 + i], x * 5)),
        kernel(plain, lambda ids, x, b, i: owner(ids, x, b, i, x)),
        kernel(plain, lambda ids, x, b, i: tirx.GT(ids[b * 4 + i], 0)),
        kernel(plain, owner, dtype="float32"),
        kernel(plain, owner, otherwise=1.0),
        kernel(plain, owner, value=lambda out, i: out[i] + 1.0),
        kernel(plain, owner, around=lambda x, i: i > x),
        kernel(plain, owner, more=lambda out, i: tirx.BufferStore(out, tirx.const(1.0, "float32"), [i])),
        kernel(plain, owner, more=lambda out, i: tirx.Evaluate(tirx.call_extern("int32", "f", out.data))),
    ],
    ids=[
        "several_times",
        "blocks_that_overlap",
        "two_at_one_place",
        "elsewhere_on_each_device",
        "on_no_device",
        "on_two_devices",
        "from_a_device_on",
        "other_data_on_each_device",
        "on_all_devices",
        "on_no_device_if_nan",
        "not_zero",
        "adds_to_what_is_there",
        "not_reached_on_some",
        "written_again",
        "passed_on",
    ],
)
def test_what_is_not_proved_stays(func):
    assert left(func) is None


@T.prim_func
def sought(
    ids: T.Tensor((12,), "int32"),
    more: T.Tensor((12,), "int32"),
    table: T.Tensor((TILE,), "float32"),
    out: T.Tensor((12,), "float32"),
    x: T.int32,
):
    for b in T.thread_binding(12, thread="blockIdx.x"):
        with T.sblock("tilelang_root"):
            at = T.sblock_alloc_buffer((2,), "int32", scope="local")
            T.copy(ids[b], at[0])
            for k in T.serial(4):
                if more[k] > at[1]:
                    at[0] = at[0] + T.if_then_else(more[k] > at[0], k, 1)
            out[b] = T.if_then_else(
                (at[0] >= x * TILE and at[0] < x * TILE + TILE) or (x == 0 and (at[0] < 0 or at[0] >= 15)),
                table[at[0] - x * TILE],
                T.float32(0),
            )


def sought_left(apart="table", step=None, first=0, rounds=4):
    """What is left of `sought`, whose loop does `step(at, more, table, k, x)`, if that is given, from `first(x)` on."""
    tensors, x = {tensor.name: tensor for tensor in sought.buffer_map.values()}, sought.params[4]
    (block,) = [block for block in nodes(sought.body, tirx.SBlock) if block.name_hint == "tilelang_root"]
    (at,) = block.alloc_buffers

    def other(loop):
        if loop.kind != tirx.ForKind.SERIAL:
            return loop
        body = loop.body if step is None else step(at, tensors["more"], tensors["table"], loop.loop_var, x)
        return tirx.For(loop.loop_var, first if first == 0 else x, rounds if rounds == 4 else x + 1, loop.kind, body)

    func = sought.with_body(tirx.stmt_functor.ir_transform(sought.body, None, other, ["tirx.For"]))
    return left_to_one(func, tensors["out"], [{x: place} for place in range(3)], [tensors[apart]])


@pytest.mark.parametrize(("apart", "is_left"), [("table", True), ("out", True), ("ids", False), ("more", False)])
def test_places_that_are_sought_on_chip(apart, is_left):
    """What decides whose a position is has to be made of tensors that are the same on all devices."""
    assert (sought_left(apart) is not None) is is_left


def test_parts_of_loops_that_do_not_differ():
    assert sought_left(step=lambda at, more, table, k, x: store(at, more[k])) is not None


def store(at, value, place=0):
    return tirx.BufferStore(at, value, [place])


@pytest.mark.parametrize(
    "parts",
    [
        {"step": lambda at, more, table, k, x: store(at, at[0] + x)},
        {"step": lambda at, more, table, k, x: store(at, table[k].astype("int32"))},
        {"step": lambda at, more, table, k, x: store(at, (table[k] > 0.5).astype("int32"), 1)},
        {"step": lambda at, more, table, k, x: store(at, 1, tirx.floormod(x, 2))},
        {"step": lambda at, more, table, k, x: tirx.IfThenElse(more[k] > x, store(at, 1), None)},
        {"step": lambda at, more, table, k, x: tirx.While(at[0] < x, store(at, at[0] + 1))},
        {"step": lambda at, more, table, k, x: sequence([left_early(k, x), store(at, at[0] + 1)])},
        {"step": lambda at, more, table, k, x: store(at, tirx.call_extern("int32", "rank"))},
        {"step": lambda at, more, table, k, x: tirx.Evaluate(tirx.call_extern("int32", "find", at.data, x))},
        {"step": lambda at, more, table, k, x: store(at, axis_index("x"))},
        {"step": lambda at, more, table, k, x: bound(at, table[k])},
        {"step": lambda at, more, table, k, x: store(at, at[0] + 1), "rounds": None},
        {"step": lambda at, more, table, k, x: store(at, k), "first": None},
    ],
    ids=[
        "by_coordinate",
        "by_table",
        "by_table_in_between",
        "elsewhere",
        "under_a_condition",
        "until",
        "left_early",
        "asked",
        "asked_with_memory",
        "asked_in_words_of_a_mesh",
        "by_name",
        "as_often",
        "from",
    ],
)
def test_places_that_differ_between_devices(parts):
    assert sought_left(**parts) is None


def left_early(k, x):
    return tirx.IfThenElse(k >= x, tirx.Evaluate(tirx.call_intrin("int32", ir.Op.get("tl.loop_break"))), None)


def axis_index(axis):
    return tirx.call_intrin("int32", ir.Op.get("mesh.axis_index"), tirx.StringImm(axis))


def bound(at, value):
    name = tirx.Var("name", "int32")
    return sequence([tirx.Bind(name, value.astype("int32")), store(at, name)])
