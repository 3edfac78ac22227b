"""Targets: from a local kernel's PrimFunc to something that can be called."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from tvm import tirx

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.recent import KERNEL_SIZES, Recent

from .dtypes import dtype_name

Arg = torch.Tensor | int | float
CompiledKernel = Callable[..., None]


@dataclass(frozen=True)
class Target:
    """Where kernels run. `threaded`: calls for several devices may run at the same time in threads of their own."""

    name: str
    device_type: str
    threaded: bool
    compiler: Callable[[tirx.PrimFunc, bool], CompiledKernel]

    def device(self) -> torch.device:
        """The torch device that tensors have to be on."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def remembering(self) -> Target:
        """The same target, but what it has compiled lately it does not compile again."""
        made: Recent[tuple[tirx.PrimFunc, bool], CompiledKernel] = Recent(KERNEL_SIZES)

        def compiler(func: tirx.PrimFunc, poison: bool) -> CompiledKernel:
            return made.made((func, poison), lambda: self.compiler(func, poison))

        return replace(self, compiler=compiler)

    def compile(self, func: tirx.PrimFunc, poison: bool = False) -> CompiledKernel:
        """A callable on tensors, ints and floats in the order of `func`'s parameters, which writes in place."""
        return self.compiler(func, poison)


def find_target(name: str) -> Target:
    """The target of that name; `auto` is `cuda` where there is a GPU, else `c`."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "c"
    target = _TARGETS.get(name) if isinstance(name, str) else None
    if target is None:
        known = listing(("auto", *_TARGETS))
        refuse(f"unsupported target {name!r}", where="target", fix=f"use one of {known}")
    if target.device_type == "cuda" and not torch.cuda.is_available():
        refuse("target 'cuda' needs a GPU", why="torch finds none", fix="use target='c' or target='interpret'")
    return target


def _compile_c(func: tirx.PrimFunc, poison: bool) -> CompiledKernel:
    from .cpu.kernel import compile_for_cpu

    return compile_for_cpu(func)


def _compile_cuda(func: tirx.PrimFunc, poison: bool) -> CompiledKernel:
    from .cuda.kernel import compile_for_cuda

    return compile_for_cuda(func)


def _compile_interpreter(func: tirx.PrimFunc, poison: bool) -> CompiledKernel:
    from .interpreter import interpret

    def kernel(*args: Arg) -> None:
        arrays = [as_numpy(arg) if isinstance(arg, torch.Tensor) else arg for arg in args]
        interpret(func, arrays, poison=poison)

    return kernel


def as_numpy(tensor: torch.Tensor) -> Any:
    """A numpy array on the same memory; dtypes that numpy lacks are ml_dtypes'."""
    if tensor.dtype == torch.bfloat16 or (tensor.dtype.is_floating_point and tensor.dtype.itemsize == 1):
        import ml_dtypes

        bits = torch.uint16 if tensor.dtype.itemsize == 2 else torch.uint8
        return tensor.view(bits).numpy().view(getattr(ml_dtypes, dtype_name(tensor.dtype)))
    return tensor.numpy()


_TARGETS = {
    "c": Target("c", "cpu", True, _compile_c),
    "cuda": Target("cuda", "cuda", False, _compile_cuda),
    "interpret": Target("interpret", "cpu", False, _compile_interpreter),
}
