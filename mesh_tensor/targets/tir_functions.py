"""TIR functions on torch tensors through the interpreter: TileLang kernels, and functions as TE makes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
import tvm
from tvm import s_tir, tirx
from tvm.tirx import stmt_functor

from mesh_tensor.annotations.specialize import sized
from mesh_tensor.base.dtypes import TensorType, poison_value
from mesh_tensor.tir.nodes import nodes

from .dtypes import torch_dtype
from .interpreter import interpret
from .kernels import as_numpy


def tir_function(
    func: tirx.PrimFunc, inputs: Sequence[TensorType], outputs: Sequence[TensorType], numbers: Sequence[int] = ()
) -> Callable[..., tuple[torch.Tensor, ...]]:
    """What `R.call_tir(func, tensors, numbers)` computes: a function of the tensors. Results start as poison, so that
    an element that `func` leaves out shows.

    Raises:
        MeshTensorError: `func` takes other parameters, or has what the interpreter does not know.
    """
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
