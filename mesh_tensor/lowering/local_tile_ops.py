"""Tile operations on one device: the same calls on regions of its tiles."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.rules.kernel.statements import Access, Kernel, Statement
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.constants import neutral_element
from mesh_tensor.tir.rewrite import call_like, guarded, region_call, sequence, tile_op, with_args

from .counted_once import CountedOnce
from .expressions import ValueRewriter
from .padding_masks import PaddingMasks
from .splits import Shrink

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
        if isinstance(record, tile_ops.Atomic) and not isinstance(record.value, tile_ops.Region):
            return self._value_atomic(statement, record)
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
