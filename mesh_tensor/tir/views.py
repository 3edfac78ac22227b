"""Make accesses through views accesses to the buffers that they are views of.

Afterwards a memory has one buffer, its *base*: the parameter, or the on-chip buffer in the one shape that the kernel's
tile operations need. Elements and regions of other views become elements and regions of it; copies and fills of what is
no region there become loops. What is left (a product of a view that is no matrix of the base, elements of another size)
stays as it is, and the statements around it are opaque: nothing of the kernel is split then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tvm import ir, tirx

from . import tile_calls
from .effects import POINTERS, op_name
from .linear import loop_ranges
from .memory import Memory, elements, find_memories, has_equal_bits, is_compact, memories, strides_of
from .nodes import nodes
from .prover import Prover
from .regions import Region, deeper
from .rewrite import block_like, call_like, guarded, parallel_nest, rewritten, sequence, with_args, with_body
from .tile_ops import Atomic, Copy, Fill
from .view_map import ViewMap

_ACCESSES = ["tirx.BufferLoad", "tirx.BufferStore", "tirx.Evaluate", "tirx.Call"]


def resolve_views(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel, in which as little as possible goes through views. Refused where a buffer is in no memory that
    is known, or a view is not understood; the message names it."""
    found = [memory for memory in memories(func).values() if memory.views]
    return func if not found else _Resolver(func, found).run()


def left_views(func: tirx.PrimFunc) -> dict[tirx.Buffer, tirx.Buffer]:
    """The views that a kernel still has, each with the owner of its memory."""
    return {view: memory.owner for memory in memories(func).values() for view in memory.views}


