"""Kernels as flat lists of statements: what is read, written, combined, and in which loops."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import tilelang.language as T

from kernels.matmul import matmul
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.tir import tile_ops

from .kernels import kernel, on_rows, statements


def shown(access):
    return f"{access.buffer.name}[{', '.join(str(index) for index in access.indices)}]"


def described(statement):
    """`write op= reads` with the loops' kinds."""
    kinds = " ".join(loop.kind for loop in statement.loops)
    reads = ", ".join(shown(access) for access in statement.reads)
    op = f" {statement.op}{' fresh' if statement.fresh else ''}" if statement.op else ""
    return f"{kinds}: {shown(statement.write)} ={op} {reads}".rstrip()


def test_a_matmul():
    assert [described(s) for s in statements(matmul(64, 48, 32, 16, 16, 16))] == [
        "grid grid tile tile: C_local[t0, t1] =",
        "grid grid serial tile tile: A_shared[t0, t1] = A[by * 16 + t0, ko * 16 + t1]",
        "grid grid serial tile tile: B_shared[t0, t1] = B[ko * 16 + t0, bx * 16 + t1]",
        "grid grid serial tile tile tile: C_local[t0, t1] = sum A_shared[t0, t2], B_shared[t2, t1]",
        "grid grid tile tile: C[by * 16 + t0, bx * 16 + t1] = C_local[t0, t1]",
    ]


@pytest.mark.parametrize(
    ("trans_A", "trans_B", "reads"),
    [
        (True, False, "A_shared[t2, t0], B_shared[t2, t1]"),
        (False, True, "A_shared[t0, t2], B_shared[t1, t2]"),
        (True, True, "A_shared[t2, t0], B_shared[t1, t2]"),
    ],
)
def test_transposed_operands(trans_A, trans_B, reads):
    gemm = statements(matmul(64, 48, 32, 16, 16, 16, trans_A=trans_A, trans_B=trans_B))[3]
    assert described(gemm) == f"grid grid serial tile tile tile: C_local[t0, t1] = sum {reads}"


def test_tops_count_the_statements_of_the_body():
    assert [s.top for s in statements(matmul(64, 48, 32, 16, 16, 16))] == [0, 1, 1, 1, 2]


def test_the_grid_and_the_parts_of_a_kernel():
    made = kernel(matmul(64, 48, 32, 16, 16, 16))
    assert [(loop.var.name, int(loop.extent)) for loop in made.grid] == [("bx", 3), ("by", 4)]
    assert list(made.params) == ["A", "B", "C"]
    assert {buffer.name for buffer in made.on_chip} == {"A_shared", "B_shared", "C_local"}
    assert made.is_param(made.params["A"])
    assert not made.is_param(made.on_chip[0])


def stores(body):
    """The statements of `body`, a macro over a block of rows, between the copies in and out."""
    return statements(on_rows(body))[1:-1]


def test_updates_are_recognised():
    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            b[i] = b[i] + a[i, 0]
            b[i] = a[i, 0] * b[i]
            b[i] = T.max(b[i], a[i, 0])
            b[i] = b[i] - a[i, 0]
            b[i] = a[i, 0] - b[i]
            b[i] = b[i] + b[i]

    assert [s.op for s in stores(body)] == ["sum", "prod", "max", "sum", None, None]


def test_reductions_and_what_they_start_from():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)
        T.reduce_max(a, b, dim=1, clear=False)
        T.reduce_absmax(a, b, dim=1)
        T.reduce_min(a, b, dim=1)

    reductions = [s for s in statements(on_rows(body)) if isinstance(s.tile_op, tile_ops.Reduce)]
    assert [(s.op, s.fresh) for s in reductions] == [("sum", True), ("max", False), ("max", True), ("min", True)]
    assert {described(s).split("= ")[1].split(maxsplit=1)[-1] for s in reductions} == {"a[t0, t1]", "fresh a[t0, t1]"}


def test_conditions_guard_both_branches():
    @T.macro
    def body(A, B, a, b, bx):
        if bx > 1:
            T.clear(b)
        else:
            T.reduce_sum(a, b, dim=1)

    clear, reduce = (s for s in statements(on_rows(body)) if s.conditions)
    assert [str(c) for c in clear.conditions] == ["bx > 1"]
    assert [str(c) for c in reduce.conditions] == ["not bx > 1"]


def test_loads_inside_indices_and_conditions_are_reads():
    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            if a[i, 3] > 0.0:
                b[i] = a[T.Cast("int32", a[i, 1]), 2]

    (store,) = stores(body)
    read = {shown(access): access for access in store.reads}
    assert list(read) == ["a[i, 1]", 'a[T.Cast("int32", a[i, 1]), 2]', "a[i, 3]"]
    assert read['a[T.Cast("int32", a[i, 1]), 2]'].forms[0] is None, "an index from memory is no linear form"


def test_index_bindings_are_seen_through():
    @T.prim_func
    def bound(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            start = bx * 8
            for i in T.Parallel(8):
                row = start + i
                B[row] = A[row] + 1.0

    (store,) = statements(bound)
    assert described(store) == "grid parallel: B[bx * 8 + i] = A[bx * 8 + i]"


def test_values_are_where_a_loop_variable_is_not_an_index():
    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            b[i] = T.Cast("float32", i) + a[i, 0]

    (store,) = stores(body)
    assert [str(v) for v in store.values] == ['T.Cast("float32", i) + a[i, 0]']


def test_what_is_not_understood_keeps_its_name():
    @T.macro
    def body(A, B, a, b, bx):
        T.call_extern("handle", "unknown", a.data)
        T.reduce_sum(a, b, dim=1)

    unknown = [s.unknown for s in statements(on_rows(body)) if s.unknown]
    assert unknown == ["tirx.call_extern"]


def test_reading_changes_nothing():
    func = matmul(64, 48, 32, 16, 16, 16)
    before = func.script()
    read_kernel(func)
    assert func.script() == before


def test_what_a_thread_assumes_is_not_known_to_others():
    """Kernels that one thread has read may be planned anew, for other sizes, by several."""
    analyzed = read_kernel(matmul(64, 48, 32, 16, 16, 16))
    ko = next(loop.var for loop in analyzed.loops.values() if loop.kind == "serial")
    with analyzed.analyzer.constraint_scope(ko < 5), ThreadPoolExecutor(1) as other:
        assert analyzed.analyzer.can_prove(ko < 6)
        assert not other.submit(lambda: analyzed.analyzer.can_prove(ko < 6)).result()
