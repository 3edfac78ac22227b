"""Targets: from a local kernel's PrimFunc, or a TIR function on torch tensors, to something that can be called."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch
import tvm
from tvm import s_tir, tirx
from tvm.tirx import stmt_functor

from mesh_tensor.annotations.annotate import sized
from mesh_tensor.base.dtypes import TensorType, poison_value
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.tir.nodes import nodes

from .dtypes import dtype_name, torch_dtype

Arg = torch.Tensor | int | float
CompiledKernel = Callable[..., None]


@dataclass(frozen=True)
class Target:
    """Where kernels run. `threaded`: calls for several devices may run at the same time in threads of their own.
    `together` compiles several kernels, where that is quicker than one after the other; `prepare` has what `compiler`
    will be asked for compiled so, of a target that remembers it."""

    name: str
    device_type: str
    threaded: bool
    compiler: Callable[[tirx.PrimFunc, bool], CompiledKernel]
    together: Callable[[Sequence[tirx.PrimFunc]], Sequence[CompiledKernel]] | None = None
    prepare: Callable[[Sequence[tirx.PrimFunc]], None] | None = None

    def device(self) -> torch.device:
        """The torch device that tensors have to be on."""
        return torch.device("cuda", torch.cuda.current_device()) if self.device_type == "cuda" else torch.device("cpu")

    def remembering(self) -> Target:
        """The same target, but what it has compiled lately it does not compile again."""
        made: Recent[tuple[tirx.PrimFunc, bool], CompiledKernel] = Recent(KERNEL_SIZES)

        def compiler(func: tirx.PrimFunc, poison: bool) -> CompiledKernel:
            return made.made((func, poison), lambda: self.compiler(func, poison))

        def prepare(funcs: Sequence[tirx.PrimFunc]) -> None:
            new = [func for func in dict.fromkeys(funcs) if made.get((func, False)) is None]
            if self.together is not None and len(new) > 1:
                for func, kernel in zip(new, self.together(new), strict=True):
                    made.put((func, False), kernel)

        return replace(self, compiler=compiler, prepare=None if self.together is None else prepare)

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


def _compile_all_c(funcs: Sequence[tirx.PrimFunc]) -> Sequence[CompiledKernel]:
    from .cpu.kernel import compile_together

    return compile_together(funcs)


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
    "c": Target("c", "cpu", True, _compile_c, _compile_all_c),
    "cuda": Target("cuda", "cuda", False, _compile_cuda),
    "interpret": Target("interpret", "cpu", False, _compile_interpreter),
}


def tir_function(
    func: tirx.PrimFunc, inputs: Sequence[TensorType], outputs: Sequence[TensorType], numbers: Sequence[int] = ()
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What `R.call_tir(func, tensors, numbers)` computes: a function of the tensors. Results start as poison, so that
    an element that `func` leaves out shows. Refused where `func` takes other parameters, or has what the interpreter
    does not know."""
    from .interpreter import interpret

    func, scratch = _as_loops(sized(func, inputs, outputs, numbers))
    extra = [int(n) for n in numbers][: len(func.params) - len(inputs) - len(outputs) - len(scratch)]

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        device = tensors[0].device if tensors else torch.get_default_device()
        made = [_poisoned(out) for out in (*outputs, *scratch)]
        results = made[: len(outputs)]
        arrays = [as_numpy(t.contiguous().cpu()) for t in (*tensors, *results)]
        interpret(func, [*arrays, *extra, *map(as_numpy, made[len(outputs) :])])
        return tuple(result.to(device) for result in results)

    return run


def _poisoned(kind: TensorType) -> torch.Tensor:
    dtype = torch_dtype(kind.dtype)
    return torch.full(kind.shape, poison_value(kind.dtype), dtype=dtype, device="cpu")


@lru_cache(maxsize=512)
def _as_loops(func: tirx.PrimFunc) -> tuple[tirx.PrimFunc, tuple[TensorType, ...]]:
    """`func` in the form that the interpreter runs: blocks become plain statements, what starts a reduction an if, and
    global memory that it allocates becomes parameters at the end."""
    blocks = nodes(func.body, tirx.SBlock)
    if not any(block.init is not None or block.iter_vars or _global(block) for block in blocks):
        return func, ()
    lower = tvm.transform.Sequential([s_tir.transform.LowerInitBlock(), s_tir.transform.ConvertBlocksToOpaque()])
    func = lower(tvm.IRModule({"main": func}))["main"]
    found: list[tirx.Buffer] = []

    def lift(block: tirx.SBlock) -> tirx.SBlock | None:
        lifted = _global(block)
        if not lifted:
            return None
        found.extend(lifted)
        kept = [buffer for buffer in block.alloc_buffers if buffer.scope() != "global"]
        return tirx.SBlock(
            block.iter_vars, block.reads, block.writes, block.name_hint, block.body, block.init, kept,
            block.match_buffers, block.annotations,
        )  # fmt: skip

    body = stmt_functor.ir_transform(func.body, None, lift, ["tirx.SBlock"])
    params = {tirx.Var(f"{buffer.name}_scratch", "handle"): buffer for buffer in found}
    lifted = tirx.PrimFunc(
        [*func.params, *params], body, func.ret_type, {**dict(func.buffer_map.items()), **params}, func.attrs
    )
    return lifted, tuple(TensorType(tuple(int(n) for n in b.shape), str(b.dtype)) for b in found)


def _global(block: tirx.SBlock) -> list[tirx.Buffer]:
    return [buffer for buffer in block.alloc_buffers if buffer.scope() == "global"]
