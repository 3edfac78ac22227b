"""Global view to local view: the kernel that one device runs on its tiles.

Loops of a split factor run over the tile, buffers' dims shrink to it, a coordinate that is used as a value gets the
tile's offset. Where the tile is short or blocks reach past its end, what is reduced is masked with the neutral
element, and direct accesses are guarded. What must count once, such as the start of an accumulator, counts on the
first device only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set

from tvm import tirx

from mesh_tensor.annotations.combination import is_stated
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import ALL_TURNS, RESUMED, TURN, Access, Statement, split_update
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.double_loops import fuse, join
from mesh_tensor.tir.effects import changes_nothing, op_name
from mesh_tensor.tir.linear import as_expr, vars_of
from mesh_tensor.tir.loops import backward, shorten
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import block_like, guarded, loop_like, neutral_element, replace_block, without_mark
from mesh_tensor.tir.tile_position import resolve
from mesh_tensor.tir.user_reports import assert_call, is_print

from .expressions import ValueRewriter, contains_load, has_trap
from .local_reports import LocalReports
from .padding_masks import CountedOnce, LocalTileOps, PaddingMasks
from .splits import DeviceCoordinates, Shrink, Split


def localize(
    analysis: Analysis,
    splits: Sequence[Split],
    coordinates: DeviceCoordinates,
    name: str,
    layouts: Mapping[str, Sharding],
) -> tuple[tirx.PrimFunc, tuple[str, ...]]:
    """The local kernel and the axes it wants to know: its parameters are the kernel's own (as tiles), then this
    device's coordinate on each of the axes. Parameters that nothing uses come in tiles of their `layouts`, and dims in
    the windows that these have.

    Raises `Blocked` (rules.factors) where a split turns out not to be expressible."""
    return _Localizer(analysis, splits, coordinates, layouts).run(name)


class _Localizer:
    def __init__(
        self,
        analysis: Analysis,
        splits: Sequence[Split],
        coordinates: DeviceCoordinates,
        layouts: Mapping[str, Sharding],
    ):
        self.analysis, self.kernel = analysis, analysis.kernel
        self.splits = [split for split in splits if split.divides]
        self.device = coordinates
        self.shrink = Shrink(analysis, self.splits, layouts)
        self.values = ValueRewriter(analysis, self.splits, self.shrink)
        self.masks = PaddingMasks(analysis, self.splits, self.shrink, self.values)
        self.once = CountedOnce(analysis, self.splits)
        self.tile_ops = LocalTileOps(self.kernel, self.shrink, self.values, self.masks, self.once)
        self.extents = _LoopExtents(analysis, self.splits, self.shrink, self.values)
        self.around = [loop.var for loop in self.kernel.grid]
        self.reports = LocalReports(analysis, self.splits, self.shrink, self.values, coordinates)
        self.by_node: dict[tirx.Stmt, Statement] = {s.node: s for s in self.kernel.statements}

    def run(self, name: str) -> tuple[tirx.PrimFunc, tuple[str, ...]]:
        func, root = self.kernel.func, self.kernel.root
        body = self._visit(root.body)
        allocs = [self.shrink.buffer(b) for b in root.alloc_buffers]
        block = block_like(root, body, allocs, annotations=self._annotations(root))
        new_body = join(backward(shorten(fuse(replace_block(func.body, block, self.shrink.extents)))))
        new_body = resolve(new_body, self.device.__getitem__)
        buffer_map = {p: self.shrink.buffer(b) for p, b in func.buffer_map.items()}
        axes = self.device.mentioned_in(new_body)
        params = [*func.params, *self._symbols(buffer_map, new_body, axes.values()), *axes.values()]
        local = tirx.PrimFunc(params, new_body, func.ret_type, buffer_map)
        return local.with_attr("global_symbol", name), tuple(axes)

    def _annotations(self, block: tirx.SBlock) -> dict[str, object]:
        """The block's annotations name no buffers by shape; expressions in them keep their global meaning."""
        rewrite = self.values.rewrite
        kept = {k: v for k, v in block.annotations.items() if not is_stated(str(k))}
        return {k: rewrite(v) if isinstance(v, tirx.PrimExpr) else v for k, v in kept.items()}

    def _symbols(self, buffer_map: dict, body: tirx.Stmt, axes: Iterable[tirx.Var]) -> list[tirx.Var]:
        """Sizes that no tile's shape tells any more, or none of this part's: they become parameters."""
        told = {d for b in buffer_map.values() for d in b.shape if isinstance(d, tirx.Var)}
        known = {*told, *self.kernel.func.params, *axes}
        in_shapes = [vars_of(buffer.shape, {}) for buffer in self.kernel.func.buffer_map.values()]
        free = {var for var in tirx.analysis.undefined_vars(body) if var.dtype != "handle"}
        used = [var for some in (*in_shapes, free) for var in sorted(some, key=lambda v: v.name)]
        return list(dict.fromkeys(var for var in used if var not in known))

    # -- statements ------------------------------------------------------------------------------------------------

    def _visit(self, stmt: tirx.Stmt) -> tirx.Stmt:
        if stmt in self.by_node:
            return self._statement(self.by_node[stmt])
        rewrite = self.values.rewrite
        if isinstance(stmt, tirx.SeqStmt):
            return tirx.SeqStmt([self._visit(child) for child in stmt.seq])
        if isinstance(stmt, tirx.For):
            extent = self.extents.extent(stmt, self.around)
            self.around.append(stmt.loop_var)
            body = self._visit(stmt.body)
            self.around.pop()
            made = loop_like(stmt, extent, body, start=rewrite(stmt.min))
            return without_mark(without_mark(made, RESUMED), TURN)
        if isinstance(stmt, tirx.While):
            return tirx.While(self.extents.condition(stmt, self.around), self._visit(stmt.body))
        if isinstance(stmt, tirx.IfThenElse):
            condition = self.values.uncertain(rewrite(stmt.condition))
            if condition is None:
                return self._visit(stmt.then_case)
            otherwise = None if stmt.else_case is None else self._visit(stmt.else_case)
            return tirx.IfThenElse(condition, self._visit(stmt.then_case), otherwise)
        if isinstance(stmt, tirx.SBlockRealize):
            allocs = [self.shrink.buffer(b) for b in stmt.block.alloc_buffers]
            block = block_like(stmt.block, self._visit(stmt.block.body), allocs)
            return tirx.SBlockRealize(stmt.iter_values, stmt.predicate, block)
        if isinstance(stmt, tirx.AttrStmt):
            return tirx.AttrStmt(stmt.node, stmt.attr_key, rewrite(stmt.value), self._visit(stmt.body))
        return stmt

    def _statement(self, statement: Statement) -> tirx.Stmt:
        if statement.unknown:
            return statement.node
        if is_print(statement.node):
            return self.reports.print(statement.node)
        if isinstance(statement.node, tirx.AssertStmt) or assert_call(statement.node) is not None:
            return self.reports.assertion(statement)
        if changes_nothing(statement.node):
            # What holds of the whole tensor need not hold of a tile's padding.
            return tirx.Evaluate(0) if op_name(statement.node.value) == "tirx.assume" else statement.node
        if isinstance(statement.node, tirx.BufferStore):
            new = self._store(statement)
        elif statement.tile_op is not None:
            new = self.tile_ops.local(statement)
        elif isinstance(statement.node, tirx.Bind):
            return tirx.Bind(statement.node.var, self.values.rewrite(statement.node.value))
        else:
            return tirx.Evaluate(self.values.rewrite(statement.node.value))
        return self._guarded(statement, new)

    def _store(self, statement: Statement) -> tirx.Stmt:
        stmt: tirx.BufferStore = statement.node
        indices = self.values.indices(statement.target)
        buffer = self.shrink.buffer(stmt.buffer)
        op, operand = split_update(stmt)
        operand = self.once.started(statement, operand)
        if op is None:
            value = self._owned(statement, self.once.value(statement, self.values.rewrite(operand)), "sum")
            return tirx.BufferStore(buffer, value, indices)
        operand = self.once.value(statement, self.masks.value(statement, self.values.rewrite(operand)), op)
        operand = self._owned(statement, operand, op)
        current = tirx.BufferLoad(buffer, indices)
        return tirx.BufferStore(buffer, _combine(stmt.value, current, operand), indices)

    def _owned(self, statement: Statement, value: tirx.PrimExpr, op: str) -> tirx.PrimExpr:
        """The value on the device that has what is looked up for it; what is neutral on the others."""
        lookups = ((statement, None), *self.once.owners(statement))
        for condition in (condition for lookup in lookups for condition in self.values.owned(*lookup)):
            value = tirx.if_then_else(condition, value, neutral_element(op, value.dtype))
        return value

    # -- accesses outside the tile ---------------------------------------------------------------------------------

    def _guarded(self, statement: Statement, new: tirx.Stmt) -> tirx.Stmt:
        """Skip stores past the tile's end, and work on padding that could fault (division, indices from memory)."""
        conditions = []
        direct = statement.tile_op is None or (
            isinstance(statement.tile_op, tile_ops.Atomic) and not statement.tile_op.dst.long_dims
        )
        if direct and self.kernel.is_param(statement.target.buffer):
            conditions += self.values.guards(statement.target)
        elif not direct:
            conditions += self.values.placed(statement.target)
        if self._may_fault(statement):
            forms = self.analysis.coordinates.of_statement(statement)
            for split in self.splits:
                form = forms.get(split.factor)
                if form is None or (split.even and self.shrink.fits(form, split)):
                    continue
                if not form.terms.keys() & statement.element_vars:
                    conditions.append(as_expr(form) < split.valid)
        return guarded(new, conditions)

    def _may_fault(self, statement: Statement) -> bool:
        indices = [i for access in statement.accesses for i in access.indices]
        computed = any(contains_load(i) for i in indices) or any(map(self._places_by_block, statement.accesses))
        return computed or any(has_trap(v) for v in statement.values)

    def _places_by_block(self, access: Access) -> bool:
        """Whether an on-chip buffer is accessed at places that are computed from the loops over blocks."""
        if self.kernel.is_param(access.buffer):
            return False
        of_access = self.analysis.coordinates.of_access
        untyped = [index for dim, index in enumerate(access.indices) if of_access(access, dim) is None]
        return bool(vars_of(untyped, {}) & self.values.block_offsets.keys())


