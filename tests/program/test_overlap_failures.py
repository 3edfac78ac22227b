"""Values of `overlap` that mean nothing, and what a Program with overlap may not be."""

from dataclasses import replace

import pytest

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.lowering.verify import VerificationError
from mesh_tensor.program.steps import CollectiveStep, KernelStep
from mesh_tensor.program.verify import verify_program
from tests.refusals import refusal

from .test_overlap import GATHERED, REDUCED, X2, program, small


@pytest.mark.parametrize("overlap", ["on", 0, -1, 65, 2.0, True, None, [2]])
def test_unknown_overlap(overlap):
    func = mt.annotate(matmul(64, 32, 32), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}})
    message = refusal(mt.compile, func, target="interpret", overlap=overlap)
    text = message
    assert f"overlap={overlap!r} is unknown" in text
    assert "why: it is 'auto', 'off', or into how many slabs (1 .. 64) a kernel beside a collective is split" in text
    assert "fix: leave it out" in text


def broken(change, layouts=REDUCED):
    """What verify_program says once `change` has changed the list of steps."""
    made = program(small(), X2, layouts, 2)
    steps = list(made.steps)
    change(steps)
    with pytest.raises(VerificationError) as error:
        verify_program(mt.Program(made.name, made.mesh, made.parameters, made.values, tuple(steps)))
    return str(error.value)


def test_a_wait_that_is_missing():
    assert "C.1[32:64] is never waited for" in broken(lambda steps: steps.pop())


def test_a_wait_too_many():
    assert "nothing that makes C.1[32:64] was started" in broken(lambda steps: steps.append(steps[-1]))


def test_a_kernel_before_its_wait():
    def swap(steps):
        position = max(i for i, step in enumerate(steps) if isinstance(step, KernelStep))
        steps.insert(position - 1, steps.pop(position))

    assert "A.1[32:64] is used before all_gather has made A.1[32:64]" in broken(swap, GATHERED)


def test_a_kernel_that_writes_what_is_sent():
    def repeat(steps):
        kernels = [i for i, step in enumerate(steps) if isinstance(step, KernelStep)]
        steps[kernels[1]] = steps[kernels[0]]

    assert "C[0:32] is used before all_reduce has made C.1[0:32]" in broken(repeat)


def test_a_collective_into_what_is_sent():
    def gather_again(steps):
        first = next(step for step in steps if isinstance(step, CollectiveStep))
        steps.insert(steps.index(first) + 1, replace(first, src=first.dst, dst=first.src, wait=True))

    assert "A[0:32] is written while all_gather reads A[0:32]" in broken(gather_again, GATHERED)
