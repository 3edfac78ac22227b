"""Kernels with symbolic dims: lowered and compiled once for all sizes of a family, right for each of them."""

import random

import pytest
import tilelang.language as T
import torch
from tvm.ir import structural_equal

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.softmax import softmax
from mesh_tensor.program.from_kernel import Lowering
from mesh_tensor.program.steps import CollectiveStep, KernelStep
from tests import symbolic_points
from tests.sweep_points import KERNELS, NEVER_REFUSED

MESHES = ((2,), (3,), (2, 2), (2, 3))
M_SPLIT = {"A": {"x": 0}, "B": {}, "C": {"x": 0}}
K_SPLIT = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}


@pytest.mark.parametrize(("number", "kernel"), list(enumerate(KERNELS)), ids=list(KERNELS))
def test_all_sizes_are_right(number, kernel):
    """Other symbols, meshes and shardings for other kernels."""
    symbols = next(symbolic_points.symbols_of(kernel, -1 - number), ())
    mesh = MESHES[number % len(MESHES)]
    for point in symbolic_points.sample(kernel, symbols, mesh, 1):
        outcome = symbolic_points.run(point)
        allowed = outcome.verdict == "refused" and kernel not in NEVER_REFUSED
        assert outcome.verdict == "right" or allowed, (point, outcome)


def test_places_that_symbols_are_part_of():
    """The other half of a row lies `dim / 2` further on, which is no loop's doing."""
    point = symbolic_points.SymbolicPoint("rope", ("seq", "heads", "dim"), (2,), 91)
    assert symbolic_points.run(point).verdict == "right"


def compiled(layouts, axes=None, target="interpret", **options):
    """C = A @ B for any sizes."""
    func = matmul(*map(T.dynamic, "MNK"), 16, 16, 16)
    return mt.compile(mt.annotate(func, axes or {"x": 2}, layouts), target=target, **options)


def call(kern, m, n, k):
    """Call a matmul with these sizes, check what it gives; the program that ran."""
    a, b = torch.randn(m, k), torch.randn(k, n)
    torch.testing.assert_close(kern(a, b), a @ b, rtol=1e-4, atol=1e-4)
    return kern.program


def kernels_of(program):
    return [step.func for step in program.steps if isinstance(step, KernelStep)]


@pytest.mark.parametrize("layouts", [M_SPLIT, K_SPLIT], ids=["m", "k"])
@pytest.mark.parametrize("sizes", [((32, 32, 64), (96, 64, 32)), ((9, 5, 7), (33, 1, 21)), ((2, 10, 6), (18, 14, 22))])
def test_sizes_of_a_family_share_their_kernel(layouts, sizes):
    kern = compiled(layouts, target="c")
    one, other = (call(kern, *size) for size in sizes)
    assert one is not other
    assert all(a.same_as(b) for a, b in zip(kernels_of(one), kernels_of(other), strict=True))
    assert other.values["A"].shape == (sizes[1][0], sizes[1][2])


def test_a_family_is_lowered_once_and_compared_once_per_magnitude(monkeypatch):
    """A first call lowers for the family and for sizes like its own, however many symbols there are."""
    kern, lowered = compiled(M_SPLIT), []
    lower = Lowering.__call__
    monkeypatch.setattr(Lowering, "__call__", lambda *args: lowered.append(args) or lower(*args))
    counts = []
    for sizes in ((32, 64, 32), (96, 32, 64), (64, 64, 96), (3200, 64, 32), (6400, 32, 64)):
        call(kern, *sizes)
        counts.append(len(lowered))
    assert counts == [2, 2, 2, 3, 3]


def test_programs_do_not_depend_on_the_sizes_before():
    """Also where plans go with what is larger."""
    layouts, sizes = {"A": {"x": 0}, "B": {"x": 1}, "C": {}}, [(512, 32, 32), (32, 512, 32), (64, 64, 64), (9, 5, 7)]
    there, back = compiled(layouts), compiled(layouts)
    programs = {size: call(there, *size) for size in sizes}
    for size in reversed(sizes):
        program = call(back, *size)
        assert program.values == programs[size].values
        for step, other in zip(program.steps, programs[size].steps, strict=True):
            same = isinstance(step, KernelStep) and structural_equal(step.func, other.func, map_free_vars=True)
            assert same or step == other


def test_families_have_kernels_of_their_own():
    """Multiples of the blocks need no masks; what is even, or not even that, does."""
    kern = compiled(M_SPLIT)
    funcs = [kernels_of(call(kern, m, 32, 32))[0] for m in (32, 34, 33)]
    assert not any(a.same_as(b) for a in funcs for b in funcs if a is not b)


@pytest.mark.parametrize("layouts", [M_SPLIT, K_SPLIT], ids=["m", "k"])
def test_programs_are_those_of_the_sizes_alone(layouts):
    """Steps, layouts, bytes and flops of random sizes, next to the kernel built and lowered for these sizes."""
    kern, draw = compiled(layouts, {"x": 2, "y": 3}), random.Random(5)
    for _ in range(20):
        m, n, k = (draw.choice((1, 2, 6, 96)) * draw.randint(1, 9) for _ in range(3))
        program = call(kern, m, n, k)
        alone = mt.compile(mt.annotate(matmul(m, n, k, 16, 16, 16), {"x": 2, "y": 3}, layouts), target="interpret")
        assert program.values == alone.program.values
        assert program.parameters == alone.program.parameters
        for step, expected in zip(program.steps, alone.program.steps, strict=True):
            if isinstance(step, KernelStep):
                # Where it can't be proved that no block is cut short, loops go over a whole block, then as well.
                assert (step.args, step.writes) == (expected.args, expected.writes)
            else:
                assert step == expected
    assert kern.explain().splitlines()[4:] == alone.explain().splitlines()[4:]


