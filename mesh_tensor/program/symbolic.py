"""Programs of kernels with symbolic dims: lowered once for all sizes of a family, then filled in for each.

A family are the multiples of a number: of blocks and devices (no block is cut short), of devices (all tiles are even),
or of 1, with which the axes split the same. The kernel is lowered with `number * n` in place of a symbol, so that
whatever the passes prove holds for the whole family. If that gives another plan than a size by itself does, the
family's sizes are lowered one by one. Which it is depends on the kernel alone, never on the sizes that came before: all
ranks find the same.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Protocol

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations, specialize
from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.plan.tir_rule import Sizes
from mesh_tensor.tir.nodes import nodes

from .from_kernel import SplitDims
from .overlap import with_overlap
from .program import Program


class Sizable(Protocol):
    """A kernel's Program for all sizes of its symbols."""

    def sized(self, sizes: Sequence[int], decided: Callable[[], Decisions] | None = None) -> Program:
        """The Program for these sizes, as OpenProgram makes it."""


class Lower(Protocol):
    """Makes Programs of annotated kernels."""

    def __call__(
        self, func: tirx.PrimFunc, symbols: Sequence[tirx.Var] = (), split: SplitDims | None = None
    ) -> Sizable:
        """The Program of a kernel whose `symbols` stay open, with that split, or with the one that costs least."""

    def splits(self, func: tirx.PrimFunc) -> Callable[[Sizes], SplitDims] | None:
        """What costs least, by the sizes of symbols; None if sizes are lowered one by one."""


_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)
_MOST_SYMBOLS = 4  # a family is compared with exact sizes, large and small ones of each symbol
_MOST = 1 << 20  # no family of multiples of more than this


@dataclass(frozen=True)
class _Family:
    """`program` for sizes that are multiples of `numbers`; its symbols say how many times."""

    numbers: tuple[int, ...]
    program: Sizable


class Programs:
    """The Programs of one kernel, by the sizes of its symbols."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        symbols: tuple[tirx.Var, ...],
        lower: Lower,
        overlap: str | int,
        compile_kernel: Callable[[tirx.PrimFunc], object],
    ) -> None:
        self._func, self._lower, self._overlap = func, lower, overlap
        self._compile_kernel = compile_kernel
        self._symbols = symbols
        self._numbers = _numbers(func, symbols) if symbols else {}
        self._families: dict[tuple[tuple[int, ...], SplitDims], _Family | None] = {}
        self._programs: Recent[tuple[int, ...], Program] = Recent(KERNEL_SIZES)
        self._decided: Recent[tuple[int, ...], Decisions] = Recent(KERNEL_SIZES)  # for explain

    def of(self, sizes: Sizes) -> Program:
        """The Program for these sizes, made once as long as it is kept."""
        key = tuple(sizes[var] for var in self._symbols)
        return self._programs.made(key, lambda: self._sized(sizes) or self.exact(sizes))

    def exact(self, sizes: Sizes, split: SplitDims | None = None) -> Program:
        """The Program of the kernel lowered for these sizes and no others, with that split if it is known."""
        func = specialize(self._func, sizes) if self._symbols else self._func
        return with_overlap(self._lower(func, (), split).sized(()), self._overlap)

    def _sized(self, sizes: Sizes) -> Program | None:
        """The Program of the sizes' family with the sizes filled in; None where there is none."""
        few = 1 <= len(self._symbols) <= _MOST_SYMBOLS
        if not few or self._split_at is None or isinstance(self._overlap, int) or min(sizes.values()) < 1:
            return None
        numbers = tuple(
            next(number for number in self._numbers[var] if sizes[var] % number == 0) for var in self._symbols
        )
        key = numbers, self._split_at(sizes)
        if key not in self._families:
            self._families[key] = self._family(*key)
        family = self._families[key]
        return None if family is None else self._filled(family, sizes)

    def _filled(self, family: _Family, sizes: Sizes) -> Program:
        times = [sizes[var] // number for var, number in zip(self._symbols, family.numbers, strict=True)]
        program = family.program.sized(times, partial(self._decided_for, sizes))
        return with_overlap(program, self._overlap)

    def _decided_for(self, sizes: Sizes) -> Decisions:
        def exactly() -> Decisions:
            decided = self.exact(sizes).decided
            assert decided is not None
            return decided()

        return self._decided.made(tuple(sizes[var] for var in self._symbols), exactly)

    @cached_property
    def _split_at(self) -> Callable[[Sizes], SplitDims] | None:
        """What the axes split at which sizes; None if that can't be said."""
        try:
            return self._lower.splits(self._func)
        except MeshTensorError:
            return None

    def _family(self, numbers: tuple[int, ...], split: SplitDims) -> _Family | None:
        """The family of these multiples with that split, if it can be lowered as one, compiled, and nothing is lost by
        it."""
        unknowns = tuple(tirx.Var(var.name, var.dtype) for var in self._symbols)
        wholes = zip(self._symbols, unknowns, numbers, strict=True)
        sizes = {var: unknown * number if number > 1 else unknown for var, unknown, number in wholes}
        try:
            assert self._split_at is not None
            family = _Family(numbers, self._lower(specialize(self._func, sizes), unknowns, split))
            for some in self._typical(numbers):
                program = self._filled(family, some)
                if _plan(program) != _plan(self.exact(some, None if self._split_at(some) == split else split)):
                    return None
            for step in program.kernels:
                self._compile_kernel(step.func)
        except MeshTensorError:
            return None
        return family

    def _typical(self, numbers: tuple[int, ...]) -> list[dict[tirx.Var, int]]:
        """Sizes of the family and of no family of larger numbers, small and large ones together: a plan may depend on
        which tensors are larger."""
        choices = []
        for var, number in zip(self._symbols, numbers, strict=True):
            largest = self._numbers[var][0]
            rest = number if number < largest else 0
            choices.append([times * largest + rest for times in (3, 300)])
        return [dict(zip(self._symbols, sizes, strict=True)) for sizes in itertools.product(*choices)]


def _plan(program: Program) -> tuple[object, ...]:
    """What a Program does, but for the code of its kernels."""
    return (program.parameters, program.values, [(step.words, step.uses, step.writes) for step in program.steps])


def _numbers(func: tirx.PrimFunc, found: tuple[tirx.Var, ...]) -> dict[tirx.Var, tuple[int, ...]]:
    """Per symbol, what its families are multiples of, the largest first."""
    devices = read_annotations(func)[0].num_devices
    blocks: dict[tirx.Var, set[int]] = {var: {1} for var in found}
    for division in nodes(func.body, *_DIVISIONS):
        if isinstance(division.b, tirx.IntImm) and int(division.b) > 0:
            for var in tirx.analysis.undefined_vars(division.a):
                blocks.get(var, set()).add(int(division.b))
    most = {var: math.lcm(*numbers) * devices for var, numbers in blocks.items()}
    return {var: tuple(dict.fromkeys((n if n <= _MOST else devices, devices, 1))) for var, n in most.items()}
