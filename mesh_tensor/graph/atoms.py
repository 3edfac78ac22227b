"""Atoms: dims refined until reshapes only regroup them.

Where a module merges the dims (batch, heads) into one and takes them apart again, a split of the heads is no contiguous
part of the merged dim. So every dim is known as a product of atoms, major first, found for all values together:
dims that operators index by one factor have the same atoms. Layouts are decided on atoms; an operator's rule is
refined to say which factor each atom belongs to.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from ..rules.ops import OpRule
from ..rules.ops.rule import Dim, atoms_of
from ..sharding import Sharding
from .ir import Graph, Node, Value

Sizes = tuple[int, ...]
# The factor of every atom of a tensor; None: needed (or made) whole.
AtomFactors = tuple[str | None, ...]


@dataclass(frozen=True)
class NodeRule:
    """An operator's rule over the atoms of its tensors. `sizes` are those of the factors, `reduced` as in `rule`.
    `even`: factors that axes have to divide, because tiles are to be contiguous parts of a dim that has more atoms."""

    rule: OpRule
    inputs: tuple[AtomFactors, ...]
    outputs: tuple[AtomFactors, ...]
    sizes: dict[str, int]
    reduced: dict[str, str]
    even: frozenset[str] = frozenset()


@dataclass(frozen=True, eq=False)
class Atoms:
    """Per value the atoms of each of its dims, per node its refined rule."""

    of: dict[Value, tuple[Sizes, ...]]
    rules: dict[Node, NodeRule]

    def shape(self, value: Value) -> Sizes:
        """The value's shape with every dim taken apart."""
        return self._shapes[value]

    @cached_property
    def _shapes(self) -> dict[Value, Sizes]:
        return {value: tuple(size for dim in dims for size in dim) for value, dims in self.of.items()}

    def positions(self, value: Value, dim: int) -> range:
        """Where the atoms of a dim stand in `shape`."""
        start = sum(len(atoms) for atoms in self.of[value][:dim])
        return range(start, start + len(self.of[value][dim]))

    def merge(self, value: Value, tile: Sizes) -> Sizes:
        """The shape with its dims whole again, of a tile of that refined shape."""
        return tuple(math.prod(tile[p] for p in self.positions(value, d)) for d in range(value.type.ndim))


def find_atoms(graph: Graph, rules: dict[Node, OpRule]) -> Atoms:
    """The coarsest atoms on which every operator's compound dims are made of whole factors."""
    classes = _Classes()
    compounds = []
    for node, rule in rules.items():
        for value, dims in _tensors(node, rule):
            for position, dim in enumerate(dims):
                here = classes.of((value, position), value.type.shape[position])
                if isinstance(dim, str):
                    classes.join(here, classes.of((node, dim), value.type.shape[position]))
                elif dim:
                    sizes = [rule.sizes[f] if f in rule.sizes else _size(node, rule, f) for f in dim]
                    compounds.append(
                        _Compound(node, here, [(f, classes.of((node, f), s)) for f, s in zip(dim, sizes, strict=True)])
                    )
    broken = _settle(classes, compounds)
    of = {
        value: tuple(classes.atoms(classes.of((value, d), size)) for d, size in enumerate(value.type.shape))
        for value in graph.values()
    }
    return Atoms(of, _refined(rules, of, classes, broken))


def _refined(
    rules: dict[Node, OpRule], of: dict[Value, tuple[Sizes, ...]], classes: _Classes, broken: dict[Node, set[str]]
) -> dict[Node, NodeRule]:
    """The rules over atoms. Nodes with one rule and the same atoms share theirs."""
    known: dict[tuple, NodeRule] = {}
    compounds = {id(rule): _in_compounds(rule) for rule in rules.values()}
    refined = {}
    for node, rule in rules.items():
        factors = tuple(classes.atoms(classes.of((node, factor), 0)) for factor in compounds[id(rule)])
        tensors = tuple(of[value] for value in (*node.inputs, *node.outputs))
        key = (id(rule), tensors, factors, frozenset(broken.get(node, ())))
        if key not in known:
            known[key] = _Refinement(node, rule, classes, broken.get(node, set())).refine(of)
        refined[node] = known[key]
    return refined


def _in_compounds(rule: OpRule) -> tuple[str, ...]:
    """The factors whose atoms no dim tells."""
    dims = [dim for tensor in (*rule.inputs, *rule.outputs) for dim in tensor]
    return tuple(dict.fromkeys(factor for dim in dims if isinstance(dim, tuple) for factor in dim))


def plain_sharding(sharding: Sharding, dims: tuple[Sizes, ...]) -> Sharding | None:
    """A layout over atoms as one over the dims that they make up, if it is one: only first atoms are split, and evenly
    where more follow."""
    start, axes = 0, []
    for atoms in dims:
        uneven = len(atoms) > 1 and atoms[0] % sharding.num_shards(start) != 0
        if uneven or any(sharding.axes_of(p) for p in range(start + 1, start + len(atoms))):
            return None
        axes.append(sharding.axes_of(start))
        start += len(atoms)
    return Sharding(sharding.mesh, len(dims), tuple(axes), sharding.partial)


def made_plain(sharding: Sharding, dims: tuple[Sizes, ...]) -> Sharding:
    """The layout over atoms in which no dim is split that isn't split in contiguous tiles."""
    start = 0
    for atoms in dims:
        uneven = len(atoms) > 1 and atoms[0] % sharding.num_shards(start) != 0
        for position in range(start if uneven else start + 1, start + len(atoms)):
            for axis in sharding.axes_of(position):
                sharding = sharding.with_replicate(axis)
        start += len(atoms)
    return sharding


