"""Operators that are not understood are refused by name, as values and as statements, on every target of a CPU; and no
analysis takes them for functions of elements."""

import pytest
import tilelang.language as T
from tvm import ir, tirx

import mesh_tensor as mt
from mesh_tensor.lowering.pipeline import lower_kernel
from mesh_tensor.targets.cpu.build import c_source
from mesh_tensor.targets.interpreter.run import _compiled
from mesh_tensor.tir.effects import INTRINSICS, NO_EFFECT, side_effect
from tests.lowering.support import local_kernels

from .table import TABLE
from .test_enumeration import operators

#: TVM's printer takes the process down on some calls of these; that they are refused is seen in other tests.
_UNPRINTABLE = ("tirx.call_llvm_intrin", "tirx.call_llvm_pure_intrin", "tirx.TVMBackendAnyList")

#: They take what is no number; the table has examples of them.
_BY_EXAMPLE = ("tirx.address_of", "tirx.call_extern", "tirx.call_pure_extern", "tirx.thread_return")

REFUSED = [
    op
    for row in TABLE
    if row.verdict == "refused"
    for op in operators()
    if row.has_op(op) and not op.startswith((*_UNPRINTABLE, *_BY_EXAMPLE))
]


def _kernels(op: str) -> list[tirx.PrimFunc]:
    """A kernel that stores what the operator gives, and one that calls it for nothing."""

    @T.prim_func
    def plain(X: T.Tensor((8, 4), "float32"), Y: T.Tensor((8, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i, j in T.Parallel(8, 4):
                Y[i, j] = X[i, j]

    def called(store: tirx.BufferStore) -> tirx.Call:
        count = ir.Op.get(op).num_inputs
        return tirx.Call("float32", ir.Op.get(op), [store.value] * (count if count >= 0 else 3))

    def value(store: tirx.BufferStore) -> tirx.Stmt:
        return tirx.BufferStore(store.buffer, called(store), store.indices)

    def statement(store: tirx.BufferStore) -> tirx.Stmt:
        return tirx.SeqStmt([tirx.Evaluate(called(store)), store])

    def rebuilt(change: object) -> tirx.PrimFunc:
        return plain.with_body(tirx.stmt_functor.ir_transform(plain.body, None, change, ["tirx.BufferStore"]))

    return [rebuilt(value), rebuilt(statement)]


@pytest.mark.parametrize("op", REFUSED)
def test_by_name(op: str):
    for func in _kernels(op):
        annotated = mt.annotate(func, mt.Mesh({"x": 2}), {"X": {"x": 0}, "Y": {"x": 0}})
        for run in (c_source, lambda local: _compiled(local, False)):
            with pytest.raises(mt.MeshTensorError) as caught:
                run(*local_kernels(lower_kernel(annotated)))
            assert op.rpartition(".")[2] in str(caught.value)


@pytest.mark.parametrize("op", [op for op in operators() if op not in INTRINSICS])
def test_no_function_of_elements(op: str):
    x = tirx.Var("x", "float32")
    buffer = tirx.decl_buffer((1,), "float32")
    assert side_effect(tirx.BufferStore(buffer, tirx.Call("float32", ir.Op.get(op), [x]), [0])) == op


def test_lists_name_operators():
    known = set(operators())
    assert {name for name in INTRINSICS if name.startswith("mesh.")} == {
        "mesh.axis_index",
        "mesh.tile_extent",
        "mesh.tile_offset",
    }
    assert known >= {name for name in INTRINSICS if not name.startswith("mesh.")}
    assert known >= NO_EFFECT
    assert not INTRINSICS.keys() & NO_EFFECT
