"""Atoms: dims refined until reshapes only regroup them.

Where a module merges the dims (batch, heads) into one and takes them apart again, a split of the heads is no contiguous
part of the merged dim. So every dim is known as a product of atoms, major first, found for all values together:
dims that operators index by one factor have the same atoms. Layouts are decided on atoms; an operator's rule is
refined to say which factor each atom belongs to.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.window import EVERYWHERE, Reaches
from mesh_tensor.rules.operator import OpRule
from mesh_tensor.rules.operator.manual import factor_of
from mesh_tensor.rules.operator.rule import Dim, InnerReduction, atoms_of

from .hindered import Hindrances
from .ir import Graph, Node, Value
from .manual import Axes, varying
from .poles import Poles
from .wiring import Sizes, Wiring, settle

# The factor of every atom of a tensor; None: needed (or made) whole.
AtomFactors = tuple[str | None, ...]


@dataclass(frozen=True)
class NodeRule:
    """An operator's rule over the atoms of its tensors. `sizes` are those of the factors, `reduced` as in `rule`, and
    `partial` has that for each result.
    `even`: factors that axes have to divide, because tiles are to be contiguous parts of a dim that has more atoms.
    `blocks`: of how many of a factor's elements a block is made, `first`: how many the first tile has to hold.
    `inner`: what is reduced inside a kernel.
    `windows`: (operand, atom) -> what is read of it from where a factor is; it is None in `inputs`.
    `fixed`: what axes split, whatever it takes, and nothing else does: the devices of a manual computation."""

    rule: OpRule
    inputs: tuple[AtomFactors, ...]
    outputs: tuple[AtomFactors, ...]
    sizes: dict[str, int]
    reduced: Mapping[str, str]
    partial: tuple[Mapping[str, str], ...]
    even: frozenset[str] = frozenset()
    blocks: Mapping[str, int] = field(default_factory=dict)
    inner: tuple[InnerReduction, ...] = ()
    first: Mapping[str, int] = field(default_factory=dict)
    windows: Mapping[tuple[int, int], Reaches] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def followed(self) -> tuple[AtomFactors, ...]:
        """Of the operands: also the factors from which windows of an atom are read."""
        if not self.windows:
            return self.inputs
        read = {place: reaches.factor or None for place, reaches in self.windows.items()}
        return tuple(
            tuple(read.get((operand, position), factor) for position, factor in enumerate(factors))
            for operand, factors in enumerate(self.inputs)
        )


def may_split(fixed: Mapping[str, str], axis: str, factor: str) -> bool:
    """Whether an axis may split a factor. Devices belong to their own axis: another one would leave some devices with
    none of what they are to compute with."""
    return fixed[axis] == factor if axis in fixed else factor not in fixed.values()


@dataclass(frozen=True, eq=False)
class Atoms:
    """Per value the atoms of each of its dims, per node its refined rule. `devices`: the axes along which every device
    has a value of its own, in a manual computation; each is an atom before those of the dims."""

    of: dict[Value, tuple[Sizes, ...]]
    rules: dict[Node, NodeRule]
    devices: Mapping[Value, Axes] = field(default_factory=dict)

    def shape(self, value: Value) -> Sizes:
        """The value's shape with every dim taken apart, after its devices."""
        return self._shapes[value]

    @cached_property
    def _shapes(self) -> dict[Value, Sizes]:
        flat = {dims: tuple(size for dim in dims for size in dim) for dims in set(self.of.values())}
        shapes = {value: flat[dims] for value, dims in self.of.items()}
        return shapes | {value: (*(n for _, n in axes), *shapes[value]) for value, axes in self.devices.items()}

    @cached_property
    def hindrances(self) -> Hindrances:
        """Which atoms lead to what some operator needs whole."""
        return Hindrances(self.rules)

    @cached_property
    def poles(self) -> Poles:
        """Where what is computed of finite numbers is infinite."""
        return Poles(self.rules)

    def positions(self, value: Value, dim: int) -> range:
        """Where the atoms of a dim stand in `shape`."""
        start = len(self.devices.get(value, ())) + sum(len(atoms) for atoms in self.of[value][:dim])
        return range(start, start + len(self.of[value][dim]))

    def merge(self, value: Value, tile: Sizes) -> Sizes:
        """The shape with its dims whole again, of a tile of that refined shape."""
        return tuple(math.prod(tile[p] for p in self.positions(value, d)) for d in range(value.type.ndim))

    def on_device(self, value: Value, sharding: Sharding) -> Sharding:
        """How the value of a device lies over the atoms of its dims, for a layout over all atoms."""
        count = len(self.devices.get(value, ()))
        if not count:
            return sharding
        windows = [(dim - count, window) for dim, window in sharding.windows]
        return Sharding(sharding.mesh, sharding.ndim - count, sharding.dims[count:], sharding.partial, tuple(windows))


