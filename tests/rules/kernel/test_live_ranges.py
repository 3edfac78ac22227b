"""Which writes of an on-chip buffer may reach which reads."""

import tilelang.language as T

from kernels.matmul import matmul
from kernels.sparse import block_sparse_matmul
from mesh_tensor.rules.kernel.live_ranges import LiveRanges, overwrites_all

from .kernels import analysis, kernel, on_rows


def ranges_of(func, name):
    """The live ranges of a buffer, in the order of their first access, as (writes, reads)."""
    made = kernel(func)
    number = {id(s): index for index, s in enumerate(made.statements)}
    found = [
        ([number[id(s)] for s, _ in r.writes], [number[id(s)] for s, _ in r.reads], r)
        for r in LiveRanges(made).all
        if r.buffer.name == name
    ]
    return sorted(((w, r, live) for w, r, live in found), key=lambda x: (x[0] + x[1])[:1])


def uses(func, name):
    return [(writes, reads) for writes, reads, _ in ranges_of(func, name)]


def test_a_matmul():
    func = matmul(64, 64, 64, 16, 16, 16)  # 0: clear, 1: copy A, 2: copy B, 3: gemm, 4: copy out
    assert uses(func, "C_local") == [([0, 3], [4])]
    assert uses(func, "A_shared") == [([1], [3])]
    assert uses(func, "A") == [([], [1])]
    assert uses(func, "C") == [([4], [])]


def test_scopes_are_the_loops_that_a_range_lives_in():
    func = matmul(64, 64, 64, 16, 16, 16)
    (a,) = ranges_of(func, "A_shared")
    (c,) = ranges_of(func, "C_local")
    assert [loop.var.name for loop in a[2].scope] == ["bx", "by", "ko"]
    assert [loop.var.name for loop in c[2].scope] == ["bx", "by"]


def test_a_variable_of_its_own_in_every_parallel_iteration():
    """A buffer with an element per iteration lives in all of them; a variable in one."""

    @T.macro
    def body(A, B, a, b, bx):
        for i in T.Parallel(8):
            total = T.alloc_var("float32")
            total = 0.0
            for j in T.serial(48):
                total += a[i, j]
            b[i] = total

    func = on_rows(body)
    (total,), (b,) = ranges_of(func, "total"), ranges_of(func, "b")
    assert [loop.var.name for loop in total[2].scope] == ["bx", "i"]
    assert [loop.var.name for loop in b[2].scope] == ["bx"]


def test_a_reused_buffer_has_two_ranges():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)  # 1
        for i, j in T.Parallel(8, 48):
            a[i, j] = b[i]  # 2
        T.reduce_max(a, b, dim=1)  # 3

    assert uses(on_rows(body), "a") == [([0], [1]), ([2], [3])]
    assert uses(on_rows(body), "b") == [([1], [2]), ([3], [4])]


def test_an_update_continues_its_range():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)  # 1
        for i, j in T.Parallel(8, 48):
            a[i, j] = a[i, j] * 2.0  # 2
        T.reduce_sum(a, b, dim=1, clear=False)  # 3

    assert uses(on_rows(body), "a") == [([0, 2], [3])]
    assert uses(on_rows(body), "b") == [([1, 3], [4])]


def test_a_partial_overwrite_continues_its_range():
    @T.macro
    def body(A, B, a, b, bx):
        T.reduce_sum(a, b, dim=1)  # 1
        for i in T.Parallel(4):
            b[i] = 0.0  # 2

    assert uses(on_rows(body), "b") == [([1, 2], [3])]


def test_a_branch_may_or_may_not_overwrite():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)  # 1
        if bx > 0:
            T.reduce_sum(a, b, dim=1)  # 2

    assert uses(on_rows(body), "b") == [([1, 2], [3])]


def test_a_value_carried_around_a_loop_is_one_range():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)  # 1
        for k in T.serial(48):
            for i in T.Parallel(8):
                b[i] = b[i] * 0.5 + a[i, k]  # 2

    ((writes, reads, live),) = ranges_of(on_rows(body), "b")
    assert (writes, reads) == ([1, 2], [2, 3])
    assert "k" in {var.name for var in live.carried}
    assert [loop.var.name for loop in live.scope] == ["bx"]


