"""Overlap: what stays in bulk, what is predicted to pay, and what is said of it."""

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.base.machine_presets import CPU, CPU_TO_SPARE
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.overlap import overlapped
from mesh_tensor.program.steps import CollectiveStep, KernelStep, WaitStep
from tests.runtime.programs import matmul_k_split

REDUCED = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}
GATHERED = {"A": {"x": 1}, "B": {"x": 1}, "C": {"x": 1}}
SCATTERED = {"A": {"x": 1}, "B": {"x": 0}, "C": {"x": 1}}
BOTH = {"A": {"x": 1, "y": 1}, "B": {"x": 0, "y": 1}, "C": {"y": 1}}
X2 = {"x": 2}


def small(m=64, n=32, k=32):
    return matmul(m, n, k, 16, 16, 16)


def program(func, mesh, layouts, slabs):
    """The program in (at most) so many slabs, or as it is decided for a Machine."""
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


# -- what stays in bulk ------------------------------------------------------------------------------------------------


def test_too_few_blocks():
    assert "24 of m, in blocks of 16, are too few for slabs" in bulk_reason(small(24), X2, REDUCED)


def test_slabs_have_to_be_aligned():
    """A row of A has 5 elements of 4 bytes: only every 16th starts at a multiple of 64."""
    assert words(program(matmul(64, 32, 10, 4, 16, 5), X2, REDUCED, 8))[0] == "kernel A[0:16] B C[0:16]"


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
    made = program(matmul(2048, 2048, 2048), X2, REDUCED, CPU)
    assert words(made) == ["kernel A B C", "all_reduce C.1"]
    (note,) = made.overlap
    assert note.startswith("all_reduce(C, sum) over x: in bulk: predicted ")
    assert note.endswith(f"({CPU.name})")


def test_with_cores_to_spare_what_pays_is_in_slabs():
    made = program(matmul(2048, 2048, 256), X2, REDUCED, CPU_TO_SPARE)
    kernels = [step for step in made.steps if isinstance(step, KernelStep)]
    assert len(kernels) in (2, 4, 8)
    (note,) = made.overlap
    assert f"beside kernel matmul_kernel in {len(kernels)} slabs of {2048 // len(kernels)} of m: predicted " in note


def test_explain_says_what_was_decided():
    kernels = {
        overlap: mt.compile(mt.annotate(small(), X2, REDUCED), target="interpret", overlap=overlap)
        for overlap in ("auto", "off", 2)
    }
    assert "overlap\n  auto: no slabs on a virtual mesh" in kernels["auto"].explain()
    assert "overlap\n  off: everything in bulk" in kernels["off"].explain()
    text = kernels[2].explain()
    assert "overlap\n  all_reduce(C, sum) over x: beside kernel matmul_kernel in 2 slabs of 32 of m: overlap=2" in text
    assert "start all_reduce(sum)" in text
    assert "wait all_reduce" in text
    alone = mt.compile(mt.annotate(small(), X2, {"A": {"x": 0}, "C": {"x": 0}}), target="interpret")
    assert "overlap" not in alone.explain()
