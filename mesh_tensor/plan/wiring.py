"""Wiring: which dims of a graph's tensors are the same, because operators index them by one factor, and into which
atoms compound dims take those that they are made of apart."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mesh_tensor.base.joined import Joined
from mesh_tensor.rules.operator import OpRule

from .ir import Graph, Node, Value

Sizes = tuple[int, ...]


@dataclass(frozen=True)
class _Compound:
    """A dim of a node's tensor made of several factors, by their numbers in the classes."""

    node: Node
    dim: int
    factors: list[tuple[str, int]]


@dataclass(frozen=True)
class _Ties:
    """What a rule says of its tensors' dims, which stand as (tensor, dim).

    A factor has a home: the first dim that is nothing else; `links` lead there from the others. `compounds` are dims
    made of several factors, `loose` the factors that have no home."""

    homes: dict[str, tuple[int, int]]
    links: list[tuple[tuple[int, int], tuple[int, int]]]
    compounds: list[tuple[tuple[int, int], tuple[str, ...]]]
    loose: list[str]

    @staticmethod
    def of(rule: OpRule) -> _Ties:
        """The ties of a rule."""
        homes: dict[str, tuple[int, int]] = {}
        links, compounds = [], []
        for tensor, dims in enumerate((*rule.inputs, *rule.outputs)):
            for position, dim in enumerate(dims):
                here = tensor, position
                if isinstance(dim, str):
                    home = homes.setdefault(dim, here)
                    if home is not here:
                        links.append((here, home))
                elif dim:
                    compounds.append((here, dim))
        loose = dict.fromkeys(factor for _, factors in compounds for factor in factors if factor not in homes)
        return _Ties(homes, links, compounds, list(loose))


class Wiring:
    """Which dims and factors are the same, in all of a graph. Dims are numbered, those of a value from `start` on."""

    def __init__(self, graph: Graph, rules: dict[Node, OpRule]) -> None:
        self.classes = classes = _Classes()
        self.start = {value: classes.add(value.type.shape) for value in graph.values()}
        for first, *others in graph.groups().values():
            for value in others:
                for dim in range(value.type.ndim):
                    classes.join(self.start[value] + dim, self.start[first] + dim)
        for before, after in [*((inside, end) for inside, _, end in graph.carried()), *graph.state.items()]:
            for dim in range(before.type.ndim):
                classes.join(self.start[before] + dim, self.start[after] + dim)
        self.compounds: list[_Compound] = []
        self._ties = {id(rule): _Ties.of(rule) for rule in {id(rule): rule for rule in rules.values()}.values()}
        self._loose: dict[Node, int] = {}
        for node, rule in rules.items():
            ties, starts = self._ties[id(rule)], self._starts(node)
            for (tensor, dim), (home, home_dim) in ties.links:
                classes.join(starts[tensor] + dim, starts[home] + home_dim)
            if ties.compounds:
                self._loose[node] = classes.add([rule.sizes[factor] for factor in ties.loose])
                numbers = self._factors(node, rule)
                for (tensor, dim), factors in ties.compounds:
                    self.compounds.append(_Compound(node, starts[tensor] + dim, [(f, numbers[f]) for f in factors]))

        for node, rule in rules.items():
            for factor in rule.devices:
                classes.keep(self._factors(node, rule)[factor])

    def atoms(self) -> dict[Value, tuple[Sizes, ...]]:
        """Of each value the atoms of each dim; what is equal is one object."""
        known: dict[tuple[Sizes, ...], tuple[Sizes, ...]] = {}
        found = {}
        for value, start in self.start.items():
            dims = tuple([self.classes.atoms(number) for number in range(start, start + value.type.ndim)])
            found[value] = known.setdefault(dims, dims)
        return found

    def factor_atoms(self, node: Node, rule: OpRule) -> dict[str, Sizes]:
        """The atoms of each factor of a node."""
        return {factor: self.classes.atoms(number) for factor, number in self._factors(node, rule).items()}

    def atoms_in_compounds(self, node: Node, rule: OpRule) -> tuple[Sizes, ...]:
        """The atoms of the factors of a node whose atoms no dim tells."""
        start = self._loose.get(node)
        if start is None:
            return ()
        loose = self._ties[id(rule)].loose
        return tuple([self.classes.atoms(number) for number in range(start, start + len(loose))])

    def _starts(self, node: Node) -> list[int]:
        return [self.start[value] for value in (*node.inputs, *node.outputs)]

    def _factors(self, node: Node, rule: OpRule) -> dict[str, int]:
        ties, starts = self._ties[id(rule)], self._starts(node)
        numbers = {factor: starts[tensor] + dim for factor, (tensor, dim) in ties.homes.items()}
        return numbers | {factor: self._loose[node] + index for index, factor in enumerate(ties.loose)}


