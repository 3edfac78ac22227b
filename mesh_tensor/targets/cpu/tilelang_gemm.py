"""The own micro-kernel for those who compile for TileLang's target "c" without mesh_tensor."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from tilelang import language as T
from tilelang.cpu.op.gemm.gemm_scalar import GEMM_INST_SCALAR, GemmScalar
from tilelang.tileop.gemm.registry import register_gemm_impl
from tvm import tirx
from tvm.target import Target

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.tir.memory import strides_of
from mesh_tensor.tir.rewrite import cast

from .build import NO_RED_ZONE

_FOLDER = Path(__file__).parent / "csrc"
_DTYPES = ("float32", "float64")


def register_cpu_gemm() -> list[str]:
    """Make TileLang compute `T.gemm` for target "c" with mesh_tensor's micro-kernel, for blocks that are all float32 or
    all float64; other dtypes stay TileLang's scalar loops.

    It is for kernels that TileLang compiles for "c" at all: accumulators from `T.alloc_local`, blocks from
    `T.alloc_shared(..., scope="shared")`. Kernels as for a GPU, with fragments, are for `mt.compile`, which re-targets
    them; the micro-kernel is in those anyway.

    Returns:
        The flags that such kernels have to be compiled with: `tilelang.compile(..., target="c",
        execution_backend="cython", compile_flags=flags)`. TileLang's cache tells kernels apart by them: that of kernels
        compiled without them knows nothing of the micro-kernel.
    """
    version = hashlib.sha256("".join(path.read_text() for path in sorted(_FOLDER.glob("*.h"))).encode()).hexdigest()
    register_gemm_impl("cpu.scalar", GEMM_INST_SCALAR, lambda target: target.kind.name in ("c", "llvm"), _BlockGemm)
    kept = ["-O2", "-march=native", *NO_RED_ZONE, "-ffp-contract=off"]
    return [*kept, f"-DMT_VERSION={version[:16]}", "-include", str(_FOLDER / "mesh_tensor_tilelang.h")]


class _BlockGemm(GemmScalar):
    def infer_layout(self, target: Target, thread_nums: int) -> dict:
        """None of a fragment, for which TileLang has no layout on a CPU."""
        buffers = [region.buffer for region in (self.ARegion, self.BRegion, self.CRegion)]
        if target.kind.name == "c" and (fragments := [b.name for b in buffers if b.scope() == "local.fragment"]):
            refuse(
                f"TileLang's target 'c' has no layout for fragments: {listing(fragments)}",
                where="T.gemm with mt.register_cpu_gemm",
                fix='allocate them with T.alloc_local, and blocks with T.alloc_shared(..., scope="shared"); or compile '
                "the kernel as it is with mt.compile, which re-targets it for a CPU and has the micro-kernel, too",
            )
        return super().infer_layout(target, thread_nums)

    def lower(self, layout_map: dict, target: Target, *rest: Any) -> tirx.PrimFunc:
        regions = (self.ARegion, self.BRegion, self.CRegion)
        dtype = regions[0].buffer.dtype
        same = all(region.buffer.dtype == dtype for region in regions)
        if target.kind.name != "c" or dtype not in _DTYPES or not same:
            return super().lower(layout_map, target, *rest)
        starts = [tirx.BufferLoad(region.buffer, [part.min for part in region.region]) for region in regions]
        a, b, c = (strides_of(region.buffer)[-2:] for region in regions)
        strides = [*(a[::-1] if self.trans_A else a), *(b[::-1] if self.trans_B else b), *c]
        sizes = [cast(size, "int64") for size in (*map(tirx.IntImm, ["int32"] * 3, (self.M, self.N, self.K)), *strides)]
        clear = cast(self.clear_accum, "int32")
        function = "_".join(["mt_gemm", dtype, dtype, dtype])
        call = tirx.call_extern("void", function, *map(tirx.address_of, starts), *sizes, clear)

        @T.prim_func
        def block_gemm() -> None:
            T.evaluate(call)

        return block_gemm