@dataclass(frozen=True)
class _Compound:
    """A dim of a node's tensor made of several factors: the keys of the dim and of the factors in the classes."""

    node: Node
    dim: int
    factors: list[tuple[str, int]]


class _Classes:
    """Sets of dims and factors that have the same atoms. `cuts` of a set are the products of its last atoms."""

    def __init__(self) -> None:
        self._ids: dict[tuple, int] = {}
        self._parent: list[int] = []
        self._size: list[int] = []
        self._cuts: list[frozenset[int]] = []

    def of(self, key: tuple, size: int) -> int:
        """The class of a (value, dim) or (node, factor)."""
        if key not in self._ids:
            self._ids[key] = len(self._parent)
            self._parent.append(len(self._parent))
            self._size.append(size)
            self._cuts.append(frozenset())
        return self.find(self._ids[key])

    def find(self, index: int) -> int:
        while self._parent[index] != index:
            self._parent[index] = index = self._parent[self._parent[index]]
        return index

    def join(self, a: int, b: int) -> None:
        a, b = self.find(a), self.find(b)
        self._parent[b] = a

    def size(self, index: int) -> int:
        return self._size[self.find(index)]

    def cuts(self, index: int) -> frozenset[int]:
        return self._cuts[self.find(index)]

    def cut(self, index: int, cuts: frozenset[int]) -> bool | None:
        """Add cuts: True if that changed something, None if they don't go with those that are there."""
        index = self.find(index)
        size, together = self._size[index], self._cuts[index] | {c for c in cuts if 1 < c < self._size[index]}
        chain = [1, *sorted(together), size]
        if any(low == 0 or high % low for low, high in zip(chain, chain[1:], strict=False)):
            return None
        changed = together != self._cuts[index]
        self._cuts[index] = together
        return changed

    def atoms(self, index: int) -> Sizes:
        chain = [1, *sorted(self.cuts(index)), self.size(index)]
        if self.size(index) == 0:
            return (0,)
        return tuple(high // low for low, high in zip(chain[:-1], chain[1:], strict=True))[::-1]


def _settle(classes: _Classes, compounds: list[_Compound]) -> dict[Node, set[str]]:
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


def _exchange(classes: _Classes, compound: _Compound):
    minor = 1
    inside = classes.cuts(compound.dim)
    for _, factor in reversed(compound.factors):
        size = classes.size(factor)
        yield classes.cut(compound.dim, frozenset([minor, *(c * minor for c in classes.cuts(factor))]))
        within = {c for c in inside if minor < c < minor * size}
        yield None if any(c % minor for c in within) else classes.cut(factor, frozenset(c // minor for c in within))
        minor *= size


class _Refinement:
    """A rule over atoms, in the making."""

    def __init__(self, node: Node, rule: OpRule, classes: _Classes, broken: set[str]) -> None:
        self._node, self._rule, self._classes = node, rule, classes
        self._whole = set(rule.unsplit) | broken
        self._base: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._even: set[str] = set()
        self._minor: set[str] = set()

    def refine(self, of: dict[Value, tuple[Sizes, ...]]) -> NodeRule:
        """The rule over atoms: what some tensor of the operator has to have whole is whole in all of them."""
        node, rule = self._node, self._rule
        inputs = [self._tensor(dims, of[value]) for value, dims in zip(node.inputs, rule.inputs, strict=True)]
        outputs = [self._tensor(dims, of[value]) for value, dims in zip(node.outputs, rule.outputs, strict=True)]
        sizes = {name: size for name, size in self._sizes.items() if not self._is_whole(name)}
        reduced = {name: rule.reduced[self._base[name]] for name in sizes if self._base[name] in rule.reduced}
        return NodeRule(rule, self._split(inputs), self._split(outputs), sizes, reduced, frozenset(self._even))

    def _tensor(self, dims: tuple[Dim, ...], all_atoms: tuple[Sizes, ...]) -> list[str | None]:
        result: list[str | None] = []
        for dim, atoms in zip(dims, all_atoms, strict=True):
            factors = atoms_of(dim)
            names = [name for factor in factors for name in self._pieces(factor, alone=len(factors) == 1)]
            if len(names) == len(atoms):
                result += names
            else:
                self._whole.update(factors)
                result += [None] * len(atoms)
        return result

    def _pieces(self, factor: str, alone: bool) -> list[str]:
        """The names of a factor's atoms. A factor of size 1 is no atom of a compound dim; where it is a dim by itself,
        an axis on it would leave the other devices nothing to make the compound of."""
        atoms = self._classes.atoms(self._classes.of((self._node, factor), 0))
        if atoms == (1,) and not alone:
            self._whole.add(factor)
            return []
        names = [factor if len(atoms) == 1 else f"{factor}.{i}" for i in range(len(atoms))]
        if factor in self._rule.positional and len(atoms) > 1:
            self._even.add(names[0])
            self._minor.update(names[1:])
        self._sizes.update(zip(names, atoms, strict=True))
        self._base.update(dict.fromkeys(names, factor))
        return names

    def _split(self, tensors: list[list[str | None]]) -> tuple[AtomFactors, ...]:
        return tuple(
            tuple(None if name is None or self._is_whole(name) else name for name in names) for names in tensors
        )

    def _is_whole(self, name: str) -> bool:
        return self._base[name] in self._whole or name in self._minor


def _tensors(node: Node, rule: OpRule):
    yield from zip(node.inputs, rule.inputs, strict=True)
    yield from zip(node.outputs, rule.outputs, strict=True)


def _size(node: Node, rule: OpRule, factor: str) -> int:
    for value, dims in _tensors(node, rule):
        for dim, size in zip(dims, value.type.shape, strict=True):
            if dim == factor:
                return size
    raise AssertionError(f"{node.where}: the rule of {node.call.name} gives factor {factor!r} no size")
