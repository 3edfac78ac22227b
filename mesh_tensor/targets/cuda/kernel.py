"""Compile a kernel for NVIDIA GPUs with TileLang; without a GPU, as far as its source and binary."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import tilelang
import torch
import tvm_ffi
from tvm import tirx
from tvm.target import Target

from mesh_tensor.base.errors import refuse
from mesh_tensor.tir.reducers import as_reducers
from mesh_tensor.tir.user_reports import without_reports_for_cpus

_SPECIFIC_FROM = 90  # from Hopper on, the instructions that TileLang uses need the variant "a" of an architecture


def compile_for_cuda(func: tirx.PrimFunc) -> Callable[..., None]:
    """A callable on CUDA tensors and numbers in the order of `func`'s parameters, for the current GPU."""
    if not torch.cuda.is_available():
        refuse("target 'cuda' needs a GPU", why="torch finds none", fix="use target='c' or target='interpret'")
    func, target = _for_tilelang(func), _target(_current_arch())
    return _explained(func, lambda: tilelang.compile(func, target=target, execution_backend="tvm_ffi"))


def cuda_source(func: tirx.PrimFunc, arch: str = "sm_80") -> str:
    """The CUDA source of `func` for an architecture such as "sm_80", "sm_90a" or "sm_100a". No GPU is needed."""
    func, target = _for_tilelang(func), _target(arch)
    with target:
        return _explained(func, lambda: tilelang.lower(func, target=target).kernel_source)


def cuda_binary(func: tirx.PrimFunc, arch: str = "sm_80") -> bytes:
    """The machine code of `func` (a cubin), compiled by nvcc. No GPU is needed."""
    if shutil.which("nvcc") is None:
        refuse("no nvcc was found", fix="install the CUDA toolkit, or generate the source alone with cuda_source")
    source, target = cuda_source(func, arch), _target(arch)
    compile_source = tvm_ffi.get_global_func("tilelang_callback_cuda_compile")
    return _explained(func, lambda: bytes(compile_source(source, target)))


def _for_tilelang(func: tirx.PrimFunc) -> tirx.PrimFunc:
    return as_reducers(without_reports_for_cpus(func))


def _target(arch: str) -> Target:
    number = arch.removeprefix("sm_")
    if number.isdigit() and int(number) >= _SPECIFIC_FROM:
        why = "from sm_90 on, the code uses instructions that nvcc has only for the architecture-specific variant"
        refuse(f"unsupported architecture {arch!r}", why=why, fix=f"use {arch + 'a'!r}")
    return Target({"kind": "cuda", "arch": arch})


def _current_arch() -> str:
    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}{'a' if major * 10 + minor >= _SPECIFIC_FROM else ''}"


def _explained(func: tirx.PrimFunc, build: Callable[[], Any]) -> Any:
    """What `build` gives; what TileLang or nvcc raise becomes a MeshTensorError that names the kernel."""
    try:
        return build()
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        refuse(
            f"TileLang can't compile kernel '{func.attrs['global_symbol']}' for CUDA",
            why=reason[-1],
            fix="see the error above for the details; target='c' runs the same kernel on a CPU",
        )
