"""Where manual computations are in a module, over which axes, and what their collectives are."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise

from tvm import relax

from mesh_tensor.annotations.comm import PREFIX, Comm, comm_of
from mesh_tensor.annotations.manual import axes_of_manual, is_manual
from mesh_tensor.annotations.names import bindings
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import op_name, plain
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE


@dataclass(frozen=True)
class Region:
    """Inside of a manual computation: its `axes`, and those of all around it with them."""

    axes: Mesh
    manual: frozenset[str]

    @staticmethod
    def inside(outer: Region | None, axes: Mesh, mesh: Mesh, where: str) -> Region:
        """That of a manual computation over `axes`.

        Raises:
            MeshTensorError: they are no axes of the mesh, or manual already.
        """
        problems = wrong_axes(axes, mesh)
        around = outer.manual if outer is not None else frozenset()
        problems += [f"axis {axis!r} is manual already, around it" for axis in axes if axis in around]
        if not problems and mesh.in_order(axes) != axes.axis_names:
            problems.append(f"the axes are {listing(axes.axis_names)}, but {listing(mesh.in_order(axes))} in the mesh")
        if problems:
            refuse(
                problems,
                where=f"{where}, a manual computation",
                why="its axes are those of the mesh that it is distributed over; searches, which choose one, take none",
                fix=f"use axes of {mesh}, each once",
            )
        return Region(axes, around | {*axes})


def manual_mesh(functions: Iterable[relax.Function]) -> Mesh:
    """All manual axes of functions, in an order that is theirs everywhere; one of size 1 where there are none.

    Raises:
        MeshTensorError: an axis has several sizes, or there is no such order.
    """
    sizes: dict[str, set[int]] = {}
    order: TopologicalSorter[str] = TopologicalSorter()
    for func in functions:
        for axes in filter(None, [axes_in(binding.value) for binding in bindings(func)]):
            for axis, size in axes.items():
                sizes.setdefault(axis, set()).add(size)
                order.add(axis)
            for before, after in pairwise(axes):
                order.add(after, before)
    problems = [
        f"axis {axis!r} has {listing(sorted(found))} devices" for axis, found in sizes.items() if len(found) > 1
    ]
    try:
        names = list(order.static_order())
    except CycleError as error:
        problems.append(f"axes are in several orders: {listing(list(dict.fromkeys(error.args[1])))}")
    if problems:
        refuse(problems, where="manual computations of one module", fix="use axes of one mesh")
    return Mesh({name: min(sizes[name]) for name in names} or {"none": 1})


def axes_in(value: relax.Expr) -> dict[str, int]:
    """The manual axes that a binding's value states, with their sizes."""
    if not isinstance(value, relax.Call):
        return {}
    if is_manual(value):
        return axes_of_manual(value)
    if not is_edge(value):
        return {}
    names = str(value.args[-1].value).split(",")
    tensor = value.args[1] if _name(value) == PER_DEVICE else value
    return dict(zip(names, plain(tensor.struct_info.shape), strict=False))


def is_edge(call: relax.Call) -> bool:
    """Whether a call leads into what devices have of their own, or out of it."""
    return _name(call) in (PER_DEVICE, ALL_DEVICES)


def leaves_devices(call: relax.Call) -> bool:
    """Whether a call puts what devices have of their own along dims."""
    return _name(call) == ALL_DEVICES


def is_collective(call: relax.Call) -> bool:
    """Whether a call is a manual computation, a collective of one, or what gradients write for them."""
    name = _name(call)
    return name.startswith((PREFIX, "ccl.")) or is_edge(call) or is_manual(call)


def comm_in(region: Region | None, call: relax.Call, mesh: Mesh, where: str) -> Comm:
    """The collective that a call is.

    Raises:
        MeshTensorError: it stands outside of a manual computation, or goes over devices that are no group of it.
    """
    name = _name(call)
    if region is None:
        refuse(
            f"R.{name} stands outside of a manual computation",
            where=where,
            why="elsewhere tensors are whole, and collectives are found from their layouts",
            fix="put it into a function that mt.manual_computation calls",
        )
    comm = comm_of(name, call, region.axes, len(region.manual) < len(mesh))
    if comm is None:
        refuse(f"R.{name} is no collective of a manual computation", where=where, fix="use mt.comm")
    problems = wrong_axes(comm.axes, mesh)
    problems += [f"axis {axis!r} is not manual here" for axis in comm.axes if axis not in region.manual]
    if problems:
        refuse(problems, where=f"{where}, {name}", fix=f"use manual axes: {listing(mesh.in_order(region.manual))}")
    return comm


def check_types(what: str, found: Sequence[TensorType], wanted: Sequence[TensorType]) -> None:
    """Refuse tensors of other types than was said."""
    if list(found) != list(wanted):
        texts = [", ".join(f"{list(one.shape)} {one.dtype}" for one in types) for types in (wanted, found)]
        refuse(f"{what} {texts[0]}, but devices have {texts[1]}", fix="state the shapes of tiles")


def wrong_axes(axes: Mesh, mesh: Mesh) -> list[str]:
    """Which axes are none of the mesh, or have other sizes there."""
    return [
        f"axis {axis!r} of {size} devices"
        + (f" has {mesh.size(axis)} in {mesh}" if axis in mesh else f" is none of {mesh}")
        for axis, size in axes.shape.items()
        if axis not in mesh or mesh.size(axis) != size
    ]


def _name(call: relax.Call) -> str:
    name = op_name(call.op)
    if name.startswith("call_") and isinstance(call.args[0], relax.ExternFunc):  # most calls are of operators
        return str(call.args[0].global_symbol)
    return name
