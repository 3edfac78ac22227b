"""What torch was told elsewhere in the process and nothing here depends on.

Autocast, a default device, modes that see or change every operation, torch.func's transforms and flushed denormals hold
for whatever this thread computes; a lower precision of float32 for the whole process. The public functions that compute
something set all that aside while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import NoReturn, ParamSpec, TypeVar

import torch
from torch.autograd import forward_ad
from torch.nn.parameter import is_lazy

from mesh_tensor.base.errors import MeshTensorError, refuse

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Asked at every call of a kernel.
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_autocast, _transform = torch._C._is_any_autocast_enabled, torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_keys, _DENSE = torch._C._dispatch_keys, torch._C._dispatch_keys(torch.empty(0, device="cpu"))
_SMALLEST = 5e-324  # as a factor it is 0 where this thread flushes denormals
_PRECISIONS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"), ("cuda", "matmul"))
_EXACT = ("none", "ieee")
_BREAKS = {"_torchdynamo_disable": True, "_torchdynamo_disable_msg": "mt.as_custom_op makes kernels part of a graph"}


def uncompiled(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, at which torch.compile breaks its graph, and below which it compiles nothing: it would take what
    we do for the model's own operations, and fails on process groups."""
    function.__dict__.update(_BREAKS)
    frames = torch._C._dynamo.eval_frame
    if hasattr(frames, "set_code_exec_strategy"):  # an older torch looks at the functions below
        skip = frames._FrameAction.SKIP
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(skip, skip))
    return function


def undisturbed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, which computes as if torch had been told nothing; refused where torch traces or transforms it."""

    @uncompiled
    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if is_plain():
            return function(*args, **kwargs)
        try:
            refuse_traced(function.__qualname__, args)
        except MeshTensorError as error:
            _refuse(error, *args)
        with plain():
            return function(*args, **kwargs)

    return run


def _refuse(error: MeshTensorError, owner: object = None, *given: object) -> NoReturn:
    """Raise instead of a call, which on ranks the others make: a method's `owner` may have a way to tell them."""
    tell = getattr(owner, "refuse_call", None)
    if tell is None:
        raise error
    with plain():
        tell(error, given)
    raise error


def is_plain() -> bool:
    """Whether this thread computes as torch does when it was told nothing."""
    return not (
        _function_modes()
        or _dispatch_modes()
        or _autocast()
        or _transform() is not None
        or _trace() is not None
        or _SMALLEST * 1.0 == 0.0
    )


@contextmanager
def plain() -> Iterator[None]:
    """Nothing that torch was told about this thread holds within; inference mode and grad mode stay."""
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
    from torch.utils._python_dispatch import _disable_current_modes

    with ExitStack() as entered:
        entered.enter_context(temporarily_clear_interpreter_stack())
        entered.enter_context(_disable_current_modes())
        entered.enter_context(_without_function_modes())
        entered.enter_context(torch._C._DisableAutocast())
        entered.enter_context(_with_denormals())
        yield


class Computing:
    """Within, no gradients are recorded, and torch's operators on float32 compute in float32, whatever precision the
    process was set to. Calls from several threads share that: the last one to end gives it back. Every call enters it:
    a class costs half of what generators do."""

    __slots__ = ("_records",)

    def __enter__(self) -> None:
        with _precision_lock:
            if not _precision_users:
                _precisions[:] = [(place, was) for place in _PRECISIONS if (was := _precision(place)) not in _EXACT]
                for place, _ in _precisions:
                    _set_precision(place, "ieee")
            _precision_users.append(None)
        self._records = torch.is_grad_enabled()
        torch._C._set_grad_enabled(False)

    def __exit__(self, *_: object) -> None:
        torch._C._set_grad_enabled(self._records)
        with _precision_lock:
            _precision_users.pop()
            if not _precision_users:
                for place, was in _precisions:
                    _set_precision(place, was)


_precision_lock = threading.Lock()
_precision_users: list[None] = []
_get_precision = getattr(torch._C, "_get_fp32_precision_getter", None)
_precisions: list[tuple[tuple[str, str], str]] = []


def _precision(place: tuple[str, str]) -> str:
    return _get_precision(*place) if _get_precision else "none"


def _set_precision(place: tuple[str, str], precision: str) -> None:
    torch._C._set_fp32_precision_setter(*place, precision)


@contextmanager
def _without_function_modes() -> Iterator[None]:
    """Among them is what `torch.set_default_device` and `with torch.device` set up."""
    modes = [torch._C._pop_torch_function_stack() for _ in range(_function_modes())]
    try:
        yield
    finally:
        for mode in reversed(modes):
            torch._C._push_on_torch_function_stack(mode)


@contextmanager
def _with_denormals() -> Iterator[None]:
    flushes = _SMALLEST * 1.0 == 0.0
    if flushes:
        torch.set_flush_denormal(False)
    try:
        yield
    finally:
        if flushes:
            torch.set_flush_denormal(True)


