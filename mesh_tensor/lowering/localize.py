"""Global view to local view: the kernel that one device runs on its tiles.

Loops of a split factor run over the tile, buffers' dims shrink to it, a coordinate that is used as a value gets the
tile's offset. Where the tile is short or blocks reach past its end, what is reduced is masked with the neutral
element, and direct accesses are guarded. What must count once, such as the start of an accumulator, counts on the
first device only.
"""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from ..rules import tile_ops
from ..rules.factors import Blocked
from ..rules.fused_loops import fuse
from ..rules.linear import Linear, as_expr, vars_of
from ..rules.sharding_rule import Analysis
from ..rules.statements import Access, Statement, split_update
from ..rules.values import neutral_element
from .expressions import ValueRewriter, contains_load, has_trap
from .rewrite import block_like, loop_like, parallel_nest, region_call, replace_block, sequence, tile_op, with_args
from .shrink import Shrink
from .splits import DeviceCoordinates, Split


def localize(
    analysis: Analysis, splits: Sequence[Split], coordinates: DeviceCoordinates, name: str
) -> tuple[tirx.PrimFunc, tuple[str, ...]]:
    """The local kernel and the axes it wants to know: its parameters are the kernel's own (as tiles), then this
    device's coordinate on each of the axes.

    Raises `Blocked` (rules.factors) where a split turns out not to be expressible."""
    return _Localizer(analysis, splits, coordinates).run(name)


