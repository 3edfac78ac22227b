"""Products that read the tensors where they are, without a copy of each block first.

On a GPU a block of a parameter goes to shared memory before `T.gemm` takes it. A CPU has caches for that, and its
micro-kernel packs what it reads anyway: where a block is nothing but a copy for products that follow right away, the
products take the parameter itself, and the copy and its buffer go.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace

from tvm import tirx

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.tir.effects import written
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.nodes import int_or, nodes
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.rewrite import block_like, sequence, with_inner
from mesh_tensor.tir.tile_calls import parse_tile_op
from mesh_tensor.tir.tile_ops import Copy, Gemm, TileOp

from .exprs import Bounds, is_pure_index

_PAGE = 4096  # bytes that a way of the nearest cache has, on x86 and most others


def gemms_in_place(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`func`, not yet re-targeted, with products that read parameters in place where that gives the same.

    A block stays where its parameter is written anywhere in the kernel, where the block may reach past the end (a copy
    fills that with 0), where anything else reads the block, where its rows aren't contiguous in the parameter, and
    where a product's first operand is it transposed (that one isn't packed, and short rows suit the caches better)."""
    return _InPlace(func).run()


class _InPlace:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self._func = func
        self._bounds = Bounds()
        self._uses = _uses(func.body)
        written_to = {buffer.data for buffer in written(func.body)}
        self._sources = {b.data: b.dtype for b in func.buffer_map.values() if b.data not in written_to}
        self._blocks: set[tirx.Var] = set()
        self._gone: set[tirx.Var] = set()
        self._known = set(func.params)
        self._table: dict[type, Callable[..., tirx.Stmt]] = {
            tirx.SBlockRealize: self._block,
            tirx.SeqStmt: self._sequence,
            tirx.For: self._for,
            tirx.IfThenElse: self._if,
            tirx.AttrStmt: lambda attr: with_inner(attr, self._stmt),
        }

    def run(self) -> tirx.PrimFunc:
        func = self._func
        for buffer in func.buffer_map.values():
            for size in buffer.shape:
                if isinstance(size, tirx.Var):
                    self._bounds.not_negative(size)
                self._known.update(tirx.analysis.undefined_vars(size))
        body = self._stmt(func.body)
        return func.with_body(body) if self._gone else func

    def _stmt(self, stmt: tirx.Stmt) -> tirx.Stmt:
        visit = self._table.get(type(stmt))
        return stmt if visit is None else visit(stmt)

    def _block(self, realize: tirx.SBlockRealize) -> tirx.Stmt:
        block = realize.block
        self._blocks.update(buffer.data for buffer in block.alloc_buffers)
        body = self._stmt(block.body)
        left = [buffer for buffer in block.alloc_buffers if buffer.data not in self._gone]
        return tirx.SBlockRealize(realize.iter_values, realize.predicate, block_like(block, body, left))

    def _for(self, loop: tirx.For) -> tirx.Stmt:
        self._bounds.loop(loop.loop_var, loop.min, loop.extent)
        self._known.add(loop.loop_var)
        return with_inner(loop, self._stmt)

    def _if(self, branch: tirx.IfThenElse) -> tirx.Stmt:
        with self._bounds.assume(branch.condition):
            then_case = self._stmt(branch.then_case)
        with self._bounds.assume(branch.condition, holds=False):
            else_case = None if branch.else_case is None else self._stmt(branch.else_case)
        return tirx.IfThenElse(branch.condition, then_case, else_case)

    def _sequence(self, stmts: tirx.SeqStmt) -> tirx.Stmt:
        parts = []
        for stmt in stmts.seq:
            if isinstance(stmt, tirx.Bind) and self._known.issuperset(tirx.analysis.undefined_vars(stmt.value)):
                self._bounds.let(stmt.var, stmt.value)
                self._known.add(stmt.var)
            parts.append(self._stmt(stmt))
        ops = [parse_tile_op(stmt) for stmt in parts]
        for position, copy in enumerate(ops):
            if not isinstance(copy, Copy):
                continue
            readers = self._readers(copy, ops[position + 1 :])
            for here, gemm in readers.items():
                place = position + 1 + here
                block = copy.dst.buffer.data
                a, b = (_through(r, copy) if r.buffer.data == block else r for r in (gemm.a, gemm.b))
                ops[place] = placed = replace(gemm, a=a, b=b)
                parts[place] = _statement(parts[place], placed)
            if readers:
                self._gone.add(copy.dst.buffer.data)
        return sequence([stmt for stmt, op in zip(parts, ops, strict=True) if not self._is_gone(op)])

    def _is_gone(self, op: TileOp | None) -> bool:
        return isinstance(op, Copy) and op.dst.buffer.data in self._gone

    def _readers(self, copy: Copy, after: list[TileOp | None]) -> dict[int, Gemm]:
        """Those of the operations `after` the copy that are products and can do without it; none if any other use of
        its block can't."""
        if not self._is_plain(copy):
            return {}
        block, found, operands = copy.dst.buffer.data, {}, 0
        for position, op in enumerate(after):
            if not isinstance(op, Gemm):
                continue
            factors = ((op.a, op.trans_a or _aliases(copy.src.buffer)), (op.b, False))
            reads = [region for region, turned in factors if region.buffer.data == block and not turned]
            if reads and all(self._inside(_through(region, copy)) for region in reads):
                found[position] = op
                operands += len(reads)
        return found if self._uses[block] == 1 + operands else {}

    def _is_plain(self, copy: Copy) -> bool:
        """It copies a whole block of two dims, as it lies in the last two dims of a parameter with contiguous rows."""
        src, dst = copy.src, copy.dst
        return (
            self._sources.get(src.buffer.data) == src.buffer.dtype  # a parameter, or a view of one
            and dst.buffer.data in self._blocks
            and src.buffer.dtype == dst.buffer.dtype
            and [int_or(start, None) for start in dst.mins] == [0, 0]
            and (shape := [int_or(size, None) for size in dst.buffer.shape]) == [int_or(e, None) for e in dst.extents]
            and [int_or(e, None) for e in src.extents] == [1] * (len(src.extents) - 2) + shape
            and int_or(strides_of(src.buffer)[-1], None) == 1
            and all(self._is_known(start) for start in src.mins)
        )

    def _is_known(self, expr: tirx.PrimExpr) -> bool:
        return is_pure_index(expr) and self._known.issuperset(tirx.analysis.undefined_vars(expr))

    def _inside(self, region: Region) -> bool:
        return all(
            self._bounds.proves(start >= 0) and self._bounds.proves(start + extent <= size)
            for start, extent, size in zip(region.mins, region.extents, region.buffer.shape, strict=True)
        )


