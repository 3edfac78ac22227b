"""An exact solution for a small graph: of all splits of its operators, those that take least, by integer programming
(HiGHS, which scipy brings: the extra `exact`). It judges what the planner and the searches find; it is too slow for
more than a block of a model.

Prices are the planner's. Parameters and results may lie in any layout; a constant is everywhere. A value is laid out
anew once per layout that is needed, from the layout in which it comes, or from one that it has by then. What stands in
a loop is priced as often as the loop runs, and what the loop carries lies alike before every step and after it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.placement import Partial, Placement, Shard
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan.atoms import Atoms, NodeRule
from mesh_tensor.plan.decide import fits, operand_layouts, result_layout
from mesh_tensor.plan.ir import Graph, Node, Value, leaves
from mesh_tensor.plan.reshards import largest_part


@dataclass(frozen=True)
class Option:
    """One way to run a node: what its operands need and its results come in, and what the work takes. What gives a
    value has no operands, what takes results no results."""

    needed: tuple[Sharding, ...]
    produced: tuple[Sharding, ...]
    price: int


@dataclass(frozen=True)
class Exact:
    """The least that a graph takes, in picoseconds, and that no plan takes less than `bound`; they are equal where the
    solver ended within its time."""

    price: int
    bound: int


def exact_price(graph: Graph, atoms: Atoms, seconds: float = 60.0) -> Exact:
    """The least that a graph takes on its mesh. Refused where there is no solver, or it found nothing in time."""
    if graph.manual:
        axes = listing(sorted(graph.manual))
        refuse(
            f"{graph.name!r} has manual computations over {axes}, which are not searched exactly",
            fix="compare the strategies by their times",
        )
    try:
        from scipy.optimize import milp
    except ImportError:
        refuse("integer programs are solved by scipy, which is not installed", fix="pip install 'mesh-tensor[exact]'")
    program = _Program(graph, atoms)
    made = milp(**program.arguments(), options={"time_limit": seconds, "mip_rel_gap": 1e-9})
    if made.x is None:
        refuse(f"no plan was found in {seconds:g} s: {made.message}", fix="take a smaller graph, or more seconds")
    return Exact(round(made.fun * program.unit), math.floor(made.mip_dual_bound * program.unit))


def options_of(node: Node, graph: Graph, atoms: Atoms) -> list[Option]:
    """All ways to run a node: every axis splits a factor, or is that of sums that pass through, or neither."""
    rule, mesh, found = atoms.rules[node], graph.mesh, dict[tuple, Option]()
    if rule.inner:
        refuse(f"{node.where} reduces inside a kernel, which is not searched exactly", fix="search operators alone")
    factors = [f for f in _factors(rule) if f not in rule.rule.unsplit and _completes(rule, f)]
    linear = () if node.mark else rule.rule.linear  # nothing is pending of what loops carry
    for ways in product(*[[None, *factors, *linear] for _ in mesh]):
        split = {axis: way for axis, way in zip(mesh, ways, strict=True) if isinstance(way, str)}
        sums = {axis: way for axis, way in zip(mesh, ways, strict=True) if isinstance(way, frozenset)}
        if any(mesh.size(a) > rule.sizes.get(f, 1) for a, f in split.items()) or not fits(rule, split, mesh):
            continue
        needed = [
            _with_sums(layout, [axis for axis, operands in sums.items() if position in operands])
            for position, layout in enumerate(operand_layouts(mesh, rule, split, {}))
        ]
        results = zip(rule.outputs, rule.partial, strict=True)
        produced = [_with_sums(result_layout(mesh, factors, split, ops, {}), list(sums)) for factors, ops in results]
        work = 0 if node.mark else graph.prices.work(node, largest_part(node, split, rule, mesh))
        price, key = work * graph.times(node.scopes), (*needed, *produced)
        if key not in found or price < found[key].price:
            found[key] = Option(tuple(needed), tuple(produced), price)
    return list(found.values())


def change_times(graph: Graph) -> dict[Value, int]:
    """How often a value that a node gives is laid out anew, if it is: what leaves a loop as often as the loop is run,
    what is carried in it with every step."""
    found: dict[Value, int] = {}
    for node in graph.nodes:
        leaves_loop = node.mark in ("loop.next", "loop.stack")
        scopes = node.scopes[:-1] if leaves_loop else node.scopes
        found |= dict.fromkeys(node.outputs, graph.times(scopes))
        if node.mark == "loop.next":
            found[graph.loops[node.scopes[-1]].entered[node.outputs[0]]] = graph.times(node.scopes)
    return found


def _factors(rule: NodeRule) -> list[str]:
    return list(dict.fromkeys(f for factors in (*rule.outputs, *rule.followed) for f in factors if f is not None))


def _completes(rule: NodeRule, factor: str) -> bool:
    """Whether every result has the factor, or is completed where it is split."""
    results = zip(rule.outputs, rule.partial, strict=True)
    return all(factor in factors or factor in ops for factors, ops in results)


def _with_sums(layout: Sharding, axes: Sequence[str]) -> Sharding:
    places: dict[str, Placement] = {**layout.placements(), **{axis: Partial("sum") for axis in axes}}
    return Sharding.of(layout.mesh, layout.ndim, places) if axes else layout


def _layouts(value: Value, graph: Graph, atoms: Atoms) -> Iterator[Sharding]:
    """All layouts of a value in which nothing is pending."""
    shape = atoms.shape(value)
    for places in product([None, *range(len(shape))], repeat=len(list(graph.mesh))):
        split = {axis: Shard(dim) for axis, dim in zip(graph.mesh, places, strict=True) if dim is not None}
        if all(graph.mesh.size(axis) <= shape[place.dim] for axis, place in split.items()):
            yield Sharding.of(graph.mesh, len(shape), split)


class _Program:
    """The integer program: which option every node takes, which layouts of every value there are, and from which other
    one each is made."""

    def __init__(self, graph: Graph, atoms: Atoms) -> None:
        self._graph, self._atoms = graph, atoms
        self._prices: list[float] = []
        self._integral: list[int] = []
        self._upper: list[float] = []
        self._rows: list[tuple[dict[int, float], float, float]] = []
        self._giving: dict[Value, dict[Sharding, list[int]]] = defaultdict(lambda: defaultdict(list))
        self._taking: dict[Value, list[dict[Sharding, list[int]]]] = defaultdict(list)
        self._times = change_times(graph)
        self._choose_all()
        for now, _, end in graph.carried():
            self._same_layout(self._giving[now], self._giving[end])
        for value, takers in self._taking.items():
            self._lay_out(value, takers)
        self.unit = max(1.0, max(self._prices, default=1.0) / 1e3)

    def arguments(self) -> dict[str, Any]:
        """What `scipy.optimize.milp` takes."""
        from scipy.optimize import Bounds, LinearConstraint
        from scipy.sparse import coo_matrix

        entries = [(row, column, x) for row, (terms, _, _) in enumerate(self._rows) for column, x in terms.items()]
        rows, columns, values = zip(*entries, strict=True)
        matrix = coo_matrix((values, (rows, columns)), shape=(len(self._rows), len(self._prices))).tocsr()
        lower, upper = np.array([(low, high) for _, low, high in self._rows]).T
        return {
            "c": np.array(self._prices) / self.unit,
            "integrality": np.array(self._integral),
            "bounds": Bounds(0, np.array(self._upper)),
            "constraints": LinearConstraint(matrix, lower, upper),
        }

    def _choose_all(self) -> None:
        graph = self._graph
        for value in graph.params:
            self._choose((), (value,), [Option((), (each,), 0) for each in _layouts(value, graph, self._atoms)])
        for value in graph.values():
            if value.data is not None:
                whole = Sharding(graph.mesh, len(self._atoms.shape(value)), ((),) * len(self._atoms.shape(value)))
                self._choose((), (value,), [Option((), (whole,), 0)])
        for node in graph.nodes:
            self._choose(node.inputs, node.outputs, options_of(node, graph, self._atoms))
        for value in dict.fromkeys(leaves(graph.result)):
            self._choose((value,), (), [Option((each,), (), 0) for each in _layouts(value, graph, self._atoms)])

    def _choose(self, operands: Sequence[Value], results: Sequence[Value], options: Sequence[Option]) -> None:
        columns = [self._column(option.price) for option in options]
        self._rows.append((dict.fromkeys(columns, 1.0), 1.0, 1.0))
        for position, value in enumerate(operands):
            asked: dict[Sharding, list[int]] = defaultdict(list)
            for column, option in zip(columns, options, strict=True):
                asked[option.needed[position]].append(column)
            self._taking[value].append(asked)
        for position, value in enumerate(results):
            for column, option in zip(columns, options, strict=True):
                self._giving[value][option.produced[position]].append(column)

    def _same_layout(self, one: Mapping[Sharding, list[int]], other: Mapping[Sharding, list[int]]) -> None:
        """Two values come in the same layout, by the options that give them."""
        for layout in dict.fromkeys([*one, *other]):
            terms = {**dict.fromkeys(one.get(layout, ()), 1.0), **dict.fromkeys(other.get(layout, ()), -1.0)}
            self._rows.append((terms, 0.0, 0.0))

    def _lay_out(self, value: Value, takers: Sequence[dict[Sharding, list[int]]]) -> None:
        """Every layout that is needed comes from the one that is given, or from another one that there is."""
        given = self._giving[value]
        forms = list(dict.fromkeys([*given, *(layout for asked in takers for layout in asked)]))
        there = {layout: self._column(0) for layout in forms}
        order = {layout: self._column(0, integral=0, upper=len(forms)) for layout in forms}
        shape, dtype, times = self._atoms.shape(value), value.type.dtype, self._times.get(value, 1)
        made: dict[Sharding, list[int]] = defaultdict(list)
        for src, dst in product(forms, forms):
            if src == dst or (dst.partial and dst.partial != src.partial):
                continue
            column = self._column(self._graph.prices.change(shape, dtype, src, dst) * times)
            made[dst].append(column)
            self._rows.append(({column: 1.0, there[src]: -1.0}, -math.inf, 0.0))
            most = len(forms) + 1.0
            self._rows.append(({order[src]: 1.0, order[dst]: -1.0, column: most}, -math.inf, most - 1))
        for layout in forms:
            for asked in takers:
                if layout in asked:
                    self._rows.append(({**dict.fromkeys(asked[layout], 1.0), there[layout]: -1.0}, -math.inf, 0.0))
            sources = [*given.get(layout, []), *made[layout]]
            self._rows.append(({there[layout]: 1.0, **dict.fromkeys(sources, -1.0)}, -math.inf, 0.0))

    def _column(self, price: float, integral: int = 1, upper: float = 1.0) -> int:
        self._prices.append(price)
        self._integral.append(integral)
        self._upper.append(upper)
        return len(self._prices) - 1