_OUTSIDE = "call it outside of torch.func's transforms and batches of gradients, which can't see what a kernel does"
_AS_OP = "make the kernel an operation that tracers know: mt.as_custom_op"
_FREED = "a tensor whose memory was given back", "pass it while its wrapper holds its values"
_KINDS = torch.Tensor, torch.nn.Parameter
_NO_GRAD = "pass its .detach(), or call under torch.no_grad(): results have no gradient"


def why_not_plain(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why no kernel can work on the tensor, and the way out; None if one can."""
    if type(tensor) in _KINDS and _keys(tensor) == _DENSE:  # at once, as every call asks of all its tensors
        end = (tensor.storage_offset() + tensor.numel()) * tensor.element_size()
        found = _FREED if end > tensor.untyped_storage().nbytes() and is_freed(tensor) else None
    else:
        found = _why_not_seen(tensor)
    if found:
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


def why_transformed(tensor: torch.Tensor) -> tuple[str, str] | None:
    """Why no kernel can work on a tensor that a transform of torch.func put into another; None if it is none."""
    functorch = torch._C._functorch
    if functorch.is_functorch_wrapped_tensor(tensor) or functorch.is_legacy_batchedtensor(tensor):
        return "a tensor inside of torch.func.vmap, grad or jvp, or a batch of gradients", _OUTSIDE
    return None


def _why_not_seen(tensor: torch.Tensor) -> tuple[str, str] | None:
    if found := why_transformed(tensor):
        return found
    if is_lazy(tensor):
        return "a parameter that is not initialised yet", "run its model once, on an example"
    if tensor.layout is not torch.strided:
        return f"layout {tensor.layout}, but expected torch.strided", "pass a dense copy: .to_dense()"
    if tensor.is_quantized:
        return f"a quantized tensor ({tensor.dtype})", "pass its values: .dequantize()"
    if torch._is_functional_tensor(tensor):
        return "a tensor inside of torch.func.functionalize", _OUTSIDE
    if tensor.is_nested:
        return "a nested tensor, whose rows have lengths of their own", "pass a dense copy: .to_padded_tensor(0)"
    kind = type(tensor)
    if kind is torch.Tensor or kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__:
        return _FREED if is_freed(tensor) else None
    if kind.__name__ == "FakeTensor":
        return "a FakeTensor, which has no data", _AS_OP
    if kind.__name__ == "AsyncCollectiveTensor":
        return "the result of a collective of torch's that is under way", "pass its .wait()"
    if kind.__name__ == "DTensor":
        local = tensor._local_tensor  # type: ignore[attr-defined]
        return None if hasattr(local, "wait") else _why_not_seen(local)
    return f"a {kind.__name__}, which stands for other tensors", "pass a plain tensor of its values"


def is_freed(tensor: torch.Tensor) -> bool:
    """Whether a plain tensor has no memory of its own: it was given back, as wrappers of modules do between their uses,
    so that who reads it reads what is nobody's."""
    if not (count := tensor.numel()) or tensor.device.type == "meta" or tensor._is_zerotensor():
        return False
    try:
        offset, size, nbytes = tensor.storage_offset(), tensor.element_size(), tensor.untyped_storage().nbytes()
    except NotImplementedError:  # of a batch of gradients
        return True
    if (offset + count) * size <= nbytes:  # at once, as every call asks; what is expanded has fewer elements
        return False
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (offset + last + 1) * size > nbytes


def refuse_traced(what: str, args: Iterable[object]) -> None:
    """Raise a MeshTensorError where torch traces a call of `what` or transforms its arguments."""
    problems = []
    if _trace() is None:  # TorchScript's traces record what is asked of a tensor: its sizes are tensors, too
        problems = [found for arg in args if isinstance(arg, torch.Tensor) and (found := _why_not_seen(arg))]
    if torch._guards.detect_fake_mode() is not None:
        problems.append(("called under a FakeTensorMode, where tensors have no data", _AS_OP))
    if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) or _trace() is not None:
        problems.append(("called while torch traces, which would take the results for constants", _AS_OP))
    if problems:
        fixes = "; ".join(dict.fromkeys(fix for _, fix in problems))
        refuse(list(dict.fromkeys(fact for fact, _ in problems)), where=f"call of {what}", fix=fixes)


def overlaps(tensors: Mapping[str, Sequence[torch.Tensor]], writes: Collection[str], where: str) -> bool:
    """Whether one of `writes` shares memory with another. Where they lie counts, not the storage that torch has for it:
    of what comes from numpy or by dlpack, two storages may be one memory. Refused where two of `writes` do."""
    spans = [(name, *memory_span(tensor)) for name, parts in tensors.items() for tensor in parts]
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


def memory_span(tensor: torch.Tensor) -> tuple[int, int]:
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
