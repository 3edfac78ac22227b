"""Named dims: classes of dims, over a whole module or kernel, that are split alike; and beam search over colourings:
which of them every mesh axis splits.

Dims of parameters that the rules of operators index by one factor are one class. Layers of a model are alike: classes
whose parameters have the same names but for numbers are one named dim, so that there are no more of them in a deep
model than in one of two layers.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.joined import Joined
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.plan.atoms import Atoms
from mesh_tensor.plan.ir import Graph, Value
from mesh_tensor.plan.spread import tensors_of
from mesh_tensor.rules.kernel.sharding_rule import sharding_rule

from .evaluate import Evaluator, KernelEvaluator, ParameterLayouts, Strategy

Place = tuple[Value, int]  # a value, and the position of one of its atoms


@dataclass(frozen=True)
class NamedDim:
    """Dims of parameters: `dims` are pairs of parameter and dim, `size` is that of the atom that is split. There are
    `layers` of them that are alike."""

    name: str
    size: int
    dims: tuple[tuple[str, int], ...]
    layers: int

    def __str__(self) -> str:
        layers = f" in {self.layers} layers" if self.layers > 1 else ""
        return f"{self.name}[{self.size}]{layers}: {', '.join(f'{name} dim {dim}' for name, dim in self.dims[:3])}"


def named_dims(graph: Graph, atoms: Atoms) -> list[NamedDim]:
    """The named dims that some parameter has, those with the most elements in parameters first."""
    found: dict[tuple, list[list[tuple[Value, int]]]] = defaultdict(list)
    for places in _classes(graph, atoms):
        dims = _dims_of_parameters(graph, atoms, places)
        if dims:
            size = atoms.shape(places[0][0])[places[0][1]]
            alike = tuple(sorted({(re.sub(r"\d+", "#", value.name), dim) for value, dim in dims}))
            found[(size, alike)].append(dims)
    made = []
    for (size, _), groups in found.items():
        named = tuple(dict.fromkeys((value.name, dim) for group in groups for value, dim in group))
        elements = sum(value.type.elements for group in groups for value, _ in group)
        made.append((-elements, NamedDim("", size, named, len(groups))))
    made.sort(key=lambda each: (each[0], each[1].dims))
    return [NamedDim(f"d{number}", dim.size, dim.dims, dim.layers) for number, (_, dim) in enumerate(made)]


def kernel_dims(func: tirx.PrimFunc) -> list[NamedDim]:
    """The named dims of a kernel: those of its factors, which dims of several buffers follow, and then every dim of a
    result by itself, which may come in other parts than it is computed in. Dims that are needed whole are none."""
    rule, shapes = sharding_rule(func), {buffer.name: buffer.shape for buffer in func.buffer_map.values()}
    found: dict[str, list[tuple[str, int]]] = defaultdict(list)
    for name, factors in {**rule.inputs, **rule.outputs}.items():
        for dim, factor in enumerate(factors):
            if factor is not None and not rule.factors[factor].startswith("whole"):
                found[factor].append((name, dim))
    groups = [*found.items(), *((f"{n} {d}", [(n, d)]) for n, dims in rule.outputs.items() for d in range(len(dims)))]
    sized = ((name, int(shapes[dims[0][0]][dims[0][1]]), tuple(dims)) for name, dims in groups)
    return [NamedDim(name, size, dims, 1) for name, size, dims in sized if size > 1]


def _classes(graph: Graph, atoms: Atoms) -> list[list[Place]]:
    """The atoms of the graph's values that operators index by one factor."""
    joined = Joined[Place]()
    for node in graph.nodes:
        first: dict[str, Place] = {}
        for value, factors in tensors_of(node, atoms.rules[node]):
            for position, factor in enumerate(factors):
                if factor is not None:
                    joined.join(first.setdefault(factor, (value, position)), (value, position))
    known, classes = set(joined), defaultdict[Place, list[Place]](list)
    for value in graph.values():
        for position in range(len(atoms.shape(value))):
            if (value, position) in known:
                classes[joined.root((value, position))].append((value, position))
    return list(classes.values())


def _dims_of_parameters(graph: Graph, atoms: Atoms, places: list[Place]) -> list[tuple[Value, int]]:
    params = set(graph.params)
    found = []
    for value, position in places:
        if value in params and atoms.shape(value)[position] > 1:
            dim = next(d for d in range(value.type.ndim) if position in atoms.positions(value, d))
            found.append((value, dim))
    return found


Colouring = frozenset[tuple[int, str]]  # (number of a named dim, axis)
Rank = Callable[[Strategy], tuple]


_FEW = 64  # colourings


class Beam:
    """The `width` best colourings of a mesh at a time, each with one more dim coloured in every way. It ends where that
    gives nothing better twice in a row, or when `stop` says so. Where there are few colourings, all are looked at."""

    def __init__(
        self, evaluator: Evaluator | KernelEvaluator, dims: Sequence[NamedDim], rank: Rank, width: int
    ) -> None:
        self._evaluator, self._dims, self._rank, self._width = evaluator, dims, rank, width

    def run(self, mesh: Mesh, stop: Callable[[], bool]) -> Iterator[Strategy]:
        """Every strategy that is looked at, once. The first one splits nothing."""
        empty: Colouring = frozenset()
        whole = self._strategy(mesh, empty)
        if whole is None:
            return
        yield whole
        beam, seen, best, idle = [empty], {empty}, self._rank(whole), 0
        few = 2 ** len([*self._more(empty, mesh)]) <= _FEW
        while beam and (few or idle < 2) and not stop():
            found: list[tuple[tuple, int, Colouring]] = []
            for colouring in (more for each in beam for more in self._more(each, mesh)):
                if colouring in seen or stop():
                    continue
                seen.add(colouring)
                strategy = self._strategy(mesh, colouring)
                if strategy is not None:
                    found.append((self._rank(strategy), len(found), colouring))
                    yield strategy
            found.sort(key=lambda each: each[:2])
            beam = [colouring for _, _, colouring in found[: _FEW if few else self._width]]
            idle = 0 if found and found[0][0] < best else idle + 1
            best = min([best, *(rank for rank, _, _ in found[:1])])

    def _more(self, colouring: Colouring, mesh: Mesh) -> Iterator[Colouring]:
        for number, dim in enumerate(self._dims):
            for axis in mesh:
                if mesh.size(axis) <= dim.size and (number, axis) not in colouring:
                    yield colouring | {(number, axis)}

    def _strategy(self, mesh: Mesh, colouring: Colouring) -> Strategy | None:
        return self._evaluator.strategy(mesh, layouts_of(self._dims, colouring))


def layouts_of(dims: Sequence[NamedDim], colouring: Colouring) -> ParameterLayouts:
    """The parameters' layouts. Where an axis would split two dims of one, the first named dim has it."""
    layouts: dict[str, dict[str, int]] = {}
    for number, axis in sorted(colouring):
        for name, dim in dims[number].dims:
            layouts.setdefault(name, {}).setdefault(axis, dim)
    return layouts