class _Classes(Joined[int]):
    """Sets of dims and factors that have the same atoms. `cuts` of a set are the products of its last atoms."""

    def __init__(self) -> None:
        super().__init__()
        self._size: list[int] = []
        self._cuts: list[frozenset[int]] = []
        self._kept: set[int] = set()

    def add(self, sizes: Sequence[int]) -> int:
        """New sets, of one dim or factor each, of these sizes. They are numbered on from what is given."""
        first = len(self._size)
        self._size.extend(sizes)
        self._cuts.extend([frozenset()] * len(sizes))
        return first

    def keep(self, index: int) -> None:
        """Never cut a set."""
        self._kept.add(self.root(index))

    def size(self, index: int) -> int:
        return self._size[self.root(index)]

    def cuts(self, index: int) -> frozenset[int]:
        return self._cuts[self.root(index)]

    def cut(self, index: int, cuts: frozenset[int]) -> bool | None:
        """Add cuts: True if that changed something, None if they don't go with those that are there."""
        index = self.root(index)
        size, together = self._size[index], self._cuts[index] | {c for c in cuts if 1 < c < self._size[index]}
        chain = [1, *sorted(together), size]
        if any(low == 0 or high % low for low, high in zip(chain, chain[1:], strict=False)):
            return None
        changed = together != self._cuts[index]
        if changed and index in self._kept:
            return None
        self._cuts[index] = together
        return changed

    def atoms(self, index: int) -> Sizes:
        index = self.root(index)
        size, cuts = self._size[index], self._cuts[index]
        if not cuts or size == 0:
            return (size,)
        chain = [1, *sorted(cuts), size]
        return tuple(high // low for low, high in zip(chain[:-1], chain[1:], strict=True))[::-1]


def settle(classes: _Classes, compounds: list[_Compound]) -> dict[Node, set[str]]:
    """Exchange cuts between compound dims and their factors until nothing changes. The factors of those where they
    don't fit together are given back: the operator needs them whole."""
    broken: set[int] = set()
    changed = True
    while changed:
        changed = False
        for index, compound in enumerate(compounds):
            if index in broken:
                continue
            results = list(_exchange(classes, compound))
            if None in results:
                broken.add(index)
            changed = changed or any(results) or None in results
    found: dict[Node, set[str]] = {}
    for compound in map(compounds.__getitem__, broken):
        found.setdefault(compound.node, set()).update(name for name, _ in compound.factors)
    return found


def _exchange(classes: _Classes, compound: _Compound) -> Iterator[bool | None]:
    minor = 1
    inside = classes.cuts(compound.dim)
    for _, factor in reversed(compound.factors):
        size = classes.size(factor)
        yield classes.cut(compound.dim, frozenset([minor, *(c * minor for c in classes.cuts(factor))]))
        within = {c for c in inside if minor < c < minor * size}
        yield None if any(c % minor for c in within) else classes.cut(factor, frozenset(c // minor for c in within))
        minor *= size
