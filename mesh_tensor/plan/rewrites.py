"""What is written otherwise before layouts are decided, as devices run it with less.

Slices that are a value's parts one after the other along a dim, and all that is made of it: one split. Slices that are
put beside something along the same dim, and nothing else: one operator with that, and one exchange. Splits
into unequal parts of a dim that axes split: slices, of which each takes what its tiles lack. Choices between a value
and itself as a constant, as embeddings make of their padding: the value alone. What is put side by side and taken apart
again: the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise

from tvm import relax

from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.shifts import joined_parts

from .atoms import Atoms
from .expansion import Expansion
from .ir import Graph, Node, Value
from .manual import Axes, varying
from .propagate import Layouts

Own = Mapping[Value, Axes]  # the manual axes along which devices have values of their own


def joined_slices(graph: Graph) -> Graph:
    """The graph with such slices as one operator."""
    slices = [node for node in graph.nodes if node.call.name == "strided_slice"]
    if len(slices) < 2:
        return graph
    kept = graph.kept()
    users = {value: list(dict.fromkeys(user for user, _ in found)) for value, found in graph.uses().items()}
    made: dict[Node, Node] = {}
    gone: set[Node] = set()
    for value in dict.fromkeys(node.inputs[0] for node in slices):
        found = users[value]
        if value not in kept and (parts := _parts(value, found)) is not None:
            made[found[0]] = _split(value, *parts)
            gone.update(found)
    if not made:
        return graph
    nodes = [one for node in graph.nodes for one in ([made[node]] if node in made else [] if node in gone else [node])]
    return replace(graph, nodes=nodes)


def without_joins(graph: Graph) -> Graph:
    """The graph in which what a split makes of the parts that a concat was made of is those parts; concats that nothing
    else takes are not made."""
    joins = {node.outputs[0]: node for node in graph.nodes if node.call.name == "concat"}
    splits = [node for node in graph.nodes if node.call.name == "split" and node.inputs[0] in joins]
    kept = graph.kept()
    own = varying(graph) if splits else {}
    splits = [node for node in splits if _undoes(node, joins[node.inputs[0]], own) and kept.isdisjoint(node.outputs)]
    if not splits:
        return graph
    same: dict[Value, Value] = {}
    for node in splits:
        parts = joins[node.inputs[0]].inputs
        same |= {out: same.get(part, part) for out, part in zip(node.outputs, parts, strict=True)}
    nodes = [_with(node, same) for node in graph.nodes if node not in splits]
    taken = kept.union(*(node.inputs for node in nodes))
    gone = {node.inputs[0] for node in splits} - taken
    return replace(graph, nodes=[node for node in nodes if gone.isdisjoint(node.outputs)])


def _undoes(split: Node, join: Node, own: Own) -> bool:
    """Whether a split gives just what a concat was given."""
    if join.call.attr("axis") is None or len(split.outputs) != len(join.inputs) or split.scopes != join.scopes:
        return False
    same_dim = split.call.axis(split.call.attr("axis", 0)) == join.call.axis(join.call.attr("axis"))
    return same_dim and all(_alike(out, part, own) for out, part in zip(split.outputs, join.inputs, strict=True))


def _alike(one: Value, other: Value, own: Own) -> bool:
    """Whether values are of one type, and devices of manual computations have their own of both, or of none."""
    return one.type == other.type and own.get(one) == own.get(other)


def sliced_splits(graph: Graph, atoms: Atoms, layouts: Layouts) -> Graph | None:
    """The graph in which such splits are slices; None where there are none."""
    made = {}
    for node in graph.nodes:
        if node.call.name == "split" and len({out.type.shape for out in node.outputs}) > 1:
            (value,), dim = node.inputs, node.call.axis(node.call.attr("axis", 0))
            if any(layouts.of[value].axes_of(position) for position in atoms.positions(value, dim)):
                made[node] = Expansion(node).nodes(partial(_slices, dim))
    if not made:
        return None
    return parts_side_by_side(replace(graph, nodes=[one for node in graph.nodes for one in made.get(node, [node])]))


def _slices(dim: int, made: Expansion) -> list[relax.Var]:
    ends = list(accumulate([0, *(out.type.shape[dim] for out in made.node.outputs)]))
    return [made(relax.op.strided_slice(made.given[0], [dim], [at], [end])) for at, end in pairwise(ends)]


def parts_side_by_side(graph: Graph) -> Graph:
    """The graph in which a concat takes what slices of its dim take, where nobody else has these."""
    joins = [node for node in graph.nodes if node.call.name == "concat" and node.call.attr("axis") is not None]
    links = graph.inner_links() - {*graph.annotations} if joins else set()
    makers = {value: node for node in graph.nodes for value in node.outputs if value in links}
    made: dict[Node, Node] = {}
    gone: set[Node] = set()
    for node in joins:
        axis = node.call.axis(node.call.attr("axis"))
        taken = [_taken_of(node, n, axis, makers.get(value)) for n, value in enumerate(node.inputs)]
        if any(of is not None for of in taken):
            made[node] = _with_parts(node, axis, taken)
            gone.update(of for of in taken if of is not None)
    if not made:
        return graph
    return replace(graph, nodes=[made.get(node, node) for node in graph.nodes if node not in gone])


def _taken_of(join: Node, operand: int, axis: int, maker: Node | None) -> Node | None:
    """The slice that an operand of a concat is, if windows of what it takes from hold nothing that it leaves out: where
    the result has no place for that."""
    cut = None if maker is None or maker.scopes != join.scopes else _cut(maker)
    if maker is None or cut is None or cut[0] != axis:
        return None
    _, begin, end = cut
    is_first, is_last = operand == 0, operand == len(join.inputs) - 1
    return maker if (is_first or begin == 0) and (is_last or end == maker.inputs[0].type.shape[axis]) else None


def _with_parts(join: Node, axis: int, taken: list[Node | None]) -> Node:
    """The concat of parts of what is sliced."""
    inputs = [value if of is None else of.inputs[0] for value, of in zip(join.inputs, taken, strict=True)]
    whole = [(0, value.type.shape[axis]) for value in inputs]
    cuts = [None if of is None else _cut(of) for of in taken]
    parts = [part if cut is None else cut[1:] for part, cut in zip(whole, cuts, strict=True)]
    made = joined_parts([value.variable() for value in inputs], axis, parts)
    call = op_call(relax.BlockBuilder().normalize(made))
    return replace(join, call=call, inputs=tuple(inputs))


def _parts(value: Value, users: list[Node]) -> tuple[int, list[Node]] | None:
    """The dim that these take apart, and they in order; None if they do anything else."""
    cuts = [_cut(node) for node in users]
    dims = {cut[0] for cut in cuts if cut is not None}
    if None in cuts or len(dims) != 1 or len(users) < 2 or len({node.scopes for node in users}) != 1:
        return None
    (dim,) = dims
    ordered = sorted(zip(cuts, users, strict=True), key=lambda pair: pair[0] or ())
    ends = [0, *(cut[2] for cut, _ in ordered if cut is not None)]
    starts = [*(cut[1] for cut, _ in ordered if cut is not None), value.type.shape[dim]]
    return (dim, [node for _, node in ordered]) if starts == ends else None


def _cut(node: Node) -> tuple[int, int, int] | None:
    """The one dim of which a slice takes a part, where that begins and where it ends; None for any other operator."""
    if node.call.name != "strided_slice" or len(node.inputs) != 1:
        return None
    axes, begins, _, *strides = node.call.literals
    if strides and any(stride != 1 for stride in strides[0]):
        return None
    before, after = node.inputs[0].type.shape, node.outputs[0].type.shape
    found = list(_taken(node, axes, begins, before, after))
    return found[0] if len(found) == 1 else None


def _taken(
    node: Node, axes: tuple[int, ...], begins: tuple[int, ...], before: tuple[int, ...], after: tuple[int, ...]
) -> Iterator[tuple[int, int, int]]:
    for axis, begin in zip(axes, begins, strict=True):
        dim = node.call.axis(axis)
        if after[dim] != before[dim]:
            start = begin + before[dim] if begin < 0 else begin
            yield dim, start, start + after[dim]


def _split(value: Value, dim: int, parts: list[Node]) -> Node:
    """One node for them, where the first of them stood."""
    var = value.variable()
    sizes = [node.outputs[0].type.shape[dim] for node in parts]
    cuts = [sum(sizes[: n + 1]) for n in range(len(sizes) - 1)]
    call = op_call(relax.BlockBuilder().normalize(relax.op.split(var, cuts, dim)))
    return Node(call, (value,), tuple(node.outputs[0] for node in parts), parts[0].scopes, parts[0].where)


def without_fixed_rows(graph: Graph) -> Graph:
    """The graph in which such a value is made under the name of the choice, or taken in its place, and conditions that
    nothing else takes are not made."""
    choices = [node for node in graph.nodes if node.call.name == "where"]
    if not choices:
        return graph
    makers = graph.makers()
    made: dict[Node, Node] = {}
    gone: set[Node] = set()
    kept, own = graph.kept(), varying(graph)
    users = {value: {user for user, _ in found} for value, found in graph.uses().items()}
    for choice in choices:
        maker, constant = makers.get(choice.inputs[-1]), makers.get(choice.inputs[1])
        if maker is None or constant is None or not _is_itself(choice, constant, maker, own):
            continue
        if maker.call.name == "where" and _chooses_itself(maker, makers, own):
            continue  # the value that it chooses is taken in the place of both
        if users[maker.outputs[0]] == {constant, choice} and kept.isdisjoint({*maker.outputs, *constant.outputs}):
            made[maker] = replace(maker, outputs=choice.outputs)
            gone |= {choice, constant}
    same = _chosen(choices, makers, kept | {value for node in gone for value in node.outputs}, own)
    gone |= {makers[value] for value in same}
    for choice in [node for node in choices if node in gone]:
        gone.update(_alone(choice.inputs[0], makers, users, kept, gone))
        if users[choice.inputs[1]] <= gone and choice.inputs[1] not in kept:
            gone.add(makers[choice.inputs[1]])
    if not gone:
        return graph
    nodes = [made.get(node, node) for node in graph.nodes if node not in gone]
    return replace(graph, nodes=[_with(node, same) for node in nodes])


def _chosen(choices: list[Node], makers: dict[Value, Node], kept: set[Value], own: Own) -> dict[Value, Value]:
    """Of what is chosen from a value and itself, that value: as branches take what they are given."""
    same: dict[Value, Value] = {}
    for choice in choices:
        (made,), value = choice.outputs, choice.inputs[-1]
        if _chooses_itself(choice, makers, own) and made not in kept:
            same[made] = same.get(value, value)
    return same


def _chooses_itself(choice: Node, makers: dict[Value, Node], own: Own) -> bool:
    """Whether a choice is between a value and itself, and is like it."""
    constant, value = makers.get(choice.inputs[1]), choice.inputs[-1]
    same = constant is not None and constant.call.name == "grad.no_grad" and constant.inputs == (value,)
    return same and _alike(choice.outputs[0], value, own)


def _with(node: Node, same: dict[Value, Value]) -> Node:
    if same.keys().isdisjoint(node.inputs):
        return node
    return replace(node, inputs=tuple([same.get(value, value) for value in node.inputs]))


def _is_itself(choice: Node, constant: Node, maker: Node, own: Own) -> bool:
    """Whether both of what is chosen from are what `maker` gives, alone and of the choice's type."""
    value = choice.inputs[-1]
    same = constant.call.name == "grad.no_grad" and constant.inputs == (value,) and maker.outputs == (value,)
    return same and _alike(choice.outputs[0], value, own) and maker.scopes == constant.scopes == choice.scopes


def _alone(
    value: Value, makers: dict[Value, Node], users: dict[Value, set[Node]], kept: set[Value], gone: set[Node]
) -> Iterator[Node]:
    """What makes a value for the nodes that are gone alone."""
    maker = makers.get(value)
    while maker is not None and users[value] <= gone and value not in kept and len(maker.outputs) == 1:
        yield maker
        gone.add(maker)
        if not maker.inputs:
            return
        value = maker.inputs[0]
        maker = makers.get(value)
