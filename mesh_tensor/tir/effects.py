"""What an expression or a statement may do besides computing a value; and functions of elements that TIR calls: one
record each, of all that any part of the compiler has to know about one.

The value at an element needs nothing but the arguments at that element. What is not listed, such as everything that
asks which thread, warp or lane it is, is more than that.
"""

from __future__ import annotations

from dataclasses import dataclass

from tvm import ir, tirx

from mesh_tensor.base.errors import refuse

from .nodes import expressions, function_name, loads, nodes
from .tile_position import CALLED


def _ops(namespace: str, names: str) -> frozenset[str]:
    return frozenset(f"{namespace}.{name}" for name in names.split())


#: Statements that change no value and no statement's running: barriers inside a program, hints to a compiler.
NO_EFFECT = (
    _ops("tirx", "tvm_storage_sync assume ptx_wait_group ptx_commit_group")
    | _ops("tl", "annotate_consumer_reg_alloc annotate_producer_reg_dealloc conflict_hint fence_proxy_async")
    | _ops("tl", "no_set_max_nreg pdl_sync pdl_trigger set_max_nreg sync_warp wait_wgmma warpgroup_arrive")
    | _ops("tl", "warpgroup_commit_batch warpgroup_wait")
)
#: Calls of which a program of the grid sees no more than its own threads, registers and memory do: barriers between
#: its threads, what these exchange, tile operations on the buffers that they name.
OF_A_PROGRAM = (
    _ops("tirx", "ptx_arrive_barrier ptx_arrive_barrier_expect_tx ptx_init_barrier_thread_count ptx_wait_barrier")
    | _ops("tirx", "ptx_ldmatrix ptx_mma tvm_thread_allreduce tvm_warp_activemask tvm_warp_shuffle")
    | _ops("tirx", "tvm_warp_shuffle_down tvm_warp_shuffle_up tvm_warp_shuffle_xor type_annotation")
    | _ops("tl", "mbarrier_expect_tx mbarrier_wait_parity ptx_cp_async_barrier_noinc ptx_ldmatrix ptx_stmatrix region")
    | _ops("tl", "tcgen05_after_thread_sync tcgen05_before_thread_sync tcgen05_mma_arrive")
    | _ops("tl", "activemask all_sync any_sync ballot ballot_sync get_lane_idx get_warp_group_idx get_warp_idx")
    | _ops("tl", "get_warp_idx_sync match_all_sync match_any_sync named_barrier_arrive shfl_down_sync shfl_sync")
    | _ops("tl", "shfl_up_sync shfl_xor_sync syncthreads_and syncthreads_count syncthreads_or tl_shuffle_elect")
    | _ops("tl", "warp_reduce_bitand warp_reduce_bitor warp_reduce_max warp_reduce_min warp_reduce_sum")
    | _ops("tl", "warpgroup_fence_operand")
    | _ops("tl", "atomic_add_elem_op atomic_add_ret_elem_op atomic_max_elem_op atomic_max_ret_elem_op")
    | _ops("tl", "atomic_min_elem_op atomic_min_ret_elem_op")
    | _ops("tl.tileop", "copy cummax cumsum fill gemm gemm_blockscaled gemm_sp reduce transpose")
    | _ops("tl.tileop", "tcgen05_gemm tcgen05_gemm_blockscaled tcgen05_gemm_sp wgmma_gemm wgmma_gemm_sp")
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
    for expr in () if isinstance(stmt, tirx.Evaluate) else expressions(stmt):
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
    if _BREAKS.isdisjoint(_op_names(loop.body)):
        return []
    bound = {bind.var: bind.value for bind in nodes(loop.body, tirx.Bind)}
    own = nodes(_without_loops(loop.body), tirx.IfThenElse)
    left = [(branch, [n for n in nodes(branch, tirx.Evaluate) if is_break(n)]) for branch in own]
    found = [branch.condition for branch, breaks in left if breaks]
    guarded = [n for _, breaks in left for n in breaks]
    always = any(is_break(n) and n not in guarded for n in nodes(_without_loops(loop.body), tirx.Evaluate))
    if always and isinstance(loop, tirx.For):  # in the first iteration, which is no number that could be proved
        found.append(loop.loop_var >= loop.min)
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
    stored = [stmt.buffer] if isinstance(stmt, tirx.BufferStore) else []
    return (*stored, *(load.buffer for expr in expressions(stmt) for load in loads(expr)))


def _may_write(call: tirx.Call) -> bool:
    """Whether a call that takes an element as a place may write there."""
    modes = {"tl.region": 1, "tl.access_ptr": 2}
    if call.op.name in modes:
        mode = call.args[modes[call.op.name]]
        return not isinstance(mode, tirx.IntImm) or bool(int(mode) & _WRITES)
    return call.op.name == "tirx.address_of"


def op_name(expr: object) -> str:
    """The name of the operator that `expr` calls, or "" if it is no such call."""
    return expr.op.name if isinstance(expr, tirx.Call) and isinstance(expr.op, ir.Op) else ""


def chosen(expr: tirx.PrimExpr) -> list[tirx.PrimExpr] | None:
    """The condition of a choice, what it is where that holds, and what elsewhere; None if it is no choice."""
    if isinstance(expr, tirx.Select):
        return [expr.condition, expr.true_value, expr.false_value]
    return list(expr.args) if op_name(expr) == "tirx.if_then_else" else None


def changes_nothing(stmt: tirx.Stmt) -> bool:
    """Whether the statement is a barrier or a hint: the same values are computed without it."""
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) in NO_EFFECT


