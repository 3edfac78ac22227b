"""What the parts of a batch make of a value: rows behind each other, a sum, a mean, the same in all.

By an operator's sharding rule: rows are followed through the factors, sums and means through what is linear in them.

Rows that are divided by how many rows their batch has: summed up, they are a mean. And numbers that values are
divided by in a module of known sizes, which may be such a size.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.operator import OpRule, TensorType
from mesh_tensor.rules.operator.aten import name_of
from mesh_tensor.rules.operator.rule import Dim, atoms_of

from .ir import Node
from .tir_rule import counted


@dataclass(frozen=True)
class Fixed:
    """The same for every part of a batch; differs between positions along the dims `along` at most."""

    along: frozenset[int] = frozenset()


@dataclass(frozen=True)
class Rows:
    """The batch's value has the parts' behind each other along `dim`, which is (`outer`, rows and what is in them).
    `count`: how many rows a part has."""

    dim: int
    outer: int
    count: int


@dataclass(frozen=True)
class Sum:
    """The batch's value is the sum of the parts'. `elements`: of how many elements it is one, in a part; 0: of others
    at each place. `by`: what it is divided by, of numbers that may have been read off a part; 0: by none."""

    elements: int
    by: int = 0


@dataclass(frozen=True)
class Mean:
    """The batch's value is the mean of the parts', weighted by their rows."""


@dataclass(frozen=True)
class Mixed:
    """The batch's value does not follow from the parts'."""

    why: str


Kind = Fixed | Rows | Sum | Mean | Mixed
REGROUPS = ("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze")


def result_kinds(node: Node, rule: OpRule, kinds: Sequence[Kind]) -> list[Kind]:
    """The kinds of a node's results, of its operands'."""
    wrong = next((kind for kind in kinds if isinstance(kind, Mixed)), None)
    if wrong is not None:
        return [wrong] * len(node.outputs)
    rows = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, Rows)}
    added = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, (Sum, Mean))}
    if rows and added:
        names = ", ".join(node.inputs[i].name for i in added)
        return mixed(node, f"takes rows of the batch and {names}, which is made of all rows")
    if rows:
        return _of_rows(node, rule, kinds, rows)
    return _of_sums(node, rule, added) if added else _fixed(node, rule, kinds)


def mixed(node: Node, why: str) -> list[Kind]:
    """What no result of a node follows from the parts'."""
    return [Mixed(f"{node.where} ({name_of(node.call)}) {why}")] * len(node.outputs)


def _fixed(node: Node, rule: OpRule, kinds: Sequence[Kind]) -> list[Kind]:
    """What does not depend on the batch: along which dims it varies. Along a factor, a result is made of what the
    operands have there: if these don't vary along it, it doesn't either, unless it minds where it stands."""
    moving = {*placed_factors(rule), *(counted(node) if node.kernel is not None else ())}
    for kind, dims in zip(kinds, rule.inputs, strict=True):
        for d in kind.along if isinstance(kind, Fixed) else ():
            moving.update(atoms_of(dims[d]))

    def varies(dim: Dim, size: int) -> bool:
        return size > 1 and (dim is None or not moving.isdisjoint(atoms_of(dim)))

    return [
        Fixed(frozenset(d for d, dim in enumerate(dims) if varies(dim, value.type.shape[d])))
        for value, dims in zip(node.outputs, rule.outputs, strict=True)
    ]


def placed_factors(rule: OpRule) -> frozenset[str]:
    """The factors along which an operator may make something else of the same in another place."""
    windows = {reaches.factor for reaches in rule.windows.values()}
    inner = {one.factor for one in rule.inner}
    return rule.positional | rule.unsplit | rule.devices | rule.blocks.keys() | rule.first.keys() | windows | inner


def _of_sums(node: Node, rule: OpRule, added: dict[int, Sum | Mean]) -> list[Kind]:
    """Sums and means through what is linear in them. A mean is one with what is fixed added to it."""
    waiting, means = set(added), any(isinstance(kind, Mean) for kind in added.values())
    names = " and ".join(node.inputs[i].name for i in added)
    if len({type(kind) for kind in added.values()}) > 1:
        return mixed(node, f"takes sums and means over the batch's rows together, {names}")
    together = next((linear for linear in rule.linear if waiting <= linear), None)
    if together is None and waiting == {0} and is_rounded(node):
        together = frozenset({0})
    if together is None:
        return mixed(node, f"is not linear in {names}, which is made of all rows")
    if means:
        return [Mean()] * len(node.outputs)
    if together != waiting:
        fixed = " and ".join(node.inputs[i].name for i in sorted(together - waiting))
        return mixed(node, f"adds {fixed}, which is the same for all rows, to {names}, a sum over them")
    sums = [kind for kind in added.values() if isinstance(kind, Sum)]
    each, numbers = {kind.elements for kind in sums}, [kind.by for kind in sums if kind.by]
    elements, by = each.pop() if len(each) == 1 else 0, math.lcm(*numbers) if numbers else 0
    return [Sum(elements * _summed(node, rule, added, number), by) for number in range(len(node.outputs))]


