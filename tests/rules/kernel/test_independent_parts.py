"""Parts of a kernel that have nothing to do with each other, each a kernel of its own."""

import pytest
import tilelang.language as T

import mesh_tensor as mt
from kernels.fused import gate_and_up, projections, rope_of_both
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.independent_parts import independent_parts
from mesh_tensor.rules.kernel.normalize import normalize

MESH = mt.Mesh({"x": 2})


def parts(func, **dims):
    """The parameters of each part where an axis is to split these dims."""
    plain = normalize(check_kernel(func))
    shapes = {buffer.name: buffer.shape for buffer in plain.buffer_map.values()}
    asked = {name: Sharding.make(MESH, len(shapes[name]), {"x": dim}) for name, dim in dims.items()}
    return [[buffer.name for buffer in part.buffer_map.values()] for part in next(independent_parts(plain, asked), ())]


def script(func, number, **dims):
    plain = normalize(check_kernel(func))
    shapes = {buffer.name: buffer.shape for buffer in plain.buffer_map.values()}
    asked = {name: Sharding.make(MESH, len(shapes[name]), {"x": dim}) for name, dim in dims.items()}
    return next(independent_parts(plain, asked))[number].script()


def test_programs_by_their_number():
    made = parts(rope_of_both(16, 4, 2, 4), Q=1, K=1)
    assert made == [["Q", "cos", "sin", "Q_out"], ["K", "cos", "sin", "K_out"]]
    made = parts(projections(8, 8, 16, 8, 4, 4, 4), Wq=1, Wk=1, Wv=1)
    assert made == [["X", "Wq", "Q"], ["X", "Wk", "K"], ["X", "Wv", "V"]]


def test_the_programs_of_a_part_count_from_0():
    text = script(gate_and_up(8, 8, 16, 4, 4, 4), 1, Wg=1, Wu=1)
    assert 'for bx in T.thread_binding(4, thread="blockIdx.x")' in text
    assert "Wu[ko * 4, bx * 4]" in text
    assert "if " not in text


def two_loops(body, n=8, m=4):
    @T.prim_func
    def kernel(
        A: T.Tensor((n,), "float32"),
        B: T.Tensor((m,), "float32"),
        Out: T.Tensor((n,), "float32"),
        Other: T.Tensor((m,), "float32"),
    ):
        with T.Kernel(1, threads=32):
            body(A, B, Out, Other, n, m)

    return kernel


@T.macro
def apart(A, B, Out, Other, n, m):
    for i in T.serial(n):
        Out[i] = A[i] * 2.0
    for i in T.serial(m):
        Other[i] = B[i] * 2.0


@T.macro
def staged(A, B, Out, Other, n, m):
    """What is staged on chip is staged in both parts."""
    scale = T.alloc_shared((1,), "float32")
    scale[0] = A[0]
    for i in T.serial(n):
        Out[i] = A[i] * scale[0]
    for i in T.serial(m):
        Other[i] = B[i] * scale[0]


@T.macro
def reused(A, B, Out, Other, n, m):
    """One buffer on chip, one use after the other."""
    kept = T.alloc_shared((1,), "float32")
    for i in T.serial(n):
        kept[0] = A[i]
        Out[i] = kept[0] * 2.0
    for i in T.serial(m):
        kept[0] = B[i]
        Other[i] = kept[0] * 2.0


@T.macro
def updated_by_both(A, B, Out, Other, n, m):
    """What two loops make of one result is of one part, whatever else they make."""
    for i in T.serial(n):
        Out[i] = A[i] * 2.0
    for i in T.serial(m):
        Other[i] = B[i] * 2.0
        T.atomic_add(Out[i], B[i])


@pytest.mark.parametrize("body", [apart, staged, reused, updated_by_both])
def test_results_of_loops(body):
    made = parts(two_loops(body), A=0, B=0, Out=0, Other=0)
    assert [names[-1] for names in made] == ["Out", "Other"]
    assert ("A" in made[1]) == (body is staged)
    assert ("B" in made[0]) == (body is updated_by_both)


@T.macro
def of_one_another(A, B, Out, Other, n, m):
    for i in T.serial(n):
        Out[i] = A[i] * 2.0
    for i in T.serial(m):
        Other[i] = B[i] * Out[0]


@T.macro
def of_one_total(A, B, Out, Other, n, m):
    """What takes work is not done twice."""
    total = T.alloc_fragment((1,), "float32")
    total[0] = 0.0
    for i in T.serial(n):
        total[0] += A[i]
    for i in T.serial(n):
        Out[i] = A[i] * total[0]
    for i in T.serial(m):
        Other[i] = B[i] * total[0]


@T.macro
def carried_over(A, B, Out, Other, n, m):
    """The second loop goes on from what the first one left on chip."""
    total = T.alloc_fragment((1,), "float32")
    total[0] = 0.0
    for i in T.serial(n):
        total[0] += A[i]
        Out[i] = total[0]
    for i in T.serial(m):
        total[0] += B[i]
        Other[i] = total[0]


@T.macro
def printed(A, B, Out, Other, n, m):
    apart(A, B, Out, Other, n, m)
    T.print(Other[0])


@T.macro
def through_memory(A, B, Out, Other, n, m):
    """Memory of the whole grid's: a program may see what another one put there."""
    kept = T.alloc_global((1,), "float32")
    kept[0] = A[0]
    for i in T.serial(n):
        Out[i] = A[i] * 2.0
    for i in T.serial(m):
        Other[i] = B[i] * kept[0]


@T.macro
def unknown(A, B, Out, Other, n, m):
    apart(A, B, Out, Other, n, m)
    T.call_extern("handle", "f", T.address_of(Other[0]))


@pytest.mark.parametrize("body", [of_one_total, carried_over, printed, through_memory, unknown])
def test_what_is_one_kernel(body):
    assert parts(two_loops(body), A=0, B=0, Out=0, Other=0) == []


def test_a_result_that_is_read_afterwards_comes_first():
    made = parts(two_loops(of_one_another), A=0, B=0, Out=0, Other=0)
    assert made == [["A", "Out"], ["B", "Out", "Other"]]


def test_what_asks_for_one_factor_is_one_kernel():
    assert parts(projections(8, 8, 16, 8, 4, 4, 4), X=0, Q=0, K=0, V=0) == [
        ["X", "Wq", "Q"],
        ["X", "Wk", "K"],
        ["X", "Wv", "V"],
    ]
    assert parts(two_loops(apart, 8, 8), A=0, Out=0) == []
