"""Factors: which dims are walked together, and what gives way where that does not fit."""

import tilelang.language as T

from kernels.matmul import matmul

from .kernels import analysis, factor


def members(found):
    """The factors' dims."""
    return {tuple(f.dims) for f in found.factors}


def elementwise(index, size_a=32, size_b=32):
    """B[bx * 8 + i] = A[index(bx, i)]."""

    @T.prim_func
    def func(A: T.Tensor((size_a,), "float32"), B: T.Tensor((size_b,), "float32")):
        with T.Kernel(size_b // 8, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[index(bx, i)]

    return func


def detached(func, param="A", dim=0):
    """Why a parameter's dim has no factor."""
    found = analysis(func)
    assert found.factor_of(param, dim) is None
    return found.reason_whole(param, dim)


def test_a_matmul_has_three():
    found = analysis(matmul(64, 48, 32, 16, 16, 8))
    assert members(found) == {(("A", 0), ("C", 0)), (("A", 1), ("B", 0)), (("B", 1), ("C", 1))}
    assert {f.name: int(f.size) for f in found.factors} == {"m": 64, "n": 48, "k": 32}


def test_roles_are_the_loops_with_their_steps():
    m = factor(analysis(matmul(64, 48, 32, 16, 16, 8)), "A")
    assert m.block == 16
    assert {(var.name, step) for var, step in m.roles.items()} == {("by", 16), ("t0", 1)}


def test_the_same_index_joins_dims():
    assert members(analysis(elementwise(lambda bx, i: bx * 8 + i))) == {(("A", 0), ("B", 0))}
    assert members(analysis(elementwise(lambda bx, i: i + 8 * bx))) == {(("A", 0), ("B", 0))}


def test_a_shifted_read_detaches_what_is_read():
    found = analysis(elementwise(lambda bx, i: bx * 8 + i + 1, size_a=33))
    assert members(found) == {(("B", 0),)}
    assert "it is shifted" in found.reason_whole("A", 0)


def test_what_does_not_walk_a_dim_from_end_to_end_detaches_it():
    assert "does not walk a dim of 64" in detached(elementwise(lambda bx, i: bx * 8 + i, size_a=64))
    assert "steps by 16 where blocks are 8 long" in detached(elementwise(lambda bx, i: bx * 16 + i, size_a=64))
    assert "steps by 2 where blocks are 1 long" in detached(elementwise(lambda bx, i: (bx * 8 + i) * 2, size_a=64))
    assert "it is the same in every iteration" in detached(elementwise(lambda bx, i: 3))
    assert "it is no sum of loop variables" in detached(elementwise(lambda bx, i: (bx * 8 + i) // 2, size_a=16))
    assert "it is reversed" in detached(elementwise(lambda bx, i: 31 - bx * 8 - i))


def test_a_symbolic_dim_is_a_factor():
    rows = T.dynamic("rows")

    @T.prim_func
    def func(A: T.Tensor((rows,), "float32"), B: T.Tensor((rows,), "float32")):
        with T.Kernel(T.ceildiv(rows, 8), threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[bx * 8 + i]

    assert members(analysis(func)) == {(("A", 0), ("B", 0))}


def test_two_dims_of_one_buffer_are_never_one_factor():
    @T.prim_func
    def diagonal(A: T.Tensor((32, 32), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = A[bx * 8 + i, bx * 8 + i]

    found = analysis(diagonal)
    assert found.factor_of("A", 0) is None or found.factor_of("A", 0) is not found.factor_of("A", 1)
    assert found.factor_of("B", 0) is not None


def test_dims_of_different_sizes_are_not_joined():
    func = elementwise(lambda bx, i: bx * 8 + i, size_a=40)
    found = analysis(func)
    assert found.factor_of("A", 0) is not found.factor_of("B", 0)


def test_elements_walked_together_in_different_places_block_both():
    @T.prim_func
    def fold(A: T.Tensor((32,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1, threads=16):
            a = T.alloc_shared((32,), "float32")
            T.copy(A, a)
            for i in T.Parallel(16):
                B[i] = a[i] + a[i + 16]

    found = analysis(fold)
    reasons = [found.reason_whole("A", 0), found.reason_whole("B", 0)]
    assert any(reason and "walked together, but not element by element" in reason for reason in reasons)


def test_a_loop_that_walks_two_dims_in_different_steps_blocks_both():
    @T.prim_func
    def func(A: T.Tensor((32,), "float32"), S: T.Tensor((4,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                A[bx * 8 + i] = 1.0
            S[bx] = 2.0

    found = analysis(func)
    assert "loop bx walks two dims in different steps" in found.reason_whole("A", 0)
    assert "loop bx walks two dims in different steps" in found.reason_whole("S", 0)


def test_an_unknown_statement_detaches_what_it_touches():
    @T.prim_func
    def func(A: T.Tensor((32,), "float32"), B: T.Tensor((32,), "float32")):
        with T.Kernel(4, threads=8) as bx:
            for i in T.Parallel(8):
                B[bx * 8 + i] = 1.0
            T.call_extern("handle", "use", T.address_of(A[0]))

    found = analysis(func)
    assert found.factor_of("A", 0) is None
    assert "not understood" in found.reason_whole("A", 0)
    assert "not understood" in found.reason_whole("B", 0), "the call may do anything, so nothing is split"
