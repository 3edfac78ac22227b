"""A function on parts of a batch: what its results make of the whole one, and what has to be known of that before.

Parts of a batch give the whole one's results where these are their rows, sums or means (see `batch_kinds`). A loss that
divides by a count of labels is none of them; but where the count depends on nothing that is trained, it is known before
anything runs: the count of the whole batch is a parameter then, a *total*, and the loss a sum over the parts. What is
added to a sum and is a mean, or the same in all parts (a penalty on weights), is added in the part's *share* of the
batch's rows, another parameter. That holds for the gradients, too.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from tvm import ir

from mesh_tensor.annotations.names import reachable, relax_function
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.operator import OpRule
from mesh_tensor.rules.operator.dropout import DROPOUT

from .batch_devices import AnyKind, Apart, DeviceKinds, kind_within, settled, with_kind
from .batch_growth import Larger, Numbers, PartsWriter, Total
from .batch_kinds import Divided, Fixed, Kind, Mean, Mixed, Rows, Sum, quotient
from .gradient import depending_on
from .ir import Graph, Node, Value, leaves
from .manual import manual_mesh
from .reader import read_graph
from .tir_rule import node_rules
from .tir_stages import expand_kernels


@dataclass(frozen=True, eq=False)
class BatchParts:
    """A function that is run on parts of a batch: `mod` has it with `totals` as parameters, after its own, in the order
    in which they can be computed, then `shares` (name -> dtype): the part of the batch's rows that a part has. `kinds`
    are those of its results. The bindings of which there are totals are still there, to compute these by; nothing else
    may need them."""

    mod: ir.IRModule
    kinds: tuple[Kind, ...]
    totals: tuple[Total, ...] = ()
    shares: Mapping[str, str] = field(default_factory=dict)


def batch_parts(
    mod: ir.IRModule,
    function: str,
    inputs: Collection[str],
    trained: Collection[str] = (),
    *,
    shapes_of: ir.IRModule | None = None,
    stated: Collection[str] = (),
    by_itself: Collection[str] = (),
    quotients: str | None = None,
    larger: ir.IRModule | None = None,
    through_stops: bool = True,
    own_seeds: bool = False,
    written: Collection[str] = (),
) -> BatchParts:
    """What a function makes of parts of a batch. Every variable has a name of its own.

    Args:
        inputs: the parameters that have rows of the batch, along their first dims.
        trained: parameters of which totals are independent.
        shapes_of: the module with known sizes, where it has open ones.
        stated: bindings whose results are taken as rows of their parts (or means, if they are numbers), although they
            are made of all rows: statistics of a batch norm are those of each part then.
        by_itself: bindings that are those of each part: they take no totals.
        quotients: what a sum over rows is that is divided by as many as there are elements, or rows, in a part: a
            "mean", as the number is larger for the batch, or a "sum", as it is a constant; None: it is not known.
        larger: the module of the same function of a batch of more rows. It tells what `quotients` says, of each by
            itself, and what else follows from how many rows there are.
        through_stops: what depends on what is trained only where no gradient goes through depends on it, too: totals
            are known before anything is run. Else they are known before what has gradients is.
        written: parameters that each part leaves another value for, which the next one takes.
        own_seeds: each part drops by a seed of its own: which row of its part a row is does not matter, then.
    """
    graph = _graph(shapes_of or mod, function)
    beside = None if larger is None else _beside(graph, _graph(larger, function), inputs)
    rules = node_rules(graph, replicate_unknown=True)
    if own_seeds:
        anywhere = {node: replace(rules[node], positional=frozenset()) for node in graph.nodes if _drops(node)}
        rules = {**rules, **anywhere}
    known = _Kinds(graph, rules, inputs, trained, stated, by_itself, quotients, beside, through_stops, written)
    kinds = tuple(settled(known.of[value], value.name) for value in leaves(graph.result))
    if not known.uses and not known.shared:
        return BatchParts(mod, kinds)
    writer = PartsWriter(relax_function(mod, function))
    for value, user in known.uses:
        kind = known.of[value]
        assert isinstance(kind, (Sum, Mean))
        writer.take_total(known.binding(value), user, kind)
    for value, user in known.shared:
        writer.take_share(known.binding(value), user)
    return BatchParts(writer.written(mod, function), kinds, tuple(writer.totals.values()), writer.shares)


def _graph(mod: ir.IRModule, function: str) -> Graph:
    graph = read_graph(mod, function, manual_mesh(reachable(mod, function).values()), {})
    expand_kernels(graph)
    return graph


def _beside(graph: Graph, larger: Graph, inputs: Collection[str]) -> Larger:
    """The graph beside that of more rows."""
    pairs = zip(graph.params, larger.params, strict=True)
    times = {its.type.shape[0] // mine.type.shape[0] for mine, its in pairs if mine.name in inputs and mine.type.ndim}
    return Larger(graph, larger, max(times, default=1))


@dataclass(eq=False)
class _Kinds:
    """The kind of every value of a graph; `uses`: of which totals are taken, by which bindings; `shared`: of which
    shares are."""

    graph: Graph
    rules: Mapping[Node, OpRule]
    inputs: Collection[str]
    trained: Collection[str]
    stated: Collection[str]
    by_itself: Collection[str]
    quotients: str | None
    larger: Larger | None
    through_stops: bool
    written: Collection[str] = ()
    of: dict[Value, AnyKind] = field(default_factory=dict)
    uses: dict[tuple[Value, str], None] = field(default_factory=dict)
    shared: dict[tuple[Value, str], None] = field(default_factory=dict)

    def __post_init__(self) -> None:
        params = self.graph.params
        self._numbers, self._devices = Numbers(self.graph), DeviceKinds(self.graph)
        self._makers = self.graph.makers()
        self._wheres = Counter(node.where for node in self.graph.nodes)
        trained = [value for value in params if value.name in self.trained]
        self._tainted = depending_on(self.graph, trained, through_stops=self.through_stops)
        rows = [value for value in params if value.name in self.inputs and value.type.ndim]
        self._rows = rows[0].type.shape[0] if rows else 1
        self._counted = self._rows  # divides all numbers of rows that something may have been divided by
        self.of |= {value: Rows(0, 1, self._rows) for value in rows}
        for value in self.graph.values():
            if value not in self._makers and value not in self.of:
                self.of[value] = Fixed(self._varying(value))
        self.of |= {
            value: Mixed(f"{value.name} is another one for each part") for value in params if value.name in self.written
        }
        for node in self.graph.nodes:
            self._visit(node)

    def binding(self, value: Value) -> str:
        """The name of the binding that makes a value, or of the parameter that it is."""
        return _name(self._makers[value]) if value in self._makers else value.name

    def _visit(self, node: Node) -> None:
        kinds = [self.of[value] for value in node.inputs]
        made = self._picked(node, kinds) or self._made(node, kinds)
        if self.larger is not None:
            made = self.larger.kinds(node, self.rules[node], kinds, made)
        elif isinstance(kind_within(made[0]), (Sum, Rows)):
            made = [self._scaled(node, made[0]), *made[1:]]
        if isinstance(made[0], Mixed) and self._is_binding(node) and _name(node) in self.stated:
            made = [self._as_stated(node.outputs[0], made[0]), *made[1:]]
        counts = [within.count for kind in made if isinstance(within := kind_within(kind), Rows)]
        self._counted = math.gcd(self._counted, *counts)
        self.of.update(zip(node.outputs, made, strict=True))

    def _picked(self, node: Node, kinds: list[AnyKind]) -> list[AnyKind]:
        """Elements of what does not depend on the batch, picked by stacked indices, which don't either: an index along
        a dim along which the data are the same makes no difference."""
        if node.kernel is not None or node.call.name != "gather_nd" or int(node.call.attr("batch_dims")):
            return []
        data, indices = node.inputs
        stack = self._makers.get(indices)
        if stack is None or stack.kernel is not None or stack.call.name != "stack":
            return []
        places, of_data = [self.of[value] for value in stack.inputs], kinds[0]
        last = int(stack.call.attr("axis")) % indices.type.ndim == indices.type.ndim - 1
        if not last or len(places) != indices.type.shape[-1] or not isinstance(of_data, Fixed):
            return []
        if not all(isinstance(kind, Fixed) for kind in places):
            return []
        mattering = [kind.along for d, kind in enumerate(places) if isinstance(kind, Fixed) and d in of_data.along]
        whole = indices.type.ndim - 1 - len(places)  # dims that no index is for come behind the indices'
        kept = {d + whole for d in of_data.along if d >= len(places)}
        return [Fixed(frozenset(kept).union(*mattering))]

    def _made(self, node: Node, kinds: list[AnyKind]) -> list[AnyKind]:
        """The kinds of a node's results; where these would be mixed, with totals instead of its operands, if that
        helps."""
        made = self._devices.of(node, self.rules[node], kinds, self.quotients)
        added = [i for i, kind in enumerate(kinds) if isinstance(kind, (Sum, Mean)) and self._countable(node, i)]
        if not isinstance(made[0], Mixed) or _name(node) in self.by_itself:
            return made
        if not isinstance(self._devices.of(node, self.rules[node], kinds, "sum")[0], Mixed):
            return made  # what is not known is not taken for a constant in a total, either
        for chosen in (added[-1:], added):
            tried: list[AnyKind] = [
                Fixed(self._varying(v)) if i in chosen else kinds[i] for i, v in enumerate(node.inputs)
            ]
            found = self._devices.of(node, self.rules[node], tried, self.quotients)
            if chosen and not any(isinstance(kind, Mixed) for kind in found):
                self.uses |= {(node.inputs[i], _name(node)): None for i in chosen}
                return found
        return self._in_shares(node, kinds) or made

    def _in_shares(self, node: Node, kinds: list[AnyKind]) -> list[AnyKind]:
        """The results of a node that adds to sums what is none: a share of that is added."""
        sums = {i for i, kind in enumerate(kinds) if isinstance(kind, Sum)}
        others = {i for i, kind in enumerate(kinds) if isinstance(kind, Mean)}
        together = next((linear for linear in self.rules[node].linear if sums and sums | others <= linear), None)
        if together is None or not all(isinstance(kinds[i], (Sum, Mean, Fixed)) for i in range(len(kinds))):
            return []
        scaled = [node.inputs[i] for i in sorted(together - sums)]
        outside = [v for v in scaled if not self._at_top(v) or not is_float(v.type.dtype)]
        if (
            not self._is_binding(node)
            or outside
            or any(not isinstance(kinds[i], Fixed) for i in range(len(kinds)) if i not in together)
        ):
            return []
        self.shared |= {(value, _name(node)): None for value in scaled}
        return [Sum(0)] * len(node.outputs)

    def _at_top(self, value: Value) -> bool:
        """Whether a value is one tensor that a binding of the function itself makes, or a parameter."""
        node = self._makers.get(value)
        return value.data is None if node is None else self._is_binding(node) and len(node.outputs) == 1

    def _is_binding(self, node: Node) -> bool:
        """Whether a node is all of a binding of the function itself."""
        return not node.scopes and self._wheres[node.where] == 1

    def _countable(self, node: Node, operand: int) -> bool:
        """Whether an operand can be computed of the whole batch before anything is trained, and put there."""
        value = node.inputs[operand]
        return value in self._makers and self._at_top(value) and self._is_binding(node) and value not in self._tainted

    def _as_stated(self, value: Value, kind: AnyKind) -> AnyKind:
        if value.type.ndim == 0:
            return Mean()
        return Rows(0, 1, self._rows) if value.type.shape[0] == self._rows else kind

    def _scaled(self, node: Node, made: AnyKind) -> AnyKind:
        """What a sum or rows are that a node divides, perhaps by a number that was read off a part. Rows that are
        divided by one may be added up later."""
        within = made.kind if isinstance(made, Apart) else made
        number = self._numbers.divisor(node) or 0.0
        count = round(number)
        if not count or abs(number - count) > 1e-6 * abs(count) or count % self._counted or self.quotients == "sum":
            return made
        if isinstance(within, Sum):
            return with_kind(made, quotient(node, replace(within, by=(within.by or 1) * abs(count)), self.quotients))
        if not isinstance(within, (Rows, Divided)) or not self.rules[node].linear:
            return made
        before = within if isinstance(within, Divided) else Divided(within, 1)
        return with_kind(made, replace(before, count=before.count * abs(count)))

    def _varying(self, value: Value) -> frozenset[int]:
        """The dims along which a parameter, a constant or a total may vary."""
        if value.data is not None and self._numbers.of(value) is not None:
            return frozenset()
        return frozenset(d for d, size in enumerate(value.type.shape) if size > 1)


def _drops(node: Node) -> bool:
    return node.call.operator == DROPOUT


def _name(node: Node) -> str:
    return node.where.partition(".")[2]
