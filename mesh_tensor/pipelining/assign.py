"""Which stage every binding of a function belongs to: what is stated, by annotations for several device meshes, too,
as TVM's DistIR writes them, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import relax

from mesh_tensor.annotations.module_annotations import stated_meshes
from mesh_tensor.annotations.named_values import device_meshes, is_pattern, named_mesh, same
from mesh_tensor.annotations.names import reachable
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.topology import Topology

from .flow import Flow

Stages = Mapping[str, frozenset[int]]


@dataclass(frozen=True)
class NamedStage:
    """A stage as it is stated: names of the values that it computes, with all that they need, and its mesh if that is
    stated."""

    names: tuple[str, ...]
    mesh: str | None = None


def assign(flow: Flow, stages: Sequence[NamedStage], inputs: Sequence[str]) -> Stages:
    """The stages of every binding: one, or several that each compute it where it follows from parameters alone.

    A stage computes its named values and what these need, as far as no stage before it does. What comes after all named
    values stays where its operands are, in the last of their stages; what has none of them is computed where it is
    used. `inputs` are the parameters that are no weights. Refused where a name means no value or is in two stages, or a
    stage needs what a later one computes."""
    stated = _stated(flow, stages)
    return spread(flow, _closed(flow, stated, len(stages), set(inputs)), len(stages))


def spread(flow: Flow, stated: Mapping[str, int], count: int) -> Stages:
    """The stages of every binding that the results depend on, of those of some."""
    found: dict[str, frozenset[int]] = {name: frozenset([stage]) for name, stage in stated.items()}
    for name, taken in flow.operands.items():
        sources = [max(found[value]) for value in taken if value in found]
        if name not in found and sources:
            found[name] = frozenset([max(sources)])
    for name, binding in flow.bindings.items():  # a field is where its tuple is: tuples don't leave their mesh
        if isinstance(binding.value, relax.TupleGetItem) and name not in stated and flow.operands[name]:
            found[name] = found.get(flow.operands[name][0], found.get(name, frozenset()))
    results = set(flow.results)
    for name in reversed(flow.bindings):
        used: frozenset[int] = frozenset().union(*(found.get(user, frozenset()) for user in flow.users[name]))
        if not found.get(name):
            found[name] = used or (frozenset([count - 1]) if name in results else used)
    live = flow.above(results)
    found = {name: where for name, where in found.items() if where and name in live}
    _check_order(flow, found)
    return found


def _stated(flow: Flow, stages: Sequence[NamedStage]) -> dict[str, int]:
    names = flow.named
    found: dict[str, int] = {}
    problems: list[str] = []
    named, needed = _named(flow, stages), set[str]()  # what stages before this one need
    for number, stage in enumerate(stages):
        meant, wrong = names.meant_by(stage.names)
        problems += [f"stage {number}: {problem}" for problem in wrong]
        exact = [value for name, (function, value), _ in meant if not is_pattern(name) and function == flow.function]
        for name, (function, value), _ in meant:
            if is_pattern(name) and (value not in flow.bindings or value in named or value in needed):
                continue
            if function != flow.function or value not in flow.bindings:
                what = "a parameter" if value in flow.params else f"inside of function {function!r}"
                problems.append(f"stage {number}: {name!r} is {what}, not a value that {flow.function!r} computes")
            elif found.setdefault(value, number) != number:
                problems.append(f"{name!r} is in stages {found[value]} and {number}")
        needed |= flow.above(exact)
    problems += [f"stage {n} has no value" for n, stage in enumerate(stages) if not stage.names]
    if problems:
        refuse(
            problems,
            where=f"stages of {flow.function!r}",
            fix="name values that it computes: those of submodules (blocks.0), or of bindings as TVMScript prints them",
        )
    return found


def _named(flow: Flow, stages: Sequence[NamedStage]) -> set[str]:
    """The values of submodules that are named, with all inside of these: patterns of other stages don't mean them."""
    named = [name for stage in stages for name in stage.names if not is_pattern(name)]
    inside = tuple(f"{name}." for name in named)
    return {own for name, own in flow.sources.items() if name in named or name.startswith(inside)} | {*named}


def _closed(flow: Flow, stated: Mapping[str, int], count: int, inputs: set[str]) -> dict[str, int]:
    """The named values with all that they need of the inputs, stage by stage."""
    found, varying = dict(stated), flow.below(inputs)
    for stage in range(count):
        todo = [name for name, where in stated.items() if where == stage]
        while todo:
            for value in flow.operands[todo.pop()]:
                if value in varying and value not in found:
                    found[value] = stage
                    todo.append(value)
    return found


def _check_order(flow: Flow, found: Mapping[str, frozenset[int]]) -> None:
    problems = []
    for name, taken in flow.operands.items():
        for stage in sorted(found.get(name, ())):
            late = [value for value in taken if value in found and min(found[value]) > stage]
            problems += [
                f"{name!r} of stage {stage} needs {value!r} of stage {min(found[value])}, which comes after it"
                for value in late
            ]
    if problems:
        refuse(
            problems,
            where=f"stages of {flow.function!r}",
            why="the cut is cyclic: a stage can't take what a later one makes",
            fix="state the stages in the order in which values go through them",
        )