def find_atoms(graph: Graph, rules: dict[Node, OpRule]) -> Atoms:
    """The coarsest atoms on which every operator's compound dims are made of whole factors."""
    wiring = Wiring(graph, rules)
    broken = settle(wiring.classes, wiring.compounds)
    of, devices = wiring.atoms(), varying(graph)
    return Atoms(of, _refined(rules, of, wiring, broken, devices), devices)


def _refined(
    rules: dict[Node, OpRule],
    of: dict[Value, tuple[Sizes, ...]],
    wiring: Wiring,
    broken: dict[Node, set[str]],
    devices: Mapping[Value, Axes],
) -> dict[Node, NodeRule]:
    """The rules over atoms. Nodes with one rule and the same atoms share theirs."""
    known: dict[tuple, NodeRule] = {}
    refined = {}
    for node, rule in rules.items():
        whole = frozenset(broken.get(node, ()))
        tensors = tuple([of[value] for value in (*node.inputs, *node.outputs)])
        axes = tuple([devices.get(value, ()) for value in (*node.inputs, *node.outputs)]) if devices else ()
        key = (id(rule), tensors, wiring.atoms_in_compounds(node, rule), whole, axes)
        made = known.get(key)
        if made is None:
            made = known[key] = _Refinement(node, rule, wiring.factor_atoms(node, rule), whole, devices).refine(of)
        refined[node] = made
    return refined


def plain_sharding(sharding: Sharding, dims: tuple[Sizes, ...]) -> Sharding | None:
    """A layout over atoms as one over the dims that they make up, if it is one: all dims are split in contiguous
    tiles."""
    start, axes, windows = 0, [], []
    for dim, atoms in enumerate(dims):
        windows += [(dim, window)] if (window := sharding.window(start)) is not None else []
        contiguous = _contiguous(sharding, start, atoms)
        if any(sharding.axes_of(p) for p in range(start, start + len(atoms)) if p not in contiguous):
            return None
        axes.append(tuple([axis for position in contiguous for axis in sharding.axes_of(position)]))
        start += len(atoms)
    return Sharding(sharding.mesh, len(dims), tuple(axes), sharding.partial, tuple(windows))


def made_plain(sharding: Sharding, dims: tuple[Sizes, ...]) -> Sharding:
    """The layout over atoms in which no dim is split that isn't split in contiguous tiles. Windows are of dims that are
    one atom."""
    start, windows, sharding = 0, sharding.windows, sharding.plain
    for atoms in dims:
        contiguous = _contiguous(sharding, start, atoms)
        for position in range(start, start + len(atoms)):
            if position not in contiguous:
                sharding = sharding.with_replicate(*sharding.axes_of(position))
        start += len(atoms)
    return sharding.with_windows(windows) if windows else sharding


def _contiguous(sharding: Sharding, start: int, atoms: Sizes) -> range:
    """Where the atoms of a dim stand that may be split so that tiles are contiguous, as the axes on the dim cut it one
    after the other: its first one, and the next where every device has one element of those before. Evenly, where there
    are several."""
    end = start
    for size in atoms:
        shards = sharding.num_shards(end)
        if len(atoms) > 1 and size % shards:
            break
        end += 1
        if shards < size:
            break
    return range(start, end)


