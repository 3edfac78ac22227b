"""What every mesh axis splits in every operator: the factor with which the least is sent and the least work is
repeated, given the values' layouts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, product, repeat
from typing import Any, NamedTuple

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Partial, Placement, Shard, Sharding
from mesh_tensor.base.window import EVERYWHERE, Reach, Reaches
from mesh_tensor.rules.operator.rule import InnerReduction

from .atoms import AtomFactors, Atoms, NodeRule, may_split
from .ir import Node, Value
from .prices import PRICES, Prices, node_flops
from .propagate import Layouts
from .spread import tensors_of

AxisFactors = Mapping[str, str | None]  # axis -> factor
Order = Mapping[str, int]  # axis -> which comes first of those that split one factor, as in Shard


@dataclass(frozen=True)
class Decision:
    """What the axes split in a node, `after` all that is reduced inside it, and the layouts that follow for its
    operands and results."""

    split: dict[str, str]
    after: dict[str, str]
    needed: tuple[Sharding, ...]
    produced: tuple[Sharding, ...]

    @staticmethod
    def of(
        mesh: Mesh, rule: NodeRule, split: dict[str, str], order: Order, after: dict[str, str] | None = None
    ) -> Decision:
        """What follows from a split; `after` is the same if nothing is said of it. `order`: of axes that split one
        factor, as in Shard."""
        after, results = split if after is None else after, zip(rule.outputs, rule.partial, strict=True)
        produced = tuple([result_layout(mesh, factors, after, ops, order) for factors, ops in results])
        return Decision(split, after, operand_layouts(mesh, rule, split, order), produced)


class _Tensor(NamedTuple):
    """An operand or a result of a node: `there` are the layouts in which the value exists by then; none if it may come
    in any. `takers`: how many nodes alike take it, and would share a change of its layout."""

    shape: tuple[int, ...]
    dtype: str
    layout: Sharding
    factors: AtomFactors
    there: tuple[Sharding, ...]
    takers: int


class Decider:
    """Decides node by node, in the order in which they run; the same question is answered once.

    `free`: values that may come, and stay, in any layout. `fixed`: what axes split, as far as that is known.
    `in_place`: of all splits, those win with which the fewest axes have to stop splitting what they split.
    `nodes`: all that are going to be decided, as far as they share operands. `prices`: what is cheap; `decided`: by
    the names of what nodes give, what axes split in them, where they may, whatever is cheap."""

    def __init__(
        self,
        mesh: Mesh,
        atoms: Atoms,
        layouts: Layouts,
        *,
        free: Collection[Value] = (),
        fixed: AxisFactors | None = None,
        in_place: bool = False,
        nodes: Collection[Node] = (),
        prices: Prices = PRICES,
        decided: Mapping[tuple[str, ...], Mapping[str, str]] | None = None,
    ) -> None:
        self._before = decided or {}
        self._mesh, self._atoms, self._layouts = mesh, atoms, layouts
        self._fixed, self._in_place, self._prices = fixed or {}, in_place, prices
        self._known: dict[tuple, Decision] = {}
        self._takers = Counter((id(atoms.rules[n]), p, v) for n in nodes for p, v in enumerate(n.inputs))
        self._there: dict[Value, tuple[Sharding, ...]] = {
            value: () if value in free else (layout,) for value, layout in layouts.of.items()
        }

    def decide(self, node: Node) -> Decision:
        """The cheapest split of a node. Where costs tie, more axes split, then the first factor named wins: results
        come first."""
        rule = self._atoms.rules[node]
        values = (*node.inputs, *node.outputs)
        takers = tuple([self._takers.get((id(rule), p, value), 1) for p, value in enumerate(node.inputs)])
        before = self._before.get(node.names)
        asked = None if before is None else tuple(before.items())
        known = (id(rule), takers, tuple([(self._layouts.of[value], self._there[value]) for value in values]), asked)
        decision = self._known.get(known)
        if decision is None:
            decision = self._known[known] = self._decided(node, rule, takers, before)
        for value, layout in zip(node.inputs, decision.needed, strict=True):
            if self._there[value] and layout not in self._there[value] and not layout.windows:
                self._there[value] += (layout,)
        return decision

    def _decided(
        self, node: Node, rule: NodeRule, takers: tuple[int, ...], before: Mapping[str, str] | None
    ) -> Decision:
        shared = chain(takers, repeat(1))
        tensors = [
            _Tensor(self._atoms.shape(v), v.type.dtype, self._layouts.of[v], f, self._there[v], count)
            for (v, f), count in zip(tensors_of(node, rule), shared, strict=False)
        ]
        operands, results = tensors[: len(node.inputs)], tensors[len(node.inputs) :]
        decisions = [self._decision(rule, split, results) for split in self._splits(rule, tensors)]
        decisions = [decision for decision in decisions if decision.split == before] or decisions
        if len(decisions) == 1:
            return decisions[0]
        flops = node_flops(node)
        return min(decisions, key=lambda decision: self._rank(decision, node, flops, rule, operands, results))

    def _rank(
        self,
        decision: Decision,
        node: Node,
        flops: int,
        rule: NodeRule,
        operands: list[_Tensor],
        results: list[_Tensor],
    ) -> tuple[int, int, int]:
        """How good a decision is: less is better."""
        ways = [(t, t.there, needed) for t, needed in zip(operands, decision.needed, strict=True) if t.there]
        for tensor, produced in zip(results, decision.produced, strict=True):
            completed = produced.complete if produced.partial else produced
            ways.append((tensor, (produced,), tensor.layout if tensor.there else completed))
        change = self._prices.change
        waiting = {inner.factor for inner in rule.inner if inner.op == "turns"}
        apart = [self._mesh.size(axis) for axis, factor in decision.split.items() if factor not in waiting]
        cost = self._prices.work(node, flops // math.prod(apart))
        cost += sum(min(change(t.shape, t.dtype, src, dst) for src in there) // t.takers for t, there, dst in ways)
        cost += sum(self._inner_cost(inner, decision) for inner in rule.inner)
        leaving = sum(_leaving(there[0], dst) for _, there, dst in ways) if self._in_place else 0
        return leaving, cost, -len(decision.split)

    def _decision(self, rule: NodeRule, split: dict[str, str], asked: list[_Tensor]) -> Decision:
        """What follows from a split. An axis whose factor ends inside the kernel splits what results ask for from
        there on."""
        ended = {inner.factor for inner in rule.inner if inner.ends}
        after = dict(split)
        for axis in [axis for axis, factor in split.items() if factor in ended]:
            found = (t.factors[p] for t in asked if (p := t.layout.dim_of(axis)) is not None)
            wanted = next((factor for factor in found if factor is not None), None)
            if wanted is not None and fits(rule, {**after, axis: wanted}, self._mesh):
                after[axis] = wanted
        return Decision.of(self._mesh, rule, split, self._layouts.order, after)

    def _splits(self, rule: NodeRule, tensors: list[_Tensor]) -> Iterator[dict[str, str]]:
        """All ways to give each axis one of the factors that it splits in some tensor's layout, or none. Results
        come first: owner computes."""
        choices: list[list[str | None]] = []
        for axis in self._mesh:
            found = [t.factors[p] for t in reversed(tensors) if (p := t.layout.dim_of(axis)) is not None]
            free = list(dict.fromkeys([*(f for f in found if f is not None), None]))
            fixed = rule.fixed if axis in rule.fixed else self._fixed
            choices.append([fixed[axis]] if axis in fixed else free)
        for combination in product(*choices):
            split = {a: f for a, f in zip(self._mesh, combination, strict=True) if f is not None}
            if fits(rule, split, self._mesh):
                yield split

    def _inner_cost(self, inner: InnerReduction, decision: Decision) -> int:
        """What it takes to complete a value in the middle of a kernel."""
        over = [axis for axis, factor in decision.split.items() if factor == inner.factor]
        if not over:
            return 0
        if inner.op in ("scan", "turns"):
            return self._handed_on_cost(inner, decision, over)
        partial: dict[str, Placement] = {axis: Partial(inner.op) for axis in over}
        src = _places(inner.dims, decision.split, {}) | partial
        dst = _places(inner.dims, decision.after if inner.ends else decision.split, {})
        layouts = [Sharding.of(self._mesh, len(inner.dims), places) for places in (src, dst)]
        return self._prices.change(inner.shape, inner.dtype, *layouts)

    def _handed_on_cost(self, inner: InnerReduction, decision: Decision, over: Collection[str]) -> int:
        """What it takes devices to have what all others make of a value, or, in turns, the one before them."""
        sizes = [self._mesh.size(axis) for axis in over]
        devices = math.prod(sizes)
        kept = _places((None, *inner.dims), decision.split, {})
        places = ({**kept, **dict.fromkeys(over, Shard(0))}, kept)
        each, all_of = (Sharding.of(self._mesh, len(inner.dims) + 1, place) for place in places)
        shape = devices, *inner.shape
        if inner.op == "scan":
            return self._prices.change(shape, inner.dtype, each, all_of)
        window = Reaches(inner.factor, devices, 1, 1, (Reach(-1, 0),)).window(devices, sizes)
        there = all_of if window is None else each.with_windows([(0, window)])
        return (devices - 1) * self._prices.change(shape, inner.dtype, each, there)


def _places(factors: AtomFactors, split: AxisFactors, order: Order) -> dict[str, Placement]:
    return {axis: Shard(factors.index(f), order.get(axis, 0)) for axis, f in split.items() if f in factors}


def operand_layouts(mesh: Mesh, rule: NodeRule, split: AxisFactors, order: Order) -> tuple[Sharding, ...]:
    """How the operands have to lie. `order`: of axes that split one factor, as in Shard."""
    layouts = [Sharding.of(mesh, len(factors), _places(factors, split, order)) for factors in rule.inputs]
    for (operand, position), reaches in rule.windows.items():
        size = rule.sizes.get(reaches.factor, 1)
        layouts[operand] = with_window(layouts[operand], position, reaches, size, split, order)
    return tuple(layouts)


def with_window(
    layout: Sharding, dim: int, reaches: Reaches, size: int, split: Mapping[str, Any], order: Order
) -> Sharding:
    """The layout, in which the axes that split the factor (of `size`) split a dim into what is read of it from there;
    the layout itself, with the dim whole, where that is as much, or they split another dim. What is the same everywhere
    is a window however axes split."""
    axes = [axis for axis, factor in split.items() if factor == reaches.factor and layout.mesh.size(axis) > 1]
    window = reaches.window(size, [layout.mesh.size(axis) for axis in axes])
    if window is not None and reaches.factor == EVERYWHERE:
        return layout.with_windows([*layout.windows, (dim, window)])
    if not axes or window is None or any(layout.dim_of(axis) is not None for axis in axes):
        return layout
    places = layout.placements() | {axis: Shard(dim, order.get(axis, 0)) for axis in axes}
    return Sharding.of(layout.mesh, layout.ndim, places).with_windows([*layout.windows, (dim, window)])


def result_layout(
    mesh: Mesh, factors: AtomFactors, split: AxisFactors, partial: Mapping[str, str], order: Order
) -> Sharding:
    """How a result with these factors comes out, where `partial` has the ops that complete it."""
    places = _places(factors, split, order)
    for axis, factor in split.items():
        if axis not in places and factor is not None and factor in partial:
            places[axis] = Partial(partial[factor])
    return Sharding.of(mesh, len(factors), places)


def _leaving(src: Sharding, dst: Sharding) -> int:
    """How many axes stop splitting what they split."""
    return sum(dst.dim_of(axis) != dim for axis, dim in src.as_dict().items() if src.mesh.size(axis) > 1)


def fits(rule: NodeRule, split: Mapping[str, str], mesh: Mesh) -> bool:
    """Whether axes may split factors so."""
    fixed = all(split.get(axis) == factor for axis, factor in rule.fixed.items())
    own = all(may_split(rule.fixed, axis, factor) for axis, factor in split.items())
    return fixed and own and _one_op(rule, split) and _is_even(rule, split, mesh) and _has_blocks(rule, split, mesh)


def _one_op(rule: NodeRule, split: AxisFactors) -> bool:
    """A result can't be pending with two different ops."""
    return all(len({ops[f] for f in split.values() if f is not None and f in ops}) < 2 for ops in rule.partial)


def _is_even(rule: NodeRule, split: AxisFactors, mesh: Mesh) -> bool:
    """Axes divide the factors that they have to divide."""
    parts = {f: math.prod(mesh.size(a) for a, other in split.items() if other == f) for f in rule.even}
    return all(rule.sizes[factor] % count == 0 for factor, count in parts.items() if factor in rule.sizes)


def _has_blocks(rule: NodeRule, split: AxisFactors, mesh: Mesh) -> bool:
    """Tiles are whole blocks where they have to be, and the first one holds what it has to."""
    for factor, least in rule.first.items():
        parts = math.prod(mesh.size(axis) for axis, other in split.items() if other == factor)
        if parts > 1 and -(-rule.sizes.get(factor, 0) // parts) < least:
            return False
    for factor, block in rule.blocks.items():
        tile = rule.sizes.get(factor, 0)
        for axis in [axis for axis, other in split.items() if other == factor and mesh.size(axis) > 1]:
            tile = -(-tile // mesh.size(axis))
            if tile % block:
                return False
    return True
