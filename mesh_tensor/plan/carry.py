"""Which sums stay pending: values that all users can take as parts, because they are linear in them.

Reducing later saves collectives where two pending sums are added, and bytes where what follows makes less of them.

contributions: decisions in which what is looked up is made of the table's rows where they lie.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.sharding import Partial, Sharding
from mesh_tensor.rules.operator.elementwise import NARROWED
from mesh_tensor.rules.operator.update import UPDATE

from .atoms import Atoms, NodeRule
from .decide import Decision, Order, fits, operand_layouts, result_layout
from .ir import Graph, Node, Value, leaves
from .owners import Pending, kept, look_up_of, owner_made, row_factor, taken_by_owners
from .propagate import Layouts

_MOVED = ("permute_dims", "reshape", "squeeze", "expand_dims")


def find_carried(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> tuple[dict[Value, Sharding], Mapping[Node, Decision]]:
    """The values that are handed on partial, each with a layout that says over which axes; and the decisions, of which
    some are others so that pending sums meet (see `_meeting`)."""
    uses = graph.uses()
    widened = widened_values(graph, uses)
    meeting = _meeting(graph, atoms, decisions, uses, widened, layouts.order)
    while True:
        tried = {**decisions, **meeting}
        pending = _carried(graph, atoms, tried, uses, widened)
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


def _meeting(
    graph: Graph,
    atoms: Atoms,
    decisions: Mapping[Node, Decision],
    uses: Mapping[Value, list[tuple[Node, int]]],
    widened: Collection[Value],
    order: Order,
) -> dict[Node, Decision]:
    """Other decisions for nodes that add several pending sums, which nothing else takes, and for those that only move
    elements on the way there: the axes that these are pending over split nothing there, so that one sum is reduced
    after it instead of several before."""
    found: dict[Node, Decision] = {}
    pending: dict[Value, Pending] = {}
    for node in graph.nodes:
        decision, rule = decisions[node], atoms.rules[node]
        parts = {pending[value].parts if value in pending else () for value in node.inputs}
        (only,) = parts if len(parts) == 1 else ((),)
        split = {axis: factor for axis, factor in decision.split.items() if axis not in dict(only)}
        joins = _adds(node, rule) or _moves(node, rule)
        joins = joins and not rule.fixed.keys() & dict(only)
        if only and split != decision.split and joins and all(len(uses[v]) == 1 for v in node.inputs):
            needed = operand_layouts(graph.mesh, rule, split, order)
            results = zip(rule.outputs, rule.partial, strict=True)
            produced = tuple(result_layout(graph.mesh, factors, split, ops, order) for factors, ops in results)
            decision = found[node] = Decision(split, split, needed, produced)
        taken = taken_of(node, atoms, {node: decision}, pending)
        for value, left in left_by(node, rule, decision, taken, pending):
            if value not in graph.annotations and not _is_narrow_sum(value, left, widened):
                pending[value] = left
    for node in reversed(graph.nodes):
        if node in found and _moves(node, atoms.rules[node]) and not _is_added(node, atoms, found, uses):
            del found[node]
    return found


def _moves(node: Node, rule: NodeRule) -> bool:
    """Whether the node only moves the elements of its one operand, or makes float32 of them."""
    moves = rule.rule.moves or _widens(node)
    return len(node.inputs) == len(node.outputs) == 1 and moves and not node.is_annotation


def _is_added(
    node: Node, atoms: Atoms, found: Mapping[Node, Decision], uses: Mapping[Value, list[tuple[Node, int]]]
) -> bool:
    """Whether what the node gives is added to other pending sums, or is a gradient that an optimizer takes: there it is
    in the parameter's layout, and nothing but the optimizer waits for it."""
    users = [user for user, _ in uses.get(node.outputs[0], ())]
    if any(user.call.operator in (UPDATE, NARROWED) for user in users):
        return True
    return len(users) == 1 and (users[0] in found or _adds(users[0], atoms.rules[users[0]]))


def _adds(node: Node, rule: NodeRule) -> bool:
    """Whether the node is linear in several operands together, and they are all that it has."""
    return len(node.inputs) > 1 and frozenset(range(len(node.inputs))) in rule.rule.linear


def _carried(
    graph: Graph,
    atoms: Atoms,
    decisions: Mapping[Node, Decision],
    uses: Mapping[Value, list[tuple[Node, int]]],
    widened: Collection[Value],
) -> dict[Value, Pending]:
    """What values are pending with. Starts from all that could be, and takes away what some user can't take, until that
    changes nothing."""
    refused = {*leaves(graph.result), *graph.annotations, *_taken_into_loops(graph)}
    while True:
        pending = _pending(graph, atoms, decisions, refused, widened)
        bad = {
            value
            for value in pending
            if any(
                position not in taken_of(node, atoms, decisions, pending, refused)
                for node, position in uses.get(value, ())
            )
        }
        if not bad:
            return pending
        refused |= bad


