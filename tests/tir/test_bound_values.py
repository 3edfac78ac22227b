"""Values go from their variables to where they are used, if that changes nothing."""

import pytest
from tvm import tirx

from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.plain_statements import with_values_in_place

VAR, OTHER = tirx.Var("value", "float32"), tirx.Var("other", "float32")
A, B = tirx.decl_buffer((4,), "float32", "A"), tirx.decl_buffer((4,), "float32", "B")
ZERO = tirx.IntImm("int32", 0)
LOAD = tirx.BufferLoad(A, [ZERO])


def store(value, buffer=B):
    return tirx.BufferStore(buffer, value, [ZERO])


def placed(*stmts):
    return with_values_in_place(tirx.PrimFunc([], tirx.SeqStmt(list(stmts)))).body


def test_a_value_goes_to_its_only_user():
    made = placed(tirx.Bind(VAR, LOAD * 2.0), store(VAR + 1.0))
    assert isinstance(made, tirx.BufferStore)
    assert str(made.value) == "A[0] * T.float32(2.0) + T.float32(1.0)"


def test_by_way_of_another_variable_and_into_its_own_source():
    made = placed(tirx.Bind(VAR, LOAD), tirx.Bind(OTHER, VAR * 2.0), store(OTHER, A))
    assert isinstance(made, tirx.BufferStore)
    assert not nodes(made, tirx.Bind)


LOOP = tirx.Var("i", "int32")
STAYS = {
    "what it loads is written in between": [tirx.Bind(VAR, LOAD), store(tirx.FloatImm("float32", 0), A), store(VAR)],
    "threads wait in between": [
        tirx.Bind(VAR, LOAD),
        tirx.Evaluate(tirx.call_intrin("int32", "tirx.tvm_storage_sync", tirx.StringImm("shared"))),
        store(VAR),
    ],
    "a place that others write": [tirx.Bind(VAR, tirx.BufferLoad(A, [tirx.IntImm("int32", 1)])), store(VAR, A)],
    "two users": [tirx.Bind(VAR, LOAD), store(VAR), store(VAR, A)],
    "in a loop of its own": [tirx.Bind(VAR, LOAD), tirx.For(LOOP, 0, 4, tirx.ForKind.SERIAL, store(VAR))],
    "dear, and twice": [tirx.Bind(VAR, tirx.exp(LOAD)), store(VAR * VAR)],
    "an effect": [tirx.Bind(VAR, tirx.call_extern("float32", "f", LOAD)), store(VAR)],
    "nothing is loaded": [tirx.Bind(VAR, tirx.exp(tirx.FloatImm("float32", 1))), store(VAR)],
}


@pytest.mark.parametrize("name", STAYS)
def test_stays(name):
    assert len(nodes(placed(*STAYS[name]), tirx.Bind)) == 1