def _summed(node: Node, rule: OpRule, added: Mapping[int, Kind], number: int) -> int:
    """How many elements of an operand a result of a node is a sum of."""
    ops, sizes = rule.partial[number] if rule.partial else rule.reduced, _sizes(node, rule)
    return math.prod(sizes[a] for a in {a for i in added for dim in rule.inputs[i] for a in atoms_of(dim)} if a in ops)


def is_rounded(node: Node) -> bool:
    """A cast that changes sums by rounding at most: not one to whole numbers."""
    return node.call.name == "astype" and (
        is_float(node.call.outputs[0].dtype) or node.call.inputs[0].dtype == node.call.outputs[0].dtype
    )


def _of_rows(node: Node, rule: OpRule, kinds: Sequence[Kind], rows: dict[int, Rows]) -> list[Kind]:
    """Rows through the factor that they are; summed over, they are a sum."""
    if node.call.name in REGROUPS:
        return [_regrouped(node, rows[0])]
    if (joined := _joined(node, rows)) is not None:
        return [joined]
    found = {rule.inputs[i][kind.dim] for i, kind in rows.items()}
    like = {(kind.outer, kind.count) for kind in rows.values()}
    factor = found.pop() if len(found) == 1 else None
    if not isinstance(factor, str) or len(like) != 1:
        return mixed(node, "needs the batch's rows together")
    if node.kernel is not None and (factor in rule.reduced or factor in counted(node)):
        return mixed(node, "is a kernel that sums over the batch's rows, or computes with their numbers")
    why = _in_the_way(node, rule, kinds, factor)
    if why:
        return mixed(node, why)
    some = next(iter(rows.values()))
    return [_along(node, rule, factor, some, number, dims) for number, dims in enumerate(rule.outputs)]


def _joined(node: Node, rows: dict[int, Rows]) -> Rows | None:
    """What tensors of rows make that are put behind each other along that dim, as a stack of them is made: each has
    the batch's rows."""
    kinds, shapes = {*rows.values()}, {value.type.shape for value in node.inputs}
    if node.kernel is not None or node.call.name != "concat" or len(rows) < len(node.inputs):
        return None
    if len(kinds) > 1 or len(shapes) > 1 or int(node.call.attr("axis")) % node.inputs[0].type.ndim != rows[0].dim:
        return None
    return replace(rows[0], outer=rows[0].outer * len(rows))


def _in_the_way(node: Node, rule: OpRule, kinds: Sequence[Kind], factor: str) -> str:
    """Why rows are not on their own in an operator whose factor they are."""
    if factor in rule.positional or factor in rule.unsplit or any(one.factor == factor for one in rule.inner):
        return "needs the batch's rows together"
    for value, kind, dims in zip(node.inputs, kinds, rule.inputs, strict=True):
        for d, dim in enumerate(dims):
            meets = factor in atoms_of(dim) and value.type.shape[d] > 1
            if meets and isinstance(kind, Fixed) and d in kind.along:
                return f"takes rows of the batch with {value.name}, which has as many as one microbatch"
            if meets and isinstance(kind, Rows) and d != kind.dim:
                return f"takes the rows of {value.name} twice"
    return ""


def _along(node: Node, rule: OpRule, factor: str, rows: Rows, number: int, dims: Sequence[Dim]) -> Kind:
    """A result of an operator whose factor the rows are."""
    sizes = _sizes(node, rule)
    for d, dim in enumerate(dims):
        atoms = atoms_of(dim)
        if factor in atoms:
            before = math.prod(sizes[atom] for atom in atoms[: atoms.index(factor)])
            return Rows(d, rows.outer * before, rows.count)
    ops = rule.partial[number] if rule.partial else rule.reduced
    if ops.get(factor) != "sum":
        return mixed(node, "needs the batch's rows together")[0]
    if node.call.name == "mean":
        return Mean()
    summed = {atom for dims in rule.inputs for dim in dims for atom in atoms_of(dim) if atom in ops}
    return Sum(math.prod(sizes[atom] for atom in summed))


def _sizes(node: Node, rule: OpRule) -> dict[str, int]:
    sizes = dict(rule.sizes)
    tensors: list[tuple[TensorType, tuple[Dim, ...]]] = [
        *zip(node.call.inputs, rule.inputs, strict=True),
        *zip(node.call.outputs, rule.outputs, strict=True),
    ]
    for tensor, dims in tensors:
        for size, dim in zip(tensor.shape, dims, strict=True):
            if isinstance(dim, str):
                sizes.setdefault(dim, size)
    return sizes


