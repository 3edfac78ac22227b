"""Stages of a module whose annotations are for several device meshes, as TVM's DistIR writes them."""

from __future__ import annotations

from tvm import relax
from tvm.relax.distributed import DeviceMesh

from mesh_tensor.annotations.module_annotations import stated_meshes
from mesh_tensor.annotations.module_meshes import device_meshes, named_mesh, same
from mesh_tensor.annotations.names import reachable
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.topology import Topology

from .assign import Stages, spread
from .flow import Flow

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
        mesh = _mesh_of(binding.value)
        if mesh is not None:
            wanted = topology.names[next(i for i, other in enumerate(meshes) if same(other, mesh))]
            stated[name] = latest[name] = _stage_on(wanted, max(before, default=0), order)
        elif before:
            latest[name] = max(before)
    return spread(flow, stated, len(order)), order


def _stage_on(mesh: str, least: int, order: list[str]) -> int:
    """The first stage from `least` on that is on `mesh`; made, where there is none."""
    for stage in range(least, len(order)):
        if order[stage] == mesh:
            return stage
    order.append(mesh)
    return len(order) - 1


def _mesh_of(value: relax.Expr) -> DeviceMesh | None:
    is_call = isinstance(value, relax.Call) and getattr(value.op, "name", "") in _ANNOTATE
    return value.attrs.device_mesh if is_call else None
