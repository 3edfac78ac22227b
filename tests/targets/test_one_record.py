"""A tile operation and an intrinsic are one record each, from which the rules and all targets know them."""

import pytest
import tilelang.language as T
import torch
from tvm import ir, tirx

import mesh_tensor as mt
from mesh_tensor.targets.cpu.exprs import Bounds
from mesh_tensor.targets.cpu.tile_ops import TileOps
from mesh_tensor.targets.interpreter.tiles import _BUILDERS
from mesh_tensor.tir.effects import INTRINSICS
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.tile_ops import TILE_OPS, Copy, Fill, Gemm, Reduce, TileOp, Transpose, Unmatched

OPERANDS = {"fma": 3, "atan2": 2, "copysign": 2, "fmod": 2, "hypot": 2, "nextafter": 2, "pow": 2, "max": 2, "min": 2}
FLAGS = ("isfinite", "isinf", "isnan")  # tests/targets/cpu/test_values.py has them


def records(kind=TileOp):
    """The classes of tile operations, without those that only gather what some have in common."""
    return [record for made in kind.__subclasses__() for record in records(made) or [made]]


@pytest.mark.parametrize("kind", records(), ids=lambda kind: kind.__name__)
def test_a_tile_operation_is_a_record_and_a_function_per_target(kind):
    assert kind.calls
    assert all(TILE_OPS[name] is kind for name in kind.calls)
    assert kind in _BUILDERS
    assert kind in TileOps(Bounds(), {}, "kernel")._table


def region(name, *extents):
    buffer = tirx.decl_buffer(extents, "float32", name)
    return Region(buffer, (tirx.const(0, "int32"),) * len(extents), tuple(buffer.shape))


@pytest.mark.parametrize(
    ("record", "walked"),
    [
        (Copy(region("A", 1, 4, 6), region("B", 4, 1, 6)), [(4, {0: 0, 1: 1}), (6, {0: 2, 1: 2})]),
        (Transpose(region("A", 1, 4, 6), region("B", 6, 4)), [(6, {0: 0, 1: 2}), (4, {0: 1, 1: 1})]),
        (Fill(region("B", 1, 4), tirx.const(0.0, "float32")), [(4, {0: 1})]),
        (Reduce(region("A", 4, 6), region("B", 4), "max", 1, True), [(4, {0: 0, 1: 0}), (6, {1: 1})]),
        (Reduce(region("A", 4, 6), region("B", 4, 1), "max", 1, True), [(4, {0: 0, 1: 0}), (6, {1: 1})]),
        (
            Gemm(region("A", 5, 4), region("B", 6, 5), region("C", 4, 6), True, True, False),
            [(4, {0: 0, 1: 1}), (6, {0: 1, 2: 0}), (5, {1: 0, 2: 1})],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_which_elements_meet(record, walked):
    elements = record.elements(lambda a, b: int(a) == int(b))
    assert [(int(e.extent), dict(e.dims)) for e in elements] == walked


@pytest.mark.parametrize(
    ("record", "why"),
    [
        (Copy(region("A", 4, 6), region("B", 6)), "A and B have regions of different rank"),
        (Copy(region("A", 4, 6), region("B", 4, 5)), "A dim 1 (6) and B dim 1 (5) differ"),
        (Reduce(region("A", 4, 6, 2), region("B", 4), "sum", 1, True), "T.reduce of A into B"),
    ],
    ids=["rank", "extent", "reduce"],
)
def test_regions_that_do_not_pair_up(record, why):
    with pytest.raises(Unmatched) as caught:
        record.elements(lambda a, b: int(a) == int(b))
    assert str(caught.value) == why


def test_every_function_of_floats_is_the_same_on_all_targets():
    names = [name for name, one in INTRINSICS.items() if one.python and one.c not in (None, *FLAGS) and not one.rounds]
    assert len(names) >= 50

    @T.prim_func
    def frame(A: T.Tensor((3, 40), "float32"), B: T.Tensor((len(names), 40), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(40):
                B[0, i] = A[0, i]

    def stores(store):
        values = [tirx.BufferLoad(store.value.buffer, [n, store.indices[1]]) for n in range(3)]
        made = []
        for n, name in enumerate(names):
            function = str(INTRINSICS[name].c)
            value = tirx.call_intrin("float32", ir.Op.get(name), *values[: OPERANDS.get(function, 1)])
            made.append(tirx.BufferStore(store.buffer, value, [n, store.indices[1]]))
        return tirx.SeqStmt(made)

    kernel = frame.with_body(tirx.stmt_functor.ir_transform(frame.body, None, stores, ["tirx.BufferStore"]))
    annotated = mt.annotate(kernel, mt.Mesh({"x": 2}), {"A": {"x": 1}, "B": {"x": 1}})
    assert mt.compile(annotated, target="interpret").program.collectives == ()
    numbers = torch.rand(3, 40) * 0.8 + 0.1
    numbers[0, 0::2] += 1.0  # what acosh takes, and what acos makes NaN of
    compiled, interpreted = (mt.compile(annotated, target=target)(numbers) for target in ("c", "interpret"))
    torch.testing.assert_close(compiled, interpreted, rtol=4e-6, atol=1e-6, equal_nan=True)
    plain = dict(zip(names, interpreted, strict=True))
    assert torch.equal(plain["tirx.exp"], plain["tl.__exp"])
    torch.testing.assert_close(plain["tirx.hypot"], torch.hypot(numbers[0], numbers[1]))
    torch.testing.assert_close(plain["tirx.fma"], numbers[0] * numbers[1] + numbers[2])
