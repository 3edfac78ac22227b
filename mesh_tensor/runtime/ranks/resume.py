"""resume: ranks whose calls on a mesh have failed begin again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.topology import Topology

from .ranks import Ranks, known_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def resume(mesh: Mesh | Mapping[str, int] | DeviceMesh | Topology) -> None:
    """Make a mesh usable again on whose ranks a call has failed. All ranks have to call it, when none of them is in a
    call on the mesh; it returns when all have.

    What was under way is dropped, connections are new, and kernels agree anew on what to run. Values that a failed call
    was updating in place are as that call left them.

    Args:
        mesh: the mesh of the kernels, or the DeviceMesh that they ran on; of a pipeline its topology.

    Raises:
        MeshTensorError: nothing ever ran on the mesh, or some rank doesn't call it in time.
    """
    given: Any = mesh
    if isinstance(mesh, Topology):
        found = _of_topology(mesh)
    else:
        found = known_on(None, given) if type(mesh).__name__ == "DeviceMesh" else known_on(Mesh(given), None)
    if not found:
        refuse(
            "there is nothing to resume",
            where=str(mesh),
            why="no call has run on ranks of this mesh",
            fix="pass the mesh of the kernels, or the DeviceMesh that they are called on; where the first call on it"
            " has failed, destroy the process group and initialize it again, or start all ranks again",
        )
    for ranks in found:
        ranks.calls.resume()


def _of_topology(topology: Topology) -> list[Ranks]:
    """All ranks as one mesh first, over which pipelines run, then the meshes that this rank is in."""
    found = known_on(Mesh({"ranks": topology.num_devices}), None)
    for name in topology:
        places = list(topology.devices(name))
        found += [ranks for ranks in known_on(topology[name], None) if list(ranks.calls.places) == places]
    return list(dict.fromkeys(found))