def test_what_the_iteration_before_left_is_one_range_with_what_is_written_later():
    @T.macro
    def body(A, B, a, b, bx):
        left = T.alloc_fragment((8,), "float32")
        for k in T.serial(48):  # 1: clear b
            T.clear(b)
            if k > 0:
                for i in T.Parallel(8):
                    b[i] = left[i]  # 2
            for i in T.Parallel(8):
                left[i] = a[i, k]  # 3

    ((writes, reads, live),) = ranges_of(on_rows(body), "left")
    assert (writes, reads) == ([3], [2])
    assert "k" in {var.name for var in live.carried}


def test_what_an_iteration_before_left_where_none_was_written_in_this_one():
    @T.macro
    def body(A, B, a, b, bx):
        left = T.alloc_fragment((8,), "float32")
        for k in T.serial(48):
            if k % 2 == 0:
                for i in T.Parallel(8):
                    left[i] = a[i, k]  # 1
            for i in T.Parallel(8):
                b[i] = left[i]  # 2
            T.clear(left)  # 3

    assert uses(on_rows(body), "left") == [([1, 3], [2])]


def test_a_loop_that_may_not_run_keeps_what_was_there():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)  # 1
        for _ in T.serial(bx):
            T.reduce_sum(a, b, dim=1)  # 2

    assert uses(on_rows(body), "b") == [([1, 2], [3])]


def test_what_overwrites_all_of_a_buffer():
    @T.macro
    def body(A, B, a, b, bx):
        T.clear(b)
        for i in T.Parallel(8):
            b[i] = 1.0
        for i in T.Parallel(7):
            b[i] = 1.0
        for i in T.Parallel(8):
            b[7 - i] = 1.0
        for i in T.Parallel(8):
            b[i] = b[i] + 1.0
        for i in T.Parallel(8):
            if i > 2:
                b[i] = 1.0
        T.reduce_sum(a, b, dim=1)
        T.reduce_sum(a, b, dim=1, clear=False)
        for i, j in T.Parallel(2, 4):
            b[i * 4 + j] = 1.0
        for i, j in T.Parallel(2, 4):
            b[j * 2 + i] = 1.0
        for i, j in T.Parallel(2, 3):
            b[i * 4 + j] = 1.0
        for i, j in T.Parallel(2, 4):
            b[i * 3 + j] = 1.0
        for i in T.Parallel(4):
            b[i + i] = 1.0

    made = kernel(on_rows(body))
    found = [overwrites_all(s, made) for s in made.statements[1:-1]]
    assert found[:8] == [True, True, False, False, False, False, True, False]
    assert found[8:] == [True, True, False, False, False]


def test_what_overwrites_all_or_nothing_under_a_condition_that_is_loaded():
    """The condition counts as one where nothing writes what it is loaded from between one element and the next."""

    @T.macro
    def body(A, B, a, b, bx):
        if A[bx, 0] > 0.0:
            T.clear(b)
        for i in T.Parallel(8):
            if A[bx, 0] > 0.0:
                b[i] = 1.0
        for i in T.Parallel(8):
            if A[bx, i] > 0.0:
                b[i] = 1.0
        for i in T.serial(8):
            if a[0, 0] > 0.0:
                b[i] = 1.0
            a[0, 0] = 0.0
        T.reduce_sum(a, b, dim=1)

    made = kernel(on_rows(body))
    found = [overwrites_all(s, made) for s in made.statements if s.write.buffer.name == "b"]
    assert found == [True, True, False, False, True]


def test_what_is_staged_in_a_branch_lives_there():
    """Each block that counts is staged and used in one branch: nothing is carried from block to block."""
    func = block_sparse_matmul(64, 64, 64)
    (a,) = ranges_of(func, "A_shared")
    assert [loop.var.name for loop in a[2].scope] == ["bx", "by", "k"]
    assert not a[2].carried


def test_taints_follow_values():
    found = analysis(matmul(64, 64, 64, 16, 16, 16))
    taints = {r.buffer.name: {v.name for v in variables} for r, variables in found.taints.items()}
    assert {"ko", "by"} <= taints["A_shared"]
    assert "bx" not in taints["A_shared"]
    assert {"ko", "by", "bx"} <= taints["C_local"]
