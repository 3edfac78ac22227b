"""Faults on ranks: every rank ends, with a message that says who is to blame and where."""

import pytest

from . import fault_bodies as bodies
from .launcher import run


def test_no_process_group():
    (text,) = run(bodies.no_process_group, 1, group=False)
    assert "there is no process group" in text
    assert "torchrun" in text


def test_mesh_that_does_not_fit_the_world():
    for text in run(bodies.mesh_larger_than_the_world, 2):
        assert "the mesh has 4 devices, but there are 2 ranks" in text
        assert "start 4 ranks" in text


def test_device_mesh_that_does_not_fit_the_kernel():
    for names, sizes, kind in run(bodies.other_device_meshes, 2):
        assert "the DeviceMesh has axes 'tp', the kernel's mesh 'x'" in names
        assert "the DeviceMesh has axes 'x', 'y', the kernel's mesh 'x'" in sizes
        assert "the DeviceMesh has sizes (2, 1), the kernel's mesh (2,)" in sizes
        assert "device_mesh is a str" in kind


def test_rank_outside_the_device_mesh():
    text = run(bodies.not_a_member, 3)[2]
    assert "rank 2 has no place in the DeviceMesh" in text
    assert "its ranks are [0, 1]" in text


def test_wrong_backend():
    ((on_gpu, on_cpu),) = run(bodies.wrong_backend, 1)
    assert "the kernel's tensors are on 'cuda', but the process group has gloo for it" in on_gpu
    assert "init_process_group('cuda:nccl')" in on_gpu
    assert "the kernel's tensors are on 'cpu', but the process group has cuda:nccl" in on_cpu


def test_different_kernels():
    first, second = run(bodies.different_kernels, 2)
    assert (
        "shapes differ between ranks: rank 0: A (4, 8), B (8, 4), C_part (4, 4), C (4, 4); rank 1: A (8,), B (8,)"
        in first
    )
    assert first.splitlines()[:4] == second.splitlines()[:4]


def test_different_shapes():
    texts = run(bodies.different_shapes, 4)
    for text in texts:
        assert "shapes differ between ranks: ranks 0, 1, 3: A (4, 8), B (8, 4)" in text
        assert "rank 2: A (4, 12), B (12, 4)" in text
        assert "compile the same kernel on every rank" in text
    assert len(set(texts)) == 1


def test_arguments_refused_on_one_rank():
    first, second = run(bodies.refused_on_one_rank, 2)
    reason = "parameter 'A': (4, 4) torch.float64 on cpu, but expected (4, 4) torch.float32 on cpu"
    assert second.startswith(reason)
    assert f"rank 1 refused the call: {reason}" in first


def test_arguments_refused_on_one_rank_later():
    first, second = run(bodies.refused_on_one_rank_later, 2)
    reason = "parameter 'A': (4, 4) torch.float64 on cpu, but expected (4, 4) torch.float32 on cpu"
    assert second.startswith(reason)
    assert f"rank 1 raised MeshTensorError: {reason}" in first


def test_raises_before_any_collective():
    assert run(bodies.raises_before_any_collective, 2) == ["bad numbers", "bad numbers"]


def test_raises_in_the_middle():
    first, second = run(bodies.raises_in_the_middle, 2)
    assert second == "bad numbers"
    assert "rank 1 raised ArithmeticError: bad numbers (in step 2 of 3, kernel kernel_0)" in first
    assert (
        "step 3 of 3, all_reduce(C_part, sum) over x, of kernel 'matmul' on Mesh({\"x\": 2}); seen on rank 0" in first
    )


def test_raises_after_a_refusal():
    first, second = run(bodies.raises_after_a_refusal, 2)
    assert second == "bad numbers"
    assert "rank 1 raised ArithmeticError: bad numbers (in step 2 of 3, kernel kernel_0)" in first


def test_dies():
    texts = run(bodies.dies, 4)
    assert texts.pop(2) is None
    for text in texts:
        assert "rank 2 has ended, hangs, or is not in this collective" in text
        assert "all_reduce(C_part, sum) over x" in text


def test_hangs():
    first, second = run(bodies.hangs, 2, timeout=3)
    assert second is None
    assert "rank 1 has ended, hangs, or is not in this collective" in first
    assert "Timed out" in first


@pytest.mark.parametrize(
    ("body", "doing"),
    [
        (bodies.dies_before_the_first_call, "the agreement on what to run"),
        (bodies.dies_in_a_change_of_layout, "a change of layout, 'S[0]' -> 'S[1]'"),
    ],
)
def test_dies_elsewhere(body, doing):
    first, second = run(body, 2)
    assert second is None
    assert "rank 1 has ended, hangs, or is not in this collective" in first
    assert doing in first
