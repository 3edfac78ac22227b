"""TIR functions that are easily distributed wrong: what one device computes of a tile is not what the tile holds."""

from __future__ import annotations

from tvm import ir, relax, tirx
from tvm.script.parser import ir as I
from tvm.script.parser import tirx as T


@I.ir_module
class Traps:
    """Functions of one result, which is the last parameter."""

    @T.prim_func
    def reduce_then_use(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7,), "float32")):
        """A sum and what follows it in one nest."""
        acc = T.sblock_alloc_buffer((7,), "float32")
        for i in range(7):
            for k in range(9):
                with T.sblock("acc"):
                    vi, vk = T.axis.remap("SR", [i, k])
                    with T.init():
                        acc[vi] = T.float32(0)
                    acc[vi] = acc[vi] + A[vi, vk]
            with T.sblock("out"):
                vo = T.axis.spatial(7, i)
                C[vo] = T.max(acc[vo] / T.float32(9), T.float32(0))

    @T.prim_func
    def bias_start(
        A: T.Buffer((7, 9), "float32"),
        B: T.Buffer((9, 5), "float32"),
        b: T.Buffer((5,), "float32"),
        C: T.Buffer((7, 5), "float32"),
    ):
        """An accumulator that starts with a bias."""
        for i, j, k in T.grid(7, 5, 9):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = b[vj]
                C[vi, vj] = C[vi, vj] + A[vi, vk] * B[vk, vj]

    @T.prim_func
    def through_cast(A: T.Buffer((7, 9), "float32"), B: T.Buffer((9, 5), "float32"), C: T.Buffer((7, 5), "float16")):
        """An accumulator that every step rounds."""
        for i, j, k in T.grid(7, 5, 9):
            with T.sblock("C"):
                vi, vj, vk = T.axis.remap("SSR", [i, j, k])
                with T.init():
                    C[vi, vj] = T.float16(0)
                C[vi, vj] = T.Cast("float16", T.Cast("float32", C[vi, vj]) + A[vi, vk] * B[vk, vj])

    @T.prim_func
    def index_as_value(
        A: T.Buffer((T.int64(7), T.int64(9)), "float32"), C: T.Buffer((T.int64(7), T.int64(9)), "float32")
    ):
        """A mask and a factor made of indices."""
        for i, j in T.grid(T.int64(7), T.int64(9)):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] * T.Cast("float32", vi) + T.Select(vj <= vi, T.float32(1), T.float32(0))

    @T.prim_func
    def sum_of_indices(A: T.Buffer((T.int64(7), T.int64(9)), "float32"), C: T.Buffer((T.int64(9),), "float32")):
        """Indices that are summed over as values."""
        for j, k in T.grid(T.int64(9), T.int64(7)):
            with T.sblock("C"):
                vj, vk = T.axis.remap("SR", [j, k])
                with T.init():
                    C[vj] = T.float32(0)
                C[vj] = C[vj] + A[vk, vj] * T.Cast("float32", vk + T.int64(1))

    @T.prim_func
    def shifted(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7, 9), "float32")):
        for i, j in T.grid(7, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.if_then_else(vi >= 1, A[vi - 1, vj], T.float32(0)) + A[vi, vj]

    @T.prim_func
    def flipped(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7, 9), "float32")):
        for i, j in T.grid(7, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[6 - vi, vj]

    @T.prim_func
    def gathered(A: T.Buffer((7, 9), "float32"), rows: T.Buffer((7,), "int32"), C: T.Buffer((7, 9), "float32")):
        for i, j in T.grid(7, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[rows[vi], vj]

    @T.prim_func
    def regrouped(A: T.Buffer((7, 9), "float32"), C: T.Buffer((9, 7), "float32")):
        for i, j in T.grid(9, 7):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[(vi * 7 + vj) // 9, (vi * 7 + vj) % 9]

    @T.prim_func
    def joined(A: T.Buffer((7, 9), "float32"), B: T.Buffer((7, 9), "float32"), C: T.Buffer((14, 9), "float32")):
        for i, j in T.grid(14, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.if_then_else(vi >= 7, B[vi - 7, vj], A[vi, vj])

    @T.prim_func
    def joined_in_two(A: T.Buffer((7, 9), "float32"), B: T.Buffer((7, 9), "float32"), C: T.Buffer((14, 9), "float32")):
        """Two nests that write one buffer."""
        for i, j in T.grid(7, 9):
            with T.sblock("first"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj]
        for i, j in T.grid(7, 9):
            with T.sblock("second"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi + 7, vj] = B[vi, vj]

    @T.prim_func
    def to_scalar(A: T.Buffer((7, 9), "float32"), C: T.Buffer((), "float32")):
        for i, j in T.grid(7, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("RR", [i, j])
                with T.init():
                    C[()] = T.float32(0)
                C[()] = C[()] + A[vi, vj] * A[vi, vj]

    @T.prim_func
    def scanned(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7, 9), "float32")):
        """Every element is made from the one before it."""
        for i, j in T.grid(7, 9):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = T.if_then_else(vj == 0, T.float32(0), C[vi, T.max(vj - 1, 0)]) + A[vi, vj]

    @T.prim_func
    def symmetric(A: T.Buffer((7, 7), "float32"), C: T.Buffer((7, 7), "float32")):
        for i, j in T.grid(7, 7):
            with T.sblock("C"):
                vi, vj = T.axis.remap("SS", [i, j])
                C[vi, vj] = A[vi, vj] + A[vj, vi]

    @T.prim_func
    def tiled(A: T.Buffer((7, 12), "float32"), C: T.Buffer((7, 12), "float32")):
        """Loops that walk a dim together, past its end on a condition."""
        for io, jo, ii, ji in T.grid(2, 3, 4, 4):
            with T.sblock("C"):
                vi = T.axis.spatial(7, io * 4 + ii)
                vj = T.axis.spatial(12, jo * 4 + ji)
                T.where(io * 4 + ii < 7)
                C[vi, vj] = A[vi, vj] * T.float32(2)

    @T.prim_func
    def largest(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7,), "float32")):
        """A reduction whose neutral element is not 0, of values that may all be negative."""
        for i, k in T.grid(7, 9):
            with T.sblock("C"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.min_value("float32")
                C[vi] = T.max(C[vi], A[vi, vk] - T.float32(100))

    @T.prim_func
    def padded_exp(A: T.Buffer((7, 9), "float32"), C: T.Buffer((7,), "float32")):
        """What is summed is not 0 where the operand is."""
        for i, k in T.grid(7, 9):
            with T.sblock("C"):
                vi, vk = T.axis.remap("SR", [i, k])
                with T.init():
                    C[vi] = T.float32(0)
                C[vi] = C[vi] + T.exp(A[vi, vk])


def calling(func: tirx.PrimFunc, name: str, numbers: tuple[int, ...] = ()) -> ir.IRModule:
    """A module whose `main` calls the function: its last parameter is the result."""
    *ins, out = [func.buffer_map[param] for param in func.params if param in func.buffer_map]
    builder = relax.BlockBuilder()
    params = [relax.Var(buffer.name, info_of(buffer)) for buffer in ins]
    with builder.function("main", params):
        with builder.dataflow():
            tir_vars = relax.ShapeExpr(list(numbers)) if numbers else None
            called = relax.op.call_tir(builder.add_func(func, name), relax.Tuple(params), info_of(out), tir_vars)
            result = builder.emit_output(builder.emit(called, "result"))
        builder.emit_func_output(result)
    return builder.get()


def info_of(buffer: tirx.Buffer) -> relax.TensorStructInfo:
    """The type of a tensor of known size."""
    return relax.TensorStructInfo([int(size) for size in buffer.shape], buffer.dtype)
