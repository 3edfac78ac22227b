"""What users state beside layouts: groups of values that lie alike, barriers that layouts don't spread through,
sub-axes (`{"x:(1)4": 0}`) wherever a dict names axes; and what a module states, without the module."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tvm import ir, relax

from mesh_tensor.base.errors import MeshTensorError, listing, refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import parse_dict
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.sub_axes import Refinement, named_part

from .module_annotations import BARRIERS, HINTS_ATTR, Annotation, read_module_annotations
from .named_values import Key, NamedValues
from .names import reachable, variables, without_layout


@dataclass(frozen=True)
class Ties:
    """What `groups` and `barriers` of annotate_module say of the values of a module."""

    names: NamedValues
    mesh: Mesh
    groups: Mapping[str, Iterable[str]]
    barriers: Mapping[str, str]

    def added(self, stated: Mapping[Key, Annotation]) -> tuple[dict[Key, Annotation], list[str]]:
        """What is stated, with these; and all that is wrong with them. A value of which no layout is stated is open."""
        found, problems = dict(stated), []
        for group, members in self.groups.items():
            problems += self._grouped(str(group), members, found)
        for name, direction in self.barriers.items():
            if direction not in BARRIERS:
                problems.append(f"the barrier of {name!r} is {direction!r}, none of {listing(list(BARRIERS))}")
                continue
            for _, key, var in self._meant([name], problems):
                if (annotation := self._of(key, var, found, problems)) is not None:
                    found[key] = replace(annotation, barrier=direction)
        return found, problems

    def _grouped(self, group: str, members: Any, found: dict[Key, Annotation]) -> list[str]:
        """Put the members into the group; what is wrong with it."""
        problems: list[str] = []
        meant = self._meant([members] if isinstance(members, str) else list(members), problems)
        shapes_of = {key: _shape(var) for _, key, var in meant}
        if not _may_be_one(list(filter(None, shapes_of.values()))):
            shapes = ", ".join(f"{key[1]} ({' x '.join(shape or ())})" for key, shape in shapes_of.items())
            return [*problems, f"group {group!r} has values of several shapes: {shapes}"]
        for _, key, var in meant:
            annotation = self._of(key, var, found, problems)
            if annotation is None:
                continue
            if annotation.group not in (None, group):
                problems.append(f"value {key[1]!r} is in two groups, {annotation.group!r} and {group!r}: make them one")
            if annotation.sharding.partial:
                problems.append(
                    f"value {key[1]!r} of group {group!r} is partial: pending sums are no layout of a group"
                )
            found[key] = replace(annotation, group=group)
        said = {key[1]: found[key] for key in shapes_of if key in found and not found[key].says_nothing}
        if len({(one.sharding, one.open) for one in said.values()}) > 1:
            layouts = ", ".join(f"{name} '{one.sharding}'{' (open)' if one.open else ''}" for name, one in said.items())
            problems.append(f"values of group {group!r} are stated to lie differently: {layouts}")
        return problems

    def _meant(self, names: list[Any], problems: list[str]) -> list[tuple[Any, Key, relax.Var]]:
        meant, wrong = self.names.meant_by(names)
        problems += wrong
        return meant

    def _of(self, key: Key, var: relax.Var, found: Mapping[Key, Annotation], problems: list[str]) -> Annotation | None:
        """What is stated of a value, or that nothing is."""
        if _shape(var) is None:
            problems.append(f"value {key[1]!r} is {var.struct_info}, which is no tensor of known rank")
            return None
        return found.get(key) or Annotation(Sharding.of(self.mesh, var.struct_info.ndim, {}), open=True)


def _shape(var: relax.Var) -> tuple[str, ...] | None:
    """The sizes of a tensor of known rank, as text: they may be symbols, or unknown."""
    info = without_layout(var.struct_info)
    if not isinstance(info, relax.TensorStructInfo) or info.ndim < 0:
        return None
    if not isinstance(info.shape, relax.ShapeExpr):
        return ("?",) * info.ndim
    return tuple(str(getattr(size, "value", size)) for size in info.shape.values)


def _may_be_one(shapes: Sequence[tuple[str, ...]]) -> bool:
    """Whether shapes may be equal, once all sizes are known: that is asked again then."""
    if len({len(shape) for shape in shapes}) > 1:
        return False
    return all(len({size for size in sizes if size.isdecimal()}) < 2 for sizes in zip(*shapes, strict=True))


_INNER = ("sharding", "partial")  # of metadata: what are dicts from axes
_LISTED = "replicate"


def stated_refinement(mesh: Mesh, shardings: Any, priority: Mapping[str, Any]) -> Refinement:
    """The mesh in which all sub-axes that layouts and priorities name are made of axes. Refused where a sub-axis is no
    part of its axis, or two of them overlap."""
    layouts = [*(shardings.values() if isinstance(shardings, Mapping) else ()), *priority.values()]
    return Refinement.by_names(mesh, [name for layout in layouts for name in _names(layout)])


def names_parts(mesh: Mesh, layout: Any) -> bool:
    """Whether a layout names a sub-axis."""
    return any(named_part(mesh, name) is not None for name in _names(layout))


def with_parts(refinement: Refinement, layout: Any) -> Any:
    """What is stated, of the axes of the refined mesh."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return layout
    inner = {key: with_parts(refinement, layout[key]) for key in _INNER if isinstance(layout.get(key), Mapping)}
    if not inner and _LISTED not in layout:
        return refinement.expanded(layout)
    listed = layout.get(_LISTED, ())
    listed = (listed,) if isinstance(listed, str) else listed
    if _LISTED in layout:
        inner[_LISTED] = tuple(axis for name in listed for axis in refinement.axes(name))
    return {**layout, **inner}


