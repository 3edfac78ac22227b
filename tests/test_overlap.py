"""Overlap: the order of the steps of kernels in slabs, what stays in bulk, and what is said of it."""

import tilelang.language as T

import mesh_tensor as mt
from kernels.matmul import batched_matmul, matmul, split_k_matmul
from mesh_tensor.overlap import overlapped
from mesh_tensor.overlap_cost import GLOO, GLOO_BESIDE
from mesh_tensor.program import CollectiveStep, KernelStep, WaitStep, lower_to_program

from .runtime.programs import matmul_k_split

REDUCED = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
GATHERED = {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 1}}
SCATTERED = {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 1}}
BOTH = {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 1}, "C": {"y": 1}}
X2 = {"x": 2}


def small(m=64, n=32, k=32):
    return matmul(m, n, k, 16, 16, 16)


def program(func, mesh, layouts, slabs):
    """The program in (at most) so many slabs, or as it is decided by Rates."""
    return overlapped(lower_to_program(mt.annotate(func, mesh, layouts)), slabs)


def words(made):
    """The kernels, starts and waits, each with the slab that it is about."""
    found = []
    for step in made.steps:
        if isinstance(step, KernelStep):
            found.append(f"kernel {' '.join(step.args)}")
        elif isinstance(step, CollectiveStep):
            found.append(f"{'' if step.wait else 'start '}{step.kind} {step.dst}")
        elif isinstance(step, WaitStep):
            found.append(f"wait {step.collective.dst}")
    return found


def bulk_reason(func, mesh, layouts, slabs=2):
    """Why the only collective stays in bulk."""
    made = program(func, mesh, layouts, slabs)
    assert not any(isinstance(step, WaitStep) for step in made.steps)
    assert [step for step in made.steps if isinstance(step, CollectiveStep)]
    (note,) = made.overlap
    return note


# -- the order of steps ------------------------------------------------------------------------------------------------


def test_what_is_reduced_in_two_slabs():
    assert words(program(small(), X2, REDUCED, 2)) == [
        "kernel A[0:32] B C[0:32]",
        "start all_reduce C.1[0:32]",
        "kernel A[32:64] B C[32:64]",
        "start all_reduce C.1[32:64]",
        "wait C.1[0:32]",
        "wait C.1[32:64]",
    ]


def test_what_is_reduced_in_four_slabs():
    assert words(program(small(), X2, REDUCED, 4)) == [
        "kernel A[0:16] B C[0:16]",
        "start all_reduce C.1[0:16]",
        "kernel A[16:32] B C[16:32]",
        "start all_reduce C.1[16:32]",
        "kernel A[32:48] B C[32:48]",
        "wait C.1[0:16]",
        "start all_reduce C.1[32:48]",
        "kernel A[48:64] B C[48:64]",
        "wait C.1[16:32]",
        "start all_reduce C.1[48:64]",
        "wait C.1[32:48]",
        "wait C.1[48:64]",
    ]


def test_what_is_gathered():
    assert words(program(small(48), X2, GATHERED, 3)) == [
        "start all_gather A.1[0:16]",
        "start all_gather A.1[16:32]",
        "wait A.1[0:16]",
        "kernel A.1[0:16] B C[0:16]",
        "start all_gather A.1[32:48]",
        "wait A.1[16:32]",
        "kernel A.1[16:32] B C[16:32]",
        "wait A.1[32:48]",
        "kernel A.1[32:48] B C[32:48]",
    ]


def test_gathered_and_reduced_at_once():
    assert words(program(small(), {"x": 2, "y": 2}, BOTH, 2)) == [
        "start all_gather A.1[0:32]",
        "start all_gather A.1[32:64]",
        "wait A.1[0:32]",
        "kernel A.1[0:32] B C[0:32]",
        "start all_reduce C.1[0:32]",
        "wait A.1[32:64]",
        "kernel A.1[32:64] B C[32:64]",
        "start all_reduce C.1[32:64]",
        "wait C.1[0:32]",
        "wait C.1[32:64]",
    ]


def test_the_last_slab_takes_the_rest():
    made = program(small(75), X2, REDUCED, 3)
    assert [word for word in words(made) if "kernel" in word] == [
        "kernel A[0:32] B C[0:32]",
        "kernel A[32:48] B C[32:48]",
        "kernel A[48:75] B C[48:75]",
    ]


def test_slabs_of_a_dim_that_is_split_evenly_are_slabs_of_every_tile():
    made = program(small(), {"x": 2, "y": 2}, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}, 2)
    assert words(made)[0] == "kernel A[0:16] B C[0:16]"
    assert made.values["C[0:16]"].shape == (32, 32)
    assert made.values["C[0:16]"].tile_shape == (16, 32)


def test_slabs_after_leading_dims_of_one():
    func = batched_matmul(1, 64, 32, 32, 16, 16, 16)
    made = program(func, X2, {"A": {"x": 2}, "B": {"x": 1}, "C": {}}, 2)
    assert words(made)[:2] == ["kernel A[:, 0:32] B C[:, 0:32]", "start all_reduce C.1[:, 0:32]"]


