"""Programs on the virtual mesh: steps, storages, coordinates, scalars and the bytes that a device holds."""

from dataclasses import replace

import pytest
import torch

from mesh_tensor import Mesh, Sharding
from mesh_tensor.program.steps import AllocStep, FreeStep, KernelStep, WaitStep
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.virtual.launch import Launch
from mesh_tensor.runtime.virtual.mesh_tensor import distribute
from mesh_tensor.runtime.virtual.virtual_mesh import VirtualMesh
from mesh_tensor.targets.kernels import Target, find_target
from tests.runtime.programs import (
    accumulate_kernel,
    add_one_kernel,
    add_one_program,
    axpy_kernel,
    collective,
    kernel_of,
    local_axpy_kernel,
    matmul_k_split,
    matmul_kernel,
    program,
    value,
)

TARGETS = ["interpret", "c"]


def step(func, args, writes, axes=(), scalars=()):
    return KernelStep("kernel", func, tuple(args), tuple(axes), tuple(writes), 0, tuple(scalars))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("devices", [1, 2, 4])
def test_matmul_with_k_split(target, devices):
    kern = kernel_of(matmul_kernel(32, 48, 64), matmul_k_split(32, 48, 64, devices), target)
    a, b = torch.randn(32, 64), torch.randn(64, 48)
    torch.testing.assert_close(kern(a, b), a @ b)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(("size", "devices"), [(8, 2), (7, 2), (7, 4), (2, 4), (300, 3)])
def test_uneven_tiles(target, size, devices):
    kern = kernel_of(add_one_kernel(size), add_one_program(size, devices), target)
    a = torch.randn(size)
    assert torch.equal(kern(a), a + 1)


def test_poisoned_padding_never_shows():
    kern = kernel_of(add_one_kernel(7), add_one_program(7, 4), poison=True)
    a = torch.randn(7)
    assert torch.equal(kern(a), a + 1)
    result = kern(distribute(a, kern.mesh, {"x": 0}))
    assert torch.equal(result.full(), a + 1)


def test_poisoned_tiles_lie_in_memory_as_before():
    """Or products of matrices take other ways, and differ in the last bit from those without poison."""
    layout = layout_of((5, 4), torch.float32, Sharding.make(Mesh({"x": 2}), 2, {"x": 0}))
    tile = torch.randn(4, 3).t()
    poisoned = layout.poisoned(tile, 1)
    assert poisoned.stride() == tile.stride()
    assert torch.equal(poisoned[:2], tile[:2])
    assert poisoned[2].isnan().all()
    for shared in (torch.ones(()).expand(3, 4), torch.ones(6).unfold(0, 4, 1)):
        poisoned = layout.poisoned(shared, 1)
        assert torch.equal(poisoned[:2], torch.ones(2, 4))
        assert poisoned[2].isnan().all()


def test_memory_that_nothing_writes_is_poisoned():
    mesh = Mesh({"x": 2})
    values = [value("A", (4,), mesh, {"x": 0}), value("B", (4,), mesh, {"x": 0}), value("W", (4,), mesh, {"x": 0})]
    add = add_one_kernel(2)
    steps = [AllocStep("W"), AllocStep("B"), step(add, ["W", "B"], ["B"])]
    kern = kernel_of(add_one_kernel(4), program(mesh, values, steps, ["A", ">B"]), poison=True)
    assert kern(torch.zeros(4)).isnan().all()


@pytest.mark.parametrize("target", TARGETS)
def test_scalars_and_coordinates_follow_the_tensors(target):
    mesh = Mesh({"x": 2, "y": 2})
    values = [value("A", (8,), mesh, {"x": 0, "y": 0}), value("B", (8,), mesh, {"x": 0, "y": 0})]
    steps = [AllocStep("B"), step(local_axpy_kernel(2), ["A", "B"], ["B"], ["x", "y"], ["alpha", "n"])]
    kern = kernel_of(axpy_kernel(8), program(mesh, values, steps, ["A", ">B"]), target)
    a = torch.randn(8)
    places = torch.tensor([0.0, 0, 10, 10, 100, 100, 110, 110])
    torch.testing.assert_close(kern(a, 2.5, 3), 2.5 * a + 3 + places)
    out = torch.zeros(8)
    kern(a, 2.0, out, 1)
    torch.testing.assert_close(out, 2 * a + 1 + places)


def chain(kinds):
    """A + 1, then collectives by (kind, layout, partial, details), then + 1 again."""
    mesh = Mesh({"x": 2, "y": 2})
    values = [value("A", (8,), mesh, {"x": 0}), value("V0", (8,), mesh, {"x": 0})]
    steps = [AllocStep("V0"), step(add_one_kernel(4), ["A", "V0"], ["V0"])]
    for index, (kind, axes, layout, partial, details) in enumerate(kinds):
        values.append(value(f"V{index + 1}", (8,), mesh, layout, partial))
        steps += [
            AllocStep(f"V{index + 1}"),
            collective(kind, f"V{index}", f"V{index + 1}", axes, **details),
            FreeStep(f"V{index}"),
        ]
    values.append(value("B", (8,), mesh, values[-1].sharding.as_dict()))
    last = f"V{len(kinds)}"
    steps += [AllocStep("B"), step(add_one_kernel(values[-1].tile_shape[0]), [last, "B"], ["B"]), FreeStep(last)]
    return program(mesh, values, steps, ["A", ">B"])


