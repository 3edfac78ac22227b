"""What every mesh axis splits in every operator: the factor with which the least is sent and the least work is
repeated, given the values' layouts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import product
from typing import NamedTuple

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Partial, Placement, Shard, Sharding
from mesh_tensor.redistribution.plan import RedistributionPlan
from mesh_tensor.rules.kernel.cost import count_flops as count_kernel_flops
from mesh_tensor.rules.operator.cost import count_flops

from .atoms import AtomFactors, Atoms, NodeRule
from .ir import Node, Value
from .propagate import Layouts, tensors_of

Split = Mapping[str, str | None]  # axis -> factor
# What a device could compute while it receives a byte: where two splits move about as much, the one that repeats less
# work wins. And what it could receive while a collective starts: one large one is better than two small ones.
_FLOPS_PER_BYTE, _BYTES_PER_START = round(CPU.flops_per_byte), round(CPU.bytes_per_start)


@dataclass(frozen=True)
class Decision:
    """What the axes split in a node, and the layouts that follow for its operands and results."""

    split: dict[str, str]
    needed: tuple[Sharding, ...]
    produced: tuple[Sharding, ...]


class _Tensor(NamedTuple):
    """An operand or a result of a node: `there` are the layouts in which the value exists by then."""

    shape: tuple[int, ...]
    dtype: str
    layout: Sharding
    factors: AtomFactors
    there: tuple[Sharding, ...]


class Decider:
    """Decides node by node, in the order in which they run; the same question is answered once."""

    def __init__(self, mesh: Mesh, atoms: Atoms, layouts: Layouts) -> None:
        self._mesh, self._atoms, self._layouts = mesh, atoms, layouts
        self._known: dict[tuple, Decision] = {}
        self._there: dict[Value, tuple[Sharding, ...]] = {value: (s,) for value, s in layouts.of.items()}

    def decide(self, node: Node) -> Decision:
        """The cheapest split of a node. Where costs tie, more axes split, then the first factor named wins."""
        rule = self._atoms.rules[node]
        tensors = [
            _Tensor(self._atoms.shape(v), v.type.dtype, self._layouts.of[v], f, self._there[v])
            for v, f in tensors_of(node, rule)
        ]
        key = (node.call.name, _flops(node), tuple(tensors), tuple(rule.reduced.items()), rule.even, len(node.inputs))
        decision = self._known.get(key)
        if decision is None:
            split = self._cheapest(node, rule, tensors)
            needed = tuple(operand_layout(self._mesh, factors, split) for factors in rule.inputs)
            produced = tuple(result_layout(self._mesh, factors, split, rule) for factors in rule.outputs)
            decision = self._known[key] = Decision(split, needed, produced)
        for value, layout in zip(node.inputs, decision.needed, strict=True):
            if layout not in self._there[value]:
                self._there[value] += (layout,)
        return decision

    def _cheapest(self, node: Node, rule: NodeRule, tensors: list[_Tensor]) -> dict[str, str]:
        best: tuple[tuple, dict[str, str]] | None = None
        for order, split in enumerate(self._splits(rule, tensors)):
            cost = _flops(node) // math.prod(self._mesh.size(a) for a in split) // _FLOPS_PER_BYTE
            for index, tensor in enumerate(tensors):
                if index < len(node.inputs):
                    needed = operand_layout(self._mesh, tensor.factors, split)
                    cost += min(_cost(tensor.shape, tensor.dtype, there, needed) for there in tensor.there)
                else:
                    produced = result_layout(self._mesh, tensor.factors, split, rule)
                    cost += _cost(tensor.shape, tensor.dtype, produced, tensor.layout)
            rank = (cost, -len(split), order)
            if best is None or rank < best[0]:
                best = (rank, split)
        assert best is not None
        return best[1]

    def _splits(self, rule: NodeRule, tensors: list[_Tensor]) -> Iterator[dict[str, str]]:
        """All ways to give each axis one of the factors that it splits in some tensor's layout, or none. Results
        come first: owner computes."""
        choices = []
        for axis in self._mesh:
            found = [t.factors[p] for t in reversed(tensors) if (p := t.layout.dim_of(axis)) is not None]
            choices.append(list(dict.fromkeys([*(f for f in found if f is not None), None])))
        for combination in product(*choices):
            split = {a: f for a, f in zip(self._mesh, combination, strict=True) if f is not None}
            if _one_op(rule, split) and _is_even(rule, split, self._mesh):
                yield split


def _flops(node: Node) -> int:
    return count_kernel_flops(node.kernel) if node.kernel is not None else count_flops(node.call)


def operand_layout(mesh: Mesh, factors: AtomFactors, split: Split) -> Sharding:
    """How an operand with these factors has to lie."""
    places = {axis: Shard(factors.index(f)) for axis, f in split.items() if f in factors}
    return Sharding.of(mesh, len(factors), places)


def result_layout(mesh: Mesh, factors: AtomFactors, split: Split, rule: NodeRule) -> Sharding:
    """How a result with these factors comes out."""
    places: dict[str, Placement] = {}
    for axis, factor in split.items():
        if factor in factors:
            places[axis] = Shard(factors.index(factor))
        elif factor in rule.reduced:
            places[axis] = Partial(rule.reduced[factor])
    return Sharding.of(mesh, len(factors), places)


def _cost(shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    """What it takes to go from one layout to another, in bytes that could be received meanwhile."""
    moved = bytes_moved(shape, dtype, src, dst)
    return moved and moved + _BYTES_PER_START


@lru_cache(maxsize=65536)
def bytes_moved(shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
    """What one device receives when a tensor goes from one layout to another."""
    if src == dst:
        return 0
    return RedistributionPlan.make(shape, dtype, itemsize(dtype), src, dst).bytes


def _one_op(rule: NodeRule, split: Split) -> bool:
    """A result can't be pending with two different ops."""
    return len({rule.reduced[f] for f in split.values() if f in rule.reduced}) < 2


def _is_even(rule: NodeRule, split: Split, mesh: Mesh) -> bool:
    """Axes divide the factors that they have to divide."""
    parts = {f: math.prod(mesh.size(a) for a, other in split.items() if other == f) for f in rule.even}
    return all(rule.sizes[factor] % count == 0 for factor, count in parts.items() if factor in rule.sizes)
