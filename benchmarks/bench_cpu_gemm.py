"""What re-targeted kernels reach on one core: matmul by block and dtype, by the own micro-kernel and by BLAS, next to
torch; and the cost of a call.

python -m benchmarks.bench_cpu_gemm
"""

from __future__ import annotations

import os
import time

import tilelang.language as T
import torch
from tilelang import tvm

from kernels.matmul import matmul
from mesh_tensor import MeshTensorError
from mesh_tensor.targets.cpu.blas import VARIABLE
from mesh_tensor.targets.cpu.kernel import CpuKernel, compile_for_cpu

from ._timing import Row, header, interleaved, median_ms, row, seconds, table, verdicts

SIZES = (512, 1024, 2048)
BLOCKS = ((64, 64, 64), (128, 128, 128), (256, 256, 256), (512, 256, 256))
BEST_BLOCK = (512, 256, 256)
LEAST_SPEED = {"own": 0.7, "blas": 0.9}
DTYPES = (("float16", "float32"), ("bfloat16", "float32"), ("int8", "int32"))


def of_product(size: int, who: str) -> Row:
    """float32, the blocks multiplied by `who`, beside torch."""
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    try:
        kernel = _compiled(_matmul(size, BEST_BLOCK, "float32", "float32"), who)
    except MeshTensorError as error:
        return Row(f"matmul {size}³ float32", who, "torch", note=str(error).splitlines()[0])
    times = interleaved({who: lambda: kernel(a, b, c), "torch": lambda: torch.mm(a, b, out=c)}, rounds=11)
    return row(f"matmul {size}³ float32", times, who, "torch", must=1 / LEAST_SPEED[who])


def of_narrow_product(dtype: str) -> Row:
    """16-bit inputs and result, summed in float32, beside the same in float32."""
    size, runs = 1024, {}
    for name in (dtype, "float32"):
        a, b = (torch.randn(size, size).to(getattr(torch, name)) for _ in range(2))
        kernel = compile_for_cpu(matmul(size, size, size, *BEST_BLOCK, dtype=name, accum_dtype="float32"))
        tensors = a, b, torch.empty_like(a)
        runs[name] = lambda kernel=kernel, tensors=tensors: kernel(*tensors)
    return row(f"matmul {size}³", interleaved(runs), dtype, "float32", must=2.0)


def rows() -> list[Row]:
    """Everything that has to be as good as something, with one thread."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        products = [of_product(size, who) for size in (1024, 2048) for who in LEAST_SPEED]
        return [*products, *(of_narrow_product(dtype) for dtype in ("float16", "bfloat16"))]
    finally:
        torch.set_num_threads(threads)


def by_block(size: int) -> str:
    """float32, two rows for each size of block."""
    a, b, c = torch.randn(size, size), torch.randn(size, size), torch.empty(size, size)
    runs = {"torch": lambda: torch.mm(a, b, out=c)}
    for block in BLOCKS:
        for who in LEAST_SPEED:
            kernel = _compiled(_matmul(size, block, "float32", "float32"), who)
            runs[f"{' x '.join(map(str, block))}, {who}"] = lambda kernel=kernel: kernel(a, b, c)
    return _rates(f"float32, {size} x {size} x {size}", size, runs)


def by_dtype(size: int) -> str:
    """Blocks of 128 x 128 x 64, one row for each dtype."""
    runs = {}
    for dtype, accum_dtype in DTYPES:
        a, b = ((torch.randn(size, size) * 10).to(getattr(torch, dtype)) for _ in range(2))
        c = torch.empty(size, size, dtype=getattr(torch, accum_dtype))
        kernel = compile_for_cpu(_matmul(size, (128, 128, 64), dtype, accum_dtype))
        runs[f"{dtype} -> {accum_dtype}"] = lambda kernel=kernel, args=(a, b, c): kernel(*args)
    return _rates(f"128 x 128 x 64 blocks, {size} x {size} x {size}", size, runs)


def of_a_call() -> str:
    """A kernel that does next to nothing: compiled, loaded again, called."""

    @T.prim_func
    def tiny_kernel(X: T.Tensor((4,)), n: T.int32):
        with T.Kernel(1, threads=32):
            for i in T.Parallel(4):
                X[i] = T.cast(n, "float32")

    x = torch.zeros(4)
    kernel = compile_for_cpu(tiny_kernel)
    start = time.perf_counter()
    compile_for_cpu(tiny_kernel)
    load = time.perf_counter() - start
    rows = [
        ("load a compiled kernel", f"{load * 1e6:.0f}"),
        ("call a kernel", f"{seconds(lambda: kernel(x, 3), 100000) * 1e6:.1f}"),
    ]
    return "## Around a kernel\n\n" + table(["what", "µs"], rows)


def _matmul(size: int, block: tuple[int, int, int], dtype: str, accum_dtype: str) -> tvm.tirx.PrimFunc:
    block_M, block_N, block_K = block
    options = {"block_M": block_M, "block_N": block_N, "block_K": block_K}
    return matmul(size, size, size, **options, dtype=dtype, accum_dtype=accum_dtype, out_dtype=accum_dtype)


def _compiled(func: tvm.tirx.PrimFunc, who: str) -> CpuKernel:
    """`func` with its blocks multiplied by `who`."""
    before = os.environ.get(VARIABLE, "")
    os.environ[VARIABLE] = who
    try:
        return compile_for_cpu(func)
    finally:
        os.environ[VARIABLE] = before


def _rates(title: str, size: int, runs: dict) -> str:
    times = interleaved(runs, rounds=9)
    rows = [(name, f"{median_ms(values):.2f}", f"{2e-9 * size**3 / min(values):.0f}") for name, values in times.items()]
    return f"## {title}\n\n" + table(["", "median ms", "best GFLOP/s"], rows)


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(header("CPU kernels on one core"))
    for size in SIZES:
        print(by_block(size))
    print(by_dtype(1024))
    print(verdicts(rows()))
    print(of_a_call())
