"""What plans are priced by: what it takes a machine to change layouts, and to compute."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

from mesh_tensor.base.collectives import collective_time
from mesh_tensor.base.dtypes import dtype_bits, itemsize
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import RedistributionPlan
from mesh_tensor.rules.kernel.cost import count_flops as count_kernel_flops
from mesh_tensor.rules.operator.cost import count_flops, operator_work

if TYPE_CHECKING:
    from .ir import Node

_PER_SECOND = 1e12  # prices are in picoseconds


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on a machine: collectives by the links that they cross, work by its operations or its bytes."""

    machine: Machine

    def work(self, node: Node, flops: int) -> int:
        """What it takes a device to compute so many operations of a node's."""
        return round(_PER_SECOND * self._whole(node) * flops / max(1, node_flops(node)))

    def change(self, shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
        """What it takes to go from one layout to another."""
        return _change_on(self, shape, dtype, src, dst)

    def _whole(self, node: Node) -> float:
        """Seconds of a node's work on whole tensors, without its start."""
        if node.kernel is None:
            work = operator_work(node.call, self.machine)
        else:
            tensors = (*node.call.inputs, *node.call.outputs)
            nbytes = sum(tensor.elements * dtype_bits(tensor.dtype) // 8 for tensor in tensors)
            dtype = tensors[0].dtype if tensors else "float32"
            work = self.machine.work(node_flops(node), nbytes, dtype, "kernel", "product")
        return max(work.flops, work.memory)


def prices_on(mesh: Mesh, machine: Machine | None) -> Prices:
    """The prices on a machine that holds the mesh; None: on CPU ranks."""
    if machine is None:
        return PRICES
    machine.check_holds(mesh.num_devices, str(mesh))
    return _known(machine)


@lru_cache(maxsize=64)
def _known(machine: Machine) -> Prices:
    return Prices(machine)


@lru_cache(maxsize=65536)
def _change_on(prices: Prices, shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    if src == dst:
        return 0
    plan = RedistributionPlan.make(shape, dtype, itemsize(dtype), src, dst)
    moves = zip(plan.moves, plan.bytes_per_move, strict=True)
    return round(
        _PER_SECOND * sum(collective_time(prices.machine, m.kind, size, src.mesh, m.axes) for m, size in moves)
    )


@lru_cache(maxsize=65536)
def bytes_moved(shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    """What one device receives when a tensor goes from one layout to another."""
    return 0 if src == dst else RedistributionPlan.make(shape, dtype, itemsize(dtype), src, dst).bytes


def node_flops(node: Node) -> int:
    """What one run of a node computes, on whole tensors."""
    if node.flops is not None:
        return node.flops
    return count_kernel_flops(node.kernel) if node.kernel is not None else count_flops(node.call)


PRICES = _known(CPU)