CHAINS = {
    "gather": [("all_gather", "x", {}, None, {"src_dim": 0})],
    "slice": [("slice", "y", {"x": 0, "y": 0}, None, {"dst_dim": 0})],
    "slice_and_gather": [
        ("slice", "y", {"x": 0, "y": 0}, None, {"dst_dim": 0}),
        ("all_gather", "xy", {}, None, {"src_dim": 0}),
    ],
    "partial_and_reduce": [
        ("to_partial", "y", {"x": 0}, {"y": "sum"}, {"op": "sum"}),
        ("all_reduce", "y", {"x": 0}, None, {"op": "sum"}),
    ],
    "partial_and_scatter": [
        ("to_partial", "y", {"x": 0}, {"y": "max"}, {"op": "max"}),
        ("reduce_scatter", "y", {"x": 0, "y": 0}, None, {"op": "max", "dst_dim": 0}),
    ],
}


@pytest.mark.parametrize("kinds", CHAINS.values(), ids=CHAINS)
def test_collectives_between_kernels(kinds):
    kern = kernel_of(add_one_kernel(8), chain(kinds), poison=True)
    a = torch.arange(8.0)
    assert torch.equal(kern(a), a + 2)


def test_a_shared_tile_is_not_written_by_several_devices():
    """What an all-reduce leaves may be one memory for all devices, unless a later step adds to it in place."""
    mesh = Mesh({"x": 2})
    values = [
        value("A", (4,), mesh, {}),
        value("P", (4,), mesh, {}, {"x": "sum"}, "B"),
        value("B", (4,), mesh, {}),
    ]
    steps = [
        AllocStep("B"),
        step(add_one_kernel(4), ["A", "P"], ["P"]),
        collective("all_reduce", "P", "B", "x", "sum"),
        step(accumulate_kernel(4), ["A", "B"], ["B"]),
    ]
    for target in TARGETS:
        kern = kernel_of(add_one_kernel(4), program(mesh, values, steps, ["A", ">B"]), target)
        a = torch.arange(4.0)
        assert torch.equal(kern(a), 2 * (a + 1) + a)


def test_bytes_per_device_are_those_of_tiles_and_workspaces():
    """A: 4 floats, V0: 4, then gathered V1: 8, V0 freed, then B: 8."""
    kern = kernel_of(add_one_kernel(8), chain(CHAINS["gather"]))
    assert kern.peak_bytes == 0
    kern(torch.zeros(8))
    assert kern.peak_bytes == 4 * (4 + 8 + 4 + 8)
    tiles = kernel_of(add_one_kernel(64), add_one_program(64, 4))
    tiles(torch.zeros(64))
    assert tiles.peak_bytes == 4 * (16 + 16)


def test_empty_tensors_run_no_kernel():
    mesh = Mesh({"x": 2})
    values = [value("A", (0,), mesh, {"x": 0}), value("B", (0,), mesh, {"x": 0})]
    steps = [AllocStep("B"), step(add_one_kernel(1), ["A", "B"], ["B"])]
    kern = kernel_of(add_one_kernel(0), program(mesh, values, steps, ["A", ">B"]), "c")
    assert kern(torch.empty(0)).shape == (0,)


def test_values_of_one_storage_have_one_tile_shape():
    mesh = Mesh({"x": 2})
    values = [value("A", (4,), mesh, {"x": 0}), value("B", (4,), mesh, {}, storage="A")]
    with pytest.raises(AssertionError, match="A and B can't share storage 'A'"):
        VirtualMesh(program(mesh, values, [], ["A"]), find_target("interpret"))


def test_an_error_of_one_device_reaches_the_caller():
    def fail_on_device_1(tile, out, alpha, n, x, y):
        if (x, y) == (0, 1):
            raise RuntimeError("device 1 failed")
        out.copy_(tile)

    mesh = Mesh({"x": 2, "y": 2})
    values = [value("A", (8,), mesh, {"x": 0, "y": 0}), value("B", (8,), mesh, {"x": 0, "y": 0})]
    steps = [AllocStep("B"), step(local_axpy_kernel(2), ["A", "B"], ["B"], ["x", "y"], ["alpha", "n"])]
    target = Target("failing", "cpu", True, lambda func, poison: fail_on_device_1)
    launch = Launch(program(mesh, values, steps, ["A", ">B"]), target)
    with pytest.raises(RuntimeError, match="device 1 failed"):
        launch({"A": torch.zeros(8), "B": None}, {"alpha": 1.0, "n": 1})


@pytest.mark.parametrize("early", [False, True])
def test_what_is_used_before_its_wait_is_poison(early):
    mesh = Mesh({"x": 2})
    values = [value("A", (4,), mesh, {"x": 0}), value("W", (4,), mesh, {}), value("B", (4,), mesh, {})]
    gather = replace(collective("all_gather", "A", "W", "x", src_dim=0), wait=False)
    use, wait = step(add_one_kernel(4), ["W", "B"], ["B"]), WaitStep(gather)
    steps = [AllocStep("W"), AllocStep("B"), gather, *((use, wait) if early else (wait, use)), FreeStep("W")]
    kern = kernel_of(add_one_kernel(4), program(mesh, values, steps, ["A", ">B"]), poison=True)
    a = torch.randn(4)
    assert kern(a).isnan().all() if early else torch.equal(kern(a), a + 1)
