"""annotate_module: state how values of a Relax module lie on a mesh, by name.

Stated in TVM's own terms as far as they go: `R.dist.annotate_sharding` calls, the mesh in the module's global infos.
What TVM has no words for (partial values, the order of axes in a dim, open dims, replicated axes, priorities, groups,
barriers) is in the function attribute `mesh_tensor_hints`, from the name that such a call binds to a dict with
"partial", "order", "open", "replicated", "priority", "later", "group", "barrier". Axis names: see `meshes`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, TypeGuard

from tvm import ir, relax
from tvm.relax.distributed import DeviceMesh, Placement, PlacementSpec

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.placement import Placement as MeshPlacement
from mesh_tensor.base.sharding import Shard, Sharding
from mesh_tensor.base.sub_axes import Refinement

from .annotation import check, complete, from_attr, is_int
from .module_annotations import (
    GRADIENTS_ATTR,
    HINTS_ATTR,
    Annotation,
    ModuleAnnotations,
    read_module_annotations,
    stated_meshes,
)
from .named_values import NamedValues, device_mesh, device_meshes, fits, named_mesh, same, with_mesh
from .names import (
    SOURCE_NAMES_ATTR,
    Fresh,
    check_module,
    meant_function,
    relax_functions,
    unique_names,
    variables,
    with_flat_parameters,
    without_layout,
)
from .stated_ties import Ties, names_parts, stated_refinement, stated_replicated, with_parts

__all__ = ["SOURCE_NAMES_ATTR", "ModuleAnnotations", "annotate_module", "read_module_annotations"]

_HOW = (
    'give {name of a parameter or value: {axis: dim}, a list of one placement per axis, a text like "S[0], R", or an '
    'mt.Sharding}; "function.value" names a value of another function of the module, in all its calls'
)


def annotate_module(
    mod: ir.IRModule,
    mesh: Mesh | Mapping[str, int],
    shardings: Mapping[str, Any],
    function: str = "main",
    *,
    open: Iterable[str] | Mapping[str, Iterable[int]] = (),
    priority: Mapping[str, int | Mapping[str, int]] | None = None,
    groups: Mapping[str, Iterable[str]] | None = None,
    barriers: Mapping[str, str] | None = None,
) -> ir.IRModule:
    """State layouts of values of a Relax module: a copy of the module, with sharding annotations for `mesh`.

    Args:
        mod: the module in global view; it stays as it is.
        mesh: the mesh. All annotations of a module are for one mesh.
        shardings: from names to layouts. A name is that of a parameter or of what a binding binds in `function`, as
            TVMScript prints it ("t_0" is the first field of a parameter `t` that is a tuple); or "mlp.Y", the value Y
            of the module's function `mlp`, in all calls of it; or the name that a parameter had in torch
            ("blocks.0.mlp.fc.weight"; what wrappers put into it, as "module." and "_orig_mod.", doesn't matter); or a
            pattern of these, "*.fc.weight" or a compiled regular expression, over which names prevail. A layout is a
            dict from axes to dims, a list or a text with one placement per axis ([mt.Shard(0), mt.Replicate()],
            "S[0], R"), an `mt.Sharding`, or {"sharding": ..., "partial": {axis: op}}. An axis that is left out is
            replicated. {("y", "x"): 0} has y and x on dim 0, y major, whatever the mesh's order. In dicts, a part
            of an axis is named as in Shardy: of an axis x of 8 devices, {"x:(1)4": 0, "x:(4)2": 1} has 4 along dim 0
            and 2 along dim 1; the module is then annotated for the mesh in which these are axes.
        function: the function in which names without a function's name are looked up.
        open: names of annotated values that propagation may split further, over axes that their layouts leave out; or a
            dict from these names to the dims that may be split. Axes that a layout maps to None, or has under
            "replicate", stay replicated.
        priority: from names of annotated values to 0, 1, ..., or to a dict from axes to these: layouts with lower
            numbers propagate first. The default is 0.
        groups: from a name of your choice to names of values of one shape that get one layout: what is stated for one,
            or propagates to it, holds for all.
        barriers: from names of values to the direction in which layouts propagate through the value: "forward" (from
            its operator to its users), "backward", or "none".

    Returns:
        The annotated module; it can be printed and parsed as TVMScript.

    Raises:
        MeshTensorError: a name, axis, rank or dim does not fit (all that is wrong is listed), the module is annotated
            for another mesh, or a value is given two layouts.
    """
    check_module(mod, "annotate_module")
    function = meant_function(mod, function)
    mod = with_flat_parameters(mod, function)
    names, refinement = NamedValues(mod, function), stated_refinement(Mesh(mesh), shardings, priority or {})
    mesh = refinement.mesh
    device = _device_mesh(mod, mesh)
    stated, problems = _read(names, refinement, shardings, open, priority or {})
    stated, wrong = Ties(names, mesh, groups or {}, barriers or {}).added(stated)
    problems += wrong
    if problems:
        refuse(problems, where=f"module function {function!r} on {mesh}", fix=_HOW)
    stated = {**_of_gradients(mod, stated), **stated}
    mod = with_mesh(unique_names(mod), device, mesh)
    for name in dict.fromkeys(where for where, _ in stated):
        by_var = {var: annotation for (where, var), annotation in stated.items() if where == name}
        annotated = _Inserter(mod, device, by_var).annotated(relax_functions(mod)[name])
        mod.update_func(mod.get_global_var(name), annotated)
    return mod


def _read(
    names: NamedValues, refinement: Refinement, shardings: Any, open: Any, priority: Mapping[str, Any]
) -> tuple[dict[tuple[str, str], Annotation], list[str]]:
    """(function, variable) -> what is stated for it; and all that is wrong."""
    if not isinstance(shardings, Mapping):
        return {}, [f"the shardings are {shown(shardings)}, which is no dict from names"]
    opened: dict[str, Any] = dict(open) if isinstance(open, Mapping) else dict.fromkeys(_listed(open), True)
    problems = [f"`open` has {name!r}, which is not annotated" for name in opened if name not in shardings]
    problems += [f"`priority` has {name!r}, which is not annotated" for name in priority if name not in shardings]
    mesh = refinement.mesh
    priority = {name: one if is_int(one) else with_parts(refinement, one) for name, one in priority.items()}
    problems += [problem for name, value in priority.items() for problem in _wrong_priority(mesh, name, value)]
    stated: dict[tuple[str, str], Annotation] = {}
    meant, wrong_names = names.meant_by(shardings)
    for name, key, var in meant:
        sharding, wrong = _sharding(refinement, var, shardings[name])
        dims = opened.get(name, False)
        if sharding is not None and not isinstance(dims, bool):
            wrong += [f"`open` has {dim!r}, which is none of its dims" for dim in dims if not _is_dim(dim, sharding)]
            dims = tuple(int(dim) % sharding.ndim for dim in dims) if not wrong else ()
        problems += [f"value {name!r}: {problem}" for problem in wrong]
        if sharding is not None and not problems:
            first, later = _heard(priority.get(name, 0))
            replicated = stated_replicated(refinement, shardings[name]) if dims else ()
            annotation = Annotation(sharding, dims, first, later, replicated)
            if stated.setdefault(key, annotation) != annotation:
                problems.append(f"value {key[1]!r} of {key[0]!r} is given two layouts, one of them under {name!r}")
    return stated, [*problems, *wrong_names]


def _listed(names: Any) -> list[Any]:
    return [names] if isinstance(names, str) else list(names)


def _is_dim(dim: Any, sharding: Sharding) -> bool:
    return is_int(dim) and -sharding.ndim <= dim < sharding.ndim


def _wrong_priority(mesh: Mesh, name: str, value: Any) -> list[str]:
    """What is wrong with a priority: of a value, or of its axes."""
    if not isinstance(value, Mapping):
        ok = is_int(value) and value >= 0
        return [] if ok else [f"the priority of {name!r} is {value!r}, which is no int >= 0"]
    unknown = [
        f"the priority of {name!r} has {axis!r}, which is no axis of {mesh}" for axis in value if axis not in mesh
    ]
    bad = {axis: one for axis, one in value.items() if not is_int(one) or one < 0}
    return unknown + [f"the priority of {name!r} along {axis!r} is {one!r}, no int >= 0" for axis, one in bad.items()]


def _heard(priority: int | Mapping[str, int]) -> tuple[int, tuple[tuple[str, int], ...]]:
    """A priority for all axes, and how much later some are heard."""
    if isinstance(priority, Mapping):
        return 0, tuple((axis, int(later)) for axis, later in priority.items() if later)
    return int(priority), ()


def _of_gradients(mod: ir.IRModule, stated: Mapping[tuple[str, str], Annotation]) -> dict[tuple[str, str], Annotation]:
    """The same layouts for the values' gradients, which are never partial. They are heard after what was stated, as
    what a weight's layout makes of a gradient comes first."""
    found = {}
    for (function, name), annotation in stated.items():
        attr = (relax_functions(mod)[function].attrs or {}).get(GRADIENTS_ATTR, {})
        if name in attr:
            whole, later = annotation.sharding.complete, annotation.priority + 1
            found[function, str(attr[name])] = replace(
                annotation, sharding=whole, priority=later, group=None, barrier=None
            )
    return found


def _sharding(refinement: Refinement, var: relax.Var, layout: Any) -> tuple[Sharding | None, list[str]]:
    info = without_layout(var.struct_info)
    if not isinstance(info, relax.TensorStructInfo) or info.ndim < 0:
        return None, [f"it is {var.struct_info}, which is no tensor of known rank"]
    if names_parts(refinement.base, layout):
        mesh = refinement.mesh
        annotation, wrong = check(mesh, info.ndim, complete(mesh, with_parts(refinement, layout)))
        return (annotation.sharding if annotation else None), wrong
    annotation, wrong = check(refinement.base, info.ndim, complete(refinement.base, layout))
    return (refinement.refine(annotation.sharding) if annotation else None), wrong


def _device_mesh(mod: ir.IRModule, mesh: Mesh) -> DeviceMesh:
    """What the annotations name as their mesh: that of the annotations that are there already, which has to fit."""
    used = stated_meshes(relax_functions(mod))
    for device, where in used:
        if len(used) > 1 or not fits(mod, device, mesh):
            refuse(
                f"the module is annotated for {named_mesh(mod, device)} already, not for {mesh}",
                where=where,
                why="a module that runs on one mesh has annotations for that one",
                fix="annotate for the mesh that is there, or take the other annotations out",
            )
    if used:
        return used[0][0]
    made = device_mesh(mesh)
    return next((device for device in device_meshes(mod) if same(device, made)), made)


@relax.expr_functor.mutator
class _Inserter(relax.PyExprMutator):
    """Inserts an annotate_sharding call after each annotated value, and has all later uses take what it gives."""

    def __init__(self, mod: ir.IRModule, device: DeviceMesh, stated: Mapping[str, Annotation]) -> None:
        super().__init__(mod)
        self._device, self._stated = device, stated
        self._hints: dict[str, dict[str, Any]] = {}
        self._fresh = Fresh([])

    def annotated(self, func: relax.Function) -> relax.Function:
        """The function with its annotations."""
        self._fresh = Fresh([var.name_hint for var in variables(func)])
        first = [self._bind(param, param) for param in func.params if param.name_hint in self._stated]
        body = self.visit_expr(func.body)
        if first:
            body = relax.SeqExpr([relax.BindingBlock(first), *body.blocks], body.body)
        body = relax.BlockBuilder().normalize(body)
        made = relax.Function(func.params, body, func.ret_struct_info, func.is_pure, func.attrs)
        there = from_attr((func.attrs or {}).get(HINTS_ATTR, {}))
        return made.with_attr(HINTS_ATTR, {**there, **self._hints}) if self._hints else made

    def visit_var_binding_(self, binding: relax.VarBinding) -> None:
        """Bind as before, and annotate what was bound."""
        super().visit_var_binding_(binding)
        self._after(binding.var)

    def visit_match_cast_(self, binding: relax.MatchCast) -> None:
        """Cast as before, and annotate what was bound."""
        super().visit_match_cast_(binding)
        self._after(binding.var)

    def _after(self, var: relax.Var) -> None:
        if var.name_hint in self._stated:
            self.builder_.emit_normalized(self._bind(var, self.visit_expr(var)))

    def _bind(self, var: relax.Var, value: relax.Var) -> relax.VarBinding:
        annotation = self._stated[var.name_hint]
        placement = _placement(annotation.sharding)
        call = self.builder_.normalize(relax.op.distributed.annotate_sharding(value, self._device, placement))
        kind = relax.DataflowVar if isinstance(var, relax.DataflowVar) else relax.Var
        made = kind(self._fresh.name(f"{var.name_hint}_sharded"), call.struct_info)
        self.set_var_remap(var.vid, made)
        if hints := _hints(annotation):
            self._hints[made.name_hint] = hints
        return relax.VarBinding(made, call)


def _placement(sharding: Sharding) -> Placement:
    """TVM's placement: one per axis. A partial axis is replicated in it."""
    dims = (sharding.dim_of(axis) for axis in sharding.mesh)
    return Placement([PlacementSpec.replica() if dim is None else PlacementSpec.sharding(dim) for dim in dims])


def _is_later(placement: MeshPlacement) -> TypeGuard[Shard]:
    """Whether an axis comes later in its dim than in the mesh."""
    return isinstance(placement, Shard) and placement.minor > 0


def _hints(annotation: Annotation) -> dict[str, Any]:
    said: dict[str, Any] = {"partial": dict(annotation.sharding.partial), "open": annotation.open}
    said["order"] = {axis: p.minor for axis, p in annotation.sharding.placements().items() if _is_later(p)}
    said |= {"priority": annotation.priority, "later": dict(annotation.later)}
    said |= {"replicated": list(annotation.replicated), "group": annotation.group, "barrier": annotation.barrier}
    return {what: value for what, value in said.items() if value}