def test_flops_of_even_sizes():
    kern = compiled(K_SPLIT)
    (step,) = (step for step in call(kern, 64, 32, 96).steps if isinstance(step, KernelStep))
    assert step.flops == 2 * 64 * 32 * 96 // 2
    (step,) = (step for step in call(kern, 32, 32, 64).steps if isinstance(step, KernelStep))
    assert step.flops == 2 * 32 * 32 * 64 // 2


def test_a_plan_that_depends_on_sizes_is_made_for_each():
    """What C's layout leaves open goes with the larger operand."""
    kern = compiled({"A": {"x": 0}, "B": {"x": 1}, "C": {}})
    for sizes in ((512, 32, 32), (32, 512, 32), (32, 32, 512)):
        program = call(kern, *sizes)
        alone = mt.compile(mt.annotate(matmul(*sizes, 16, 16, 16), {"x": 2}, {"A": {"x": 0}, "B": {"x": 1}, "C": {}}))
        collectives = [
            [step for step in found.steps if isinstance(step, CollectiveStep)] for found in (program, alone.program)
        ]
        assert collectives[0] == collectives[1]


def test_no_elements():
    kern = compiled(M_SPLIT, target="c")
    for sizes in ((0, 8, 8), (8, 8, 8), (8, 0, 8)):
        a, b = torch.randn(sizes[0], sizes[2]), torch.randn(sizes[2], sizes[1])
        assert torch.equal(kern(a, b).shape and kern(a, b) @ torch.zeros(sizes[1], 1), torch.zeros(sizes[0], 1))


def test_slabs_are_made_for_each_size():
    kern = compiled(K_SPLIT, overlap=2)
    for m in (32, 64, 65):
        program = call(kern, m, 32, 32)
        assert len(kernels_of(program)) == 2


def test_strict_holds_for_every_size():
    func = softmax(T.dynamic("M"), T.dynamic("N"), 8)
    kern = mt.compile(mt.annotate(func, {"x": 2}, {"X": {"x": 1}, "Y": {"x": 0}}), target="interpret", strict=True)
    for shape in ((8, 16), (9, 5), (8, 16)):
        with pytest.raises(mt.MeshTensorError, match="strict"):
            kern(torch.randn(shape))


def test_symbols_that_are_parameters():
    n = T.dynamic("n")

    @T.prim_func
    def scaled(A: T.Tensor((n, 8), "float32"), B: T.Tensor((n, 8), "float32"), n: T.int32):
        with T.Kernel(T.ceildiv(n, 4), threads=32) as bx:
            for i, j in T.Parallel(4, 8):
                if bx * 4 + i < n:
                    B[bx * 4 + i, j] = A[bx * 4 + i, j] * T.float32(2) + T.cast(n, "float32")

    kern = mt.compile(mt.annotate(scaled, {"x": 2}, {"A": {"x": 0}, "B": {"x": 0}}), target="c")
    for rows in (8, 16, 10, 7, 1, 8):
        a = torch.randn(rows, 8)
        torch.testing.assert_close(kern(a, rows), a * 2 + rows)


def test_dims_that_are_expressions():
    n = T.dynamic("n")

    @T.prim_func
    def pairs(A: T.Tensor((n * 2 + 1,), "float32"), B: T.Tensor((n,), "float32"), C: T.Tensor((n * 2 + 1,), "float32")):
        with T.Kernel(T.ceildiv(n * 2 + 1, 16), threads=32) as bx:
            for i in T.Parallel(16):
                if bx * 16 + i < n * 2 + 1:
                    C[bx * 16 + i] = A[bx * 16 + i] + 1.0

    for target in ("c", "interpret"):
        kern = mt.compile(mt.annotate(pairs, {"x": 2}, {"A": {"x": 0}, "C": {"x": 0}}), target=target)
        for size in (32, 16, 3, 8):
            a = torch.randn(2 * size + 1)
            assert torch.equal(kern(a, torch.zeros(size)), a + 1)


@pytest.mark.parametrize("target", ["c", "interpret"])
def test_sizes_that_only_an_earlier_part_has_tensors_of(target):
    """What divides the sum stands behind the collective, where no tensor is `n` long."""
    m, n = T.dynamic("m"), T.dynamic("n")

    @T.prim_func
    def mean_of_rows(A: T.Tensor((m, n), "float32"), B: T.Tensor((m,), "float32")):
        with T.Kernel(T.ceildiv(m, 4), threads=32) as bx:
            a, total = T.alloc_fragment((4, 4), "float32"), T.alloc_fragment((4,), "float32")
            T.clear(total)
            for ko in T.serial(T.ceildiv(n, 4)):
                T.copy(A[bx * 4, ko * 4], a)
                T.reduce_sum(a, total, dim=1, clear=False)
            for i in T.Parallel(4):
                total[i] = total[i] / T.cast(n, "float32")
            T.copy(total, B[bx * 4])

    kern = mt.compile(mt.annotate(mean_of_rows, {"x": 2}, {"A": {"x": 1}}), target=target)
    for rows, columns in ((8, 16), (8, 10), (5, 7), (3, 1)):
        a = torch.randn(rows, columns)
        torch.testing.assert_close(kern(a), a.mean(1))


def test_calls_of_several_sizes_at_once():
    """A call keeps its sizes whatever other threads call meanwhile: here at the worst moment, between check and run."""
    kern = compiled(K_SPLIT)
    virtual = kern._virtual
    checked = virtual._checked

    def interrupted(given):
        virtual._checked = checked
        launch = checked(given)
        assert kern(torch.ones(32, 16), torch.ones(16, 16)).eq(16).all()
        return launch

    virtual._checked = interrupted
    assert kern(torch.ones(5, 6), torch.ones(6, 7)).eq(6).all()