def _combine(original: tirx.PrimExpr, current: tirx.PrimExpr, operand: tirx.PrimExpr) -> tirx.PrimExpr:
    """`current op operand` with the operation of the original store's value."""
    if isinstance(original, tirx.Call):
        return tirx.Call(original.dtype, original.op, [current, operand])
    return type(original)(current, operand)


class _LoopExtents:
    """How far loops go on one device: those over split factors have the tile's extent, those that depend on data end
    before they begin where that would be padding."""

    def __init__(self, analysis: Analysis, splits: Sequence[Split], shrink: Shrink, values: ValueRewriter):
        self._analysis, self._splits, self._shrink, self._values = analysis, splits, shrink, values

    def extent(self, loop: tirx.For, around: Collection[tirx.Var]) -> tirx.PrimExpr:
        """The extent of a loop inside the loops `around`."""
        known = self._shrink.extents.get(loop.loop_var)
        if known is not None:
            return self._in_turn(loop, known, self._within(loop.loop_var, known))
        extent = self._values.rewrite(loop.extent)
        return self._unless_padding(extent, self._taints([loop.min, loop.extent]), around)

    def condition(self, loop: tirx.While, around: Collection[tirx.Var]) -> tirx.PrimExpr:
        """The condition of a loop inside the loops `around`."""
        return self._unless_padding(self._values.rewrite(loop.condition), self._taints([loop.condition]), around)

    def _unless_padding(
        self, value: tirx.PrimExpr, depends_on: Set[tirx.Var], around: Collection[tirx.Var]
    ) -> tirx.PrimExpr:
        """The value, but 0 where loops around are past the end of what it depends on."""
        for split in self._splits:
            for form in self._analysis.coordinates.forms[split.factor]:
                here = form.terms and form.terms.keys() <= set(around)
                if here and depends_on & form.terms.keys() and not (split.even and self._shrink.fits(form, split)):
                    value = tirx.if_then_else(as_expr(form) < split.valid, value, tirx.const(0, value.dtype))
        return value

    def _within(self, var: tirx.Var, extent: tirx.PrimExpr) -> tirx.PrimExpr:
        """A loop that carries a state in order, or position by position, ends with what is valid: nothing is taken over
        from padding. So does one that takes the maximum of a block alone from its elements: padding has none."""
        for split in self._splits:
            reduction = self._analysis.reductions[split.factor]
            loops = [state.loop for state in reduction.states if state.takes_blocks]
            loops += [scan.loop for scan in reduction.scans]
            if any(loop.var.same_as(var) for loop in loops) and not split.even:
                step = split.factor.roles[var]
                extent = tirx.min(tirx.floordiv(split.valid + (step - 1), step), extent)
        return extent

    def _in_turn(self, loop: tirx.For, longest: tirx.PrimExpr, extent: tirx.PrimExpr) -> tirx.PrimExpr:
        """A loop that devices run one after the other is that of one of them."""
        turn = int(loop.annotations.get(TURN, ALL_TURNS))
        for split in self._splits if turn != ALL_TURNS else ():
            if loop.loop_var in split.factor.roles:
                apart = tirx.max(split.place - turn, turn - split.place)
                extent = tirx.min(extent, longest * tirx.max(1 - apart, 0))
        return extent

    def _taints(self, exprs: Sequence[tirx.PrimExpr]) -> set[tirx.Var]:
        """The loops that what is loaded in the expressions depends on."""
        analysis, found = self._analysis, set[tirx.Var]()
        binds = analysis.kernel.binds
        for node in (node for expr in exprs for node in nodes(expr, tirx.BufferLoad, tirx.Var)):
            if isinstance(node, tirx.BufferLoad):
                access = self._values.access(node)
                found |= vars_of(node.indices, binds)
                found |= set() if access is None else analysis.taints[analysis.coordinates.ranges.of(access)]
            elif node in binds:
                found |= self._taints([binds[node]])
        return found