class _Refinement:
    """A rule over atoms, in the making."""

    def __init__(
        self, node: Node, rule: OpRule, atoms: dict[str, Sizes], broken: frozenset[str], devices: Mapping[Value, Axes]
    ) -> None:
        self._node, self._rule, self._atoms, self._devices = node, rule, atoms, devices
        self._whole = {*rule.unsplit, *broken}
        self._base: dict[str, str] = {}
        self._sizes: dict[str, int] = {}
        self._even: set[str] = set()
        self._minor: set[str] = set()

    def refine(self, of: dict[Value, tuple[Sizes, ...]]) -> NodeRule:
        """The rule over atoms: what some tensor of the operator has to have whole is whole in all of them."""
        node, rule = self._node, self._rule
        inputs = [self._tensor(dims, of, value) for value, dims in zip(node.inputs, rule.inputs, strict=True)]
        outputs = [self._tensor(dims, of, value) for value, dims in zip(node.outputs, rule.outputs, strict=True)]
        inputs, outputs = ([self._as_alike(names) for names in tensors] for tensors in (inputs, outputs))
        read = self._windows(of)
        sizes = {name: size for name, size in self._sizes.items() if not self._is_whole(name)}
        windows = {place: reaches for place, reaches in read.items() if reaches.factor in {*sizes, EVERYWHERE}}
        reduced = {name: rule.reduced[self._base[name]] for name in sizes if self._base[name] in rule.reduced}
        tensors = self._split(inputs), self._split(outputs)
        blocks = {self._first(name): self._block(name, size) for name, size in rule.blocks.items()}
        inner = tuple([replace(one, factor=self._first(one.factor), dims=self._firsts(one)) for one in rule.inner])
        partial = tuple([{name: ops[b] for name in sizes if (b := self._base[name]) in ops} for ops in rule.partial])
        partial = partial or (reduced,) * len(outputs)
        first = {self._first(name): self._block(name, size) for name, size in rule.first.items()}
        axes = {axis: factor_of(axis) for v in (*node.inputs, *node.outputs) for axis, _ in self._devices.get(v, ())}
        even = frozenset(self._even)
        return NodeRule(rule, *tensors, sizes, reduced, partial, even, blocks, inner, first, windows, axes)

    def _as_alike(self, names: list[str | None]) -> list[str | None]:
        """The atoms of a tensor; that of a factor which is like another one is the other's first, of which axes have to
        make equal tiles."""
        made = list(names)
        for mine, other in self._rule.alike.items():
            atoms = self._atoms[other]
            first = other if len(atoms) == 1 else f"{other}.0"
            self._even.add(first)
            self._minor.update(f"{other}.{n}" for n in range(1, len(atoms)))
            if len(self._atoms[mine]) > 1:
                self._whole.update((mine, other))
            made = [first if name == mine else name for name in made]
        return made

    def _windows(self, of: dict[Value, tuple[Sizes, ...]]) -> dict[tuple[int, int], Reaches]:
        """Windows of atoms: of dims that are one atom, from the first atom of the factor that reads them. Where there
        are none, an operator needs the factor whole; a kernel makes its own of what it reads."""
        found: dict[tuple[int, int], Reaches] = {}
        for (operand, dim), reaches in self._rule.windows.items():
            dims = of[self._node.inputs[operand]]
            before = len(self._devices.get(self._node.inputs[operand], ())) + sum(map(len, dims[:dim]))
            if reaches.factor == EVERYWHERE and len(dims[dim]) == 1:
                found[(operand, before)] = reaches
                continue
            first, *minor = [name for name, base in self._base.items() if base == reaches.factor] or [""]
            along = reaches.along_first(first, math.prod(self._sizes[name] for name in minor)) if minor else reaches
            kernel = self._node.kernel is not None
            if along is not None and len(dims[dim]) == 1 and first and not (kernel and minor):
                found[(operand, before)] = along
                self._minor.update(minor)
            elif not kernel:
                self._whole.add(reaches.factor)
        return found

    def _first(self, factor: str) -> str:
        """The atom of a factor that axes may split: of kernels, only the first one."""
        return factor if len(self._atoms.get(factor, ())) < 2 else f"{factor}.0"

    def _firsts(self, inner: InnerReduction) -> tuple[str | None, ...]:
        return tuple([None if factor is None else self._first(factor) for factor in inner.dims])

    def _block(self, factor: str, size: int) -> int:
        """How many of the first atom's elements a block of the factor is made of."""
        rest = math.prod(self._atoms.get(factor, ())[1:])
        return size // math.gcd(size, rest)

    def _tensor(self, dims: tuple[Dim, ...], of: dict[Value, tuple[Sizes, ...]], value: Value) -> list[str | None]:
        devices = {factor_of(axis): count for axis, count in self._devices.get(value, ())}
        self._sizes |= devices
        self._base |= {name: name for name in devices}
        result: list[str | None] = list(devices)
        for dim, atoms in zip(dims, of[value], strict=True):
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
        atoms = self._atoms[factor]
        if atoms == (1,) and not alone:
            self._whole.add(factor)
            return []
        names = [factor if len(atoms) == 1 else f"{factor}.{i}" for i in range(len(atoms))]
        if factor in self._rule.positional and (len(atoms) > 1 or not alone):
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