def _may_be_moved(node: Node, rows: Rows) -> bool:
    """Whether the only row of a part may as well be in a dim of one element that is put behind its own, as a stack of
    parts is made."""
    source, target = node.inputs[0].type.shape[rows.dim + 1 :], node.outputs[0].type.shape[rows.dim + 1 :]
    return node.call.name == "reshape" and rows.count == 1 and target[:1] == (1,) and source[:1] != (1,)


def _regrouped(node: Node, rows: Rows) -> Kind:
    """Rows of a tensor whose dims are taken apart or put together: what is before them stays before them, and they are
    not taken apart themselves."""
    source, target = node.inputs[0].type.shape, node.outputs[0].type.shape
    if source[: rows.dim + 1] == target[: rows.dim + 1]:
        if _may_be_moved(node, rows):
            return mixed(node, "puts a dim behind the only row, which may be in either")[0]
        return rows
    before = math.prod(source[: rows.dim]) * rows.outer
    if node.call.name == "expand_dims":
        new = {axis % len(target) for axis in node.call.attr("axis")}
        return Rows([d for d in range(len(target)) if d not in new][rows.dim], rows.outer, rows.count)
    if node.call.name == "squeeze" and node.call.attr("axis") is not None:
        left = [d for d in range(len(source)) if d not in {axis % len(source) for axis in node.call.attr("axis")}]
        if rows.dim in left:
            return Rows(left.index(rows.dim), rows.outer, rows.count)
    done = 1
    for d, size in enumerate(target):
        mine = done * size > before and before % done == 0 and size % (before // done) == 0
        if mine and size // (before // done) % rows.count == 0 and (rows.count > 1 or before == 1):
            return Rows(d, before // done, rows.count)
        done *= size
    return mixed(node, "regroups dims so that it is not known which has the batch's rows")[0]


@dataclass(frozen=True)
class Divided:
    """Rows that are divided by how many rows there are, or by as many times more. `count`: the number, where it may
    just as well be a constant; 0: it is known to be larger for more rows. `partly`: something was added to them that is
    not divided so."""

    rows: Rows
    count: int = 0
    partly: bool = False


def quotient_kinds(
    node: Node, rule: OpRule, kinds: Sequence[Kind | Divided], quotients: str | None
) -> list[Kind | Divided]:
    """The kinds of a node's results, of its operands'; `quotients` as `batch_parts` takes it. What is not linear in
    rows that a number divides makes neither a sum nor a mean of them: if it may be a constant, it is one then."""
    divided = {i: kind for i, kind in enumerate(kinds) if isinstance(kind, Divided)}
    made = result_kinds(node, rule, [kind.rows if isinstance(kind, Divided) else kind for kind in kinds])
    if not divided:
        return [quotient(node, kind, quotients) if isinstance(kind, Sum) else kind for kind in made]
    some, count = next(iter(divided.values())).rows, math.gcd(*(kind.count for kind in divided.values()))
    is_linear = node.call.name in REGROUPS or frozenset(divided) in rule.linear or is_rounded(node)
    is_added = not is_linear and any(set(divided) < linear for linear in rule.linear)
    if is_linear or (is_added and count):
        partly = is_added or any(kind.partly for kind in divided.values())
        return [_carried(node, kind, Divided(some, count, partly), quotients) for kind in made]
    if count:
        return [*made]
    names = " and ".join(node.inputs[i].name for i in divided)
    return [*mixed(node, f"is not linear in {names}, which is divided by how many rows there are")]


def _carried(node: Node, kind: Kind, divided: Divided, quotients: str | None) -> Kind | Divided:
    """What a result is of operands that are `divided`, of what it is without that."""
    count = divided.count
    if isinstance(kind, Rows):
        return replace(divided, rows=kind)
    if isinstance(kind, Sum):
        made = quotient(node, replace(kind, by=count), quotients) if count else Mean()
        return _ambiguous(node, count) if divided.partly and isinstance(made, Mean) else made
    if isinstance(kind, Mean) and not count:
        return mixed(node, "takes a mean of what is divided by how many rows there are")[0]
    return kind


def quotient(node: Node, made: Sum, quotients: str | None) -> Kind:
    """What a sum is that is divided by a number: where its elements are a multiple of that, the number may be one that
    was read off a part, and is larger for the whole batch."""
    if not made.by or made.elements % made.by or quotients == "sum":
        return made
    return Mean() if quotients == "mean" else _ambiguous(node, made.by)


def _ambiguous(node: Node, number: int) -> Mixed:
    return Mixed(
        f"{node.where.partition('.')[2]} divides a sum by {number}, which may be a constant, or the number of elements"
        " in a part"
    )
