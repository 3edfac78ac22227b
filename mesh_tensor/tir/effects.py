"""What an expression or a statement may do besides computing a value; which of it asks what thread runs it."""

from __future__ import annotations

from tvm import ir, tirx

from mesh_tensor.base.errors import refuse

from .intrinsics import INTRINSICS
from .nodes import function_name, loads, nodes


def _ops(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{name}" for name in names.split())


#: Statements that change no value and no statement's running: barriers inside a program, hints to a compiler.
NO_EFFECT = (
    _ops("tirx", "tvm_storage_sync assume ptx_wait_group ptx_commit_group")
    | _ops("tl", "annotate_consumer_reg_alloc annotate_producer_reg_dealloc conflict_hint fence_proxy_async")
    | _ops("tl", "no_set_max_nreg pdl_sync pdl_trigger set_max_nreg sync_warp wait_wgmma warpgroup_arrive")
    | _ops("tl", "warpgroup_commit_batch warpgroup_wait")
)
#: Attributes of a kernel's body that say how blocks are run, and not what they compute.
HINT_ATTRS = frozenset(("threadblock_swizzle_pattern", "tl.min_blocks_per_sm"))
#: What takes an element for the place that it is at.
POINTERS = frozenset(("tl.access_ptr", "tirx.address_of", "tirx.tvm_access_ptr"))
#: What leaves a loop, an iteration or the kernel: what stands behind or before it in the loop may not run.
LEAVES_ITERATION = frozenset(("tirx.continue_loop",))
LEAVES_KERNEL = frozenset(("tirx.ret", "tirx.thread_return"))
_BREAKS = frozenset(("tl.loop_break", "tirx.break_loop"))
_LEAVES_LOOP = LEAVES_ITERATION | _BREAKS
_WRITES = 2  # the bit in the access modes of tl.region and tl.access_ptr


def is_hint(stmt: tirx.Stmt) -> bool:
    """Whether the statement says how the blocks of what it stands around are run, and nothing of what they compute."""
    return isinstance(stmt, tirx.AttrStmt) and stmt.attr_key in HINT_ATTRS


def side_effect(stmt: tirx.Stmt) -> str | None:
    """The call with an effect in the expressions of a store, a binding, a condition or a loop's bounds; None without
    one.

    Values that come through pointers count as such: what is read is more than the element that the pointer names."""
    for expr in _expressions(stmt):
        for call in nodes(expr, tirx.Call):
            if not isinstance(call.op, ir.Op):
                return str(call.op)
            if call.op.name not in INTRINSICS:
                return call.op.name
    return None


def leaves_kernel(stmt: tirx.Stmt) -> bool:
    """Whether there is a return in a statement."""
    return any(name in LEAVES_KERNEL for name in _op_names(stmt))


def leaves_loop(loop: tirx.For | tirx.While) -> bool:
    """Whether iterations of the loop, or what is left of one, may be skipped."""
    if not any(name in _LEAVES_LOOP for name in _op_names(loop.body)):
        return False
    return any(name in _LEAVES_LOOP for name in _op_names(_without_loops(loop.body)))


def is_break(stmt: tirx.Stmt) -> bool:
    """Whether the statement leaves the loop around it for good."""
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in _BREAKS


def break_conditions(loop: tirx.For | tirx.While) -> list[tirx.PrimExpr]:
    """The conditions under which a loop is left for good, of what it loads itself."""
    bound = {bind.var: bind.value for bind in nodes(loop.body, tirx.Bind)}
    own = nodes(_without_loops(loop.body), tirx.IfThenElse)
    found = [branch.condition for branch in own if any(map(is_break, nodes(branch, tirx.Evaluate)))]
    for _ in bound:
        found = [tirx.stmt_functor.substitute(condition, bound) for condition in found]
    return found


def _without_loops(body: tirx.Stmt) -> tirx.Stmt:
    def hide(node: tirx.Stmt) -> tirx.Stmt | None:
        return tirx.Evaluate(0)

    return tirx.stmt_functor.ir_transform(body, hide, None, ["tirx.For", "tirx.While"])


def _op_names(stmt: tirx.Stmt) -> list[str]:
    return [call.op.name for call in nodes(stmt, tirx.Call) if isinstance(call.op, ir.Op)]


def written(stmt: tirx.Stmt) -> tuple[tirx.Buffer, ...]:
    """The buffers that a statement of any kind may store to: by stores, or because a call gets a pointer or a
    region."""
    found: list[tirx.Buffer] = []
    for node in nodes(stmt, tirx.BufferStore, tirx.Call):
        if isinstance(node, tirx.BufferStore):
            found.append(node.buffer)
        elif isinstance(node.op, ir.Op) and node.args:
            target = node.args[0]
            if isinstance(target, tirx.BufferLoad) and _may_write(node):
                found.append(target.buffer)
    return tuple(found)


def pointers(stmt: tirx.Stmt) -> set[tirx.Var]:
    """The variables that calls in the statement get as pointers: all that they point to may be read and written."""
    args = [arg for call in nodes(stmt, tirx.Call) for arg in call.args]
    return {arg for arg in args if isinstance(arg, tirx.Var) and arg.dtype == "handle"}


def buffers_of(stmt: tirx.Stmt) -> tuple[tirx.Buffer, ...]:
    """The buffers that a statement itself names: of a loop or a branch those in its bounds or its condition."""
    exprs = [stmt.value] if isinstance(stmt, tirx.Evaluate) else _expressions(stmt)
    stored = [stmt.buffer] if isinstance(stmt, tirx.BufferStore) else []
    return (*stored, *(load.buffer for expr in exprs for load in loads(expr)))


def _may_write(call: tirx.Call) -> bool:
    """Whether a call that takes an element as a place may write there."""
    modes = {"tl.region": 1, "tl.access_ptr": 2}
    if call.op.name in modes:
        mode = call.args[modes[call.op.name]]
        return not isinstance(mode, tirx.IntImm) or bool(int(mode) & _WRITES)
    return call.op.name == "tirx.address_of"


def _expressions(stmt: tirx.Stmt) -> list[tirx.PrimExpr]:
    if isinstance(stmt, tirx.BufferStore):
        return [stmt.value, *stmt.indices]
    if isinstance(stmt, tirx.Bind):
        return [stmt.value]
    if isinstance(stmt, (tirx.IfThenElse, tirx.While)):
        return [stmt.condition]
    return [stmt.min, stmt.extent] if isinstance(stmt, tirx.For) else []


def op_name(expr: object) -> str:
    """The name of the operator that `expr` calls, or "" if it is no such call."""
    return expr.op.name if isinstance(expr, tirx.Call) and isinstance(expr.op, ir.Op) else ""


def changes_nothing(stmt: tirx.Stmt) -> bool:
    """Whether the statement is a barrier or a hint: the same values are computed without it."""
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in NO_EFFECT


#: Where a thread index that an author did not name comes from, and the way out.
FROM = "from T.get_thread_binding or the like"
FIX = 'write it with T.Parallel, T.copy and T.reduce_*, or use target="cuda"'


def refuse_thread_groups(func: tirx.PrimFunc, target: str) -> None:
    """Refuse a kernel whose author gives groups of threads different work."""
    found = [attr for attr in nodes(func.body, tirx.AttrStmt) if attr.attr_key == "warp_specialize"]
    if found:
        refuse(
            f"`with T.ws(...)` gives groups of threads different work ({len(found)} times), by their thread index",
            where=f"kernel {function_name(func)!r}, target {target!r}",
            why="a block of the grid runs as one thread there",
            fix="leave that to TileLang: T.Pipelined with copies and T.gemm in it, without T.ws; or use target='cuda'",
        )
