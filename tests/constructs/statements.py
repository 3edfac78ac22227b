"""Statements: loops, branches, assertions, prints, hints."""

from __future__ import annotations

from typing import Any

import numpy as np
import tilelang.language as T

from .row import Example, Row, matrix

X = matrix()
SEVENS = np.full_like(X, 7)


def _loops() -> Any:
    @T.prim_func
    def loops(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i in T.serial(2):
                for k in T.unroll(2):
                    for j in T.vectorized(4):
                        Y[bx * 4 + 2 * i + k, j] = X[bx * 4 + 2 * i + k, j] + 1.0

    return loops


def _grid_loop() -> Any:
    @T.prim_func
    def grid(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i, j in T.grid(4, 4):
                Y[bx * 4 + i, j] = X[bx * 4 + i, j] + 1.0

    return grid


def _pipelined() -> Any:
    @T.prim_func
    def pipelined(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            x = T.alloc_shared((1, 4), "float32")
            for i in T.Pipelined(4, num_stages=2):
                T.copy(X[bx * 4 + i, 0], x)
                for k, j in T.Parallel(1, 4):
                    Y[bx * 4 + i, j] = x[k, j] + 1.0

    return pipelined


def _persistent() -> Any:
    @T.prim_func
    def persistent(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as block:
            for i, _ in T.Persistent([12, 1], 3, block):
                for j in T.Parallel(4):
                    Y[i, j] = X[i, j] + 1.0

    return persistent


def _strided() -> Any:
    @T.prim_func
    def strided(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(0, 12, 3):
                for j in T.Parallel(4):
                    Y[i, j] = X[i, j] + 1.0

    return strided


def _while() -> Any:
    @T.prim_func
    def counted(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            i = T.alloc_var("int32", init=0)
            while i < 4:
                Y[bx, i] = X[bx, i] + 1.0
                i += 1

    return counted


def _broken() -> Any:
    @T.prim_func
    def broken(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(12):
                if i == 8:
                    T.loop_break()
                for j in T.Parallel(4):
                    Y[i, j] = X[i, j] + 1.0

    return broken


def _continued() -> Any:
    @T.prim_func
    def continued(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(1, threads=32):
            for i in T.serial(12):
                if X[i, 0] > 0.0:
                    T.continue_loop()
                for j in T.Parallel(4):
                    Y[i, j] = X[i, j] + 1.0

    return continued


def _branches() -> Any:
    @T.prim_func
    def branches(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(3, threads=32) as bx:
            for i, j in T.Parallel(4, 4):
                if X[bx * 4 + i, j] > 0.0:
                    Y[bx * 4 + i, j] = X[bx * 4 + i, j]
                elif bx * 4 + i > 5:
                    Y[bx * 4 + i, j] = -1.0
                else:
                    Y[bx * 4 + i, j] = -2.0

    return branches


def _hints() -> Any:
    @T.prim_func
    def hints(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            T.use_swizzle(4)
            T.annotate_min_blocks_per_sm(2)
            T.annotate_l2_hit_ratio({X: 0.5})
            T.annotate_restrict_buffers(X)
            T.assume(bx < 12)
            T.disable_warp_group_reg_alloc()
            T.set_max_nreg(24, 0)
            T.annotate_producer_reg_dealloc(24)
            T.annotate_consumer_reg_alloc(240)
            T.pdl_sync()
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j] + 1.0
            T.sync_threads()
            T.sync_warp()
            T.fence_proxy_async()
            T.warpgroup_arrive()
            T.warpgroup_commit_batch()
            T.warpgroup_wait(0)
            T.wait_wgmma(0)
            T.ptx_commit_group()
            T.ptx_wait_group(0)
            T.pdl_trigger()

    return hints


def _reports() -> Any:
    @T.prim_func
    def reports(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            T.print(bx, msg="block")
            T.print(X[bx, 0])
            T.device_assert(X[bx, 0] < 100.0, "large")
            T.Assert(X[bx, 1] < 100.0, "large")
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j] + 1.0

    return reports


def _left() -> Any:
    @T.prim_func
    def left(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            if bx > 5:
                T.thread_return()
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j]

    return left


def _left_in_a_loop() -> Any:
    @T.prim_func
    def left(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.serial(4):
                if X[bx, j] > 5.0:
                    T.thread_return()
                Y[bx, j] = X[bx, j]

    return left


def _two_kernels() -> Any:
    @T.prim_func
    def two(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = X[bx, j] + 1.0
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = Y[bx, j] * 2.0

    return two


def _after_all_programs() -> Any:
    @T.prim_func
    def waiting(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(6, threads=32) as bx:
            row = T.alloc_fragment((4,), "float32")
            for i, j in T.Parallel(2, 4):
                Y[bx * 2 + i, j] = 2.0 * X[11 - bx * 2 - i, j]
            T.sync_grid()
            for half in T.serial(2):
                T.copy(Y[half * 6 + bx, 0], row)
                for j in T.Parallel(4):
                    row[j] = row[j] + 1.0
                T.copy(row, Y[half * 6 + bx, 0])

    return waiting


def _per_thread() -> Any:
    @T.prim_func
    def per_thread(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=4) as bx:
            tx = T.get_thread_binding(0)
            Y[bx, tx] = X[bx, tx]

    return per_thread


def _launched_inside() -> Any:
    @T.prim_func
    def launched_inside(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=4) as bx, T.launch_thread("blockIdx.z", 3):
            for j in T.serial(4):
                T.atomic_add(Y[bx, j], X[bx, j])

    return launched_inside


def _vectors() -> Any:
    @T.prim_func
    def vectors(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            Y[bx, T.Ramp(0, 1, 4)] = X[bx, T.Ramp(0, 1, 4)]

    return vectors


def _plus_one(x: np.ndarray, *_: np.ndarray) -> np.ndarray:
    return x + 1


def _every_third(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    return np.where(np.arange(12)[:, None] % 3 == 0, x + 1, y)


ROWS_OF_STATEMENTS = (
    Row(
        "the kernel and its loops",
        "understood",
        "grid loops, serial, unrolled, vectorized, parallel, pipelined and persistent ones",
        names="Kernel KernelLaunchFrame get_block_binding get_block_bindings get_block_extent get_block_extents"
        " get_thread_extent get_thread_extents serial Serial unroll Unroll vectorized Vectorized Parallel parallel grid"
        " Pipelined Persistent thread_binding prim_func macro inline",
        ops="tl.launch_thread_idx tirx.ignore_loop_partition",
        nodes="For SeqStmt Stmt SBlock SBlockRealize AttrStmt Bind",
        examples=(
            Example("serial, unrolled, vectorized", _loops, (X,), _plus_one),
            Example("T.grid", _grid_loop, (X,), _plus_one),
            Example("pipelined", _pipelined, (X,), _plus_one),
            Example("persistent", _persistent, (X,), _plus_one),
        ),
    ),
    Row(
        "loops with a step, `while`, `break`, `continue`, a return before the rest of a program",
        "understood",
        "every device runs them for what it has; a dim is whole if a loop that may be left walks it, or it says when",
        names="While loop_break break_loop continue_loop",
        ops="tl.loop_break tirx.break_loop tirx.continue_loop",
        nodes="While",
        examples=(
            Example("step", _strided, (X, SEVENS), _every_third),
            Example("while", _while, (X, SEVENS), _plus_one),
            Example("break", _broken, (X, SEVENS), lambda x, y: np.concatenate([x[:8] + 1, y[8:]])),
            Example("continue", _continued, (X, SEVENS), lambda x, y: np.where(x[:, :1] > 0, y, x + 1)),
            Example("return", _left, (X, SEVENS), lambda x, y: np.concatenate([x[:6], y[6:]])),
        ),
    ),
    Row(
        "branches, stores, evaluated expressions",
        "understood",
        "conditions are at global positions",
        names="If Then Else evaluate buffer_store",
        nodes="IfThenElse BufferStore Evaluate",
        examples=(
            Example(
                "branches",
                _branches,
                (X,),
                lambda x: np.where(x > 0, x, np.where(np.arange(12)[:, None] > 5, np.float32(-1), np.float32(-2))),
            ),
        ),
    ),
    Row(
        "hints and barriers inside a program",
        "understood",
        "they change nothing: one list, `tir.effects.NO_EFFECT`, for the analysis and every target of a CPU",
        names="assume sync_threads sync_warp use_swizzle annotate_min_blocks_per_sm annotate_l2_hit_ratio set_max_nreg"
        " inc_max_nreg dec_max_nreg no_set_max_nreg disable_warp_group_reg_alloc annotate_producer_reg_dealloc"
        " annotate_consumer_reg_alloc annotate_restrict_buffers fence_proxy_async pdl_sync pdl_trigger wait_wgmma"
        " warpgroup_arrive warpgroup_commit_batch warpgroup_wait ptx_commit_group ptx_wait_group tvm_storage_sync"
        " annotate_layout annotate_ws_pipeline_depth annotate_ws_schedule ws_op attr sblock_attr",
        ops="tirx.assume tirx.tvm_storage_sync tirx.ptx_commit_group tirx.ptx_wait_group tl.annotate_*_reg_*"
        " tl.conflict_hint tl.fence_proxy_async tl.no_set_max_nreg tl.pdl_* tl.set_max_nreg tl.sync_warp tl.wait_wgmma"
        " tl.warpgroup_arrive tl.warpgroup_commit_batch tl.warpgroup_wait tirx.tvm_tuple",
        examples=(Example("hints", _hints, (X,), _plus_one),),
    ),
    Row(
        "`T.print`, `T.device_assert`, `T.Assert`",
        "understood",
        "a print changes neither plan nor results, and names its device; an assertion that fails raises",
        names="print device_assert Assert",
        ops="tl.device_assert tl.device_assert_with_msg",
        nodes="AssertStmt",
        examples=(Example("reports", _reports, (X,), _plus_one),),
    ),
    Row(
        "leaving a program in a loop",
        "refused",
        "T.thread_return can't run on a CPU",
        names="thread_return ret",
        ops="tirx.thread_return tirx.ret",
        examples=(Example("thread_return", _left_in_a_loop, (X, SEVENS), targets=("c",)),),
    ),
    Row(
        "several kernels in one function",
        "understood",
        "they run in order; what one leaves stays where it lies for the next, `alloc_global` between them too",
        examples=(Example("two kernels", _two_kernels, (X,), lambda x: 2 * x + 2),),
    ),
    Row(
        "barriers of the whole grid",
        "understood",
        "at a kernel's outermost level, where all that is used on chip after one is filled there: what stands before"
        " and after are several kernels",
        names="sync_grid",
        ops="tl.sync_grid",
        examples=(Example("another program's row", _after_all_programs, (X,), lambda x: 2 * x[::-1] + 1),),
    ),
    Row(
        "thread indices",
        "refused",
        "'tx'",
        names="get_thread_binding get_thread_bindings env_thread",
        examples=(Example("per thread", _per_thread, (X, SEVENS)),),
    ),
    Row(
        "threads and programs that are launched inside of a program",
        "refused",
        "T.launch_thread inside of a program",
        names="launch_thread",
        examples=(Example("nobody asks which it is", _launched_inside, (X, SEVENS)),),
    ),
    Row(
        "vectors",
        "refused",
        "Ramp",
        names="Ramp Broadcast ramp broadcast Shuffle vectorcombine vectorhigh vectorlow vscale extract_lane abs2 add2"
        " fma2 max2 min2 mul2 sub2 get_active_lane_mask",
        ops="tirx.vector* tirx.vscale tirx.get_active_lane_mask tl.abs2 tl.add2 tl.fma2 tl.max2* tl.min2* tl.mul2"
        " tl.sub2 tl.pack_b*",
        nodes="Ramp Broadcast Shuffle",
        examples=(Example("vectors", _vectors, (X, SEVENS), targets=("c",)),),
    ),
)
