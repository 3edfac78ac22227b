"""Where manual computations are in a module, over which axes, what their collectives are, and which nodes they become;
and along which axes every device has a value of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from typing import TYPE_CHECKING

from tvm import relax

from mesh_tensor.annotations.comm import PREFIX, Comm, comm_of
from mesh_tensor.annotations.manual import Manual, axes_of_manual, is_manual, manual_text
from mesh_tensor.annotations.names import bindings
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import op_name, plain, tensor_infos, tensor_types
from mesh_tensor.rules.operator.manual import ALL_DEVICES, PER_DEVICE, axes_of

from .ir import Graph, Node, Scopes, Tree, Value, leaves

if TYPE_CHECKING:
    from .reader import GraphReader


NO_AXES = Mesh({"none": 1})  # those of what has no manual computations


@dataclass(frozen=True)
class Region:
    """Inside of a manual computation: its `axes`, and those of all around it with them."""

    axes: Mesh
    manual: frozenset[str]

    @staticmethod
    def inside(outer: Region | None, axes: Mesh, mesh: Mesh, where: str) -> Region:
        """That of a manual computation over `axes`. Refused where they are no axes of the mesh, or manual already."""
        around = outer.manual if outer is not None else frozenset()
        problems = misplaced_axes(axes, mesh)
        problems += [f"axis {axis!r} is manual already, around it" for axis in axes if axis in around]
        if problems:
            refuse(
                problems,
                where=f"{where}, a manual computation",
                why="its axes are those of the mesh that it is distributed over",
                fix=f"use axes of {mesh}, each once",
            )
        return Region(axes, around | {*axes})


def manual_mesh(functions: Iterable[relax.Function]) -> Mesh:
    """All manual axes of functions, in an order that is theirs everywhere; NO_AXES where there are none. Refused where
    an axis has several sizes, or there is no such order."""
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
    return Mesh({name: min(sizes[name]) for name in names}) if names else NO_AXES


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
    """The collective that a call is. Refused where it stands outside of a manual computation, or goes over devices that
    are no group of it."""
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


def misplaced_axes(axes: Mesh, mesh: Mesh) -> list[str]:
    """What is wrong with the axes of a manual computation on a mesh: `wrong_axes`, or their order."""
    problems = wrong_axes(axes, mesh)
    if not problems and mesh.in_order(axes) != axes.axis_names:
        problems.append(f"the axes are {listing(axes.axis_names)}, but {listing(mesh.in_order(axes))} in the mesh")
    return problems


def _name(call: relax.Call) -> str:
    name = op_name(call.op)
    if name.startswith("call_") and call.args and isinstance(call.args[0], relax.ExternFunc):  # most aren't called so
        return str(call.args[0].global_symbol)
    return name


class ManualReader:
    """Reads what is bound in `function`, in these scopes and this region; `expression` reads what calls take."""

    def __init__(
        self,
        reader: GraphReader,
        function: str,
        scopes: Scopes,
        region: Region | None,
        expression: Callable[[relax.Expr, str], Tree],
    ) -> None:
        self._reader, self._function, self._scopes = reader, function, scopes
        self._region, self._expression = region, expression

    def read(self, expr: relax.Call, name: str) -> Tree:
        """What a manual computation gives, or a collective in one. Refused where axes, tiles or groups are not as they
        have to be, or a collective stands outside of one."""
        if is_manual(expr):
            return self._manual(expr, name)
        return self._edge(expr, name) if is_edge(expr) else self._collective(expr, name)

    def _edge(self, expr: relax.Call, name: str) -> Tree:
        """What leads into what devices have of their own, or out of it."""
        where = f"{self._function}.{name}"
        (value,) = self._values(expr.args[1], name)
        made = self._reader.devices(self._function, name, self._scopes).edge(expr, value, where)
        self._reader.manual.update(axis for one in (value, made) for axis, _ in self._reader.varying.get(one, ()))
        check_types(f"{where}: the call says", [made.type], tensor_types(expr.struct_info, where))
        return made

    def _manual(self, expr: relax.Call, name: str) -> Tree:
        """What a manual computation gives: its function on tiles."""
        where = f"{self._function}.{name}"
        args = [self._expression(arg, name) for arg in expr.args[1:-1]]
        results = tensor_types(expr.struct_info, where)
        given = [arg for arg in args if isinstance(arg, Value)]
        if len(given) < len(args):
            refuse("a manual computation takes tensors, no tuples", where=where, fix="pass their fields")
        ndims = [value.type.ndim for value in given], [one.ndim for one in results]
        stated = Manual.parse(manual_text(expr), *ndims, where)
        region = Region.inside(self._region, stated.axes, self._reader.mesh, where)
        self._reader.manual.update(region.axes)
        devices = self._reader.devices(self._function, name, self._scopes)
        pairs = enumerate(zip(given, stated.inputs, strict=True))
        tiles = [devices.tile(value, one, f"{where}: operand {n}, {value.name!r},") for n, (value, one) in pairs]
        taken = self._reader.sized(self._reader.function(stated.body), tiles).params[:]
        check_types(f"{where}: {stated.body!r} takes", [one.type for one in tiles], _types(taken, where))
        made = leaves(self._reader.enter(stated.body, list(tiles), self._scopes, region))
        if len(made) != len(results):
            refuse(
                f"{stated.body!r} gives {len(made)} tensors, but the call says {len(results)}",
                where=where,
                fix="make the call by mt.manual_computation, which reads the function's results",
            )
        ends = enumerate(zip(made, stated.outputs, strict=True))
        wholes = [devices.whole(value, one, f"{where}: result {n}") for n, (value, one) in ends]
        check_types(f"{where}: the call says", [one.type for one in wholes], results)
        return tuple(wholes) if isinstance(expr.struct_info, relax.TupleStructInfo) else wholes[0]

    def _collective(self, expr: relax.Call, name: str) -> Tree:
        """What a collective of a manual computation gives."""
        where = f"{self._function}.{name}"
        comm = comm_in(self._region, expr, self._reader.mesh, where)
        devices = self._reader.devices(self._function, name, self._scopes)
        if comm.kind == "axis_index":
            made = devices.index(comm.axes)
        else:
            (value,) = [
                leaf for arg in expr.args[:] if tensor_infos(arg.struct_info) for leaf in self._values(arg, name)
            ]
            made = devices.run(comm, value, where)
        check_types(f"{where}: the call says", [made.type], tensor_types(expr.struct_info, where))
        return made

    def _values(self, arg: relax.Expr, name: str) -> list[Value]:
        return leaves(self._expression(arg, name))


def _types(params: Sequence[relax.Var], where: str) -> list[TensorType]:
    return [one for param in params for one in tensor_types(param.struct_info, where)]


Axes = tuple[tuple[str, int], ...]  # with their sizes, in mesh order


def varying(graph: Graph) -> dict[Value, Axes]:
    """The axes of every value that has some."""
    found: dict[Value, Axes] = {}
    if not any(_is_edge(node) for node in graph.nodes):
        return found
    for node in graph.nodes:
        if axes := node_axes(node, found, graph.mesh):
            found |= dict.fromkeys(node.outputs, axes)
    return found


def node_axes(node: Node, known: Mapping[Value, Axes], mesh: Mesh) -> Axes:
    """The axes of a node's results, of those of its operands."""
    axes = {axis for value in node.inputs for axis, _ in known.get(value, ())}
    if _is_edge(node):
        mine = set(axes_of(node.call))
        axes = axes | mine if node.call.operator == PER_DEVICE else axes - mine
    return tuple([(axis, mesh.size(axis)) for axis in mesh if axis in axes]) if axes else ()


def at_the_edge(graph: Graph, devices: Mapping[Value, Axes]) -> dict[Value, frozenset[str]]:
    """The axes of the values that come into manual computations, and of those that leave them."""
    if not devices:
        return {}
    edge = [value for node in graph.nodes if _is_edge(node) for value in (*node.inputs, *node.outputs)]
    return {value: frozenset(axis for axis, _ in devices[value]) for value in edge if value in devices}


def _is_edge(node: Node) -> bool:
    return node.call.operator in (PER_DEVICE, ALL_DEVICES)
