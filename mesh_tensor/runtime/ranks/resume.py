"""resume: ranks whose calls on a mesh have failed begin again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh

from .ranks import known_on

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def resume(mesh: Mesh | Mapping[str, int] | DeviceMesh) -> None:
    """Make a mesh usable again on whose ranks a call has failed. All ranks have to call it, when none of them is in a
    call on the mesh; it returns when all have.

    What was under way is dropped, connections are new, and kernels agree anew on what to run. Values that a failed call
    was updating in place are as that call left them.

    Args:
        mesh: the mesh of the kernels, or the DeviceMesh that they ran on.

    Raises:
        MeshTensorError: nothing ever ran on the mesh, or some rank doesn't call it in time.
    """
    given: Any = mesh
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
