"""Tensors that a kernel can work on: they have memory, and every element has a place there.

Tracers, torch.func and sparse layouts bring others, whose memory a kernel would look for in vain."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .errors import refuse

_OUTSIDE = "call it outside of torch.func's transforms, which can't see what a kernel does"
_AS_OP = "make the kernel an operation that tracers know: mt.as_custom_op"


def why_not_plain(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why no kernel can work on the tensor, and the way out; None if one can."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside of torch.func.vmap, grad or jvp", _OUTSIDE
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, but expected torch.strided", "pass a dense copy: .to_dense()"
    if type(tensor).__name__ == "FakeTensor":
        return "a FakeTensor, which has no data", _AS_OP
    return None


def refuse_traced(kernel: str, args: Iterable[object]) -> None:
    """Raise a MeshTensorError where torch traces a call of `kernel` or transforms it."""
    if not torch._C._len_torch_dispatch_stack() and torch._C._functorch.peek_interpreter_stack() is None:
        return
    problems = [found for arg in args if isinstance(arg, torch.Tensor) and (found := why_not_plain(arg))]
    if torch._guards.detect_fake_mode() is not None:
        problems.append(("called under a FakeTensorMode, where tensors have no data", _AS_OP))
    if problems:
        fixes = "; ".join(dict.fromkeys(fix for _, fix in problems))
        refuse(list(dict.fromkeys(fact for fact, _ in problems)), where=f"call of kernel {kernel!r}", fix=fixes)


def without_grad(value: Any) -> Any:
    """The value; of a tensor that requires gradients, one on the same memory that doesn't."""
    return value.detach() if isinstance(value, torch.Tensor) and value.requires_grad else value
