"""Tile operations as statements: their element loops get variables of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Protocol

from tvm import arith, tirx

from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.tile_ops import Region, TileOp

from .statements import Access, Loop, Statement


class StatementMaker(Protocol):
    """What a tile operation needs of the kernel around it."""

    analyzer: arith.Analyzer

    def access(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> Access: ...

    def loads(self, nodes: Sequence[Any]) -> tuple[Access, ...]: ...

    def statement(self, node: tirx.Stmt, **parts: Any) -> Statement: ...


class TileReader:
    """Turns one tile operation into one statement."""

    def __init__(self, reader: StatementMaker, stmt: tirx.Evaluate):
        self.reader, self.stmt = reader, stmt

    def read(self, record: TileOp) -> Statement:
        """The statement.

        Raises:
            Unmatched: the operation's regions do not pair up."""
        elements = record.elements(self.reader.analyzer.can_prove_equal)
        zero = tirx.IntImm("int32", 0)
        loops = [Loop(tirx.Var(f"t{n}", "int32"), zero, e.extent, "tile", None) for n, e in enumerate(elements)]
        whole = record.in_order
        write, *reads = (
            self._at(
                region, {e.dims[n]: loop.var for e, loop in zip(elements, loops, strict=True) if n in e.dims}, whole
            )
            for n, region in enumerate((record.dst, *record.sources))
        )
        values = () if record.value is None or record.sources else (record.value,)
        mins = [index for access in (write, *reads) for index in access.indices]
        return self.reader.statement(
            self.stmt,
            write=write,
            reads=(*reads, *self.reader.loads(values), *self.reader.loads(mins)),
            values=values,
            extra=loops,
            tile_op=record,
            op=None if record.reduction is None or whole is not None else reduction(record.reduction).completed_by,
            fresh=record.clears,
        )

    def _at(self, region: Region, element: dict[int, tirx.Var], whole: int | None) -> Access:
        """The access to a region's elements; the index into a dim that is needed whole stands for all of it."""
        indices = [low + element[d] if d in element else low for d, low in enumerate(region.mins)]
        access = self.reader.access(region.buffer, indices)
        return access if whole is None else replace(access, forms=_without(access.forms, whole))


def _without(forms: tuple[Linear | None, ...], dim: int) -> tuple[Linear | None, ...]:
    return (*forms[:dim], None, *forms[dim + 1 :])
