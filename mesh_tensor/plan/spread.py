"""Spread: what was stated goes through the operators' factors, both ways.

In waves: through factors that results have before factors that are summed over; from operands to results before the
other ways; what stands nearer to an annotation before what stands farther (operators with one operand are no distance:
a transposed weight is as near as the weight); then the larger tensor; then the order in the module. A value takes, per
mesh axis, what reaches it first; what comes later and disagrees is a conflict: reported, and a change of layout there.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from typing import NamedTuple

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Shard, Sharding

from .atoms import AtomFactors, Atoms, NodeRule, may_split
from .ir import Graph, Node, Value


@dataclass(frozen=True)
class Conflict:
    """At `node`, `axis` is asked to split several factors; `taken` is what spread, `other` what did not."""

    node: Node
    axis: str
    taken: str
    other: str

    def __str__(self) -> str:
        return f"{self.node.where} ({self.node.call.name}): axis {self.axis} splits {self.taken}, not {self.other}"


class _Site(NamedTuple):
    """A node, its operands and then its results (each with its atoms' factors), and where the results begin.
    `repeated`: operands that are repeated along dims which another operand has beside all of theirs: a bias, a mask.
    `around`: atoms of parameters that are read around a factor's place: whole they need no margins. `read`: the factors
    from which windows are read. `blocked`: the ways, back or not, in which nothing spreads through the node. `fixed`:
    the factors that axes split, whatever reaches the node."""

    node: Node
    tensors: tuple[tuple[Value, AtomFactors], ...]
    results: int
    reduced: Mapping[str, str]
    repeated: frozenset[int]
    around: frozenset[tuple[Value, int]]
    read: frozenset[str]
    blocked: frozenset[bool]
    fixed: Mapping[str, str]


class Spread:
    """Which atom of which value every axis splits, as far as it is known: `places` has axis -> atom.

    A wave is (in a summed factor?, to operands?, distance, -elements, order, axis, tensor of the node, node), of which
    the node is a number, too."""

    def __init__(self, graph: Graph, atoms: Atoms) -> None:
        self._atoms, self._mesh = atoms, graph.mesh
        self._values = graph.values()
        self._group: dict[Value, list[Value]] = {}
        for members in graph.alike():
            self._group |= dict.fromkeys(members, members)
        self._rank = {value: (-value.type.elements, order) for order, value in enumerate(self._values)}
        self._sites: list[_Site] = []
        self._readers = Counter((node.inputs[n], dim) for node in graph.nodes for n, dim in atoms.rules[node].windows)
        repeated: dict[int, frozenset[int]] = {}
        params = set(graph.params)
        self._touching: dict[Value, list[tuple[int, int]]] = {}  # (node, tensor of the node)
        for number, node in enumerate(graph.nodes):
            rule = atoms.rules[node]
            if id(rule) not in repeated:
                repeated[id(rule)] = _repeated(node, rule)
            read = [(node.inputs[operand], atom) for operand, atom in rule.windows]
            around = frozenset([(value, atom) for value, atom in read if value in params])
            tensors = tuple(tensors_of(node, rule))
            stated = graph.annotations.get(node.outputs[0]) if node.is_annotation else None
            blocked = stated.blocked if stated is not None else frozenset()
            windows = frozenset([reaches.factor for reaches in rule.windows.values()])
            tied = repeated[id(rule)]
            site = _Site(node, tensors, len(node.inputs), rule.reduced, tied, around, windows, blocked, rule.fixed)
            self._sites.append(site)
            for index, (value, _) in enumerate(site.tensors):
                self._touching.setdefault(value, []).append((number, index))
        self._begin()

    def _begin(self) -> None:
        devices = self._atoms.devices
        self.places: dict[Value, dict[str, int]] = {
            value: {axis: place for place, (axis, _) in enumerate(devices.get(value, ()))} for value in self._values
        }
        for members in {id(members): members for members in self._group.values()}.values():
            shared: dict[str, int] = {}
            self.places |= dict.fromkeys(members, shared)  # one dict: they lie alike
        #: As in Shard, of the axes that a layout is stated for; of values that lie alike, one dict.
        self.minors: dict[Value, dict[str, int]] = {}
        self._closed: dict[Value, frozenset[str]] = {}
        self._kept: dict[Value, frozenset[int]] = {}  # atoms that nothing else splits
        self._factor: dict[tuple[int, str], str] = {}
        self._waves: list[tuple[bool, bool, int, int, int, str, int, int]] = []

    def afresh(self) -> Spread:
        """The same graph, with nothing stated."""
        made = copy(self)
        made._begin()
        return made

    def state(self, value: Value, annotation: Annotation) -> None:
        """The layout that was stated for a value: its own axes stay, and all others unless it is open. It doesn't
        spread until it is started."""
        places = refine_sharding(annotation.sharding, value, self._atoms)
        stated = {*places, *annotation.replicated, *(axis for axis, _ in annotation.sharding.partial)}
        closed = frozenset(stated if annotation.open else self._mesh)
        dims = [dim for dim in range(value.type.ndim) if annotation.keeps(dim)] if annotation.open else []
        kept = frozenset(p for dim in dims for p in self._atoms.positions(value, dim))
        for member in self._members(value):
            self._closed[member] = self._closed.get(member, frozenset()) | closed
            self._kept[member] = self._kept.get(member, frozenset()) | kept
        self.places[value].update(places)
        for axis, placement in annotation.sharding.placements().items():
            if isinstance(placement, Shard):
                for member in self._members(value):
                    self.minors.setdefault(member, {})[axis] = placement.minor

    def start(self, value: Value, axes: Collection[str]) -> None:
        """The stated layout of a value starts to spread along these axes."""
        for axis in self.places[value]:
            if axis in axes:
                self._push(value, axis, 0)

    def splits(self, value: Value, factors: AtomFactors, axis: str) -> str | None:
        """Which of the factors of a value the axis splits."""
        return self._factor_at(value, factors, axis)

    def take(self, value: Value, axis: str, place: int) -> None:
        """The axis splits this atom of a value, if nothing else is known or stated next, and that spreads."""
        nodes = [self._sites[number].node for number, _ in self._touching[value]]
        stated = [node.outputs[0] for node in nodes if node.is_annotation and node.outputs[0] is not value]
        if any(axis in self._closed.get(one, ()) and axis not in self.places[one] for one in stated):
            return
        if axis in self.places[value] or axis in self._closed.get(value, ()) or place in self._kept.get(value, ()):
            return
        self.places[value][axis] = place
        self._push(value, axis, 0)
        self.run()

    def _members(self, value: Value) -> list[Value]:
        """The values that lie as this one, itself among them."""
        return self._group.get(value) or [value]

    def run(self) -> None:
        """Spread until nothing changes."""
        while self._waves:
            _, back, distance, _, _, axis, index, number = heapq.heappop(self._waves)
            self._meet(number, axis, index, distance, back)

    def conflicts(self) -> Iterator[Conflict]:
        """Where an axis reaches an operator through several factors."""
        for number, site in enumerate(self._sites):
            for axis in self._mesh:
                taken = self._factor.get((number, axis))
                if taken is None:
                    continue
                found = [self._factor_at(value, factors, axis) for value, factors in site.tensors]
                for other in dict.fromkeys(found):
                    if other and other != taken:
                        yield Conflict(site.node, axis, taken, other)

    def _push(self, value: Value, axis: str, distance: int) -> None:
        """The axis now splits the value: every operator on it hears of that, unless it is a small operand there for
        which this was stated: what it is repeated along is not laid out for its sake."""
        for member in self._members(value):
            self._push_one(member, axis, distance)

    def _push_one(self, value: Value, axis: str, distance: int) -> None:
        for number, index in self._touching.get(value, ()):
            site = self._sites[number]
            if index in site.repeated and not distance:
                continue
            if factor := self._factor_at(*site.tensors[index], axis):
                for back in (False, True):
                    wave = (factor in site.reduced, back, distance, *self._rank[value], axis, index, number)
                    heapq.heappush(self._waves, wave)

    def _factor_at(self, value: Value, factors: AtomFactors, axis: str) -> str | None:
        place = self.places[value].get(axis)
        return None if place is None else factors[place]

    def _meet(self, number: int, axis: str, index: int, distance: int, back: bool) -> None:
        """A wave reaches an operator: the first one per axis goes on, to its operands or to its results."""
        site = self._sites[number]
        if back in site.blocked:
            return
        factor = self._factor_at(*site.tensors[index], axis)
        if factor is None or not may_split(site.fixed, axis, factor):
            return
        if self._factor.setdefault((number, axis), factor) != factor:
            return
        for value, factors in site.tensors[: site.results] if back else site.tensors[site.results :]:
            if factor in factors and axis not in self.places[value] and axis not in self._closed.get(value, ()):
                place = factors.index(factor)
                if place in self._kept.get(value, ()) or (back and (value, place) in site.around):
                    continue
                if factor in site.read and not self._pays(site.node, factor, axis, value if back else None):
                    continue
                self.places[value][axis] = place
                self._push(value, axis, distance + (site.results > 1))

    def _pays(self, node: Node, factor: str, axis: str, onto: Value | None) -> bool:
        """Whether splitting what is read through windows moves less than gathering it once for all who read it so, and
        leaves no device without a part. `onto`: the operand to which this spreads; None: a result."""
        rule, parts = self._atoms.rules[node], self._mesh.size(axis)
        size = rule.sizes[factor]
        for (operand, dim), reaches in rule.windows.items():
            value = node.inputs[operand]
            readers = self._readers[value, dim]
            if reaches.factor == factor and (axis in self.places[value] if onto is None else value is onto):
                moved = readers * reaches.lacking(size, parts)
                gathered = reaches.extent - -(-reaches.extent // parts)
                if moved > gathered or (moved == gathered > 0 and (onto or readers > 1)):
                    return False
        return size >= parts


def _repeated(node: Node, rule: NodeRule) -> frozenset[int]:
    """The operands with fewer factors than another one, of an operator that works element by element."""
    if len(node.inputs) < 2 or rule.reduced:
        return frozenset()
    for value, dims in zip(node.inputs, rule.rule.inputs, strict=True):
        if any(dim is None and size != 1 for dim, size in zip(dims, value.type.shape, strict=True)):
            return frozenset()
    factors = [frozenset(filter(None, dims)) for dims in rule.inputs]
    return frozenset([n for n, mine in enumerate(factors) if any(mine < others for others in factors)])


def tensors_of(node: Node, rule: NodeRule) -> Iterator[tuple[Value, AtomFactors]]:
    """The operands and results of a node, with the factors that their atoms follow."""
    yield from zip(node.inputs, rule.followed, strict=True)
    yield from zip(node.outputs, rule.outputs, strict=True)


def refine_sharding(sharding: Sharding, value: Value, atoms: Atoms) -> dict[str, int]:
    """The atom that each axis of a stated layout splits: of the dim that it names, the first atom that the axes on it
    divide evenly, else the first that is large enough; those that some operator on their way needs whole come last.
    Refused where the layout is for another number of dims."""
    if sharding.ndim != value.type.ndim:
        refuse(
            f"'{sharding}' is a layout of {sharding.ndim} dims",
            where=f"value {value.name!r} of shape {value.type.shape}",
            fix="state it for the value's own dims",
        )
    places: dict[str, int] = {}
    shape = atoms.shape(value)
    taken = dict.fromkeys(range(len(shape)), 1)
    for axis, dim in [(axis, dim) for dim, axes in enumerate(sharding.dims) for axis in axes]:
        parts = sharding.mesh.size(axis)
        positions = atoms.positions(value, dim)
        even = [p for p in positions if shape[p] % (taken[p] * parts) == 0]
        large = [p for p in positions if shape[p] >= taken[p] * parts]
        choices = [*even, *large] or list(positions)
        if len({*choices}) > 1:
            choices = [p for p in choices if (value, p) not in atoms.hindered] or choices
        places[axis] = choices[0]
        taken[places[axis]] *= parts
    return places
