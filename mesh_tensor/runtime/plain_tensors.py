"""Tensors that a kernel can work on: with memory, a place there for every element, and no gradient that is waited for.

Tracers, torch.func and sparse layouts bring others, whose memory a kernel would look for in vain."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

import torch
from torch.autograd import forward_ad

from mesh_tensor.base.errors import refuse

_OUTSIDE = "call it outside of torch.func's transforms, which can't see what a kernel does"
_AS_OP = "make the kernel an operation that tracers know: mt.as_custom_op"
_NO_GRAD = "pass its .detach(), or call under torch.no_grad(): results have no gradient"


def why_not_plain(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why no kernel can work on the tensor, and the way out; None if one can."""
    if found := _why_not_seen(tensor):
        return found
    if tensor.requires_grad and torch.is_grad_enabled():
        return "requires a gradient, which would be lost", _NO_GRAD
    if is_dual(tensor):
        return "a dual tensor of torch.autograd.forward_ad, whose tangent would be lost", _NO_GRAD
    return None


def fix_of(problems: Sequence[str], given: Iterable[object], otherwise: str) -> str:
    """The way out of problems with what is given: of tensors that are not plain, theirs; `otherwise` of all else."""
    not_plain = [found for value in given if isinstance(value, torch.Tensor) and (found := why_not_plain(value))]
    fixes = [fix for _, fix in not_plain] + [otherwise] * (len(not_plain) < len(problems))
    return "; ".join(dict.fromkeys(fixes))


def may_be_dual() -> bool:
    """Whether there can be tensors with tangents now."""
    return forward_ad._current_level >= 0


def is_dual(tensor: torch.Tensor) -> bool:
    """Whether it has a tangent of `torch.autograd.forward_ad`."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None


def _why_not_seen(tensor: torch.Tensor) -> tuple[str, str] | None:
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return "a tensor inside of torch.func.vmap, grad or jvp", _OUTSIDE
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, but expected torch.strided", "pass a dense copy: .to_dense()"
    if tensor.is_nested:
        return "a nested tensor, whose rows have lengths of their own", "pass a dense copy: .to_padded_tensor(0)"
    if type(tensor).__name__ == "FakeTensor":
        return "a FakeTensor, which has no data", _AS_OP
    return None


def refuse_traced(what: str, args: Iterable[object]) -> None:
    """Raise a MeshTensorError where torch traces a call of `what` or transforms its arguments."""
    problems = [found for arg in args if isinstance(arg, torch.Tensor) and (found := _why_not_seen(arg))]
    if torch._guards.detect_fake_mode() is not None:
        problems.append(("called under a FakeTensorMode, where tensors have no data", _AS_OP))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) or torch._C._get_tracing_state():
        problems.append(("called while torch traces, which would take the results for constants", _AS_OP))
    if problems:
        fixes = "; ".join(dict.fromkeys(fix for _, fix in problems))
        refuse(list(dict.fromkeys(fact for fact, _ in problems)), where=f"call of {what}", fix=fixes)


def overlaps(tensors: Mapping[str, Sequence[torch.Tensor]], writes: Collection[str], where: str) -> bool:
    """Whether one of `writes` shares memory with another. Where they lie counts, not the storage that torch has for it:
    of what comes from numpy or by dlpack, two storages may be one memory.

    Raises:
        MeshTensorError: two of `writes` do.
    """
    spans = [(name, *_span(tensor)) for name, parts in tensors.items() for tensor in parts]
    pairs = {
        (name, other)
        for name, start, end in spans
        if name in writes
        for other, other_start, other_end in spans
        if start < other_end and other_start < end and name != other
    }
    if lost := sorted({" and ".join(sorted(map(repr, pair))) for pair in pairs if pair[1] in writes}):
        what = [f"parameters {names} are written, and share memory" for names in lost]
        why = "one result would be in the place of the other"
        refuse(what, where=where, why=why, fix="pass tensors with memory of their own")
    return bool(pairs)


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    """Where its first byte is, and what is behind its last."""
    elements = tensor.numel()
    if elements and not tensor.is_contiguous():
        elements = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return start, start + elements * tensor.itemsize


def mark_written(tensors: Iterable[torch.Tensor]) -> None:
    """Let torch know that a kernel has written them: gradients that need what was there before are refused then."""
    for tensor in tensors:
        if not tensor.is_inference():
            torch.autograd.graph.increment_version(tensor)