class _Localizer:
    def __init__(self, analysis: Analysis, splits: Sequence[Split], coordinates: DeviceCoordinates):
        self.analysis, self.kernel = analysis, analysis.kernel
        self.splits = [split for split in splits if split.divides]
        self.device = coordinates
        self.shrink = Shrink(analysis, self.splits)
        self.buffers = self.shrink.buffers
        self.values = ValueRewriter(analysis, self.splits, self.shrink)
        self.by_node: dict[tirx.Stmt, Statement] = {s.node: s for s in self.kernel.statements}

    def run(self, name: str) -> tuple[tirx.PrimFunc, tuple[str, ...]]:
        func, root = self.kernel.func, self.kernel.root
        body = self._visit(root.body)
        block = block_like(root, body, [self.buffers.get(b, b) for b in root.alloc_buffers])
        block = _with_attrs(block, self.values)
        new_body = fuse(replace_block(func.body, block, self.shrink.extents))
        buffer_map = {p: self.buffers.get(b, b) for p, b in func.buffer_map.items()}
        axes = self.device.mentioned_in(new_body)
        params = [*func.params, *self._symbols(buffer_map), *axes.values()]
        local = tirx.PrimFunc(params, new_body, func.ret_type, buffer_map)
        return local.with_attr("global_symbol", name), tuple(axes)

    def _symbols(self, buffer_map: dict) -> list[tirx.Var]:
        """Sizes that no tile's shape tells any more: they become parameters."""
        known = {d for b in buffer_map.values() for d in b.shape if isinstance(d, tirx.Var)} | set(
            self.kernel.func.params
        )
        used: list[tirx.Var] = []
        for buffer in self.kernel.func.buffer_map.values():
            used.extend(v for v in sorted(vars_of(buffer.shape, {}), key=lambda v: v.name) if v not in known)
        return list(dict.fromkeys(used))

    # -- statements ------------------------------------------------------------------------------------------------

    def _visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self._visit(child) for child in stmt.seq])
        if isinstance(stmt, tirx.For) and stmt not in self.by_node:
            extent = self.shrink.extents.get(stmt.loop_var)
            extent = self.values.rewrite(stmt.extent) if extent is None else extent
            return loop_like(stmt, extent, self._visit(stmt.body), start=self.values.rewrite(stmt.min))
        if isinstance(stmt, tirx.IfThenElse) and stmt not in self.by_node:
            otherwise = None if stmt.else_case is None else self._visit(stmt.else_case)
            return tirx.IfThenElse(self.values.rewrite(stmt.condition), self._visit(stmt.then_case), otherwise)
        if isinstance(stmt, tirx.SBlockRealize):
            allocs = [self.buffers.get(b, b) for b in stmt.block.alloc_buffers]
            block = block_like(stmt.block, self._visit(stmt.block.body), allocs)
            return tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block)
        if isinstance(stmt, tirx.AttrStmt) and stmt not in self.by_node:
            return tirx.AttrStmt(stmt.node, stmt.attr_key, self.values.rewrite(stmt.value), self._visit(stmt.body))
        return self._statement(self.by_node[stmt]) if stmt in self.by_node else stmt

    def _statement(self, statement: Statement) -> tirx.Stmt:
        if statement.unknown:
            return statement.node
        if isinstance(statement.node, tirx.BufferStore):
            new = self._store(statement)
        elif statement.tile_op is not None:
            new = self._tile_op(statement)
        elif isinstance(statement.node, tirx.Bind):
            return tirx.Bind(statement.node.var, self.values.rewrite(statement.node.value))
        else:
            return tirx.Evaluate(self.values.rewrite(statement.node.value))
        return self._guarded(statement, new)

    def _store(self, statement: Statement) -> tirx.Stmt:
        stmt: tirx.BufferStore = statement.node
        indices = self.values.indices(statement.target)
        buffer = self.buffers.get(stmt.buffer, stmt.buffer)
        op, operand = split_update(stmt)
        if op is None:
            value = self._gated_value(statement, self.values.rewrite(operand))
            return tirx.BufferStore(buffer, value, indices)
        operand = self._gated_value(statement, self._masked_value(statement, self.values.rewrite(operand)), op)
        current = tirx.BufferLoad(buffer, indices)
        return tirx.BufferStore(buffer, _combine(stmt.value, current, operand), indices)

    def _tile_op(self, statement: Statement) -> tirx.Stmt:
        record = statement.tile_op
        assert record is not None
        masks = self._masks(statement)
        call = self._tile_call(statement, record)
        return self._skipped(statement, sequence([*masks, self._gated_tile_op(statement, call)]), call)

    def _tile_call(self, statement: Statement, record: tile_ops.TileOp) -> tirx.Stmt:
        node: tirx.Evaluate = statement.node
        args = list(node.value.args)
        if isinstance(record, (tile_ops.Copy, tile_ops.Transpose)):
            args[0] = self._region(args[0], statement.reads[0], statement)
            args[1] = self._region(args[1], statement.target, statement)
        elif isinstance(record, tile_ops.Fill):
            args[0] = self._region(args[0], statement.target, statement)
            args[1] = self.values.rewrite(args[1])
        elif isinstance(record, tile_ops.Reduce):
            args[0] = self._region(args[0], statement.reads[0], statement)
            args[1] = self._region(args[1], statement.target, statement)
        elif isinstance(record, tile_ops.Gemm):
            args = self._gemm_args(args, statement)
        elif isinstance(record, tile_ops.Atomic):
            args = self._atomic_args(args, statement, record)
        return with_args(node, args)

    def _gemm_args(self, args: list, statement: Statement) -> list:
        a, b = statement.reads[:2]
        args[0] = self._region(args[0], a, statement)
        args[1] = self._region(args[1], b, statement)
        args[2] = self._region(args[2], statement.target, statement)
        m, n, k = (self.shrink.extents.get(loop.var, loop.extent) for loop in statement.loops[-3:])
        args[5], args[6], args[7] = m, n, k
        return args

    def _atomic_args(self, args: list, statement: Statement, record: tile_ops.Atomic) -> list:
        if isinstance(record.value, tile_ops.Region):
            args[0] = self._region(args[0], statement.reads[0], statement)
            args[1] = self._region(args[1], statement.target, statement)
            return args
        value_at = 0 if statement.node.value.op.name.startswith("tl.tileop") else 1
        value = self._masked_value(statement, self.values.rewrite(args[value_at]))
        args[value_at] = self._gated_value(statement, value, record.op)
        if value_at == 0:
            args[1] = self._region(args[1], statement.target, statement)
            return args
        pointer = args[0]
        buffer = self.buffers.get(statement.target.buffer, statement.target.buffer)
        load = tirx.BufferLoad(buffer, self.values.indices(statement.target))
        args[0] = tirx.Call(pointer.dtype, pointer.op, [load, *pointer.args[1:]], annotations=pointer.annotations)
        return args

    def _region(self, call: tirx.Call, access: Access, statement: Statement) -> tirx.Call:
        """The region over the tile: shrunken extents, detached dims at global coordinates."""
        region = tile_ops.region(call)
        element = self._element_vars(access, statement)
        zero = {var: tirx.IntImm("int32", 0) for var in element.values()}
        mins = [tirx.stmt_functor.substitute(i, zero) for i in self.values.indices(access)]
        mins = [self.kernel.analyzer.simplify(i) for i in mins]
        extents = [self.shrink.extents.get(element.get(d), e) for d, e in enumerate(region.extents)]
        buffer = self.buffers.get(region.buffer, region.buffer)
        return region_call(buffer, mins, extents, int(call.args[1]))

    def _element_vars(self, access: Access, statement: Statement) -> dict[int, tirx.Var]:
        """Per dim of a tile operation's access, the loop variable that runs over its elements."""
        tiles = {loop.var for loop in statement.loops if loop.kind == "tile"}
        found: dict[int, tirx.Var] = {}
        for dim, index in enumerate(access.indices):
            for var in vars_of([index], {}) & tiles:
                found[dim] = var
        return found

    # -- padding ---------------------------------------------------------------------------------------------------

    def _mask_of(self, statement: Statement) -> list[tuple[Split, Linear]]:
        """The splits whose padding the statement would combine, with its coordinate in them."""
        found = []
        for split in self.splits:
            reduction = self.analysis.reductions[split.factor]
            form = reduction.updates.get(statement)
            overrun = reduction.masked and self.shrink.overruns(split)
            if form is not None and (not split.even or overrun):
                found.append((split, form))
        return found

    def _masked_value(self, statement: Statement, value: tirx.PrimExpr) -> tirx.PrimExpr:
        neutral = neutral_element(statement.operation, value.dtype)
        for split, form in self._mask_of(statement):
            value = tirx.if_then_else(as_expr(form) < split.valid, value, neutral)
        return value

    def _masks(self, statement: Statement) -> list[tirx.Stmt]:
        """Loops that set the operands of a tile operation to its neutral element outside the valid part."""
        masks = self._mask_of(statement)
        record = statement.tile_op
        if not masks or (isinstance(record, tile_ops.Atomic) and not isinstance(record.value, tile_ops.Region)):
            return []
        operands = statement.reads[:2] if isinstance(record, tile_ops.Gemm) else statement.reads[:1]
        op = record.op if isinstance(record, tile_ops.Reduce) else statement.operation
        return [loop for operand in operands if (loop := self._mask(operand, statement, masks, op)) is not None]

    def _mask(self, operand: Access, statement: Statement, masks: list, op: str) -> tirx.Stmt | None:
        element = self._element_vars(operand, statement)
        relevant = [(s, f) for s, f in masks if set(f.terms) & set(element.values())]
        if not relevant:
            return None
        if self.kernel.is_param(operand.buffer):
            raise Blocked(
                f"{operand.buffer.name} is combined as it lies, and what is past the end of a short tile would count",
                relevant[0][0].factor,
            )
        fresh = {var: tirx.Var("mn"[d % 2] + str(d), "int32") for d, var in element.items()}
        buffer = self.buffers.get(operand.buffer, operand.buffer)
        indices = [tirx.stmt_functor.substitute(i, fresh) for i in self.values.indices(operand)]
        value: tirx.PrimExpr = tirx.BufferLoad(buffer, indices)
        for split, form in relevant:
            inside = tirx.stmt_functor.substitute(as_expr(form), fresh) < split.valid
            value = tirx.if_then_else(inside, value, neutral_element(op, buffer.dtype))
        tile_loops = {loop.var: loop for loop in statement.loops if loop.kind == "tile"}
        extents = [self.shrink.extents.get(v, tile_loops[v].extent) for v in element.values()]
        return parallel_nest([fresh[v] for v in element.values()], extents, tirx.BufferStore(buffer, value, indices))

    def _skipped(self, statement: Statement, body: tirx.Stmt, call: tirx.Evaluate) -> tirx.Stmt:
        """Tile operations that lie, as a whole, at one coordinate: past the valid part they combine nothing."""
        record = statement.tile_op
        if isinstance(record, tile_ops.Atomic) and not isinstance(record.value, tile_ops.Region):
            return body
        tiles = {loop.var for loop in statement.loops if loop.kind == "tile"}
        otherwise: tirx.Stmt | None = None
        if statement.fresh:
            target = call.value.args[_DESTINATION[type(record)]]
            otherwise = tile_op("fill", target, neutral_element(statement.operation, statement.target.buffer.dtype))
        for split, form in self._mask_of(statement):
            if not set(form.terms) & tiles:
                body = tirx.IfThenElse(as_expr(form) < split.valid, body, otherwise)
        return body

    # -- what counts once ------------------------------------------------------------------------------------------

    def _gates(self, statement: Statement) -> tuple[tirx.PrimExpr | None, str]:
        condition, op = None, ""
        for split in self.splits:
            reduction = self.analysis.reductions[split.factor]
            if statement not in reduction.gated:
                continue
            op = reduction.partial[self.analysis.coordinates.ranges.of(statement.target)]
            condition = split.is_first if condition is None else tirx.And(condition, split.is_first)
        return condition, op

    def _gated_value(self, statement: Statement, value: tirx.PrimExpr, op: str | None = None) -> tirx.PrimExpr:
        condition, partial_op = self._gates(statement)
        if condition is None:
            return value
        return tirx.if_then_else(condition, value, neutral_element(op or partial_op, value.dtype))

    def _gated_tile_op(self, statement: Statement, call: tirx.Stmt) -> tirx.Stmt:
        condition, op = self._gates(statement)
        record = statement.tile_op
        if condition is None or (isinstance(record, tile_ops.Atomic) and not isinstance(record.value, tile_ops.Region)):
            return call
        if statement.op is not None and not statement.fresh:
            return tirx.IfThenElse(condition, call, None)
        target = (
            call.value.args[0] if isinstance(record, tile_ops.Fill) else call.value.args[_DESTINATION[type(record)]]
        )
        fill = tile_op("fill", target, neutral_element(op, statement.target.buffer.dtype))
        return tirx.IfThenElse(condition, call, fill)

    # -- accesses outside the tile ---------------------------------------------------------------------------------

    def _guarded(self, statement: Statement, new: tirx.Stmt) -> tirx.Stmt:
        """Skip stores past the tile's end, and work on padding that could fault (division, indices from memory)."""
        conditions = []
        direct = statement.tile_op is None or (
            isinstance(statement.tile_op, tile_ops.Atomic) and not statement.tile_op.dst.long_dims
        )
        if direct and self.kernel.is_param(statement.target.buffer):
            conditions += self.values.guards(statement.target)
        if self._may_fault(statement):
            real = {loop.var for loop in statement.loops if loop.kind != "tile"}
            forms = self.analysis.coordinates.of_statement(statement)
            for split in self.splits:
                form = forms.get(split.factor)
                if not split.even and form is not None and set(form.terms) <= real:
                    conditions.append(as_expr(form) < split.valid)
        for condition in conditions:
            new = tirx.IfThenElse(condition, new, None)
        return new

    def _may_fault(self, statement: Statement) -> bool:
        indices = [i for access in statement.accesses for i in access.indices]
        return any(contains_load(i) for i in indices) or any(has_trap(v) for v in statement.values)


_DESTINATION = {tile_ops.Copy: 1, tile_ops.Transpose: 1, tile_ops.Reduce: 1, tile_ops.Gemm: 2, tile_ops.Atomic: 1}


def _combine(original: tirx.PrimExpr, current: tirx.PrimExpr, operand: tirx.PrimExpr) -> tirx.PrimExpr:
    """`current op operand` with the operation of the original store's value."""
    if isinstance(original, tirx.Call):
        return tirx.Call(original.dtype, original.op, [current, operand])
    return type(original)(current, operand)


def _with_attrs(block: tirx.SBlock, values: ValueRewriter) -> tirx.SBlock:
    """Block annotations name no buffers by shape; expressions in them keep their global meaning."""
    annotations = {k: values.rewrite(v) if isinstance(v, tirx.PrimExpr) else v for k, v in block.annotations.items()}
    return tirx.SBlock(
        block.iter_vars,
        block.reads,
        block.writes,
        block.name_hint,
        block.body,
        block.init,
        block.alloc_buffers,
        block.match_buffers,
        annotations,
    )