def _pending(
    graph: Graph,
    atoms: Atoms,
    decisions: Mapping[Node, Decision],
    refused: set[Value],
    widened: Collection[Value],
) -> dict[Value, Pending]:
    """What each value is pending with, if all but the refused stay so."""
    pending: dict[Value, Pending] = {}
    for node in graph.nodes:
        taken = taken_of(node, atoms, decisions, pending, refused)
        for value, left in left_by(node, atoms.rules[node], decisions[node], taken, pending):
            if value not in refused and not _is_narrow_sum(value, left, widened):
                pending[value] = left
    return pending


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
    for value, factors in zip(node.outputs, rule.outputs, strict=True):
        yield value, owned or Pending(waiting[min(taken)].parts, kept(rule, waiting, factors))


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
    if taken_by_owners(node, rule, decision, waiting, refused) is not None or _is_linear(node, rule, decision, waiting):
        before = sum(node.inputs[i].type.elements for i in waiting)
        fits = sum(value.type.elements for value in node.outputs) <= before
        return frozenset(waiting) if fits else frozenset()
    return frozenset()


def _is_linear(node: Node, rule: NodeRule, decision: Decision, waiting: Mapping[int, Pending]) -> bool:
    """Whether the node is linear in what waits, or only moves it, and adds nothing to it that waits."""
    (parts,) = {left.parts for left in waiting.values()}
    finite = any(left.owner is not None and not left.owner.zero for left in waiting.values())
    if finite or any(s.partial for s in decision.produced) or any(axis in decision.split for axis, _ in parts):
        return False
    sums, all_wait = all(op == "sum" for _, op in parts), len(waiting) == len(node.inputs)
    return (sums and (frozenset(waiting) in rule.rule.linear or _widens(node))) or (rule.rule.moves and all_wait)


def _is_narrow_sum(value: Value, left: Pending, widened: Collection[Value]) -> bool:
    """Parts of a low-precision sum are added in float32, at once, unless they are only made float32 next. Where one
    device has all and the others 0, there is nothing to round."""
    narrow = value.type.dtype in NARROW and value not in widened
    return narrow and left.owner is None and any(op == "sum" for _, op in left.parts)


def widened_values(graph: Graph, uses: Mapping[Value, list[tuple[Node, int]]]) -> set[Value]:
    """Low-precision values of which nothing is made but float32, perhaps with other dims: parts of sums may stay
    float32 all the way. Those that somebody asks to add up as they are do not."""
    others, found = {*leaves(graph.result), *graph.annotations}, set[Value]()
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


def contributions(
    graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]
) -> dict[Node, Decision]:
    """The nodes that look rows up in tables that lie split along them, and what follows of these token by token, as
    long as that makes less of them."""
    found: dict[Node, Decision] = {}
    pending: dict[Value, Pending] = {}
    less: set[Node] = set()
    for node in graph.nodes:
        rule = atoms.rules[node]
        decision = _other(node, rule, layouts, decisions[node], pending)
        taken = taken_of(node, atoms, {node: decision}, pending)
        owned = owner_made(node, rule, decision) is not None
        if not taken and not owned:
            continue
        found[node] = decision
        if sum(v.type.elements for v in node.outputs) < sum(node.inputs[i].type.elements for i in taken):
            less.add(node)
        for value, left in left_by(node, rule, decision, taken, pending):
            if left.owner is not None and value not in graph.annotations:
                pending[value] = left
    _trim(graph, found, less)
    return {node: decision for node, decision in found.items() if decision != decisions[node]}


def _other(
    node: Node,
    rule: NodeRule,
    layouts: Layouts,
    decision: Decision,
    pending: Mapping[Value, Pending],
) -> Decision:
    """The decision in which the axes that split the rows do so, or split nothing where it is computed of them."""
    split: dict[str, str] = dict(decision.split)
    for value in node.inputs:
        for axis, _ in pending[value].parts if value in pending else ():
            split.pop(axis, None)
    mesh, look_up = decision.produced[0].mesh, look_up_of(node)
    factor = None if look_up is None else row_factor(rule, look_up)
    if look_up is not None and factor is not None:
        place = rule.inputs[look_up.table].index(factor)
        split.update(dict.fromkeys(layouts.of[node.inputs[look_up.table]].axes_of(place), factor))
    if split == decision.split or not fits(rule, split, mesh):
        return decision
    results = zip(rule.outputs, rule.partial, strict=True)
    produced = tuple([result_layout(mesh, factors, split, ops, layouts.order) for factors, ops in results])
    return Decision(split, split, operand_layouts(mesh, rule, split, layouts.order), produced)


def _trim(graph: Graph, found: dict[Node, Decision], less: set[Node]) -> None:
    """Leave out the last ones, up to one that makes less of what it takes."""
    needed: set[Value] = set()
    for node in reversed(graph.nodes):
        if node in less or needed.intersection(node.outputs):
            needed.update(node.inputs)
        else:
            found.pop(node, None)