def stages_by_mesh(flow: Flow, stages: Mapping[str, object], meshes: Sequence[str]) -> list[NamedStage]:
    """The stages that a dict states, in order.

    {mesh: [names]} gives every mesh a stage, in the dict's order; {name: mesh} and {name: (mesh, stage)} assign values,
    where meshes without numbers are stages in the order in which their values are computed.
    """
    if all(isinstance(value, (list, tuple)) and not _is_place(value, meshes) for value in stages.values()):
        problems = [f"no mesh is called {name!r}" for name in stages if name not in meshes]
        if problems:
            refuse(problems, where="stages", fix=f"the topology has {listing(meshes)}")
        return [NamedStage(tuple(names), mesh) for mesh, names in stages.items()]  # type: ignore[arg-type]
    places: dict[str, tuple[str, int | None]] = {}
    problems = []
    for name, value in stages.items():
        mesh, number = value if isinstance(value, tuple) and _is_place(value, meshes) else (value, None)
        if mesh not in meshes:
            problems.append(f"{name!r} is assigned to {shown(value)}, which is no mesh, and no (mesh, stage)")
        else:
            places[name] = (str(mesh), number)
    if len({number is None for _, number in places.values()}) > 1:
        problems.append("some values have a number of a stage, some have none")
    if problems:
        refuse(problems, where="stages", fix=f"the topology has {listing(meshes)}; write name: mesh or (mesh, stage)")
    return _numbered(flow, places)


def _is_place(value: object, meshes: Sequence[str]) -> bool:
    return (
        isinstance(value, tuple)
        and len(value) == 2
        and value[0] in meshes
        and isinstance(value[1], int)
        and not isinstance(value[1], bool)
    )


def _numbered(flow: Flow, places: Mapping[str, tuple[str, int | None]]) -> list[NamedStage]:
    """Assigned values as stages: those of one number, or of one mesh, are one."""
    order = {value: i for i, value in enumerate(flow.bindings)}
    names = flow.named
    groups: dict[str | int, list[str]] = {}
    first: dict[str | int, int] = {}
    for name, (mesh, number) in places.items():
        key: str | int = mesh if number is None else number
        groups.setdefault(key, []).append(name)
        meant, _ = names.meant_by([name])
        at = min((order.get(value, len(order)) for _, (_, value), _ in meant), default=len(order))
        first[key] = min(first.get(key, at), at)
    stages = []
    for key in sorted(groups, key=lambda key: first[key] if isinstance(key, str) else key):
        meshes = dict.fromkeys(places[name][0] for name in groups[key])
        if len(meshes) > 1:
            refuse(f"stage {key} is on meshes {listing(list(meshes))}", where="stages", fix="give it one mesh")
        stages.append(NamedStage(tuple(groups[key]), next(iter(meshes))))
    return stages


_ANNOTATE = ("relax.dist.annotate_sharding", "relax.dist.redistribute")


def annotated_topology(flow: Flow) -> Topology:
    """The module's device meshes as a Topology: "mesh0", "mesh1", ... in the order of its global infos."""
    meshes = device_meshes(flow.mod)
    if not meshes:
        refuse("the module has no device mesh", fix="pass a Topology")
    devices = {f"mesh{i}": [int(d) for d in mesh.device_ids] for i, mesh in enumerate(meshes)}
    return Topology({f"mesh{i}": named_mesh(flow.mod, mesh) for i, mesh in enumerate(meshes)}, devices)


def annotated_stages(flow: Flow, topology: Topology) -> tuple[Stages, list[str]]:
    """The stages of every binding, and their meshes: an annotation puts its value on a mesh, and what follows is
    computed there until the next one."""
    meshes = device_meshes(flow.mod)
    if len(stated_meshes(reachable(flow.mod, flow.function))) < 2 or len(meshes) != len(topology):
        refuse(
            "no stages are stated",
            why=f"the module's annotations are not for the {len(topology)} meshes of the topology",
            fix="pass `stages`, or annotate values for one device mesh each of the module (R.dist.annotate_sharding)",
        )
    stated: dict[str, int] = {}
    latest: dict[str, int] = {}  # value -> the stage it is in, as far as one is known
    order: list[str] = []
    for name, binding in flow.bindings.items():
        before = [latest[value] for value in flow.operands[name] if value in latest]
        is_call = isinstance(binding.value, relax.Call) and getattr(binding.value.op, "name", "") in _ANNOTATE
        mesh = binding.value.attrs.device_mesh if is_call else None
        if mesh is not None:
            wanted = topology.names[next(i for i, other in enumerate(meshes) if same(other, mesh))]
            stated[name] = latest[name] = _stage_on(wanted, max(before, default=0), order)
        elif before:
            latest[name] = max(before)
    if not order:
        refuse(
            "no stages are stated",
            why=f"what {flow.function!r} calls is annotated inside, which doesn't say on which mesh it is called",
            fix=f"annotate what {flow.function!r} passes to it (R.dist.annotate_sharding), or pass `stages`",
        )
    return spread(flow, stated, len(order)), order


def _stage_on(mesh: str, least: int, order: list[str]) -> int:
    """The first stage from `least` on that is on `mesh`; made, where there is none."""
    for stage in range(least, len(order)):
        if order[stage] == mesh:
            return stage
    order.append(mesh)
    return len(order) - 1
