"""The way out of what is wrong in a call of `annotate`, in the words of that call."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tvm import tirx

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh


def how_to_annotate(mesh: Mesh, shardings: Any, buffers: Mapping[str, tirx.Buffer]) -> str:
    """What the shardings look like, for a buffer of the kernel and an axis of the mesh."""
    stated = shardings if isinstance(shardings, Mapping) else {}
    name, buffer = next(((n, b) for n, b in buffers.items() if n in stated), next(iter(buffers.items()), ("A", None)))
    first = mesh.axis_names[0]
    dim = 0 if buffer is None or len(buffer.shape) else None
    listed = ", ".join(["mt.Shard(0)" if dim == 0 else "mt.Replicate()", *["mt.Replicate()"] * (len(mesh) - 1)])
    dims = f"0..{len(buffer.shape) - 1}" if buffer is not None and len(buffer.shape) else "none"
    return (
        f'write {{"{name}": {{"{first}": {dim}}}}}: per buffer, the dim that each axis splits (axes: '
        f"{listing(mesh.axis_names)}; dims of {name!r}: {dims}), an axis that is left out replicates; or one placement "
        f'per axis, {{"{name}": [{listed}]}}; of partial values, {{"{name}": {{"partial": {{"{mesh.axis_names[-1]}": '
        f'"sum"}}}}}}'
    )


def check_order_of_arguments(mesh: Any, shardings: Any) -> None:
    """Refuse a mesh in the place of the shardings."""
    is_sizes = isinstance(shardings, Mapping) and shardings and all(type(size) is int for size in shardings.values())
    is_mesh = isinstance(mesh, Mesh) or (isinstance(mesh, Mapping) and any(type(s) is int for s in mesh.values()))
    if isinstance(shardings, Mesh) or (is_sizes and not is_mesh and isinstance(mesh, Mapping)):
        refuse(
            f"the mesh is {shown(mesh)} and the shardings are {shown(shardings)}: they are the other way round",
            fix='write annotate(kernel, {"x": 2}, {"A": {"x": 0}}): first the mesh, then the shardings',
        )


def why_not_parameter(func: tirx.PrimFunc, name: Any) -> str:
    """What is wrong with a name that is no buffer's among the kernel's parameters."""
    buffers = [str(buffer.name) for param in func.params if (buffer := func.buffer_map.get(param)) is not None]
    known = f"(parameters: {listing(buffers)})"
    if isinstance(name, tirx.Buffer):
        is_there = str(name.name) in buffers
        wanted = f"; give its name, {str(name.name)!r}" if is_there else ""
        return f"a buffer ({str(name.name)!r}) where a parameter's name is expected{wanted} {known}"
    if any(str(param.name) == name for param in func.params if param not in func.buffer_map):
        return f"parameter {name!r} is a number, and every device has it {known}"
    return f"buffer {shown(name)} is no parameter of the kernel {known}{did_you_mean(name, buffers)}"
