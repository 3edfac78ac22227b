"""What plans are priced by: what it takes to change layouts, and to compute, in one unit."""

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

# What a device could compute while it receives a byte: where two splits move about as much, the one that repeats less
# work wins. And what it could receive while a collective starts: one large one is better than two small ones.
_FLOPS_PER_BYTE, _BYTES_PER_START = round(CPU.flops_per_byte), round(CPU.bytes_per_start)
_PER_SECOND = 1e12  # with a machine, prices are in picoseconds


@dataclass(frozen=True, eq=False)
class Prices:
    """Prices on a machine: collectives by the links that they cross, work by its operations or its bytes. Without one,
    those of CPU ranks, in bytes that one could receive meanwhile: all links are alike, and operations are what counts.
    """

    machine: Machine | None = None

    def work(self, node: Node, flops: int) -> int:
        """What it takes a device to compute so many operations of a node's."""
        if self.machine is None:
            return flops // _FLOPS_PER_BYTE
        return round(_PER_SECOND * self._whole(node, self.machine) * flops / max(1, node_flops(node)))

    def change(self, shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
        """What it takes to go from one layout to another."""
        if self.machine is None:
            moved = bytes_moved(shape, dtype, src, dst)
            return moved and moved + _BYTES_PER_START
        return _change_on(self, shape, dtype, src, dst)

    def _whole(self, node: Node, machine: Machine) -> float:
        """Seconds of a node's work on whole tensors, without its start."""
        tensors = (*node.call.inputs, *node.call.outputs)
        if node.kernel is None:
            work = operator_work(node.call, machine)
        else:
            nbytes = sum(tensor.elements * dtype_bits(tensor.dtype) // 8 for tensor in tensors)
            dtype = tensors[0].dtype if tensors else "float32"
            work = machine.work(node_flops(node), nbytes, dtype, "kernel", "product")
        return max(work.flops, work.memory)


def prices_on(mesh: Mesh, machine: Machine | None) -> Prices:
    """The prices on a machine that holds the mesh; None: on CPU ranks."""
    if machine is None or machine == CPU:
        return PRICES
    machine.check_holds(mesh.num_devices, str(mesh))
    return _known(machine)


@lru_cache(maxsize=64)
def _known(machine: Machine) -> Prices:
    return Prices(machine)


@lru_cache(maxsize=65536)
def _change_on(prices: Prices, shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    if src == dst or prices.machine is None:
        return 0
    plan = RedistributionPlan.make(shape, dtype, itemsize(dtype), src, dst)
    moves = zip(plan.moves, plan.bytes_per_move, strict=True)
    return round(
        _PER_SECOND * sum(collective_time(prices.machine, m.kind, size, src.mesh, m.axes) for m, size in moves)
    )


@lru_cache(maxsize=65536)
def bytes_moved(shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    """What one device receives when a tensor goes from one layout to another."""
    if src == dst:
        return 0
    return RedistributionPlan.make(shape, dtype, itemsize(dtype), src, dst).bytes


def node_flops(node: Node) -> int:
    """What one run of a node computes, on whole tensors."""
    if node.flops is not None:
        return node.flops
    return count_kernel_flops(node.kernel) if node.kernel is not None else count_flops(node.call)


PRICES = Prices()
