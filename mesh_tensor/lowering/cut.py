"""Cut a kernel in two before one of its top-level statements; what is live across the cut goes through workspaces.

Both parts are plain kernels in global view again: a workspace is a tensor with the dims that the on-chip buffer's
elements stand for, so that it can be sharded, reduced and reduce-scattered like any other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from tvm import tirx

from mesh_tensor.base.recent import made_once
from mesh_tensor.rules.kernel.factors import Blocked, Factor
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.padding import ANYTHING, ZERO, content_past_the_end, takes_whole_blocks
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import OWN_ATTR, Statement, body_statements, hinted_like
from mesh_tensor.rules.kernel.workspaces import workspace_dims
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.effects import written
from mesh_tensor.tir.memory import row_strides
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import block_like, number, region_call, replace_block, sequence, tile_op
from mesh_tensor.tir.tile_calls import completed
from mesh_tensor.tir.user_reports import is_print, message_only, printed_buffers

from .scalars import computed_again, is_computed_again


@dataclass(frozen=True, eq=False)
class Workspace:
    """A tensor that carries an on-chip buffer over a cut. `factors` are those of its dims (None: a plain dim)."""

    buffer: tirx.Buffer
    handle: tirx.Var
    factors: tuple[Factor | None, ...]
    on_chip: tirx.Buffer
    mins: tuple[tirx.PrimExpr, ...]
    extents: tuple[tirx.PrimExpr, ...]

    def save(self) -> tirx.Stmt:
        return self._move(to_workspace=True)

    def restore(self) -> tirx.Stmt:
        return self._move(to_workspace=False)

    def into(self, on_chip: tirx.Buffer) -> Workspace:
        """The same tensor for another on-chip buffer."""
        return replace(self, on_chip=on_chip)

    def at(self, mins: Sequence[tirx.PrimExpr]) -> Workspace:
        """The same tensor at another place."""
        return replace(self, mins=tuple(mins))

    def of_dims(self, kept: Sequence[int], on_chip: tirx.Buffer) -> Workspace:
        """A tensor of some of the dims only."""
        one, zero = tirx.IntImm("int32", 1), tirx.IntImm("int32", 0)
        shape = [self.buffer.shape[d] for d in kept] or [one]
        handle, buffer = make_param(str(self.buffer.name), shape, self.buffer.dtype)
        return Workspace(
            buffer,
            handle,
            tuple(self.factors[d] for d in kept) or (None,),
            on_chip,
            tuple(self.mins[d] for d in kept) or (zero,),
            tuple(self.extents[d] for d in kept) or (one,),
        )

    def _move(self, *, to_workspace: bool) -> tirx.Stmt:
        zeros = [tirx.IntImm("int32", 0)] * len(self.on_chip.shape)
        if self.on_chip.scope() == "local.var":
            if to_workspace:
                return tirx.BufferStore(self.buffer, tirx.BufferLoad(self.on_chip, zeros), list(self.mins))
            return tirx.BufferStore(self.on_chip, tirx.BufferLoad(self.buffer, list(self.mins)), zeros)
        chip = region_call(self.on_chip, zeros, self.on_chip.shape, 1 if to_workspace else 2)
        workspace = region_call(self.buffer, self.mins, self.extents, 2 if to_workspace else 1)
        return tile_op("copy", chip, workspace) if to_workspace else tile_op("copy", workspace, chip)


@made_once(ANALYSES)
def cut(analysis: Analysis, at: int, suffix: str) -> tuple[tirx.PrimFunc, tirx.PrimFunc, list[Workspace]]:
    """The kernel's statements before `at`, those from `at` on, and the workspaces between them.

    Raises Blocked where something live can't be carried over."""
    kernel = analysis.kernel
    stmts = body_statements(kernel.root.body)
    live = [r for r in analysis.coordinates.ranges.all if not r.is_param and is_live(r, at)]
    if len({r.buffer for r in live}) < len(live):
        raise Blocked("a buffer has two values at the point where the kernel would be cut")
    again = {r: copy for r in live if (copy := reload(r, analysis, at)) is not None}
    idle = {copy for r, copy in again.items() if not any(s.top < at for s, _ in r.reads)}
    scalars = computed_again(analysis, at, list(again.values()), [r.buffer for r in live])
    workspaces = []
    for live_range in live:
        if live_range not in again and live_range.buffer not in scalars.buffers:
            check_padding(live_range, analysis)
            workspaces.append(make_workspace(live_range, analysis, suffix))
    before = [stmt for stmt in stmts[:at] if stmt not in idle]
    first = part_of(analysis, [*before, *(w.save() for w in workspaces)], workspaces)
    taken_over = [*scalars.stmts, *again.values(), *(w.restore() for w in workspaces)]
    second = part_of(analysis, [*taken_over, *stmts[at:]], workspaces)
    second = without_lost_prints(second, analysis, at)
    return first, second, workspaces


def without_lost_prints(part: tirx.PrimFunc, analysis: Analysis, at: int) -> tirx.PrimFunc:
    """A print of what the part after the cut does not have says so instead."""
    kernel, filled = analysis.kernel, set(written(part.body))

    def is_lost(buffer: tirx.Buffer) -> bool:
        if kernel.is_param(buffer):
            return not kernel.uses(buffer, since=at)
        return buffer not in filled and any(buffer.same_as(other) for other in kernel.on_chip)

    def replace(node: tirx.AttrStmt) -> tirx.Stmt | None:
        lost = sorted(b.name for b in printed_buffers(node) if is_lost(b)) if is_print(node) else []
        return message_only(f"{', '.join(lost)}: not kept past a collective, print it earlier") if lost else None

    body = tirx.stmt_functor.ir_transform(part.body, None, replace, ["tirx.AttrStmt"])
    used = _used(body)
    buffer_map = {p: b for p, b in part.buffer_map.items() if not kernel.is_param(b) or b in used}
    params = [p for p in part.params if p in buffer_map or p not in part.buffer_map]
    return tirx.PrimFunc(params, body, part.ret_type, buffer_map, part.attrs)