def declared(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The same kernel with a declaration for each of its views, without which TVM knows of no place where they are
    defined."""
    found = [(memory, view) for memory in find_memories(func)[0].values() for view in memory.views]
    if not found:
        return func

    *_, kernel = (block for block in nodes(func.body, tirx.SBlock) if block.name_hint != "root")  # outer ones come last

    def declare(block: tirx.SBlock) -> tirx.SBlock | None:
        here = block.name_hint == kernel.name_hint
        mine = [v for m, v in found if (here if m.is_param else any(m.owner.same_as(b) for b in block.alloc_buffers))]
        return with_body(block, tirx.SeqStmt([*map(tirx.DeclBuffer, mine), block.body])) if mine else None

    return rewritten(func, declare, tirx.SBlock)


class _Resolver:
    def __init__(self, func: tirx.PrimFunc, found: Sequence[Memory]) -> None:
        self._func = func
        self._analyzer = loop_ranges(func.body, func.buffer_map.values())
        rigid = _rigid_buffers(func)
        self._bases = {m.owner: _base(m, rigid, _has_notes(func, m), self._analyzer) for m in found}
        self._maps: dict[tirx.Buffer, ViewMap] = {}
        for memory in found:
            base = self._bases[memory.owner]
            for view in (memory.owner, *memory.views):
                if not view.same_as(base) and has_equal_bits(view, base):
                    self._maps[view] = ViewMap(view, base, self._analyzer)
        self._views = {view for memory in found for view in memory.views}
        # the memories outside of which copies read something else than 0
        self._safe = {data for key, value in _notes(func) if key == "safe_value_map" for data in value}

    def run(self) -> tirx.PrimFunc:
        body = self._rewritten(self._func.body)
        body = tirx.stmt_functor.ir_transform(body, None, self._allocated, ["tirx.SBlock", "tirx.AllocBuffer"])
        body = tirx.stmt_functor.ir_transform(body, None, self._declared, ["tirx.SeqStmt"])
        return self._func.with_body(body)

    def _rewritten(self, stmt: tirx.Stmt) -> tirx.Stmt:
        return tirx.stmt_functor.ir_transform(stmt, self._access, None, _ACCESSES)

    def _expr(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        return self._rewritten(tirx.Evaluate(expr)).value if isinstance(expr, tirx.PrimExpr) else expr

    # -- what takes the place of what --------------------------------------------------------------------------------

    def _access(self, node: object) -> object:
        """What takes the place of an access (and of all in it); None: look at its parts."""
        if isinstance(node, tirx.BufferLoad):
            return self._load(node) if node.buffer in self._maps else None
        if isinstance(node, tirx.BufferStore):
            return self._store(node) if node.buffer in self._maps else None
        if isinstance(node, tirx.Evaluate):
            return self._tile_op(node)
        if op_name(node) == "tl.region":  # of an operation that is not known
            return node
        return self._pointer(node) if op_name(node) in POINTERS else None

    def _load(self, load: tirx.BufferLoad) -> tirx.PrimExpr:
        indices = [self._expr(index) for index in load.indices]
        return self._read(load.buffer, indices, self._maps[load.buffer].outside(indices))

    def _read(
        self, buffer: tirx.Buffer, indices: list[tirx.PrimExpr], conditions: Sequence[tirx.PrimExpr]
    ) -> tirx.PrimExpr:
        """An element; 0 where a condition doesn't hold."""
        base, places = self._place(buffer, indices)
        value = _as_dtype(tirx.BufferLoad(base, places), buffer.dtype)
        for condition in conditions:
            value = tirx.if_then_else(condition, value, tirx.const(0, buffer.dtype))
        return value

    def _store(self, store: tirx.BufferStore) -> tirx.Stmt:
        indices = [self._expr(index) for index in store.indices]
        conditions = self._maps[store.buffer].outside(indices)
        return self._write(store.buffer, self._expr(store.value), indices, conditions)

    def _write(
        self,
        buffer: tirx.Buffer,
        value: tirx.PrimExpr,
        indices: list[tirx.PrimExpr],
        conditions: Sequence[tirx.PrimExpr],
    ) -> tirx.Stmt:
        base, places = self._place(buffer, indices)
        return guarded(tirx.BufferStore(base, _as_dtype(value, base.dtype), places), conditions)

    def _place(self, buffer: tirx.Buffer, indices: list[tirx.PrimExpr]) -> tuple[tirx.Buffer, list[tirx.PrimExpr]]:
        if buffer not in self._maps:
            return buffer, indices
        return self._maps[buffer].base, self._maps[buffer].indices(indices)

    def _pointer(self, call: tirx.Call) -> tirx.PrimExpr | None:
        """A pointer to an element, if that is certainly inside the view; else nothing is said of it."""
        load = call.args[0]
        if not isinstance(load, tirx.BufferLoad) or load.buffer not in self._maps:
            return None
        if load.dtype != self._maps[load.buffer].base.dtype:
            return call
        indices = [self._expr(index) for index in load.indices]
        if self._maps[load.buffer].outside(indices):
            return call
        return call_like(call, [tirx.BufferLoad(*self._place(load.buffer, indices)), *call.args[1:]])

    # -- tile operations ---------------------------------------------------------------------------------------------

    def _tile_op(self, stmt: tirx.Evaluate) -> tirx.Stmt | None:
        record = tile_calls.parse_tile_op(stmt)
        if record is None:
            return None
        if isinstance(record, Atomic) and op_name(stmt.value).endswith("elem_op"):
            return self._element_atomic(stmt)
        regions = [arg for arg in stmt.value.args if op_name(arg) == "tl.region"]
        if not any(Region.of(arg).buffer in self._maps for arg in regions):
            return None
        rigid = not isinstance(record, (Copy, Fill, Atomic))
        args = [self._region(arg, rigid) if op_name(arg) == "tl.region" else self._expr(arg) for arg in stmt.value.args]
        if all(arg is not None for arg in args):
            return with_args(stmt, args)
        expand: dict[type, Callable] = {Copy: self._copy, Fill: self._fill}
        expanded = expand[type(record)](record) if type(record) in expand else None
        return stmt if expanded is None else expanded

    def _region(self, call: tirx.Call, rigid: bool) -> tirx.Call | None:
        """The same region of the base; of a `rigid` operation, which counts dims, with the same dims."""
        region = Region.of(call)
        if region.buffer in self._maps:
            mapped = self._maps[region.buffer]
            found = mapped.region(region) if mapped.base.dtype == region.buffer.dtype else None
            if found is None or (rigid and not ir.structural_equal(list(found.extents), list(region.extents))):
                return None
            region = found
        load = tirx.BufferLoad(region.buffer, [self._expr(low) for low in region.mins])
        return tirx.Call(call.dtype, call.op, [load, call.args[1], *map(self._expr, region.extents)])

    def _element_atomic(self, stmt: tirx.Evaluate) -> tirx.Stmt | None:
        """An atomic on one element: what is outside the view is left alone."""
        call, load = stmt.value, stmt.value.args[0].args[0]
        if load.buffer not in self._maps:
            return None
        if load.dtype != self._maps[load.buffer].base.dtype:
            return stmt
        indices = [self._expr(index) for index in load.indices]
        place = tirx.BufferLoad(*self._place(load.buffer, indices))
        pointer = call_like(call.args[0], [place, *call.args[0].args[1:]])
        new = with_args(stmt, [pointer, *map(self._expr, call.args[1:])])
        return guarded(new, self._maps[load.buffer].outside(indices))

    def _copy(self, op: Copy) -> tirx.Stmt | None:
        """A copy as a loop over elements."""
        if len(op.src.long_dims) != len(op.dst.long_dims) or op.src.buffer.data in self._safe:
            return None
        loops = self._loops(deeper(op.src, op.dst))
        src, dst = _element(op.src, loops), _element(op.dst, loops)
        value = self._read(op.src.buffer, src, self._outside(op.src.buffer, src))
        if op.src.buffer.dtype != op.dst.buffer.dtype:
            value = tirx.Cast(op.dst.buffer.dtype, value)
        stored = self._write(op.dst.buffer, value, dst, self._outside(op.dst.buffer, dst))
        return parallel_nest([var for var, _ in loops], [extent for _, extent in loops], stored)

    def _fill(self, op: Fill) -> tirx.Stmt | None:
        """A fill as a loop over elements."""
        loops = self._loops(op.dst)
        dst = _element(op.dst, loops)
        value = self._expr(op.value)
        if value.dtype != op.dst.buffer.dtype:
            value = tirx.Cast(op.dst.buffer.dtype, value)
        stored = self._write(op.dst.buffer, value, dst, self._outside(op.dst.buffer, dst))
        return parallel_nest([var for var, _ in loops], [extent for _, extent in loops], stored)

    def _loops(self, region: Region) -> list[tuple[tirx.Var, tirx.PrimExpr]]:
        loops = []
        for count, dim in enumerate(region.long_dims):
            var = tirx.Var(f"v{count}", "int32")
            self._analyzer.bind(var, ir.Range(0, region.extents[dim]))
            loops.append((var, region.extents[dim]))
        return loops

    def _outside(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> list[tirx.PrimExpr]:
        """What is to be checked for an element to be inside its buffer, which a tile operation looks after itself."""
        bounds = [c for i, n in zip(indices, buffer.shape, strict=True) for c in (i >= 0, i < n)]
        return [condition for condition in bounds if not self._analyzer.can_prove(condition)]

    # -- allocations -------------------------------------------------------------------------------------------------

    def _allocated(self, node: tirx.SBlock | tirx.AllocBuffer) -> object:
        """The bases in place of their owners."""
        if isinstance(node, tirx.AllocBuffer):
            base = self._bases.get(node.buffer, node.buffer)
            return None if base.same_as(node.buffer) else tirx.AllocBuffer(base)
        allocs = [self._bases.get(buffer, buffer) for buffer in node.alloc_buffers]
        if all(new.same_as(old) for new, old in zip(allocs, node.alloc_buffers, strict=True)):
            return None
        return block_like(node, node.body, allocs)

    def _declared(self, node: tirx.SeqStmt) -> tirx.Stmt | None:
        """The sequence without declarations: views need none."""
        kept = [s for s in node.seq if not (isinstance(s, tirx.DeclBuffer) and s.buffer in self._views)]
        return None if len(kept) == len(node.seq) else sequence(kept)


def _base(memory: Memory, rigid: set[tirx.Buffer], noted: bool, analyzer: Prover) -> tirx.Buffer:
    """The buffer that a memory is to have: a parameter stays itself; an on-chip buffer takes the shape in which tile
    operations use it that are more than copies, or the only shape in which it is used at all."""
    if memory.is_param or noted:
        return memory.owner
    wanted = [buffer for buffer in memory.buffers if buffer in rigid] or memory.buffers
    first = wanted[0]
    if not all(_same_shape(first, other) for other in wanted):
        return memory.owner
    fits = first.dtype == memory.owner.dtype and is_compact(first, analyzer)
    return first if fits and analyzer.can_prove_equal(elements(first), elements(memory.owner)) else memory.owner


def _same_shape(a: tirx.Buffer, b: tirx.Buffer) -> bool:
    return a.dtype == b.dtype and all(
        ir.structural_equal(list(x), list(y)) for x, y in ((a.shape, b.shape), (strides_of(a), strides_of(b)))
    )


def _rigid_buffers(func: tirx.PrimFunc) -> set[tirx.Buffer]:
    """The buffers in tile operations that are more than copies and fills."""
    calls = nodes(func.body, tirx.Evaluate)
    rigid = [c.value for c in calls if not isinstance(tile_calls.parse_tile_op(c), (Copy, Fill, type(None)))]
    return {Region.of(arg).buffer for call in rigid for arg in call.args if op_name(arg) == "tl.region"}


def _notes(func: tirx.PrimFunc) -> list[tuple[str, dict]]:
    """The annotations of blocks that say something of buffers, by their data variables."""
    notes = [note for block in nodes(func.body, tirx.SBlock) for note in block.annotations.items()]
    return [(key, value) for key, value in notes if hasattr(value, "items")]


def _has_notes(func: tirx.PrimFunc, memory: Memory) -> bool:
    return any(memory.owner.data in value for _, value in _notes(func))


def _element(region: Region, loops: Sequence[tuple[tirx.Var, tirx.PrimExpr]]) -> list[tirx.PrimExpr]:
    indices = list(region.mins)
    for dim, (var, _) in zip(region.long_dims, loops, strict=True):
        indices[dim] = region.mins[dim] + var
    return indices


def _as_dtype(value: tirx.PrimExpr, dtype: str) -> tirx.PrimExpr:
    """The bits of a value as one of another dtype."""
    return value if value.dtype == dtype else tirx.reinterpret(dtype, value)
