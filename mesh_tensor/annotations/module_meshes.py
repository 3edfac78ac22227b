"""Meshes of a module: TVM's device meshes in its global infos; their axes' names in an attribute."""

from __future__ import annotations

from typing import Any

from tvm import ir
from tvm.relax.distributed import DeviceMesh

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from .annotation import from_attr

AXES_ATTR = "mesh_tensor_axes"
_KEY = "mesh"


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """TVM's mesh of that shape, on the devices 0, 1, ..."""
    return DeviceMesh(tuple(mesh.shape.values()), ir.Range(0, mesh.num_devices))


def same(a: DeviceMesh, b: DeviceMesh) -> bool:
    """The same shape and devices. (TVM's own `==` of meshes doesn't end.)"""
    return ir.structural_equal(a, b)


def device_meshes(mod: ir.IRModule) -> list[DeviceMesh]:
    """The meshes in the module's global infos, in order."""
    return [info for info in mod.global_infos.get(_KEY, []) if isinstance(info, DeviceMesh)]


def named_mesh(mod: ir.IRModule, device: DeviceMesh) -> Mesh:
    """The Mesh that a module means by a device mesh: its axes are called "axis0", "axis1", ... where the module has no
    names for them. Rank r of the Mesh is the r-th device of the device mesh."""
    sizes = tuple(int(size) for size in device.shape)
    names = given_names(mod, device) or tuple(f"axis{index}" for index in range(len(sizes)))
    return Mesh(dict(zip(names, sizes, strict=True)))


def given_names(mod: ir.IRModule, device: DeviceMesh) -> tuple[str, ...] | None:
    """The axis names that the module gives to a device mesh, if it does."""
    for other, names in zip(device_meshes(mod), _names(mod), strict=False):
        if names and same(other, device):
            if len(names) != len(device.shape):
                refuse(
                    f"the attribute `{AXES_ATTR}` names the axes {names} of a mesh of shape {tuple(device.shape)}",
                    fix="give one name per axis, or an empty list",
                )
            return names
    return None


def fits(mod: ir.IRModule, device: DeviceMesh, mesh: Mesh) -> bool:
    """Whether `mesh` has the sizes of a device mesh, and its axes' names where the module gives it some."""
    sizes = tuple(int(size) for size in device.shape)
    return sizes == tuple(mesh.shape.values()) and given_names(mod, device) in (None, mesh.axis_names)


def with_mesh(mod: ir.IRModule, device: DeviceMesh, mesh: Mesh) -> ir.IRModule:
    """The module with a device mesh among its meshes, its axes named as in `mesh`."""
    meshes: list[Any] = device_meshes(mod)
    if not any(same(device, other) for other in meshes):
        meshes.append(device)
    names = [mesh.axis_names if same(device, other) else given_names(mod, other) or () for other in meshes]
    mod = mod.clone()
    mod.update_global_info(_KEY, meshes)
    return mod.with_attr(AXES_ATTR, [list(axes) for axes in names])


def _names(mod: ir.IRModule) -> tuple[tuple[str, ...], ...]:
    attr = mod.attrs.get(AXES_ATTR) if mod.attrs is not None else None
    return from_attr(attr) if attr is not None else ()