def stated_replicated(refinement: Refinement, layout: Any) -> tuple[str, ...]:
    """The axes of the refined mesh that a dict says are replicated, by None or under `replicate`."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return ()
    inner = layout.get("sharding")
    by_axis = inner if isinstance(inner, Mapping) else layout
    found = [
        name for key, dim in by_axis.items() if dim is None for name in (key if isinstance(key, tuple) else (key,))
    ]
    listed = layout.get(_LISTED, ())
    found += [listed] if isinstance(listed, str) else listed or ()
    return refinement.mesh.in_order(axis for name in found for axis in refinement.axes(name) if axis in refinement.mesh)


def _names(layout: Any) -> Iterator[Any]:
    """All that could be names of axes."""
    layout = _read(layout)
    if not isinstance(layout, Mapping):
        return
    for key in layout:
        yield from key if isinstance(key, tuple) else (key,)
    for key in _INNER:
        yield from _names(layout.get(key))
    listed = layout.get(_LISTED, ())
    yield from (listed,) if isinstance(listed, str) else listed if isinstance(listed, (tuple, list)) else ()


def _read(layout: Any) -> Any:
    """A dict that is written as a text; anything else, and what can't be read, as it is."""
    try:
        return parse_dict(layout) if isinstance(layout, str) and layout.strip().startswith("{") else layout
    except MeshTensorError:
        return layout


_OP = "relax.dist.annotate_sharding"


@dataclass(frozen=True)
class Unannotated:
    """`module` without annotations; `stated` are those it had, for `mesh`, by (function, value)."""

    module: ir.IRModule
    mesh: Mesh
    stated: dict[tuple[str, str], Annotation]


def without_annotations(mod: ir.IRModule, function: str) -> Unannotated:
    """A module that `annotate_module` has annotated, as it was before. Refused where some annotation is none of
    `annotate_sharding`'s."""
    read = read_module_annotations(mod, function)
    made, seen = read.module.clone(), set()
    stated: dict[tuple[str, str], Annotation] = {}
    for name, func in reachable(read.module, function).items():
        remover = _Remover(read.module)
        plain = remover.removed(func)
        made.update_func(made.get_global_var(name), plain)
        seen |= {(name, annotation) for annotation in remover.sources}
        for annotation, source in remover.sources.items():
            stated.setdefault((name, source), read.annotations[name, annotation])
    if others := set(read.annotations) - seen:
        refuse(
            [f"{where}.{name} is annotated by its type, or redistributed" for where, name in sorted(others)],
            fix="annotate the module with mt.annotate_module, or use the mesh that it is annotated for",
        )
    return Unannotated(made, read.mesh, stated)


@relax.expr_functor.mutator
class _Remover(relax.PyExprMutator):
    """Has all uses of what an annotate_sharding call gives take what it is given."""

    def __init__(self, mod: ir.IRModule) -> None:
        super().__init__(mod)
        self.sources: dict[str, str] = {}
        self._first: dict[str, str] = {}

    def removed(self, func: relax.Function) -> relax.Function:
        """The function without them."""
        body = relax.BlockBuilder().normalize(self.visit_expr(func.body))
        made = relax.Function(func.params, body, func.ret_struct_info, func.is_pure, func.attrs)
        names = {var.name_hint for var in variables(made)}
        lost = [source for source in self.sources.values() if source not in names]
        assert not lost, lost
        return made.without_attr(HINTS_ATTR) if HINTS_ATTR in (func.attrs or {}) else made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Drop an annotation; anything else stays."""
        value = binding.value
        if not (isinstance(value, relax.Call) and isinstance(value.op, ir.Op) and value.op.name == _OP):
            super().visit_var_binding_(binding)
            return
        source, name = value.args[0], binding.var.name_hint
        if not isinstance(source, relax.Var):
            refuse(f"{name!r} annotates what has no name", fix="annotate the module with mt.annotate_module")
        self._first[name] = self.sources[name] = self._first.get(source.name_hint, source.name_hint)
        self.set_var_remap(binding.var.vid, self.visit_expr(source))
