"""Sums of powers over the very elements that a block's maximum is of: `l = l * c + sum(exp(s - max(s)))`.

The largest element adds 1, so such a sum is 0 only where no block was seen."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.base.reductions import neutral
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Fill, Reduce

from .iterations import Iteration
from .statements import Statement, same_indices
from .states import ScaledSum

_POWERS = ("tirx.exp", "tirx.exp2")


def adds_at_least_one(iteration: Iteration, part: ScaledSum) -> bool:
    """Whether each iteration adds at least 1 to a sum that is relative to its block's maximum; in a block of which
    nothing counts, that is NaN."""
    block, total = _block(iteration, part), _added(iteration, part)
    if block is None or total is None:
        return False
    dim, source, largest = _reduced_dim(block, "max"), block.reads[0].buffer, part.of.held.buffer
    if dim is None or _reduced_dim(total, "sum") != dim or not total.reads[0].buffer.same_as(source):
        return False
    if not all(_starts_anew(iteration, s) for s in (block, total)):
        return False
    between = iteration.body[iteration.body.index(block) + 1 : iteration.body.index(total)]
    writes = [s for s in between if s.writes(source)]
    if len(writes) != 1 or any(s.writes(largest) for s in between) or not block.target.buffer.same_as(largest):
        return False
    return not iteration.leaves_some(writes[0]) and _is_power(writes[0], largest, dim)


def _block(iteration: Iteration, part: ScaledSum) -> Statement | None:
    """The only thing that the sum's maximum is of: what a statement reduces in one iteration."""
    value = iteration.value(part.of.held)
    atom = None if value is None else value.atom
    blocks = [] if atom is None else [key[1] for key in atom.keys if key[0] == "block"]
    return blocks[0] if len(blocks) == 1 else None


def _added(iteration: Iteration, part: ScaledSum) -> Statement | None:
    """What makes the number that the sum's last statement in an iteration adds to it, as it is."""
    updates = [s for s, _ in part.held.writes if s in iteration.body]
    last = updates[-1] if len(updates) == 1 and isinstance(updates[-1].node, tirx.BufferStore) else None
    if last is None or not isinstance(last.node.value, tirx.Add) or last.conditions != iteration.common:
        return None
    loads = [side for side in (last.node.value.a, last.node.value.b) if isinstance(side, tirx.BufferLoad)]
    found = [load for load in loads if not load.buffer.same_as(part.held.buffer)]
    if len(found) != 1 or not same_indices(found[0], last.node):
        return None
    makers = [s for s in iteration.body[: iteration.body.index(last)] if s.writes(found[0].buffer)]
    return makers[-1] if makers else None


def _reduced_dim(statement: Statement, op: str) -> int | None:
    """The dim over which the statement reduces all of a buffer into all of another one; None if it does anything
    else."""
    record = statement.tile_op
    is_op = isinstance(record, Reduce) and record.reduction == op and record.src.is_whole and record.dst.is_whole
    return record.dim if isinstance(record, Reduce) and is_op else None


def _starts_anew(iteration: Iteration, statement: Statement) -> bool:
    """Whether a reduction has nothing in it but what it reduces."""
    if statement.fresh:
        return True
    before = iteration.body[: iteration.body.index(statement)]
    fills = [s for s in before if s.writes(statement.target.buffer)][-1:]
    unit = neutral(str(statement.op), statement.target.buffer.dtype)
    return all(
        isinstance(s.tile_op, Fill)
        and s.tile_op.dst.is_whole
        and s.conditions == iteration.common
        and number(s.values[0]) == unit
        for s in fills
    ) and bool(fills)


def _is_power(statement: Statement, largest: tirx.Buffer, dim: int) -> bool:
    """Whether the statement exchanges every element with the power of what is left of it over the largest one."""
    node = statement.node
    if not isinstance(node, tirx.BufferStore) or op_name(node.value) not in _POWERS:
        return False
    pair = _difference(node.value.args[0])
    if pair is None or not pair[0].buffer.same_as(node.buffer) or not pair[1].buffer.same_as(largest):
        return False
    kept = [index for d, index in enumerate(node.indices) if d != dim]
    same = len(kept) == len(pair[1].indices) and all(map(same_expression, kept, pair[1].indices))
    return same and same_indices(pair[0], node)


def _difference(expr: tirx.PrimExpr) -> tuple[tirx.BufferLoad, tirx.BufferLoad] | None:
    """The loads of `(a - b) * n`, or `a * n - b * n`, of one positive number n."""
    if isinstance(expr, tirx.Mul):
        by = [n for n in (number(expr.a), number(expr.b)) if n is not None]
        inner = expr.a if number(expr.a) is None else expr.b
        return _difference(inner) if len(by) == 1 and by[0] > 0 and isinstance(inner, tirx.Sub) else None
    if not isinstance(expr, tirx.Sub):
        return None
    (a, rate), (b, other) = _scaled(expr.a), _scaled(expr.b)
    are_loads = isinstance(a, tirx.BufferLoad) and isinstance(b, tirx.BufferLoad)
    return (a, b) if are_loads and rate == other and rate > 0 else None


def _scaled(expr: tirx.PrimExpr) -> tuple[tirx.PrimExpr, float]:
    if isinstance(expr, tirx.Mul):
        for side, by in ((expr.a, number(expr.b)), (expr.b, number(expr.a))):
            if by is not None:
                return side, float(by)
    return expr, 1.0