def is_live(live_range: LiveRange, at: int) -> bool:
    """Whether what a buffer holds before a top-level statement may be used from there on."""
    written_before = any(s.top < at for s, _ in live_range.writes)
    used_after = any(s.top >= at for s, _ in live_range.reads) or any(
        s.top >= at and s.op is not None and not s.fresh for s, _ in live_range.writes
    )
    partly_written = any(s.top >= at for s, _ in live_range.writes)
    return written_before and (used_after or partly_written)


def check_padding(live_range: LiveRange, analysis: Analysis) -> None:
    """Where blocks reach past a dim's end, a workspace reads as 0: what was there may not count, or has to be 0."""
    for dim in range(len(live_range.buffer.shape)):
        entry = analysis.coordinates.of_node((live_range, dim))
        if entry is None or takes_whole_blocks(analysis.kernel, entry[0]):
            continue
        content = content_past_the_end(live_range, analysis.kernel, analysis.coordinates, entry[0])
        if content != ZERO and (content != ANYTHING or entry[0].blocked is not None):
            raise Blocked(f"what {live_range.buffer.name} holds past its end may count where the kernel would be cut")


def reload(live_range: LiveRange, analysis: Analysis, at: int) -> tirx.Stmt | None:
    """The copy, or the constant, that filled the buffer, if repeating that after the cut gives the same: then no
    workspace is needed."""
    before = [s for s, _ in live_range.writes if s.top < at]
    if len(before) != 1 or before[0].conditions:
        return None
    if any(loop.kind not in ("grid", "tile") for loop in before[0].loops):
        return None
    record = before[0].tile_op
    if isinstance(record, tile_ops.Fill) and number(record.value) is not None:
        return before[0].node
    if not isinstance(record, tile_ops.Copy):
        return None
    if not analysis.kernel.is_param(before[0].reads[0].buffer):
        return None
    return before[0].node if all(_is_kept(a.buffer, before[0], analysis, at) for a in before[0].reads) else None


def _is_kept(buffer: tirx.Buffer, reader: Statement, analysis: Analysis, at: int) -> bool:
    """Whether what a statement read of a buffer can be read at a cut after it, too."""
    if analysis.kernel.is_param(buffer):
        return not analysis.written(str(buffer.name))
    statements = analysis.kernel.statements
    later = statements[statements.index(reader) :]
    return is_computed_again(analysis, at, buffer) and not any(s.writes(buffer) for s in later if s.top < at)


def make_workspace(live_range: LiveRange, analysis: Analysis, suffix: str) -> Workspace:
    """A workspace for what a live range holds."""
    buffer, dims = live_range.buffer, workspace_dims(live_range, analysis)
    handle, workspace = make_param(f"{buffer.name}_{suffix}", [dim.size for dim in dims], buffer.dtype)
    factors, mins = tuple(dim.factor for dim in dims), tuple(dim.start for dim in dims)
    return Workspace(workspace, handle, factors, buffer, mins, tuple(dim.extent for dim in dims))


def with_leading_dim(workspace: Workspace, size: int, at: tirx.PrimExpr) -> Workspace:
    """A workspace for so many of the same, of which one is at a place."""
    one, name = tirx.IntImm("int32", 1), str(workspace.buffer.name)
    handle, buffer = make_param(name, [tirx.IntImm("int32", size), *workspace.buffer.shape], workspace.buffer.dtype)
    return replace(
        workspace,
        buffer=buffer,
        handle=handle,
        factors=(None, *workspace.factors),
        mins=(at, *workspace.mins),
        extents=(one, *workspace.extents),
    )


def make_param(name: str, shape: Sequence, dtype: str) -> tuple[tirx.Var, tirx.Buffer]:
    """A new tensor parameter, with contiguous rows."""
    buffer = tirx.decl_buffer(list(shape), dtype, name, strides=row_strides(shape))
    return tirx.Var(f"{name}_handle", "handle"), buffer


def part_of(
    analysis: Analysis, stmts: list[tirx.Stmt], workspaces: list[Workspace], more: Sequence[tirx.Buffer] = ()
) -> tirx.PrimFunc:
    """A function with these statements as its kernel's body, only the parameters that they use, and `more` on-chip
    buffers. What is saved of an asynchronous product or copy is complete, wherever the author waits for it."""
    kernel = analysis.kernel
    func = kernel.func
    body = completed(hinted_like(kernel.root.body, sequence(stmts)))
    used = _used(body)
    allocs = [b for b in kernel.root.alloc_buffers if b in used]
    block = block_like(kernel.root, body, [*allocs, *more])
    buffer_map = {p: b for p, b in func.buffer_map.items() if b in used}
    buffer_map |= {w.handle: w.buffer for w in workspaces}
    params = [p for p in func.params if p in buffer_map or p not in func.buffer_map]
    params = [p for p in params if p not in {w.handle for w in workspaces}] + [w.handle for w in workspaces]
    made = tirx.PrimFunc(params, replace_block(func.body, block, {}), func.ret_type, buffer_map)
    names = {str(buffer.name) for buffer in buffer_map.values()}
    own = {name: op for name, op in kernel.own.items() if name in names}
    return made.with_attr(OWN_ATTR, own) if own else made


def _used(body: tirx.Stmt) -> set[tirx.Buffer]:
    return {access.buffer for access in nodes(body, tirx.BufferLoad, tirx.BufferStore)}
