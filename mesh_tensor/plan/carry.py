"""Which sums stay pending: values that all users can take as parts, because they are linear in them.

Reducing later saves collectives where two pending sums are added, and bytes where what follows makes less of them.

What several take, and each of them hands on pending, is completed before, where that takes less.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.sharding import Partial, Sharding
from mesh_tensor.rules.operator.elementwise import NARROWED
from mesh_tensor.rules.operator.update import UPDATE

from .atoms import Atoms, NodeRule
from .decide import Decision, Order
from .ir import Graph, Node, Value, leaves
from .owners import Pending, kept, owner_made, taken_by_owners
from .prices import bytes_moved
from .propagate import Layouts

_MOST_SHARED = 32  # values that are tried
_MOVED = ("permute_dims", "reshape", "squeeze", "expand_dims")


def find_carried(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> tuple[dict[Value, Sharding], Mapping[Node, Decision]]:
    """The values that are handed on partial, each with a layout that says over which axes; and the decisions, of which
    some are others so that pending sums meet (see `_Sums.meeting`)."""
    uses = graph.uses()
    sums = _Sums(graph, atoms, uses, widened_values(graph, uses))
    meeting = sums.meeting(decisions, layouts.order)
    while True:
        tried = {**decisions, **meeting}
        pending = sums.carried(tried)
        alone = [node for node in meeting if not taken_of(node, atoms, tried, pending)]
        if not alone:
            break
        for node in alone:
            del meeting[node]
    carried = {
        value: Sharding.of(graph.mesh, layouts.of[value].ndim, {axis: Partial(op) for axis, op in left.parts})
        for value, left in pending.items()
    }
    return carried, tried


@dataclass(frozen=True, eq=False)
class _Sums:
    """The sums of a graph that may wait. `uses`: who takes a value, in which place; `widened`: see `widened_values`."""

    graph: Graph
    atoms: Atoms
    uses: Mapping[Value, list[tuple[Node, int]]]
    widened: Collection[Value]

    def meeting(self, decisions: Mapping[Node, Decision], order: Order) -> dict[Node, Decision]:
        """Other decisions for nodes that add several pending sums, which nothing else takes, or sum one along a dim,
        and for those that only move elements on the way there: the axes that these are pending over split nothing
        there, so that one sum is reduced after it instead of several before, or a smaller one."""
        found: dict[Node, Decision] = {}
        pending: dict[Value, Pending] = {}
        for node in self.graph.nodes:
            decision, rule = decisions[node], self.atoms.rules[node]
            parts = {pending[value].parts if value in pending else () for value in node.inputs}
            (only,) = parts if len(parts) == 1 else ((),)
            split = {axis: factor for axis, factor in decision.split.items() if axis not in dict(only)}
            joins = adds(node, rule) or moves(node, rule) or _sums(node, rule)
            joins = joins and not rule.fixed.keys() & dict(only)
            if only and split != decision.split and joins and all(len(self.uses[v]) == 1 for v in node.inputs):
                decision = found[node] = Decision.of(self.graph.mesh, rule, split, order)
            if (other := self._with_whole_terms(node, decision, pending)) is not None:
                decision = found[node] = other
            taken = taken_of(node, self.atoms, {node: decision}, pending)
            for value, left in left_by(node, rule, decision, taken, pending):
                if value not in self.graph.annotations and not _is_narrow_sum(value, left, self.widened):
                    pending[value] = left
        for node in reversed(self.graph.nodes):
            if node in found and moves(node, self.atoms.rules[node]) and not self._is_added(node, found):
                del found[node]
        return found

    def _with_whole_terms(self, node: Node, decision: Decision, pending: Mapping[Value, Pending]) -> Decision | None:
        """Another decision for a node that adds what all devices have to a pending sum, of which less is made next (the
        chosen experts' results, with their biases, are summed): one device adds it, and others 0."""
        waiting = [value for value in node.inputs if value in pending]
        if len(waiting) != 1 or not adds(node, self.atoms.rules[node]) or not self._shrinks(node.outputs[0]):
            return None
        left = pending[waiting[0]]
        if left.owner is not None or any(op != "sum" or axis in decision.split for axis, op in left.parts):
            return None
        if any(layout.windows for layout in decision.needed):  # what is partial is completed before
            return None
        needed = list(decision.needed)
        for number, value in enumerate(node.inputs):
            for axis, op in left.parts if value not in pending else ():
                needed[number] = needed[number].with_partial(axis, op)
        return replace(decision, needed=tuple(needed))

    def _shrinks(self, value: Value) -> bool:
        """Whether something smaller is made of the value alone, by nodes that are linear in it."""
        size = value.type.elements
        while len(users := self.uses.get(value, [])) == 1:
            node, position = users[0]
            rule = self.atoms.rules[node].rule
            if len(node.outputs) != 1 or not (
                frozenset({position}) in rule.linear or (rule.moves and len(node.inputs) == 1)
            ):
                return False
            (value,) = node.outputs
            if value.type.elements < size:
                return True
        return False

    def _is_added(self, node: Node, found: Mapping[Node, Decision]) -> bool:
        """Whether what the node gives is added to other pending sums, or summed along a dim, or is a gradient that an
        optimizer takes: there it is in the parameter's layout, and nothing but the optimizer waits for it."""
        users = [user for user, _ in self.uses.get(node.outputs[0], ())]
        if any(user.call.operator in (UPDATE, NARROWED) for user in users):
            return True
        return len(users) == 1 and (users[0] in found or adds(users[0], self.atoms.rules[users[0]]))

    def carried(self, decisions: Mapping[Node, Decision]) -> dict[Value, Pending]:
        """What values are pending with: all that could be, but those of which several sums would be completed later."""
        refused = {*leaves(self.graph.result), *self.graph.annotations, *_taken_into_loops(self.graph)}
        pending = self._settled(decisions, refused)
        shared = [value for value in pending if len(self.uses.get(value, ())) > 1]
        least, fewest = self._taken(decisions, pending) if shared else (0, 0)
        for value in shared[:_MOST_SHARED]:
            if value not in pending:
                continue
            tried = self._settled(decisions, refused | {value})
            price, nbytes = self._taken(decisions, tried)
            if price < least and nbytes <= fewest:  # small sums may be completed together: their starts are no reason
                refused, pending, least, fewest = refused | {value}, tried, price, nbytes
        return pending

    def _taken(self, decisions: Mapping[Node, Decision], pending: Mapping[Value, Pending]) -> tuple[int, int]:
        """What it takes to complete the sums that are not handed on, and the bytes that a device receives then."""
        total = nbytes = 0
        for node in self.graph.nodes:
            taken, decision = taken_of(node, self.atoms, decisions, pending), decisions[node]
            left_over = dict(left_by(node, self.atoms.rules[node], decision, taken, pending))
            for value, produced in zip(node.outputs, decision.produced, strict=True):
                if value in left_over and value not in pending:
                    parts = whole = produced.complete
                    for axis, op in left_over[value].parts:
                        parts = parts.with_partial(axis, op)
                    change = self.atoms.shape(value), value.type.dtype, parts, whole
                    total, nbytes = total + self.graph.prices.change(*change), nbytes + bytes_moved(*change)
        return total, nbytes

    def _settled(self, decisions: Mapping[Node, Decision], refused: Collection[Value]) -> dict[Value, Pending]:
        """What is pending, if that is not refused. Starts from all that could be, and takes away what some user can't
        take, until that changes nothing."""
        refused = {*refused}
        while True:
            pending = self._pending(decisions, refused)
            bad = {
                value
                for value in pending
                if any(
                    position not in taken_of(node, self.atoms, decisions, pending, refused)
                    for node, position in self.uses.get(value, ())
                )
            }
            if not bad:
                return pending
            refused |= bad

    def _pending(self, decisions: Mapping[Node, Decision], refused: set[Value]) -> dict[Value, Pending]:
        """What each value is pending with, if all but the refused stay so."""
        pending: dict[Value, Pending] = {}
        for node in self.graph.nodes:
            taken = taken_of(node, self.atoms, decisions, pending, refused)
            for value, left in left_by(node, self.atoms.rules[node], decisions[node], taken, pending):
                if value not in refused and not _is_narrow_sum(value, left, self.widened):
                    pending[value] = left
        return pending


def moves(node: Node, rule: NodeRule) -> bool:
    """Whether the node only moves the elements of its one operand, or makes float32 of them."""
    moves = rule.rule.moves or _widens(node)
    return len(node.inputs) == len(node.outputs) == 1 and moves and not node.is_annotation


def _sums(node: Node, rule: NodeRule) -> bool:
    """Whether the node makes less of its one operand, in which it is linear: as it is of what several heads share."""
    linear = len(node.inputs) == len(node.outputs) == 1 and frozenset({0}) in rule.rule.linear
    return linear and node.outputs[0].type.elements < node.inputs[0].type.elements


def adds(node: Node, rule: NodeRule) -> bool:
    """Whether the node is linear in several operands together, and they are all that it has."""
    return len(node.inputs) > 1 and frozenset(range(len(node.inputs))) in rule.rule.linear


def _taken_into_loops(graph: Graph) -> Iterator[Value]:
    """What is made outside of a loop that takes it: it would be completed at every step."""
    if not graph.loops:
        return
    made = {value: graph.loops_of(node) for node in graph.nodes for value in node.outputs}
    for node in graph.nodes:
        here = graph.loops_of(node)
        yield from (value for value in node.inputs if made.get(value, ()) != here)


def left_by(
    node: Node, rule: NodeRule, decision: Decision, taken: frozenset[int], pending: Mapping[Value, Pending]
) -> Iterator[tuple[Value, Pending]]:
    """The results that are pending, and with what, where the node takes these operands as they are."""
    if not taken:
        owned = owner_made(node, rule, decision)
        for value, produced in zip(node.outputs, decision.produced, strict=True):
            if produced.partial:
                yield value, owned or Pending(produced.partial)
        return
    waiting = {i: pending[node.inputs[i]] for i in taken}
    owned = taken_by_owners(node, rule, decision, waiting, ())
    parts = waiting[min(taken)].parts
    for value, factors, produced in zip(node.outputs, rule.outputs, decision.produced, strict=True):
        if owned or not produced.partial:
            yield value, owned or Pending(parts, kept(rule, waiting, factors))
        else:
            every = {**dict(parts), **dict(produced.partial)}
            yield value, Pending(tuple([(axis, every[axis]) for axis in produced.mesh.in_order(every)]))


def taken_of(
    node: Node,
    atoms: Atoms,
    decisions: Mapping[Node, Decision],
    pending: Mapping[Value, Pending],
    refused: Collection[Value] = (),
) -> frozenset[int]:
    """The operands that the node takes pending: none, or a set that it is linear in, or that one device each has what
    it takes of. A result that nobody takes so is among `refused`."""
    waiting = {i: pending[value] for i, value in enumerate(node.inputs) if value in pending}
    if not waiting:
        return frozenset()
    rule, decision = atoms.rules[node], decisions[node]
    if len({left.parts for left in waiting.values()}) != 1 or node.is_annotation:
        return frozenset()
    if any(needed.windows for needed in decision.needed):  # what is partial is completed before
        return frozenset()
    if not _terms_fit(decision, waiting):
        return frozenset()
    if atoms.poles.spoil(node, waiting):  # parts may become NaN where the whole becomes infinite
        return frozenset()
    if taken_by_owners(node, rule, decision, waiting, refused) is not None or _is_linear(node, rule, decision, waiting):
        before = sum(node.inputs[i].type.elements for i in waiting)
        fits = sum(value.type.elements for value in node.outputs) <= before
        return frozenset(waiting) if fits else frozenset()
    return frozenset()


def _is_linear(node: Node, rule: NodeRule, decision: Decision, waiting: Mapping[int, Pending]) -> bool:
    """Whether the node is linear in what waits, or only moves it, and adds nothing to it that waits. Sums that it makes
    over other axes are completed with those that wait, later."""
    (parts,) = {left.parts for left in waiting.values()}
    finite = any(left.owner is not None and not left.owner.zero for left in waiting.values())
    if finite or any(axis in decision.split for axis, _ in parts):
        return False
    if more := [op for layout in decision.produced for _, op in layout.partial]:
        only = all(left.owner is None for left in waiting.values()) and not any(n.partial for n in decision.needed)
        if not only or any(op != "sum" for _, op in parts) or any(op != "sum" for op in more):
            return False
    sums, all_wait = all(op == "sum" for _, op in parts), len(waiting) == len(node.inputs)
    terms = {i for i, needed in enumerate(decision.needed) if needed.partial and i not in waiting}  # of one device
    together = frozenset(waiting) | terms
    return (sums and (together in rule.rule.linear or _widens(node))) or (rule.rule.moves and all_wait)


def _terms_fit(decision: Decision, waiting: Mapping[int, Pending]) -> bool:
    """Whether what one device adds is a part over the axes that what waits has its parts over, which nobody owns."""
    (parts,) = {left.parts for left in waiting.values()}
    terms = [dict(needed.partial) for needed in decision.needed if needed.partial]
    return not terms or (
        all(term == dict(parts) for term in terms) and all(left.owner is None for left in waiting.values())
    )


def _is_narrow_sum(value: Value, left: Pending, widened: Collection[Value]) -> bool:
    """Parts of a low-precision sum are added in float32, at once, unless they are only made float32 next. Where one
    device has all and the others 0, there is nothing to round."""
    narrow = value.type.dtype in NARROW and value not in widened
    return narrow and left.owner is None and any(op == "sum" for _, op in left.parts)


def widened_values(graph: Graph, uses: Mapping[Value, list[tuple[Node, int]]]) -> set[Value]:
    """Low-precision values of which nothing is made but float32, perhaps with other dims: parts of sums may stay
    float32 all the way. Those that somebody asks to add up as they are do not."""
    others, found = graph.kept(), set[Value]()
    for node in reversed([node for node in graph.nodes if node.call.operator != NARROWED]):
        for value in node.outputs:
            users = [user for user, _ in uses.get(value, ())]
            narrow = value.type.dtype in NARROW and value not in others
            if narrow and users and all(_keeps_wide(user, found) for user in users):
                found.add(value)
    return found


def _keeps_wide(node: Node, widened: Collection[Value]) -> bool:
    return _widens(node) or (node.call.name in _MOVED and node.outputs[0] in widened)


def _widens(node: Node) -> bool:
    """Whether the node makes float32 of fewer bits, or is asked to add up what it is given with fewer."""
    return node.call.operator == NARROWED or (
        node.call.name == "astype" and node.inputs[0].type.dtype in NARROW and node.outputs[0].type.dtype == "float32"
    )