def test_slabs_that_are_alike_have_one_kernel():
    made = program(small(), X2, REDUCED, 4)
    assert len({id(step.func) for step in made.steps if isinstance(step, KernelStep)}) == 1


def test_bytes_and_flops_stay():
    bulk = lower_to_program(mt.annotate(small(), X2, REDUCED))
    made = overlapped(bulk, 4)
    for kind, what in ((CollectiveStep, "bytes"), (KernelStep, "flops")):
        totals = [sum(getattr(s, what) for s in p.steps if isinstance(s, kind)) for p in (bulk, made)]
        assert totals[0] == totals[1] > 0


# -- what stays in bulk ------------------------------------------------------------------------------------------------


def test_too_few_blocks():
    assert "24 of m, in blocks of 16, are too few for slabs" in bulk_reason(small(24), X2, REDUCED)


def test_slabs_have_to_be_aligned():
    """A row of A has 5 elements of 4 bytes: only every 16th starts at a multiple of 64."""
    assert words(program(matmul(64, 32, 10, 4, 16, 5), X2, REDUCED, 8))[0] == "kernel A[0:16] B C[0:16]"


def test_a_scatter_along_the_rows():
    assert "it changes how dim 0, along which slabs would be, is split" in bulk_reason(
        small(), X2, {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 0}}
    )


def test_a_factor_that_is_split_unevenly():
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    assert "m is split unevenly over x" in bulk_reason(small(65), {"x": 2, "y": 2}, layouts)


def test_what_is_read_and_written():
    func = split_k_matmul(64, 32, 64, 2, 16, 16, 16)
    made = program(func, X2, {"A": {"x": 1}, "B": {"x": 0}, "C": {}}, 2)
    assert not any(isinstance(step, WaitStep) for step in made.steps)
    assert all("C is read and written" in note for note in made.overlap)


def test_slabs_that_do_not_lie_in_one_piece():
    func = matmul(64, 32, 32, 16, 16, 16, trans_A=True)
    reason = bulk_reason(func, X2, {"A": {"x": 0}, "B": {"x": 0}, "C": {}})
    assert "m is dim 1 of A: its slabs don't lie in one piece" in reason


def test_what_is_reduced_can_not_be_walked_in_slabs():
    reason = bulk_reason(small(), X2, {"A": {"x": 0}, "B": {"x": 1}, "C": {"x": 0}})
    assert "k is reduced (sum)" in reason


def test_an_output_that_every_slab_would_write():
    @T.prim_func
    def two_outputs(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64,), "float32"), C: T.Tensor((32,), "float32")):
        with T.Kernel(1, threads=128):
            total = T.alloc_fragment((1,), "float32")
            for i in T.serial(64):
                total[0] = 0.0
                for k in T.serial(32):
                    total[0] += A[i, k]
                B[i] = total[0]
            for k in T.serial(32):
                C[k] = 1.0

    reason = bulk_reason(two_outputs, X2, {"A": {"x": 1}})
    assert "m doesn't index C, which every slab would write" in reason


def test_one_slab_is_bulk():
    assert "overlap=1" in bulk_reason(small(), X2, REDUCED, 1)


def test_a_program_that_was_written_out_stays():
    made = matmul_k_split(32, 32, 32)
    assert overlapped(made, 2) is made


def test_slabs_are_not_split_again():
    made = program(small(), X2, REDUCED, 2)
    assert overlapped(made, 4) is made


# -- what is predicted to pay ------------------------------------------------------------------------------------------


def test_with_a_core_per_rank_everything_is_in_bulk():
    made = program(matmul(2048, 2048, 2048), X2, REDUCED, GLOO)
    assert words(made) == ["kernel A B C", "all_reduce C.1"]
    (note,) = made.overlap
    assert note.startswith("all_reduce of C over x: in bulk: predicted ")
    assert note.endswith(f"({GLOO.name})")


def test_with_cores_to_spare_what_pays_is_in_slabs():
    made = program(matmul(2048, 2048, 256), X2, REDUCED, GLOO_BESIDE)
    kernels = [step for step in made.steps if isinstance(step, KernelStep)]
    assert len(kernels) in (2, 4, 8)
    (note,) = made.overlap
    assert f"beside kernel matmul_kernel in {len(kernels)} slabs of {2048 // len(kernels)} of m: predicted " in note


def test_explain_says_what_was_decided():
    kernels = {
        overlap: mt.compile(mt.annotate(small(), X2, REDUCED), target="interpret", overlap=overlap)
        for overlap in ("auto", "off", 2)
    }
    assert "overlap\n  auto: in bulk on a virtual mesh" in kernels["auto"].explain()
    assert "overlap\n  off: everything in bulk" in kernels["off"].explain()
    text = kernels[2].explain()
    assert "overlap\n  all_reduce of C over x: beside kernel matmul_kernel in 2 slabs of 32 of m: overlap=2" in text
    assert "start all_reduce(sum)" in text
    assert "wait all_reduce" in text
    alone = mt.compile(mt.annotate(small(), X2, {"A": {"x": 0}, "C": {"x": 0}}), target="interpret")
    assert "overlap" not in alone.explain()
