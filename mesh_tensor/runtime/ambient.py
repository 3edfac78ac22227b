"""What torch was told elsewhere in the process and nothing here depends on.

Autocast, a default device, modes that see or change every operation, torch.func's transforms and flushed denormals hold
for whatever this thread computes; a lower precision of float32 for the whole process. The public functions that compute
something set all that aside while they run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

from .plain_tensors import refuse_traced

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")

# Asked at every call of a kernel.
_function_modes, _dispatch_modes = torch._C._len_torch_function_stack, torch._C._len_torch_dispatch_stack
_autocast, _transform = torch._C._is_any_autocast_enabled, torch._C._functorch.peek_interpreter_stack
_trace = torch._C._get_tracing_state
_SMALLEST = 5e-324  # as a factor it is 0 where this thread flushes denormals
_PRECISIONS = (("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"), ("cuda", "matmul"))
_EXACT = ("none", "ieee")


def undisturbed(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, which computes as if torch had been told nothing; refused where torch traces or transforms it."""

    @wraps(function)
    def run(*args: Parameters.args, **kwargs: Parameters.kwargs) -> Result:
        if is_plain():
            return function(*args, **kwargs)
        refuse_traced(function.__qualname__, args)
        with plain():
            return function(*args, **kwargs)

    return run


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


@contextmanager
def full_precision() -> Iterator[None]:
    """Torch's operators on float32 compute in float32 within, whatever precision the process was set to. Calls from
    several threads share that: the last one to end gives it back."""
    with _precision_lock:
        if not _precision_users:
            _precisions[:] = [(place, was) for place in _PRECISIONS if (was := _precision(place)) not in _EXACT]
            for place, _ in _precisions:
                _set_precision(place, "ieee")
        _precision_users.append(None)
    try:
        yield
    finally:
        with _precision_lock:
            _precision_users.pop()
            if not _precision_users:
                for place, was in _precisions:
                    _set_precision(place, was)


_precision_lock = threading.Lock()
_precision_users: list[None] = []
_precisions: list[tuple[tuple[str, str], str]] = []


def _precision(place: tuple[str, str]) -> str:
    get = getattr(torch._C, "_get_fp32_precision_getter", None)
    return get(*place) if get else "none"


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
