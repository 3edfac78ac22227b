"""TIR functions that can't be distributed are refused by name, with the binding."""

from __future__ import annotations

import pytest
import tilelang.language as TL
from tvm import relax
from tvm.script.parser import tirx as T

import mesh_tensor as mt

from .tir_modules import calling


@T.prim_func
def overwrites(A: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")):
    for i, j in T.grid(4, 4):
        with T.sblock("A"):
            vi, vj = T.axis.remap("SS", [i, j])
            A[vi, vj] = A[vi, vj] + T.float32(1)
    for i, j in T.grid(4, 4):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj]


@T.prim_func
def forgets(A: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")):
    B = T.sblock_alloc_buffer((4, 4), "float32")
    for i, j in T.grid(4, 4):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj]


@T.prim_func
def too_early(A: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")):
    B = T.sblock_alloc_buffer((4, 4), "float32")
    for i, j in T.grid(4, 4):
        with T.sblock("C"):
            vi, vj = T.axis.remap("SS", [i, j])
            C[vi, vj] = A[vi, vj] + B[vi, vj]
    for i, j in T.grid(4, 4):
        with T.sblock("B"):
            vi, vj = T.axis.remap("SS", [i, j])
            B[vi, vj] = A[vi, vj]


@T.prim_func
def scheduled(A: T.Buffer((4, 4), "float32"), C: T.Buffer((4, 4), "float32")):
    for i in T.thread_binding(4, thread="blockIdx.x"):
        for j in T.thread_binding(4, thread="threadIdx.x"):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj]


@T.prim_func
def never_starts(A: T.Buffer((4, 4), "float32"), C: T.Buffer((4,), "float32")):
    for i, k in T.grid(4, 4):
        with T.sblock("C"):
            vi, vk = T.axis.remap("SR", [i, k])
            C[vi] = C[vi] + A[vi, vk]


@TL.prim_func
def adds_to_what_is_there(A: TL.Tensor((4, 4), "float32"), C: TL.Tensor((4,), "float32")):
    with TL.Kernel(4, threads=32) as i:
        for k in TL.serial(4):
            C[i] = C[i] + A[i, k]


@TL.prim_func
def results_first(C: TL.Tensor((4,), "float32"), A: TL.Tensor((4,), "float32")):
    with TL.Kernel(4, threads=32) as i:
        C[i] = A[i] + 1.0


@pytest.mark.parametrize(
    ("func", "words"),
    [
        (overwrites, ["writes its operand 'A'", "R.call_tir computes new tensors"]),
        (forgets, ["'forgets' never writes its output 'C'", "operands first"]),
        (too_early, ["reads 'B' before it writes it"]),
        (
            scheduled,
            ["the loops of TIR function 'scheduled' are bound to threads", "before its functions are scheduled"],
        ),
        (never_starts, ["kernel 'never_starts' needs what its result 'C' held before", "start sums in the kernel"]),
        (adds_to_what_is_there, ["needs what its result 'C' held before"]),
        (results_first, ["writes its operand 'C'", "never writes its result 'A'", "operands first, then outputs"]),
    ],
    ids=lambda value: value.attrs["global_symbol"] if hasattr(value, "attrs") else "",
)
def test_function(func, words):
    mod = calling(func, str(func.attrs["global_symbol"]))
    for shardings in ({"result": {"x": 0}}, {}):
        with pytest.raises(mt.MeshTensorError) as error:
            mt.distribute_module(mod, {"x": 2}, shardings)
        for word in [*words, "binding: main.result"]:
            assert word in str(error.value)


def test_operand_of_another_shape():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorStructInfo((4,), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            info = relax.TensorStructInfo((4,), "float32")
            called = relax.Call(
                relax.op.call_tir(builder.add_func(never_starts, "f"), [x], info).op,
                [builder.get().get_global_var("f"), relax.Tuple([x])],
                sinfo_args=[info],
            )
            made = builder.emit_output(builder.emit(called, "y"))
        builder.emit_func_output(made)
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(builder.get(), {"x": 2})
    for word in ("parameter 'A'", "[4, 4]", "[4] float32", "binding: main.y"):
        assert word in str(error.value)


def test_work_in_place():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorStructInfo((4, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            info = relax.TensorStructInfo((4, 4), "float32")
            called = relax.op.call_tir_inplace(builder.add_func(overwrites, "f"), [x, x], [1], info)
            made = builder.emit_output(builder.emit(called, "y"))
        builder.emit_func_output(made)
    for allowed in (False, True):
        with pytest.raises(mt.MeshTensorError) as error:
            mt.distribute_module(builder.get(), {"x": 2}, replicate_unknown=allowed)
        for word in ("R.call_tir_inplace can't be distributed", "main.y", "overwrites its operands", "use R.call_tir"):
            assert word in str(error.value)