def stays_in_program(stmt: tirx.Stmt) -> bool:
    """Whether nothing in the statement reaches beyond the program of the grid that runs it, but for the buffers that it
    names."""
    known = (INTRINSICS, NO_EFFECT, OF_A_PROGRAM, POINTERS)
    return all(any(op_name(call) in names for names in known) for call in nodes(stmt, tirx.Call))


def thread_indices(func: tirx.PrimFunc) -> dict[tirx.Var, int]:
    """The thread indices that a kernel binds, each with how many threads it says there are."""
    said = [block.annotations.get("tl.launch_threads", ()) for block in nodes(func.body, tirx.SBlock)]
    counts = next(filter(None, said), ())
    bound = [bind for bind in nodes(func.body, tirx.Bind) if op_name(bind.value) == "tl.launch_thread_idx"]
    at = {bind.var: int(bind.value.args[0]) for bind in bound}
    return {var: int(counts[dim]) for var, dim in at.items() if dim < len(counts)}


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


@dataclass(frozen=True)
class Intrinsic:
    """A function of elements.

    python   what computes it in the interpreter: a function of numpy, of `operator`, or of its own; None without one
    c        the function of `csrc/mesh_tensor_cpu.h`, without `mt_` and the dtype; None where it is spelled otherwise
    rounds   its last argument is a mode of rounding"""

    python: str | None = None
    c: str | None = None
    rounds: bool = False


def _tirx(names: str, intrinsic: Intrinsic | None = None) -> dict[str, Intrinsic]:
    return {f"tirx.{name}": intrinsic or Intrinsic(name, name) for name in names.split()}


def _tl(names: str, intrinsic: Intrinsic) -> dict[str, Intrinsic]:
    return {f"tl.{name}": intrinsic for name in names.split()}


_INVERSE = ("cos", "cosh", "sin", "sinh", "tan", "tan2", "tanh")
_FAST = ("cos", "exp", "exp10", "log", "log10", "log2", "sin", "tan")

INTRINSICS: dict[str, Intrinsic] = {
    **_tirx("ceil copysign cos cosh erf exp exp10 exp2 floor fma fmod hypot isfinite isinf isnan log log10 log1p"),
    **_tirx("log2 nextafter rsqrt sigmoid sin sinh sqrt tan tanh trunc"),
    **{f"tirx.a{name}": Intrinsic(f"arc{name}", f"a{name}") for name in _INVERSE},
    **{f"tl.__{name}": Intrinsic(name, name) for name in _FAST},
    **_tirx("fabs", Intrinsic("abs", "fabs")),
    **_tirx("nearbyint round", Intrinsic("rint", "nearbyint")),
    **_tirx("pow", Intrinsic("power", "pow")),
    **_tirx("ldexp", Intrinsic("ldexp")),
    **_tirx("bitwise_and", Intrinsic("and_")),
    **_tirx("bitwise_or", Intrinsic("or_")),
    **_tirx("bitwise_xor", Intrinsic("xor")),
    **_tirx("bitwise_not", Intrinsic("invert")),
    **_tirx("shift_left", Intrinsic("lshift")),
    **_tirx("shift_right", Intrinsic("rshift")),
    **_tirx("popcount", Intrinsic("popcount")),
    **_tirx("clz", Intrinsic("leading_zeros")),
    **_tirx("likely tvm_thread_invariant", Intrinsic("same")),
    **_tl("__ldg", Intrinsic("same")),
    **_tl("clamp", Intrinsic("clamp")),
    **_tl("pow_of_int", Intrinsic("power_of_int")),
    **_tl("round_ties_away_from_zero", Intrinsic("round_away", "round")),
    **_tl("max_nan", Intrinsic("maximum", "max")),
    **_tl("min_nan", Intrinsic("minimum", "min")),
    **_tl("fma", Intrinsic("fma", "fma")),
    **_tl("fast_rcp", Intrinsic("reciprocal", "rcp")),
    **_tl("ieee_frsqrt", Intrinsic("rsqrt", "rsqrt")),
    **_tl("ieee_fmaf", Intrinsic("fma", "fma", rounds=True)),
    **_tl("ieee_frcp", Intrinsic("reciprocal", "rcp", rounds=True)),
    **_tl("ieee_fsqrt", Intrinsic("sqrt", "sqrt", rounds=True)),
    **_tl("ieee_add", Intrinsic("add", rounds=True)),
    **_tl("ieee_sub", Intrinsic("sub", rounds=True)),
    **_tl("ieee_mul", Intrinsic("mul", rounds=True)),
    **_tl("ieee_fdiv", Intrinsic("truediv", rounds=True)),
    # What nothing but a GPU computes, or each target in its own way
    **_tirx("if_then_else reinterpret large_uint_imm dp4a vectorcombine vectorhigh vectorlow", Intrinsic()),
    **_tirx("q_multiply_shift q_multiply_shift_per_axis", Intrinsic()),
    **_tl("infinity __ffs __fns fmul pack_b16 pack_b8x4 abs2 add2 fma2 max2 max2_nan min2 min2_nan", Intrinsic()),
    **_tl("mul2 sub2", Intrinsic()),
    **dict.fromkeys(CALLED, Intrinsic()),
}
