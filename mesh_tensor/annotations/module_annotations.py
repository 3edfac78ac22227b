"""read_module_annotations: what a module's own annotations state."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax
from tvm.relax.distributed import DeviceMesh, DTensorStructInfo, Placement

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Partial, Replicate, Shard, collect, how_to_state
from mesh_tensor.base.placement import Placement as MeshPlacement
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.sub_axes import Refinement

from .annotation import from_attr
from .named_values import device_meshes, fits, named_mesh, same
from .names import bindings, check_module, meant_function, reachable, unique_names, without_layout

HINTS_ATTR = "mesh_tensor_hints"
# A function attribute of modules with gradients: value -> its gradient, which lies as the value is stated to lie.
GRADIENTS_ATTR = "mesh_tensor_gradients"
# By the direction in which a barrier lets layouts spread: the ways, back or not, in which it doesn't.
BARRIERS = {"none": frozenset({True, False}), "forward": frozenset({True}), "backward": frozenset({False})}
_OPS = ("relax.dist.annotate_sharding", "relax.dist.redistribute")
_SHARDING = 0  # PlacementSpecKind.kSharding


@dataclass(frozen=True)
class Annotation:
    """The layout that the user stated for a value. `open`: propagation may use the axes that it does not, on all dims
    or on these, but for those `replicated`. Lower `priority` is heard first; `later`: how much later that is along some
    axes. Values of one `group` lie alike. `barrier`: the only direction, one of BARRIERS, in which what is known of
    layouts spreads through the value."""

    sharding: Sharding
    open: bool | tuple[int, ...] = False
    priority: int = 0
    later: tuple[tuple[str, int], ...] = ()
    replicated: tuple[str, ...] = ()
    group: str | None = None
    barrier: str | None = None

    @property
    def blocked(self) -> frozenset[bool]:
        """Which ways nothing spreads through the value: to what uses it (False), to what makes it (True)."""
        return BARRIERS[self.barrier] if self.barrier is not None else frozenset()

    @property
    def says_nothing(self) -> bool:
        """Whether any layout is fine."""
        stated = self.sharding.as_dict() or self.sharding.partial or self.replicated
        return not stated and not any(self.keeps(dim) for dim in range(self.sharding.ndim))

    def states(self, axis: str) -> bool:
        """Whether it says what an axis does with the value, but for replicating it."""
        return self.sharding.dim_of(axis) is not None or self.sharding.partial_op(axis) is not None

    def priority_of(self, axis: str) -> int:
        """When the layout is heard along an axis."""
        return self.priority + dict(self.later).get(axis, 0)

    def keeps(self, dim: int) -> bool:
        """Whether no other axes may split a dim."""
        return not self.open if isinstance(self.open, bool) else dim not in self.open

    def said_priority(self) -> int | dict[str, int]:
        """The priority as users state it."""
        return {axis: self.priority + n for axis, n in self.later} if self.later else self.priority

    def said_open(self, ndim: int) -> tuple[int, ...]:
        """The open dims as users state them."""
        return tuple(dim for dim in range(ndim) if not self.keeps(dim))


@dataclass(frozen=True)
class ModuleAnnotations:
    """What is stated about the values of `module`, in which every variable of a function has a name of its own.

    `annotations`: (function, variable) -> layout. `conflicts` says, in words, which values are given several."""

    module: ir.IRModule
    mesh: Mesh
    annotations: Mapping[tuple[str, str], Annotation]
    conflicts: tuple[str, ...] = ()


def read_module_annotations(
    mod: ir.IRModule, function: str = "main", mesh: Mesh | Mapping[str, int] | None = None, *, strict: bool = False
) -> ModuleAnnotations:
    """What the annotations in `function`, and in the functions that it calls, state: `R.dist.annotate_sharding`, and
    `R.DTensor` types.

    Args:
        mod: the module, annotated by `annotate_module` or written so.
        function: the function that is to run.
        mesh: the mesh that is meant; None takes the module's. Its names go where the module has none. Where the module
            is annotated for parts of its axes, the mesh in which these are axes is the result's.
        strict: refuse a value that is given several layouts, instead of only reporting it.

    Raises:
        MeshTensorError: layouts don't fit the values or the mesh, or are for several meshes; or there is no mesh.
    """
    check_module(mod, "read_module_annotations")
    mod = unique_names(mod)
    functions = reachable(mod, meant_function(mod, function))
    statements = {name: list(_statements(func)) for name, func in functions.items()}
    mesh = _mesh(mod, _meshes(statements), Mesh(mesh) if mesh is not None else None)
    annotations: dict[tuple[str, str], Annotation] = {}
    problems: list[str] = []
    layouts = _Layouts(mesh)
    for name, stated in statements.items():
        hints = _hints(name, functions[name], stated)
        for found in stated:
            annotation, wrong = layouts.annotation(found, hints.get(found.name, {}))
            problems += [f"{name}.{found.name}: {problem}" for problem in wrong]
            if annotation is not None:
                annotations[name, found.name] = annotation
    if problems:
        refuse(problems, where=str(mesh), fix=how_to_state(mesh, 0))
    conflicts = tuple(text for name, found in statements.items() for text in _conflicts(name, found, annotations))
    if strict and conflicts:
        refuse(list(conflicts), where="strict", fix="state one layout per value, or leave out strict")
    return ModuleAnnotations(mod, mesh, annotations, conflicts)


def stated_meshes(functions: Mapping[str, relax.Function]) -> list[tuple[DeviceMesh, str]]:
    """The meshes that annotations are for, each once, with the binding that names it first."""
    return _meshes({name: _statements(func) for name, func in functions.items()})


@dataclass(frozen=True)
class _Statement:
    """An annotation of `var`, called `name`: by its type (`source` is None), or by a call that takes `source`."""

    name: str
    var: relax.Var
    source: relax.Var | None
    device: DeviceMesh
    placement: Placement


def _statements(func: relax.Function) -> Iterator[_Statement]:
    for param in func.params[:]:
        if isinstance(info := param.struct_info, DTensorStructInfo):
            yield _of_type(param, info)
    for binding in bindings(func):
        value, var = binding.value, binding.var
        if isinstance(value, relax.Call) and isinstance(op := value.op, ir.Op) and op.name in _OPS:
            attrs = value.attrs
            yield _Statement(var.name_hint, var, value.args[0], attrs.device_mesh, attrs.placement)
        elif isinstance(info := var.struct_info, DTensorStructInfo):
            yield _of_type(var, info)


def _of_type(var: relax.Var, info: DTensorStructInfo) -> _Statement:
    return _Statement(var.name_hint, var, None, info.device_mesh, info.placement)


def _meshes(statements: Mapping[str, Iterable[_Statement]]) -> list[tuple[DeviceMesh, str]]:
    found: list[tuple[DeviceMesh, str]] = []
    for name, stated in statements.items():
        for one in stated:
            if not any(same(one.device, device) for device, _ in found):
                found.append((one.device, f"{name}.{one.name}"))
    return found


def _mesh(mod: ir.IRModule, used: list[tuple[DeviceMesh, str]], mesh: Mesh | None) -> Mesh:
    if len(used) > 1:
        refuse(
            [f"{where} is annotated for {named_mesh(mod, device)} {device}" for device, where in used],
            why="a module that runs on one mesh has annotations for that one",
            fix="mt.pipeline runs a module on several meshes, a stage on each; or annotate for one with all devices",
        )
    candidates = [device for device, _ in used] or device_meshes(mod)
    if mesh is None:
        if len(candidates) != 1:
            has = f"has {len(candidates)} meshes, and no value is annotated" if candidates else "has no mesh"
            refuse(f"the module {has}", fix="pass the mesh, or annotate the module (annotate_module)")
        return named_mesh(mod, candidates[0])
    for device, where in used:
        if not fits(mod, device, mesh):
            named = named_mesh(mod, device)
            if Refinement.between(mesh, named) is not None:
                return named
            refuse(
                f"the module is annotated for {named_mesh(mod, device)}, not for {mesh}",
                where=where,
                fix="pass that mesh, or none; or annotate the module for the other one",
            )
    return mesh


class _Layouts:
    """What statements say for a mesh. A placement of so many dims is checked once."""

    def __init__(self, mesh: Mesh) -> None:
        self._mesh = mesh
        self._known: dict[tuple[int, tuple[int | None, ...]], tuple[Annotation | None, list[str]]] = {}

    def annotation(self, found: _Statement, hints: Mapping[str, Any]) -> tuple[Annotation | None, list[str]]:
        """The annotation that is stated, or all that is wrong with it."""
        info = found.var.struct_info
        info = without_layout(info)
        if not isinstance(info, relax.TensorStructInfo) or info.ndim < 0:
            return None, [f"{info} is no tensor of known rank"]
        dims = tuple(int(s.axis) if int(s.kind) == _SHARDING else None for s in found.placement.dim_specs[:])
        if len(dims) != len(self._mesh):
            axes = len(self._mesh)
            return None, [f"the placement {found.placement} has {len(dims)} parts, but the mesh {axes} axes"]
        if hints:
            return self._checked(info.ndim, dims, hints)
        key = info.ndim, dims
        if key not in self._known:
            self._known[key] = self._checked(info.ndim, dims, {})
        return self._known[key]

    def _checked(
        self, ndim: int, dims: tuple[int | None, ...], hints: Mapping[str, Any]
    ) -> tuple[Annotation | None, list[str]]:
        mesh = self._mesh
        order = {str(axis): int(minor) for axis, minor in dict(hints.get("order", {})).items()}
        stated: list[tuple[str, MeshPlacement]] = [
            (axis, Shard(dim, order.get(axis, 0))) for axis, dim in zip(mesh, dims, strict=True) if dim is not None
        ]
        stated += [(axis, Partial(op)) for axis, op in dict(hints.get("partial", {})).items()]
        by_axis, wrong = collect(mesh, ndim, stated)
        if wrong:
            return None, wrong
        sharding = Sharding.of(mesh, ndim, {axis: by_axis.get(axis, Replicate()) for axis in mesh})
        opened = hints.get("open", False)
        opened = tuple(int(dim) for dim in opened) if isinstance(opened, (list, tuple)) else bool(opened)
        later = tuple((str(axis), int(n)) for axis, n in dict(hints.get("later", {})).items())
        replicated = tuple(str(axis) for axis in hints.get("replicated", ()))
        group, barrier = (str(hints[key]) if key in hints else None for key in ("group", "barrier"))
        unknown = [axis for axis in replicated if axis not in mesh]
        wrong = [f"`replicated` has {axis!r}, which is no axis of {mesh}" for axis in unknown]
        wrong += (
            [] if barrier in (None, *BARRIERS) else [f"the barrier is {barrier!r}, none of {listing(list(BARRIERS))}"]
        )
        stated_later = Annotation(sharding, opened, int(hints.get("priority", 0)), later, replicated, group, barrier)
        return (None, wrong) if wrong else (stated_later, [])


def _hints(name: str, func: relax.Function, statements: list[_Statement]) -> Mapping[str, Any]:
    attr = (func.attrs or {}).get(HINTS_ATTR)
    hints = from_attr(attr) if attr is not None else {}
    stated = [found.name for found in statements]
    unknown = [value for value in hints if value not in stated]
    if unknown:
        refuse(
            [f"the attribute `{HINTS_ATTR}` has {value!r}, which no annotation binds" for value in unknown],
            where=f"module function {name!r}",
            fix=f"annotations bind {listing(stated)}",
        )
    return hints


def _conflicts(
    name: str, statements: list[_Statement], annotations: Mapping[tuple[str, str], Annotation]
) -> Iterator[str]:
    """Values that several annotations, directly on one another or beside one another, give different layouts."""
    root: dict[relax.Var, relax.Var] = {}
    first: dict[relax.Var, tuple[str, Sharding]] = {}
    for found in statements:
        source = root.get(found.source, found.source) if found.source is not None else found.var
        root[found.var] = source
        here = found.name, annotations[name, found.name].sharding
        there = first.setdefault(source, here)
        if there[1] != here[1]:
            yield f"{name}.{source.name_hint} is '{there[1]}' by {there[0]!r}, but '{here[1]}' by {here[0]!r}"
