"""Tile operations as statements: their element loops get variables of their own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tvm import arith, tirx

from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir import tile_ops

from .statements import Access, Loop, Statement


class StatementMaker(Protocol):
    """What a tile operation needs of the kernel around it."""

    analyzer: arith.Analyzer

    def access(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> Access: ...

    def loads(self, nodes: Sequence[Any]) -> tuple[Access, ...]: ...

    def statement(self, node: tirx.Stmt, **parts: Any) -> Statement: ...


class Unmatched(Exception):
    """A tile operation whose regions do not pair up."""


class TileReader:
    """Turns one tile operation into one statement."""

    def __init__(self, reader: StatementMaker, stmt: tirx.Evaluate):
        self.reader, self.stmt = reader, stmt
        self.loops: list[Loop] = []

    def read(self, record: tile_ops.TileOp) -> Statement:
        makers: dict[type, Callable[[Any], Statement]] = {
            tile_ops.Copy: self._copy,
            tile_ops.Fill: self._fill,
            tile_ops.Gemm: self._gemm,
            tile_ops.Reduce: self._reduce,
            tile_ops.Atomic: self._atomic,
            tile_ops.Transpose: self._transpose,
        }
        if type(record) not in makers:
            raise Unmatched(f"T.{type(record).__name__.lower()}")
        return makers[type(record)](record)

    def _loop(self, extent) -> tirx.Var:
        var = tirx.Var(f"t{len(self.loops)}", "int32")
        self.loops.append(Loop(var, tirx.IntImm("int32", 0), extent, "tile", None))
        return var

    def _at(self, region: tile_ops.Region, element: dict[int, tirx.Var]) -> Access:
        indices = [low + element[d] if d in element else low for d, low in enumerate(region.mins)]
        return self.reader.access(region.buffer, indices)

    def _pair(self, a: tile_ops.Region, b: tile_ops.Region) -> tuple[Access, Access]:
        if len(a.long_dims) != len(b.long_dims):
            raise Unmatched(f"{a.buffer.name} and {b.buffer.name} have regions of different rank")
        at_a, at_b = {}, {}
        for da, db in zip(a.long_dims, b.long_dims, strict=True):
            self._check_equal(a, da, b, db)
            at_a[da] = at_b[db] = self._loop(a.extents[da])
        return self._at(a, at_a), self._at(b, at_b)

    def _check_equal(self, a: tile_ops.Region, da: int, b: tile_ops.Region, db: int) -> None:
        if not self.reader.analyzer.can_prove_equal(a.extents[da], b.extents[db]):
            raise Unmatched(
                f"{a.buffer.name} dim {da} ({a.extents[da]}) and {b.buffer.name} dim {db} ({b.extents[db]}) differ"
            )

    def _make(self, record, write: Access, reads=(), values=(), **flags) -> Statement:
        mins = [i for access in (write, *reads) for i in access.indices]
        indirect = self.reader.loads(mins)
        return self.reader.statement(
            self.stmt,
            write=write,
            reads=(*reads, *indirect),
            values=tuple(values),
            extra=self.loops,
            tile_op=record,
            **flags,
        )

    def _copy(self, record: tile_ops.Copy) -> Statement:
        src, dst = self._pair(record.src, record.dst)
        return self._make(record, dst, (src,))

    def _transpose(self, record: tile_ops.Transpose) -> Statement:
        flipped = _flip_last_two(record.src)
        src, dst = self._pair(flipped, record.dst)
        src = self.reader.access(record.src.buffer, [*src.indices[:-2], src.indices[-1], src.indices[-2]])
        return self._make(record, dst, (src,))

    def _fill(self, record: tile_ops.Fill) -> Statement:
        dst = self._at(record.dst, {d: self._loop(record.dst.extents[d]) for d in record.dst.long_dims})
        return self._make(record, dst, self.reader.loads([record.value]), (record.value,))

    def _atomic(self, record: tile_ops.Atomic) -> Statement:
        if isinstance(record.value, tile_ops.Region):
            src, dst = self._pair(record.value, record.dst)
            return self._make(record, dst, (src,), op=record.op)
        dst = self._at(record.dst, {d: self._loop(record.dst.extents[d]) for d in record.dst.long_dims})
        return self._make(record, dst, self.reader.loads([record.value]), (record.value,), op=record.op)

    def _gemm(self, record: tile_ops.Gemm) -> Statement:
        a, b, c = record.a, record.b, record.c
        m, n = len(c.extents) - 2, len(c.extents) - 1
        am, ak = (-1, -2) if record.trans_a else (-2, -1)
        bk, bn = (-1, -2) if record.trans_b else (-2, -1)
        i, j, k = self._loop(c.extents[m]), self._loop(c.extents[n]), self._loop(a.extents[ak])
        la, lb = len(a.extents), len(b.extents)
        reads = (self._at(a, {la + am: i, la + ak: k}), self._at(b, {lb + bk: k, lb + bn: j}))
        return self._make(record, self._at(c, {m: i, n: j}), reads, op="sum", fresh=record.clear)

    def _reduce(self, record: tile_ops.Reduce) -> Statement:
        src, dst = record.src, record.dst
        element = {d: self._loop(extent) for d, extent in enumerate(src.extents)}
        kept = [d for d in range(len(src.extents)) if d != record.dim]
        if len(dst.extents) == len(src.extents):
            at_dst = {d: element[d] for d in kept}
        elif len(dst.extents) == len(kept):
            at_dst = {position: element[d] for position, d in enumerate(kept)}
        elif not kept or all(_is_const(src.extents[d], 1) for d in kept):
            at_dst = {}
        else:
            raise Unmatched(f"T.reduce of {src.buffer.name} into {dst.buffer.name}")
        op = reduction(record.op).completed_by
        return self._make(record, self._at(dst, at_dst), (self._at(src, element),), op=op, fresh=record.clear)


def _flip_last_two(region: tile_ops.Region) -> tile_ops.Region:
    def flip(items: tuple) -> tuple:
        return (*items[:-2], items[-1], items[-2])

    return tile_ops.Region(region.buffer, flip(region.mins), flip(region.extents))


def _is_const(expr: object, value: int) -> bool:
    return isinstance(expr, (int, tirx.IntImm)) and int(expr) == value
