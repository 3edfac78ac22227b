"""Mistakes that people make in kernels: what they are told names what they wrote."""

import pytest
import tilelang
import tilelang.language as T
import torch
from tilelang.cpu.op.gemm.gemm_scalar import GEMM_INST_SCALAR, GemmScalar
from tilelang.tileop.gemm.registry import register_gemm_impl

import mesh_tensor as mt
from kernels.matmul import matmul
from tests.refusals import refusal

ROWS = {"A": {"x": 0}, "B": {"x": 0}}


@T.prim_func
def warp_specialised(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64, 32), "float32")):
    with T.Kernel(2, threads=256) as bx:
        s = T.alloc_shared((32, 32), "float32")
        with T.ws(0):
            T.copy(A[bx * 32, 0], s)
        with T.ws(1):
            T.copy(s, B[bx * 32, 0])


@T.prim_func
def by_thread(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64, 32), "float32")):
    with T.Kernel(64, threads=32) as bx:
        column = T.get_thread_binding()
        B[bx, column] = A[bx, column]


def over_tiles(body):
    """A kernel over tiles whose A and B lie as rows over x, and D as it says."""
    fns = mt.mesh_tensor_functions({"x": 2})
    info, shape = fns["init_mesh_tensor_info"], fns["get_tile_shape"]
    return body(fns["annotate_mesh_tensor_info"], info, shape)


def transposing(annotate, info, shape):
    @T.prim_func
    def other_dim(A: T.Tensor((64, 64), "float32"), B: T.Tensor((64, 64), "float32")):
        annotate({A: info({"x": 0}), B: info({"x": 1})})
        with T.Kernel(shape(A)[0]) as bx:
            for j in T.Parallel(shape(B)[1]):
                B[bx, j] = A[bx, j]

    return other_dim


def run(func, target):
    kernel = mt.compile(mt.annotate(func, {"x": 2}, ROWS), target=target)
    return kernel(torch.zeros(64, 32))


@pytest.mark.parametrize("target", ["c", "interpret"])
def test_groups_of_threads(target):
    """The condition on 'tx' is TileLang's; T.ws is what the author wrote."""
    message = refusal(run, warp_specialised, target)
    assert "`with T.ws(...)` gives groups of threads different work (2 times)" in message
    assert f"where: kernel 'warp_specialised', target '{target}'" in message
    assert "why: a block of the grid runs as one thread there" in message
    assert "fix: leave that to TileLang: T.Pipelined with copies and T.gemm in it, without T.ws" in message
    assert "'tx'" not in message


@pytest.mark.parametrize("target", ["c", "interpret"])
def test_the_number_of_a_thread(target):
    message = refusal(run, by_thread, target)
    assert "the thread index 'column', from T.get_thread_binding or the like," in message
    assert "fix: write it with T.Parallel, T.copy and T.reduce_*" in message


@pytest.mark.parametrize("view", ["auto", "local"])
def test_a_buffer_that_a_kernel_over_tiles_uses_whole(view):
    message = refusal(mt.lower, over_tiles(transposing), view=view)
    assert (
        "buffer 'A' is annotated 'S[0]', but the kernel uses it as 'R': dim 0 is needed whole on axis 'x': " in message
    )
    assert "the store to B keeps one of many coordinates' values" in message
    assert "where: kernel 'other_dim', written over tiles" in message


def test_fragments_are_for_mesh_tensors_own_target():
    flags = mt.register_cpu_gemm()
    try:
        message = refusal(
            tilelang.compile,
            matmul(64, 64, 64, 32, 32, 32),
            target="c",
            execution_backend="cython",
            compile_flags=flags,
        )
    finally:
        is_cpu = lambda target: target.kind.name in ("c", "llvm")  # noqa: E731
        register_gemm_impl("cpu.scalar", GEMM_INST_SCALAR, is_cpu, GemmScalar)
    assert "TileLang's target 'c' has no layout for fragments: 'C_local'" in message
    assert "where: T.gemm with mt.register_cpu_gemm" in message
    assert "allocate them with T.alloc_local" in message
    assert "compile the kernel as it is with mt.compile" in message


def test_sizes_below_zero():
    """Of a window that is larger than its image, say."""
    rows = 6 - 8

    @T.prim_func
    def copied(A: T.Tensor((rows, 4), "float32"), B: T.Tensor((rows, 4), "float32")):
        with T.Kernel(1):
            for i, j in T.Parallel(rows, 4):
                B[i, j] = A[i, j]

    with pytest.raises(mt.MeshTensorError, match="no size is below 0") as error:
        mt.annotate(copied, {"x": 2}, ROWS)
    assert "parameter 'A' has the shape [-2, 4]" in str(error.value)
    assert "parameter 'B'" in str(error.value)


def test_a_coordinate_of_the_other_side():
    fns = mt.mesh_tensor_functions({"x": 2})
    info = fns["init_mesh_tensor_info"](sharding={"x": 0}, block_shape=(16, 8))
    with pytest.raises(mt.MeshTensorError) as error:

        @T.prim_func
        def copied(A: T.Tensor((64, 8), "float32"), B: T.Tensor((64, 8), "float32")):
            fns["annotate_mesh_tensor_info"]({A: info, B: info})
            with T.Kernel(4) as bx:
                block = T.alloc_fragment((16, 8), "float32")
                fns["mesh_tensor_copy"](A, block, dst_coord=(bx, 0))
                fns["mesh_tensor_copy"](block, B, dst_coord=(bx, 0))

    assert "`dst_coord` is for 'block', which is not annotated; 'A' is" in str(error.value)
    assert "fix: give `src_coord`, the block of 'A'; or annotate 'block'" in str(error.value)


def test_models_are_no_kernels():
    linear = torch.nn.Linear(2, 2)
    program = torch.export.export(linear, (torch.ones(1, 2),))
    for given in (linear, program, mt.from_torch(program)):
        with pytest.raises(mt.MeshTensorError, match="is no kernel") as error:
            mt.annotate(given, {"x": 2}, {})
        assert "mt.distribute_module(mt.from_torch(torch.export.export(model, inputs)), mesh, ...)" in str(error.value)
