"""Who multiplies float32 blocks on a CPU: the own micro-kernel, or the BLAS that torch brings.

The rule: the own micro-kernel, unless `MESH_TENSOR_GEMM=blas` is in the environment (`own` and `auto`, the default, ask
for it). On blocks it was measured no slower than MKL on every machine so far (`benchmarks/bench_cpu_gemm.py` has both),
and the order of its sums depends on no library's version.
"""

from __future__ import annotations

import ctypes
import functools
import os

import torch

from mesh_tensor.base.errors import refuse

VARIABLE = "MESH_TENSOR_GEMM"
_CHOICES = ("auto", "own", "blas")
_SET_BLAS = "mesh_tensor_set_blas"


def blas_wanted() -> bool:
    """Whether float32 blocks go to BLAS; a MeshTensorError where that is asked for and can't be."""
    choice = os.environ.get(VARIABLE) or "auto"
    if choice not in _CHOICES:
        refuse(f"{VARIABLE} is {choice!r} in the environment", fix=f"set it to one of {', '.join(_CHOICES)}")
    if choice == "blas" and _functions() is None:
        refuse(
            f"{VARIABLE}=blas is in the environment, but there is no BLAS to use",
            why="this build of torch exports no sgemm_ beside MKL_Set_Num_Threads_Local, which keeps it to one thread",
            fix=f"set {VARIABLE}=own, or use a build of torch with MKL",
        )
    return choice == "blas"


def who_multiplies() -> str:
    """What blocks are multiplied by, and why, for people."""
    own = "the own micro-kernel, register-blocked and vectorised for this machine's processor"
    if blas_wanted():
        return f"float32 by BLAS (sgemm_ of torch, on one thread; {VARIABLE}=blas), other dtypes by {own}"
    why = f"{VARIABLE}=own" if os.environ.get(VARIABLE) == "own" else "on blocks no slower than BLAS"
    return f"{own} ({why})"


def give_blas(library: ctypes.CDLL) -> None:
    """Tell a kernel's library where BLAS is, if it was built to use it."""
    setter = getattr(library, _SET_BLAS, None)
    functions = _functions()
    if setter is not None and functions is not None:
        setter.argtypes = [ctypes.c_void_p, ctypes.c_void_p]
        setter.restype = None
        setter(*functions)


@functools.cache
def _functions() -> tuple[int, int] | None:
    """Addresses of `sgemm_` and of what keeps it to one thread, in the libraries that torch has loaded."""
    loaded = ctypes.CDLL(torch._C.__file__)
    try:
        functions = loaded["sgemm_"], loaded["MKL_Set_Num_Threads_Local"]
    except AttributeError:
        return None
    sgemm, set_threads = (ctypes.cast(function, ctypes.c_void_p).value for function in functions)
    return None if sgemm is None or set_threads is None else (sgemm, set_threads)
