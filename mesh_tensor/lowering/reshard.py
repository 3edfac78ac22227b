"""Layout changes of a kernel's tensors, planned: sizes may still be unknown."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move, plan_moves

_UNKNOWN = 1024  # times the number of devices: an unknown size counts as large, and as one that all axes divide


def plan_for(src: Sharding, dst: Sharding, shape: Sequence[int | tirx.PrimExpr]) -> tuple[Move, ...]:
    """The moves from `src` to `dst` of a tensor of the global `shape`."""
    large = _UNKNOWN * src.mesh.num_devices
    return plan_moves(src, dst, [int(size) if isinstance(size, (int, tirx.IntImm)) else large for size in shape])
