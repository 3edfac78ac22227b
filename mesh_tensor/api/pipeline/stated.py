"""What a pipeline is told: its stages in any of their forms, the layouts of values, what is trained."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensor.annotations.named_values import is_pattern
from mesh_tensor.annotations.names import relax_function, variables
from mesh_tensor.annotations.stated_ties import names_parts
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.assign import NamedStage, Stages, annotated_stages, assign, stages_by_mesh
from mesh_tensor.pipelining.balance import balanced_stages
from mesh_tensor.pipelining.flow import Flow, stated_names
from mesh_tensor.pipelining.fragments import saved_name
from mesh_tensor.pipelining.stages import FUNCTION, Stage
from mesh_tensor.runtime.backend import checked_kind
from mesh_tensor.runtime.module_inputs import ModuleSignature

from .results import sized_module

_STAGES = (
    'give {"m0": ["embed", "blocks.0"], "m1": [...]}: per mesh the values (of submodules, or bindings) that it '
    'computes; {"embed": ("m0", 0), ...}; the values after which to cut, as ["blocks.1"]; or a number of stages'
)
_MEMORY = (
    'give {name: "pinned_host"}: weights, or values that stages compute (of submodules, or bindings), and hold for '
    "backwards"
)
_TRAIN = "give names of weights, or True for all of them"
_LAYOUTS = "give {mesh: {name: layout}}, or {name: layout} for all meshes; layouts as annotate_module takes them"
_WHOLE_AXES = (
    'pipelines take no axes apart: give the mesh these parts as axes of its own, {"a": 4, "b": 2} for {"x": 8}'
)


def stages_of(
    flow: Flow, stages: Any, topology: Topology, inputs: Sequence[str], signature: ModuleSignature, machine: Machine
) -> tuple[Stages, list[str | None]]:
    """The stages of every binding, as they are asked for or annotated, and the mesh of every stage that has one."""
    if stages is None:
        where, stated = annotated_stages(flow, topology)
        return where, [*stated]
    sized = sized_module(flow, signature) if isinstance(stages, int) else None
    named = _named_stages(flow if sized is None else Flow(sized, flow.function), stages, topology, inputs, machine)
    return assign(flow, named, inputs), [stage.mesh for stage in named]


def _named_stages(
    flow: Flow, stages: Any, topology: Topology, inputs: Sequence[str], machine: Machine
) -> list[NamedStage]:
    """The stages in any of their forms; a number of them is cut where they cost alike on a machine."""
    if isinstance(stages, int) and not isinstance(stages, bool) and stages > 0:
        return balanced_stages(flow, stages, inputs, machine)
    if isinstance(stages, Mapping) and stages:
        return stages_by_mesh(flow, stages, topology.names)
    if isinstance(stages, (list, tuple)) and stages and all(isinstance(name, str) for name in stages):
        meant, _ = flow.named.meant_by(stages)
        before = flow.above(value for _, (_, value), _ in meant)  # results may be made before the last cut
        last = [name for name in dict.fromkeys(flow.returned) if name not in before]
        return [*(NamedStage((name,)) for name in stages), NamedStage(tuple(last))]
    return refuse(f"stages={shown(stages)}", fix=_STAGES)


def without_memory(stages: Any, memory: Mapping[str, str]) -> tuple[Any, dict[str, str]]:
    """Stages without the memory kinds that they state, as {"embed": "m0@pinned_host"}, and all memory kinds by name."""
    kinds = dict(memory) if isinstance(memory, Mapping) else refuse(f"memory={shown(memory)}", fix=_MEMORY)

    def plain(name: str, place: Any) -> Any:
        if isinstance(place, tuple) and place:
            return (plain(name, place[0]), *place[1:])
        if not isinstance(place, str) or "@" not in place:
            return place
        mesh, _, kinds[name] = place.partition("@")
        return mesh

    stated = {name: plain(name, place) for name, place in stages.items()} if isinstance(stages, Mapping) else stages
    return stated, {name: checked_kind(kind, repr(name)) for name, kind in kinds.items()}


def held_memory(flow: Flow, memory: Mapping[str, str], inputs: Sequence[str]) -> dict[str, str]:
    """Memory kinds by the names under which stages hold values for backwards, and by those of weights. `inputs` are the
    parameters that are none."""
    meant, problems = flow.named.meant_by(memory)
    found: dict[str, str] = {}
    for name, (function, value), _ in meant:
        if function == flow.function and value in flow.params and value not in inputs:
            found[value] = memory[name]
        elif function != flow.function or value not in flow.bindings:
            what = "an input, which comes with every batch" if value in flow.params else f"inside of {function!r}"
            problems += [] if is_pattern(name) else [f"{name!r} is {what}"]
        else:
            found |= dict.fromkeys((value, saved_name(value)), memory[name])
    return refuse(problems, where="memory", fix=_MEMORY) if problems else found


def trained_weights(flow: Flow, weights: Mapping[str, Any], train: bool | Sequence[str]) -> tuple[str, ...]:
    """The weights whose gradients are computed."""
    if train is False:
        return ()
    used = {value for taken in flow.operands.values() for value in taken}
    kept = [name for name in flow.params if name in weights and name not in flow.state]
    floats = [name for name in kept if flow.is_float(name) and name in used]
    wanted = floats
    if train is not True:
        meant, problems = flow.named.meant_by(stated_names(train, "train", _TRAIN))
        wanted = [value for name, (_, value), _ in meant if value in floats or not is_pattern(name)]
        problems += [f"{name!r} is written by the model itself" for name in wanted if name in flow.state]
        others = [name for name in wanted if name not in floats and name not in flow.state]
        problems += [f"{name!r} is no weight that holds floats" for name in others]
        if problems:
            refuse(problems, where="train", fix=_TRAIN)
    if not wanted:
        refuse("there is nothing to train", why="no weight holds floats", fix="pass weights=, or leave out train")
    reached = {value for name in flow.above(flow.returned[:1]) for value in flow.operands[name]}
    if lost := [name for name in dict.fromkeys(wanted) if name not in reached]:
        refuse(
            [f"the loss does not depend on {name!r}" for name in lost],
            where="train",
            why="its gradient would be zero, which is more likely a mistake",
            fix="name the weights that are trained (train=[...])",
        )
    return tuple(dict.fromkeys(wanted))


def stage_layouts(
    flow: Flow, stages: Sequence[Stage], topology: Topology, shardings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Per stage: layouts of its function's values, by name. Every name has to mean a value of some stage."""
    if not isinstance(shardings, Mapping):
        refuse(f"the shardings are {shown(shardings)}", fix=_LAYOUTS)
    per_mesh = bool(shardings) and all(name in topology for name in shardings)
    stated = shardings if per_mesh else dict.fromkeys(topology, shardings)
    names = flow.named
    there = [{var.name_hint for var in variables(relax_function(stage.module, FUNCTION))} for stage in stages]
    found: list[dict[str, Any]] = [{} for _ in stages]
    problems: list[str] = []
    for mesh, layouts in stated.items():
        if not isinstance(layouts, Mapping):
            problems.append(f"the shardings of mesh {mesh!r} are {shown(layouts)}")
            continue
        meant, wrong = names.meant_by(layouts)
        problems += wrong
        mine = [stage.index for stage in stages if stage.mesh == mesh]
        for name, (function, value), _ in meant:
            inner = function != flow.function
            targets = [i for i in mine if inner or value in there[i]]
            if per_mesh and not targets and not is_pattern(name):
                problems.append(f"no stage on mesh {mesh!r} has the value {name!r}")
            for i in targets:
                layout = layouts[name] if per_mesh else _of_mesh(layouts[name], topology[mesh], topology)
                if names_parts(topology[mesh], layout):
                    problems.append(f"{name!r} is laid out by parts of an axis of mesh {mesh!r}: {shown(layout)}")
                found[i][f"{function}.{value}" if inner else value] = layout
    if problems:
        fix = _WHOLE_AXES if any("by parts of an axis" in text for text in problems) else _LAYOUTS
        refuse(list(dict.fromkeys(problems)), where=f"shardings of the pipeline of {flow.function!r}", fix=fix)
    return found


def _of_mesh(layout: Any, mesh: Mesh, topology: Topology) -> Any:
    """A layout for all meshes as one mesh has it: the axes that only others have are left out."""
    if not isinstance(layout, Mapping):
        return layout
    others = {axis for name in topology for axis in topology[name]} - set(mesh)
    return {axis: place for axis, place in layout.items() if axis not in others}
