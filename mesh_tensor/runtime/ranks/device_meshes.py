"""DeviceMeshes: which one a mesh has on all ranks, whether one fits a mesh, and whether its groups move tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def check_backend(device_type: str, config: str, where: str) -> None:
    """The process group moves tensors of this device type; `config` is torch's, as in `cpu:gloo,cuda:nccl`."""
    backend = backends(config).get(device_type)
    if backend == "fake":
        refuse(
            "the process group is a fake one, which moves nothing", where=where, fix="use a virtual mesh without ranks"
        )
    if backend is None or (device_type == "cuda" and backend == "gloo"):
        backend_words = f"has {backend} for it" if backend else f"has {config}"
        right = "nccl" if device_type == "cuda" else "gloo"
        refuse(
            f"the kernel's tensors are on {device_type!r}, but the process group {backend_words}",
            where=where,
            fix=f"init_process_group({f'{device_type}:{right}'!r}), or compile the kernel for another target",
        )


def backends(config: str) -> dict[str, str]:
    """The backend of each device type."""
    return dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)


def named(device_mesh: DeviceMesh) -> str:
    """A DeviceMesh with all that tells it from another."""
    return f"{device_mesh} of ranks {device_mesh.mesh.tolist()}"


def check_fit(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """A DeviceMesh has the axes of a mesh."""
    names, sizes = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    problems = []
    if names is not None and tuple(names) != mesh.axis_names:
        problems.append(f"the DeviceMesh has axes {listing(names)}, the kernel's mesh {listing(mesh.axis_names)}")
    if sizes != tuple(mesh.shape.values()):
        problems.append(f"the DeviceMesh has sizes {sizes}, the kernel's mesh {tuple(mesh.shape.values())}")
    if problems:
        axes = ", ".join(mesh.axis_names)
        fix = f"use a DeviceMesh, or a part of one, with the axes {axes}, or annotate for the axes of this one"
        refuse(problems, where=str(mesh), fix=fix)


def device_mesh_of(mesh: Mesh, device_type: str) -> DeviceMesh:
    """The DeviceMesh of all ranks, in order."""
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    world = dist.get_world_size()
    if world != mesh.num_devices:
        refuse(
            f"the mesh has {mesh.num_devices} devices, but there are {world} ranks",
            where=str(mesh),
            fix=f"start {mesh.num_devices} ranks, use a mesh of {world} devices, or pass the DeviceMesh to run on",
        )
    sizes = tuple(mesh.shape.values())
    if world in sizes:
        return init_device_mesh(device_type, sizes, mesh_dim_names=mesh.axis_names)
    # init_device_mesh gives the groups of several axes torch's default timeout, half an hour
    timeout, groups = timeout_of(world_group()), []
    for axis in mesh:
        sides = sorted({mesh.group_of(rank, [axis]) for rank in range(world)})
        groups.append(dist.new_subgroups_by_enumeration([list(side) for side in sides], timeout=timeout)[0])
    places = torch.arange(world).view(sizes)
    return DeviceMesh.from_group(groups, device_type, places, mesh_dim_names=mesh.axis_names)


def world_group() -> dist.ProcessGroup:
    """The user's process group."""
    world = dist.group.WORLD
    assert world is not None
    return world


def timeout_of(process_group: Any) -> Any:
    """What a process group waits for at the most; None if it doesn't say."""
    for device_type in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device_type)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
