"""What counts: padding is never reduced (where a tile is short, or blocks reach past its end, neutral elements stand
in), and where an accumulator starts from is added on the first device of a split only."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Access, Kernel, Statement
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.linear import Linear, as_expr
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.rewrite import (
    call_like,
    guarded,
    neutral_element,
    parallel_nest,
    region_call,
    sequence,
    tile_op,
    with_args,
)

from .expressions import ValueRewriter
from .splits import Shrink, Split

#: A split whose padding a statement would combine, and the statement's coordinate in it.
_Padded = tuple[Split, Linear]


class PaddingMasks:
    """Keeps what lies outside the valid part of tiles from being combined."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], shrink: Shrink, values: ValueRewriter):
        self._kernel, self._shrink, self._values = analysis.kernel, shrink, values
        self._splits = [(split, analysis.reductions[split.factor]) for split in splits]

    def value(self, statement: Statement, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """What an update combines: its value inside, the neutral element outside."""
        neutral = neutral_element(statement.operation, value.dtype)
        for split, form in self._padded(statement):
            value = tirx.if_then_else(as_expr(form) < split.valid, value, neutral)
        return value

    def loops(self, statement: Statement) -> list[tirx.Stmt]:
        """Loops that set the operands of a tile operation to its neutral element outside the valid part.

        Raises `Blocked` for an operand that lies in a parameter, which can't be overwritten."""
        padded = self._padded(statement)
        if not padded:
            return []
        record = statement.tile_op
        assert record is not None
        operands, op = statement.reads[: len(record.sources)], str(record.reduction)
        return [loop for operand in operands if (loop := self._loop(operand, statement, padded, op)) is not None]

    def skipped(self, statement: Statement, body: tirx.Stmt, target: tirx.Call) -> tirx.Stmt:
        """A tile operation that lies, as a whole, at one coordinate: past the valid part it combines nothing into the
        region `target`."""
        otherwise: tirx.Stmt | None = None
        if statement.fresh:
            neutral = neutral_element(statement.operation, statement.target.buffer.dtype)
            otherwise = tile_op("fill", target, neutral)
        for split, form in self._padded(statement):
            if not form.terms.keys() & statement.element_vars:
                body = tirx.IfThenElse(as_expr(form) < split.valid, body, otherwise)
        return body

    def _padded(self, statement: Statement) -> list[_Padded]:
        found = []
        for split, reduction in self._splits:
            form = reduction.updates.get(statement)
            overruns = self._shrink.overruns(split) and (reduction.masked or not self._shrink.is_uniform(split))
            if form is not None and (not split.even or overruns):
                found.append((split, form))
        return found

    def _loop(self, operand: Access, statement: Statement, padded: list[_Padded], op: str) -> tirx.Stmt | None:
        element = statement.element_dims(operand)
        relevant = [(split, form) for split, form in padded if form.terms.keys() & set(element.values())]
        if not relevant:
            return None
        if self._kernel.is_param(operand.buffer):
            raise Blocked(
                f"{operand.buffer.name} is combined as it lies, and what is past the end of a short tile would count",
                relevant[0][0].factor,
            )
        fresh = {var: tirx.Var("mn"[d % 2] + str(d), "int32") for d, var in element.items()}
        buffer = self._shrink.buffer(operand.buffer)
        indices = [tirx.stmt_functor.substitute(i, fresh) for i in self._values.indices(operand)]
        value: tirx.PrimExpr = tirx.BufferLoad(buffer, indices)
        for split, form in relevant:
            inside = tirx.stmt_functor.substitute(as_expr(form), fresh) < split.valid
            value = tirx.if_then_else(inside, value, neutral_element(op, buffer.dtype))
        extents = [self._shrink.extent(var) for var in fresh]
        return parallel_nest(list(fresh.values()), extents, tirx.BufferStore(buffer, value, indices))


class CountedOnce:
    """Makes what the analysis found `gated` count on one device, and start the others with the neutral element."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split]):
        self._splits = [(split, analysis.reductions[split.factor]) for split in splits]
        self._ranges = analysis.coordinates.ranges

    def value(self, statement: Statement, value: tirx.PrimExpr, op: str | None = None) -> tirx.PrimExpr:
        """What a store writes, or what an update with `op` combines, on this device."""
        condition, partial_op = self._gate(statement)
        if condition is None:
            return value
        return tirx.if_then_else(condition, value, neutral_element(op or partial_op, value.dtype))

    def looked_up(self, product: Statement) -> list[Statement]:
        """The copies of which other devices have nothing, so that they leave a product of it out."""
        copies = [reduction.products.get(product) for _, reduction in self._splits]
        return [copy for copy in copies if copy is not None]

    def owners(self, statement: Statement) -> list[tuple[Statement, Split]]:
        """What looks up, in which split, all that is in what a statement writes to a parameter: devices that have not
        got that write 0."""
        found = [(reduction.owners.get(statement), split) for split, reduction in self._splits]
        return [(lookup, split) for lookup, split in found if lookup is not None]

    def started(self, statement: Statement, value: tirx.PrimExpr) -> tirx.PrimExpr:
        """A value in which 0 stands in for maxima that are still the lowest value: nothing counts yet of such a row,
        and the lowest value can't be taken from itself. The first device has what the whole kernel has."""
        for split, reduction in self._splits:
            for state in reduction.states:
                if statement in state.guarded:
                    value = _replace_loads(value, state.guarded[statement], split.is_first)
        return value

    def tile_op(self, statement: Statement, call: tirx.Stmt, target: tirx.Call) -> tirx.Stmt:
        """A tile operation into the region `target`: a plain update is left out on the other devices, what does not
        build on the target's content is a fill there."""
        condition, op = self._gate(statement)
        if condition is None:
            return call
        if statement.op is not None and not statement.fresh:
            return tirx.IfThenElse(condition, call, None)
        fill = tile_op("fill", target, neutral_element(op, statement.target.buffer.dtype))
        return tirx.IfThenElse(condition, call, fill)

    def _gate(self, statement: Statement) -> tuple[tirx.PrimExpr | None, str]:
        """Whether this device is the one that counts, None if all do; and what completes the partial value."""
        condition, op = None, ""
        for split, reduction in self._splits:
            if statement in reduction.gated:
                op = reduction.partial[self._ranges.of(statement.target)]
                condition = split.is_first if condition is None else tirx.And(condition, split.is_first)
        return condition, op


def _replace_loads(value: tirx.PrimExpr, loads: Sequence[tirx.BufferLoad], is_first: tirx.PrimExpr) -> tirx.PrimExpr:
    def replace(load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        if not any(same_expression(load, other) for other in loads):
            return None
        lowest = neutral_element("max", load.dtype)
        return tirx.Select(tirx.And(tirx.Not(is_first), load == lowest), tirx.const(0, load.dtype), load)

    return tirx.stmt_functor.ir_transform(tirx.Evaluate(value), replace, None, ["tirx.BufferLoad"]).value


_FILL_VALUE = 1
_GEMM_SIZES = slice(5, 8)


@dataclass(frozen=True, eq=False)
class LocalTileOps:
    """Makes a kernel's tile operations those of one device."""

    kernel: Kernel
    shrink: Shrink
    values: ValueRewriter
    masks: PaddingMasks
    once: CountedOnce

    def local(self, statement: Statement) -> tirx.Stmt:
        """The statement's tile operation, with what masks its padding and makes it count once.

        Raises `Blocked` (rules.factors) where padding can't be masked."""
        record = statement.tile_op
        assert record is not None
        owned = [condition for owner in self.once.owners(statement) for condition in self.values.owned(*owner)]
        if isinstance(record, tile_ops.Atomic) and not isinstance(record.value, tile_ops.Region):
            return guarded(self._value_atomic(statement, record), owned)
        destination = len(record.sources)
        args = list(statement.node.value.args)
        for position, access in enumerate((*statement.reads[:destination], statement.target)):
            args[position] = self._region(args[position], access, statement)
        if isinstance(record, tile_ops.Fill):
            args[_FILL_VALUE] = self.values.rewrite(args[_FILL_VALUE])
        elif isinstance(record, tile_ops.Gemm):
            args[_GEMM_SIZES] = [self.shrink.extent(loop.var) for loop in statement.loops[-3:]]
        call = self.once.tile_op(statement, with_args(statement.node, args), args[destination])
        body = sequence([*self.masks.loops(statement), call])
        body = self.masks.skipped(statement, body, args[destination])
        zero = tile_op("fill", args[destination], neutral_element("sum", statement.target.buffer.dtype))
        copies = self.once.looked_up(statement)
        body = guarded(body, [condition for copy in copies for condition in self.values.owned(copy)])
        if isinstance(record, tile_ops.Copy):
            source, _, *extents = args[0].args
            nothing = tile_op("fill", region_call(source.buffer, source.indices, extents, 2), 0)
            body = sequence([*(tirx.IfThenElse(tirx.Not(condition), nothing, None) for condition in owned), body])
        else:
            body = guarded(body, owned)
        return guarded(body, self.values.owned(statement), zero)

    def _value_atomic(self, statement: Statement, record: tile_ops.Atomic) -> tirx.Stmt:
        """An atomic that combines the same value into every element of a region, or into one that is pointed at."""
        args = list(statement.node.value.args)
        is_region = statement.node.value.op.name.startswith("tl.tileop")
        value_at, target_at = (0, 1) if is_region else (1, 0)
        value = self.masks.value(statement, self.values.rewrite(args[value_at]))
        args[value_at] = self.once.value(statement, value, record.reduction)
        if is_region:
            args[target_at] = self._region(args[target_at], statement.target, statement)
        else:
            pointer = args[target_at]
            buffer = self.shrink.buffer(statement.target.buffer)
            load = tirx.BufferLoad(buffer, self.values.indices(statement.target))
            args[target_at] = call_like(pointer, [load, *pointer.args[1:]])
        return with_args(statement.node, args)

    def _region(self, call: tirx.Call, access: Access, statement: Statement) -> tirx.Call:
        """The region over the tile: shrunken extents, detached dims at global coordinates."""
        _, mode, *extents = call.args
        element = statement.element_dims(access)
        zero = {var: tirx.IntImm("int32", 0) for var in element.values()}
        substitute, simplify = tirx.stmt_functor.substitute, self.kernel.analyzer.simplify
        mins = [simplify(substitute(i, zero)) for i in self.values.indices(access)]
        extents = [self.shrink.extents.get(element.get(d), e) for d, e in enumerate(extents)]
        return region_call(self.shrink.buffer(access.buffer), mins, extents, int(mode))
