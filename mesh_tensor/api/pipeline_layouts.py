"""The layouts that are stated for a pipeline, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mesh_tensor.annotations.named_values import NamedValues, is_pattern
from mesh_tensor.annotations.names import relax_function, variables
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipeline.flow import Flow
from mesh_tensor.pipeline.stages import FUNCTION, Stage

_HOW = "give {mesh: {name: layout}}, or {name: layout} for all meshes; layouts as annotate_module takes them"


def stage_layouts(
    flow: Flow, stages: Sequence[Stage], topology: Topology, shardings: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Per stage: layouts of its function's values, by name. Every name has to mean a value of some stage."""
    if not isinstance(shardings, Mapping):
        refuse(f"the shardings are {shown(shardings)}", fix=_HOW)
    per_mesh = bool(shardings) and all(name in topology for name in shardings)
    stated = shardings if per_mesh else dict.fromkeys(topology, shardings)
    names = NamedValues(flow.mod, flow.function)
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
                found[i][f"{function}.{value}" if inner else value] = layout
    if problems:
        refuse(list(dict.fromkeys(problems)), where=f"shardings of the pipeline of {flow.function!r}", fix=_HOW)
    return found


def _of_mesh(layout: Any, mesh: Mesh, topology: Topology) -> Any:
    """A layout for all meshes as one mesh has it: the axes that only others have are left out."""
    if not isinstance(layout, Mapping):
        return layout
    others = {axis for name in topology for axis in topology[name]} - set(mesh)
    return {axis: place for axis, place in layout.items() if axis not in others}