def _aliases(buffer: tirx.Buffer) -> bool:
    """Whether rows that follow each other want the same places of a cache."""
    stride = int_or(strides_of(buffer)[-2], None)
    return stride is not None and stride * itemsize(buffer.dtype) % _PAGE == 0


def _uses(body: tirx.Stmt) -> Counter[tirx.Var]:
    """How often each buffer is named, by its data variable."""
    uses = nodes(body, tirx.BufferLoad, tirx.BufferStore, tirx.Var)  # a variable is a pointer that goes somewhere
    return Counter(use if isinstance(use, tirx.Var) else use.buffer.data for use in uses)


def _through(region: Region, copy: Copy) -> Region:
    """That region of the copy's block, in the parameter."""
    outer = tuple(copy.src.mins[:-2])
    inner = tuple(start + at for start, at in zip(copy.src.mins[-2:], region.mins, strict=True))
    return Region(copy.src.buffer, outer + inner, (*copy.src.extents[:-2], *region.extents))


def _statement(stmt: tirx.Evaluate, gemm: Gemm) -> tirx.Stmt:
    """The statement of a product, with the operands of `gemm`."""
    call = stmt.value
    args = [_region_like(old, new) for old, new in zip(call.args, (gemm.a, gemm.b), strict=False)]
    return tirx.Evaluate(tirx.Call(call.dtype, call.op, [*args, *list(call.args)[2:]]))


def _region_like(call: tirx.Call, region: Region) -> tirx.PrimExpr:
    load = tirx.BufferLoad(region.buffer, list(region.mins))
    return tirx.Call(call.dtype, call.op, [load, call.args[1], *region.extents])
