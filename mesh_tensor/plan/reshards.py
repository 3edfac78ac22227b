"""insert_reshards: from the values' layouts to explicit changes of layout, fills and casts.

A result that comes out in another layout than its value's goes there at once; operands come from the cheapest form that
exists, and a form that was made serves all later users. A sum that is pending is carried through operators that are
linear in it, and reduced where that ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from mesh_tensor.annotations.names import Fresh
from mesh_tensor.base.blocks import ceildiv
from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Partial, Replicate, Sharding
from mesh_tensor.redistribution.plan import plan_moves
from mesh_tensor.rules.operator.aten import name_of

from .atoms import Atoms, NodeRule
from .carry import find_carried, widened_values
from .contributions import contributions
from .decide import Decider, Decision
from .explicit import Cast, Change, ExplicitGraph, ExplicitStep, Fill, Form, Run
from .ir import Graph, Node, Scope, Value, leaves, map_tree
from .joint_sums import joint_sums
from .prices import bytes_moved, node_flops
from .propagate import Layouts


def insert_reshards(graph: Graph, atoms: Atoms, layouts: Layouts) -> ExplicitGraph:
    """The steps of every device, for values in these layouts."""
    decider = Decider(graph.mesh, atoms, layouts, nodes=graph.nodes, prices=graph.prices, decided=graph.decided)
    decisions = {node: decider.decide(node) for node in graph.nodes}
    made = _written(graph, atoms, layouts, decisions)
    for other in (joint_sums, contributions):
        if others := other(graph, atoms, layouts, decisions):
            tried = _written(graph, atoms, layouts, {**decisions, **others})
            if cost_of(tried) < cost_of(made):
                made, decisions = tried, {**decisions, **others}
    return made


def cost_of(made: ExplicitGraph) -> int:
    """What all changes of layout, and the work of a device, take."""
    prices, times = made.graph.prices, made.graph.times
    cost = 0
    for step in made.steps:
        if step.move is not None:
            src, dst = step.src, step.dst
            change = prices.change(made.atoms.shape(src.value), src.dtype, src.sharding, dst.sharding)
            cost += change * times(step.scopes)
        elif step.node is not None and not step.mark:
            largest = largest_part(step.node, step.split, made.atoms.rules[step.node], made.graph.mesh)
            cost += prices.work(step.node, largest) * times(step.scopes)
    return cost


def largest_part(node: Node, split: Mapping[str, str], rule: NodeRule, mesh: Mesh) -> int:
    """What the device computes of a node that has the largest tiles."""
    flops = node_flops(node)
    for factor in dict.fromkeys(split.values()):
        tile = size = max(rule.sizes.get(factor, 1), 1)
        for axis in [axis for axis, other in split.items() if other == factor]:
            tile = ceildiv(tile, mesh.size(axis))
        flops = flops * tile // size
    return flops


def _written(graph: Graph, atoms: Atoms, layouts: Layouts, decisions: Mapping[Node, Decision]) -> ExplicitGraph:
    """The steps that these decisions make."""
    carried, decided = find_carried(graph, atoms, layouts, decisions)
    writer = _Writer(graph, atoms, layouts, carried)
    for node in graph.nodes:
        writer.run(node, decided[node])
    return writer.finish()


@dataclass
class _OpenLoop:
    """A loop whose steps are being written, in the scopes `outer`; `start`: where they begin; `carried`: what it has
    from one step to the next."""

    scope: Scope
    outer: tuple[Scope, ...]
    start: int
    carried: frozenset[Form]


class _Writer:
    def __init__(self, graph: Graph, atoms: Atoms, layouts: Layouts, carried: dict[Value, Sharding]) -> None:
        self._graph, self._atoms, self._layouts, self._carried = graph, atoms, layouts, carried
        self._made = ExplicitGraph(graph, atoms, layouts)
        self._widened = widened_values(graph, graph.uses())
        self._forms: dict[Value, list[Form]] = {}
        self._fills: dict[tuple, Form] = {}
        self._fresh = Fresh([])
        self._open: list[_OpenLoop] = []  # the outermost first
        self._inside: dict[Form, int] = {}  # in how many loops it is made, if it is in any
        self._entered: set[Form] = set()  # what loops carry, as it is in there
        for value in graph.params:
            self._made.params.append(self._form(value, layouts.of[value]))
        for value in graph.values():
            if value.data is not None:
                self._made.constants.append(self._form(value, replicated(layouts.of[value])))

    def run(self, node: Node, decision: Decision) -> None:
        """The node, and before it what its operands need, and after it what its results need."""
        self._stand(node)
        if node.is_annotation:
            self._annotation(node)
            return
        if node.mark:
            self._mark(node)
            return
        carried = any(value in self._carried for value in node.inputs)
        inputs = []
        for position, (value, needed) in enumerate(zip(node.inputs, decision.needed, strict=True)):
            pending = self._carried.get(value)
            if node.kernel is not None:
                needed = self._before_windows(value, needed)  # its own lowering makes windows
            wanted = needed if pending is None else with_partial(needed, pending)
            form = self.obtain(value, wanted, node.scopes, f"{node.where} ({name_of(node.call)}) needs it so")
            inputs.append(self._filled(form, node, position))
        outputs = []
        for value, produced in zip(node.outputs, decision.produced, strict=True):
            if carried:
                produced = with_partial(produced, self._carried_through(node))
            waits = carried or value in self._carried
            waits = waits and value not in self._widened
            wide = bool(produced.partial) and not waits and value.type.dtype in NARROW
            wide = wide and dict(produced.partial).popitem()[1] == "sum"
            outputs.append(self._form(value, produced, "float32" if wide else value.type.dtype))
        self._made.steps.append(Run(node, tuple(inputs), tuple(outputs), decision.split))
        for form in outputs:
            self._settle(form, node)

    def _before_windows(self, value: Value, needed: Sharding) -> Sharding:
        """What windows are made of: tiles, or the whole dims where devices have them."""
        whole = needed.plain.with_replicate(*(axis for dim, _ in needed.windows for axis in needed.axes_of(dim)))
        return whole if any(form.sharding == whole for form in self._forms[value]) else needed.plain

    def obtain(self, value: Value, wanted: Sharding, scopes: tuple[Scope, ...], reason: str) -> Form:
        """A form of the value in that layout: one that exists, or from the one that is cheapest to change."""
        forms = self._forms[value]
        shape = self._atoms.shape(value)
        same = next((form for form in forms if form.sharding == wanted), None)
        if same is not None:
            return same
        forms = [form for form in forms if not form.sharding.windows]
        ready = [f for f in forms if f.sharding.partial == wanted.partial] or forms
        source = min(ready, key=lambda f: bytes_moved(shape, f.dtype, f.sharding, wanted))
        return self._change(source, wanted, scopes, reason)

    def _stand(self, node: Node) -> None:
        """Open and close loops, so that those that the node stands in are open."""
        loops = self._graph.loops_of(node)
        known = sum(mine.scope == scope for mine, scope in zip(self._open, loops, strict=False))
        self._close(known)
        for scope in loops[known:]:
            carried = frozenset(self._entered)
            outer = node.scopes[: node.scopes.index(scope)]
            self._open.append(_OpenLoop(scope, outer, len(self._made.steps), carried))

    def _close(self, known: int) -> None:
        """Close all loops but for so many."""
        while len(self._open) > known:
            self._open.pop()
            self._forget(len(self._open) + 1)

    def _forget(self, depth: int) -> None:
        """Forms that are made in so many loops are there no more, but for what the last of them carries."""
        kept = self._open[depth - 1].carried if len(self._open) >= depth else ()
        gone = {form for form, inside in self._inside.items() if inside >= depth and form not in kept}
        for form in gone:
            del self._inside[form]
        for forms in self._forms.values():
            forms[:] = [form for form in forms if form not in gone]
        self._fills = {k: form for k, form in self._fills.items() if form not in gone and k[0] not in gone}

    def _mark(self, node: Node) -> None:
        """A value goes into a loop or comes out of it, in the layout that it has in there; rows in their own."""
        (src,), (dst,), depth = node.inputs, node.outputs, len(self._open)
        inside = self._graph.loops[node.scopes[-1]].entered.get(dst) if node.mark == "loop.next" else dst
        wanted = made = self._layouts.of[src if inside is None else inside]
        if node.mark == "loop.stack":
            row = self._layouts.of[src]
            wanted = row.complete
            own = len(self._atoms.devices.get(src, ()))
            steps: tuple[tuple[str, ...], ...] = ((),) * len(self._atoms.of[dst][0])
            made = Sharding(row.mesh, len(self._atoms.shape(dst)), row.dims[:own] + steps + row.dims[own:])
        form = self.obtain(src, wanted, node.scopes, f"{node.where} is carried so by a loop")
        end = self._form(dst, made, inside=depth + 1 if node.mark == "loop.enter" else depth - 1)
        self._made.steps.append(Run(node, (form,), (end,), {}))
        if node.mark == "loop.enter":
            self._entered.add(end)
        elif node.mark == "loop.test":
            self._forget(depth)  # the test is run by itself

    def _add(self, step: Change | Fill) -> None:
        """A step goes to the end; one that a loop has no part in, before the loop."""
        depth = self._inside.get(step.src, 0)
        if depth >= len(self._open):
            self._made.steps.append(step)
            return
        self._made.steps.insert(self._open[depth].start, replace(step, scopes=self._open[depth].outer))
        for loop in self._open[depth:]:
            loop.start += 1

    def finish(self) -> ExplicitGraph:
        """The steps, and the results in their values' layouts."""
        self._close(0)
        self._made.result = map_tree(
            self._graph.result, lambda v: self.obtain(v, self._layouts.of[v], (), "the function returns it so")
        )
        self._made.steps = _needed(self._made)
        return self._made

    def _annotation(self, node: Node) -> None:
        """Its result is its operand, in the layout that was stated."""
        (src,), (dst,) = node.inputs, node.outputs
        self.obtain(src, self._layouts.of[dst], node.scopes, f"{node.where}: annotated")
        self._forms[dst] = self._forms[src]

    def _carried_through(self, node: Node) -> Sharding:
        return next(self._carried[value] for value in node.inputs if value in self._carried)

    def _settle(self, form: Form, node: Node) -> None:
        """Bring a result into its value's layout, unless it is carried on as it is."""
        value = form.value
        if value in self._carried:
            return
        wanted = self._layouts.of[value]
        if form.sharding != wanted and (form.sharding.partial or (value in self._graph.annotations)):
            reason = f"{node.where} ({node.call.name}) " + (
                "leaves it partial" if form.sharding.partial else "makes it so"
            )
            form = self._change(form, wanted, node.scopes, reason)
        if form.dtype != value.type.dtype:
            narrow = self._form(value, form.sharding)
            self._made.steps.append(Cast(form, narrow, node.scopes))
            self._forms[value] = [narrow]

    def _change(self, src: Form, wanted: Sharding, scopes: tuple[Scope, ...], reason: str) -> Form:
        """The moves of the cheapest redistribution, each a step."""
        form = src
        for move in plan_moves(src.sharding, wanted, self._atoms.shape(src.value)):
            after = self._form(src.value, move.after, form.dtype, inside=self._inside.get(src, 0))
            self._add(Change(form, after, scopes, move, reason))
            form = after
        return form

    def _filled(self, form: Form, node: Node, position: int) -> Form:
        """The operand with its padding made neutral, where the node reduces over it."""
        rule = self._atoms.rules[node]
        if not rule.reduced or rule.rule.masks:
            return form
        shape = self._atoms.shape(form.value)
        dims, ops = [], set()
        for dim, factor in enumerate(rule.inputs[position]):
            if factor is not None and factor in rule.reduced and shape[dim] % form.sharding.num_shards(dim):
                dims.append(dim)
                ops.add(rule.reduced[factor])
        if not dims:
            return form
        (op,) = ops
        key = (form, tuple(dims), op)
        if key not in self._fills:
            inside = self._inside.get(form, 0)
            filled = self._fills[key] = self._form(form.value, form.sharding, form.dtype, keep=False, inside=inside)
            self._add(Fill(form, filled, node.scopes, tuple(dims), op))
        return self._fills[key]

    def _form(
        self, value: Value, sharding: Sharding, dtype: str | None = None, keep: bool = True, inside: int | None = None
    ) -> Form:
        form = Form(self._fresh.name(value.name), value, sharding, dtype or value.type.dtype)
        if depth := len(self._open) if inside is None else inside:
            self._inside[form] = depth
        if keep:
            self._forms.setdefault(value, []).append(form)
        return form


def _needed(made: ExplicitGraph) -> list[ExplicitStep]:
    """The steps without changes of layout that nobody takes: of a result that settled, where its users took it as it
    came."""
    taken, kept = set(leaves(made.result)), list[ExplicitStep]()
    for step in reversed(made.steps):
        if step.node is not None or not taken.isdisjoint(step.outputs):
            taken.update(step.inputs)
            kept.append(step)
    return kept[::-1]


def replicated(sharding: Sharding) -> Sharding:
    """The layout on the same mesh that splits nothing."""
    return Sharding.of(sharding.mesh, sharding.ndim, {})


def with_partial(sharding: Sharding, pending: Sharding) -> Sharding:
    """The layout with the axes of `pending.partial` partial, too."""
    placements = sharding.placements()
    for axis, op in pending.partial:
        assert placements[axis] in (Replicate(), Partial(op))
        placements[axis] = Partial(op)
    return Sharding.of(sharding.mesh, sharding.ndim, placements)
