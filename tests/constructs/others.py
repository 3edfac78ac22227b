"""What is refused by name because it asks for hardware or a runtime, and what no kernel holds.

Most refusals in this file have no example: `test_refusals.py` puts every operator of theirs into a kernel."""

from __future__ import annotations

from typing import Any

import tilelang.language as T

from .row import Example, Row, matrix

_HARDWARE = "can't run on a CPU"


def _pointer() -> Any:
    @T.prim_func
    def through(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(12, threads=32) as bx:
            for j in T.Parallel(4):
                Y[bx, j] = T.call_extern("float32", "__ldcg", T.address_of(X[bx, j]))

    return through


def _whole_pointer() -> Any:
    @T.prim_func
    def handed(X: T.Tensor((12, 4), "float32"), Y: T.Tensor((12, 4), "float32")):
        with T.Kernel(1, threads=32):
            T.call_extern("handle", "copy_all", X.data, Y.data)
            T.call_extern("handle", "copy_all", X.access_ptr("r"), Y.access_ptr("w"))

    return handed


ROWS_OF_OTHERS = (
    Row(
        "warps, lanes, votes, shuffles",
        "refused",
        _HARDWARE,
        names="get_lane_idx get_warp_idx get_warp_idx_sync get_warp_group_idx shuffle_elect shfl_* activemask ballot"
        " ballot_sync any_sync all_sync match_any_sync match_all_sync warp_reduce_* syncthreads_and syncthreads_or"
        " syncthreads_count named_barrier_arrive tvm_warp_* tvm_thread_allreduce warpgroup_fence_operand ws"
        " WarpSpecialize WarpSpecializeFrame",
        ops="tl.get_lane_idx tl.get_warp_* tl.tl_shuffle_elect tl.shfl_* tl.activemask tl.ballot* tl.any_sync"
        " tl.all_sync tl.match_* tl.warp_reduce_* tl.syncthreads_* tl.named_barrier_arrive tirx.tvm_warp_*"
        " tirx.tvm_thread_allreduce tirx.cuda.* tirx.hip.* tirx.metal.* tirx.webgpu.* tl.warpgroup_fence_operand"
        " tl.mvb_stage_index",
    ),
    Row(
        "clusters",
        "refused",
        _HARDWARE,
        names="ClusterKernel get_cluster_* cluster_* block_rank_in_cluster clc_* alloc_cluster_barrier",
        ops="tl.cluster_* tl.block_rank_in_cluster tl.clc_* tl.ptx_cluster_store",
    ),
    Row(
        "barriers between threads, asynchronous copies of one's own",
        "refused",
        _HARDWARE,
        names="alloc_barrier create_barriers mbarrier_* barrier_arrive barrier_wait cp_async_barrier_noinc"
        " ptx_arrive_* ptx_init_barrier_thread_count ptx_wait_barrier ptx_cp_async* ptx_fence_barrier_init tma_load"
        " tma_load_2sm tma_store_* create_tma_descriptor",
        ops="tirx.create_barriers tirx.ptx_*barrier* tirx.ptx_cp_async* tl.mbarrier_* tl.ptx_arrive_cluster_barrier"
        " tl.ptx_cp_async* tl.ptx_fence_barrier_init tl.tma_load* tl.tma_store* tl.create_tma_*"
        " tl.prefetch_tma_descriptor tl.ptx_st_bulk_shared tirx.dma_*",
    ),
    Row(
        "instructions of tensor cores and their memory",
        "refused",
        _HARDWARE,
        names="deallocate_tmem alloc_descriptor alloc_tcgen05_* alloc_wgmma_desc tcgen05_gemm_* tcgen05_mma_*"
        " tcgen05_*_sync tcgen05_cp_* tcgen05_sf_* wgmma_gemm_sp ptx_mma* ptx_wgmma_* ptx_tcgen05_* ptx_ldmatrix"
        " mma_fill mma_store mma_gemm_blockscaled gemm_blockscaled gemm_sp initialize_*_descriptor"
        " increase_descriptor_offset tvm_bmma_sync tvm_fill_fragment tvm_load_matrix_sync tvm_mma_sync"
        " tvm_store_matrix_sync",
        ops="tl.deallocate_tmem tl.tcgen05_* tl.ptx_tcgen05_* tl.ptx_wgmma_* tl.ptx_mma_* tl.ptx_ldmatrix"
        " tl.ptx_stmatrix tl.ptx_*_tensor_memory tl.initialize_*_descriptor tl.increase_descriptor_offset"
        " tl.tileop.gemm_* tl.tileop.wgmma_gemm_sp tl.tileop.tcgen05_gemm_* tirx.mma_* tirx.ptx_mma* tirx.ptx_ldmatrix"
        " tirx.tvm_*mma_sync tirx.tvm_fill_fragment tirx.tvm_*_matrix_sync tl.tvm_mfma* tl.tvm_rdna_*"
        " tl.cooperative_tensor_* tirx.*simdgroup* tl.ds_read_*",
    ),
    Row(
        "loads and stores of several elements, and of other memory",
        "refused",
        _HARDWARE,
        names="ldg32 ldg64 ldg128 ldg256 lds32 lds64 lds128 stg32 stg64 stg128 stg256 sts32 sts64 sts128",
        ops="tl.ldg* tl.lds* tl.stg* tl.sts* tirx.ptx_ldg32 tirx.texture2d_* tirx.prefetch",
    ),
    Row(
        "pointers",
        "refused",
        "call_extern",
        names="access_ptr address_of tvm_access_ptr handle_add_byte_offset isnullptr",
        ops="tirx.address_of tirx.tvm_access_ptr tirx.handle_add_byte_offset tirx.isnullptr",
        examples=(Example("of an element", _pointer, (matrix(), matrix())),),
    ),
    Row(
        "addresses of whole tensors",
        "refused",
        "is used by itself",
        examples=(Example("of a tensor", _whole_pointer, (matrix(), matrix())),),
    ),
    Row(
        "random numbers, functions of integers and of packed ones",
        "refused",
        _HARDWARE,
        names="rng_init rng_rand rng_rand_float dp4a q_multiply_shift q_multiply_shift_per_axis fmul __ffs __fns",
        ops="tl.rng_* tirx.dp4a tirx.q_multiply_* tl.fmul tl.__ffs tl.__fns",
    ),
    Row(
        "calls of other functions and of the runtime",
        "refused",
        _HARDWARE,
        names="call_* tvm_call_* tvm_stack_* tvm_struct_* tvm_throw_last_error tvm_tuple TVMBackend* anylist_*"
        " lookup_param undef type_annotation start_profile_intrinsic end_profile_intrinsic bind let Let iter_var"
        " comm_reducer CommReducer Reduce ProducerLoad CUDASourceCodeKernel import_source target tvm_thread_invariant"
        " ignore_loop_partition",
        ops="tirx.call_* tirx.tvm_call_* tirx.tvm_stack_* tirx.tvm_struct_* tirx.tvm_throw_last_error"
        " tirx.tvm_context_id tirx.tvm_static_handle tirx.TVMBackend* tirx.anylist_* tirx.lookup_param tirx.undef"
        " tirx.type_annotation tirx.*_profile_intrinsic tirx.nd_mem_alloc_with_scope tl.tvm_ffi_call_with_result",
        nodes="Let Reduce ProducerLoad",
    ),
    Row(
        "other machines",
        "refused",
        _HARDWARE,
        ops="tl.ascend_* tl.simd.* tl.tileop.ascend_copy",
    ),
    Row(
        "helpers of Python that build or describe kernels",
        "not in kernels",
        "they leave nothing in a kernel's TIR, or belong to TileLang's compiler",
        names="Any AnyDType BaseTileScheduler PersistentTileScheduler BufferLoad Call CallEffectKind IterVar JITFunc"
        " Layout Fragment PartialFragment PrimExpr PrimFunc Range Ref StringImm *Emitter *EmitterSM120"
        " *EmitterWithLadderTransform TCGEN05DescriptorParams WGMMADescriptorParams WSID WSInstr WSOpRef WSPipeline"
        " WSRole WSSchedule WSScope WSSync WSSyncKind annotate_compile_flags annotate_pass_configs buffer_var"
        " compute_*_descriptor const dtype get_ldmatrix_offset get_let_value has_let_value get_mma_micro_size"
        " get_swizzle_layout get_tvm_dtype is_f8f6f4_family is_float4* index_map index_to_coordinates"
        " llvm_lookup_intrinsic_id make_*_layout meta_class meta_var axis mma_store_index_map validate_gemm_ab_dtypes",
    ),
)
