"""What torch can be told elsewhere in a process, and how it can transform who calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class _Rounds(TorchDispatchMode):
    """Every operation gives results of bfloat16's accuracy."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _rounded(func(*args, **(kwargs or {})))


class _RoundsFunctions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _rounded(func(*args, **(kwargs or {})))


def _rounded(made: Any) -> Any:
    floats = isinstance(made, torch.Tensor) and made.dtype == torch.float32 and made.device.type == "cpu"
    return made.bfloat16().float() if floats else made


@contextmanager
def _set(get: Callable[[], Any], put: Callable[[Any], None], value: Any) -> Iterator[None]:
    before = get()
    put(value)
    try:
        yield
    finally:
        put(before)


@contextmanager
def _default_device() -> Iterator[None]:
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextmanager
def _deterministic() -> Iterator[None]:
    torch.use_deterministic_algorithms(True)
    try:
        with _set(
            lambda: torch.utils.deterministic.fill_uninitialized_memory,
            lambda on: setattr(torch.utils.deterministic, "fill_uninitialized_memory", on),
            True,
        ):
            yield
    finally:
        torch.use_deterministic_algorithms(False)


@contextmanager
def _flush() -> Iterator[None]:
    assert torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


def _default_dtype(dtype: torch.dtype) -> AbstractContextManager[None]:
    return _set(torch.get_default_dtype, torch.set_default_dtype, dtype)


STATES: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
    "default device": _default_device,
    "a device context": lambda: torch.device("meta"),
    "float64 by default": lambda: _default_dtype(torch.float64),
    "float16 by default": lambda: _default_dtype(torch.float16),
    "deterministic": _deterministic,
    "inference mode": torch.inference_mode,
    "no grad": torch.no_grad,
    "anomaly mode": lambda: torch.autograd.set_detect_anomaly(True, check_nan=True),
    "a dispatch mode that rounds": _Rounds,
    "a function mode that rounds": _RoundsFunctions,
    "denormals flushed": _flush,
    "a lower precision of float32": lambda: _set(
        torch.get_float32_matmul_precision, torch.set_float32_matmul_precision, "medium"
    ),
    "no mkldnn": lambda: _set(torch._C._get_mkldnn_enabled, torch._C._set_mkldnn_enabled, False),
    "two threads": lambda: _set(torch.get_num_threads, torch.set_num_threads, 2),
    "numpy that raises": lambda: np.errstate(all="raise"),
}
TRANSFORMS: dict[str, Callable[[Callable], Callable]] = {
    "vmap": torch.vmap,
    "grad": torch.func.grad,
    "functionalize": torch.func.functionalize,
    "jvp": lambda f: lambda x: torch.func.jvp(f, (x,), (x,)),
}


def within(state: str, work: Callable[[], Any]) -> Any:
    """What `work` gives where torch was told so, or inside of a function that is transformed."""
    if state in STATES:
        with STATES[state]():
            return work()
    found = []

    def transformed(x: torch.Tensor) -> torch.Tensor:
        found.append(work())
        return x.sum()

    TRANSFORMS[state](transformed)(torch.ones(3, 2))
    return found[0]
