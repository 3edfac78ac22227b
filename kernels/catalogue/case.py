"""A kernel with everything that a test or a sweep needs to run it and to know what is right."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import tilelang  # noqa: F401  (it brings the tvm that the next lines import)
import torch
from tvm import tirx

Sizes = dict[str, int]
KernelFactory = Callable[..., tirx.PrimFunc]
Maker = Callable[[torch.Generator, Sizes], torch.Tensor]


class Tolerance(NamedTuple):
    """`|actual - expected| <= atol + rtol * |expected|`."""

    rtol: float
    atol: float


EXACT = Tolerance(0.0, 0.0)
FLOAT32 = Tolerance(1e-5, 1e-5)  # what the order of a float32 sum of some 50 normal values can change
FLOAT16 = Tolerance(2.0**-10, 1e-5)  # a float32 result, rounded once: it may fall on the other side of a tie
BFLOAT16 = Tolerance(2.0**-7, 1e-5)
FLOAT16_WITHIN = Tolerance(2.0**-9, 1e-3)  # values of about 1 are rounded to float16 on the way, too


@dataclass(frozen=True)
class KernelCase:
    """A kernel factory, its torch reference, the sizes to try it at and how exact its results are.

    `build(**sizes)` gives the kernel; `inputs(generator, sizes)` gives tensors for every parameter that the kernel
    reads, in the kernel's order; `reference(*inputs)` gives what the kernel leaves in `outputs`. An output that the
    kernel also reads is named in `inouts`. With `reads_padding` the kernel loads single elements from outside its
    tensors, where TileLang promises zeros.
    """

    name: str
    build: KernelFactory
    reference: Callable[..., torch.Tensor | tuple[torch.Tensor, ...]]
    sizes: tuple[Sizes, ...]
    inputs: Callable[[torch.Generator, Sizes], list[torch.Tensor]]
    outputs: tuple[str, ...]
    tolerance: Tolerance = FLOAT32
    inouts: tuple[str, ...] = ()
    reads_padding: bool = False

    def make_inputs(self, sizes: Sizes, seed: int = 0) -> list[torch.Tensor]:
        """The inputs of `sizes` that belong to `seed`."""
        return self.inputs(torch.Generator().manual_seed(seed), sizes)

    def expected(self, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """What each output holds after the kernel has run on `inputs`, which stay as they are."""
        results = self.reference(*inputs)
        results = results if isinstance(results, tuple) else (results,)
        return dict(zip(self.outputs, results, strict=True))

    def arguments(self, func: tirx.PrimFunc, inputs: list[torch.Tensor]) -> dict[str, torch.Tensor]:
        """One tensor per buffer parameter of `func`, in its order: copies of `inputs`, and outputs full of values that
        no kernel computes, so that an element which is never written shows."""
        rest = [tensor.clone() for tensor in inputs]
        expected = self.expected(inputs)
        arguments = {}
        for name in parameter_names(func):
            is_read = name not in self.outputs or name in self.inouts
            arguments[name] = rest.pop(0) if is_read else untouched(expected[name])
        if rest:
            raise ValueError(f"{self.name}: {len(rest)} more inputs than parameters that are read")
        return arguments

    def check(self, actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
        """Raise an AssertionError unless every output is as expected."""
        for name, tensor in expected.items():
            torch.testing.assert_close(
                actual[name], tensor, **self.tolerance._asdict(), msg=lambda text, n=name: f"{self.name}, {n}: {text}"
            )


def parameter_names(func: tirx.PrimFunc) -> tuple[str, ...]:
    """The names of the buffer parameters of `func`, in order."""
    return tuple(func.buffer_map[param].name for param in func.params if param in func.buffer_map)


def untouched(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor like `tensor`, full of NaN or of the smallest integer."""
    if tensor.is_floating_point():
        return torch.full_like(tensor, torch.nan)
    return torch.full_like(tensor, torch.iinfo(tensor.dtype).min)


def tensors(*makers: Maker) -> Callable[[torch.Generator, Sizes], list[torch.Tensor]]:
    """The `inputs` of a KernelCase: one maker per tensor."""
    return lambda generator, sizes: [make(generator, sizes) for make in makers]


def normal(dims: str, dtype: torch.dtype = torch.float32) -> Maker:
    """Standard normal values; `dims` names sizes, such as "M K" or "seq dim/2"."""
    return lambda generator, sizes: torch.randn(_shape(dims, sizes), generator=generator).to(dtype)


def uniform(dims: str, low: float, high: float, dtype: torch.dtype = torch.float32) -> Maker:
    """Uniform values in [low, high)."""
    return lambda generator, sizes: (torch.rand(_shape(dims, sizes), generator=generator) * (high - low) + low).to(
        dtype
    )


def integers(dims: str, low: int, high: int | str, dtype: torch.dtype = torch.int32) -> Maker:
    """Integers in [low, high); `high` may name a size."""

    def make(generator: torch.Generator, sizes: Sizes) -> torch.Tensor:
        end = sizes[high] if isinstance(high, str) else high
        return torch.randint(low, end, _shape(dims, sizes), generator=generator, dtype=dtype)

    return make


def _shape(dims: str, sizes: Sizes) -> tuple[int, ...]:
    return tuple(_extent(dim, sizes) for dim in dims.split())


def _extent(dim: str, sizes: Sizes) -> int:
    name, _, divisor = dim.partition("/")
    extent = int(name) if name.isdecimal() else sizes[name]
    return extent // int(divisor) if divisor else extent
