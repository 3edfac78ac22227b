"""Programs of kernels with symbolic dims: lowered once for all sizes of a family, then filled in for each.

A family are the multiples of a number: of blocks and devices (no block is cut short), of devices (all tiles are even),
or of 1, with which the axes split the same. The kernel is lowered with `number * n` in place of a symbol, so that
whatever the passes prove holds for the whole family. Where that gives another plan than sizes of the same magnitudes do
that are lowered by themselves, these are lowered one by one. Which it is depends on the kernel and the sizes alone,
never on those that came before: all ranks find the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, partial

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations, specialize
from mesh_tensor.base.decisions import Decisions
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.plan.tir_rule import Sizes
from mesh_tensor.tir.nodes import DIVISIONS, nodes

from .from_kernel import Lowering, OpenProgram, SplitDims
from .overlap import with_overlap
from .program import Program

_MAGNITUDES = (3, 30, 300)  # of the largest number that a family's sizes are multiples of
_MOST = 1 << 20  # no family of multiples of more than this


@dataclass(frozen=True, eq=False)
class _Family:
    """`program` for sizes that are multiples of `numbers`, with that split; its symbols say how many times."""

    numbers: tuple[int, ...]
    split: SplitDims
    program: OpenProgram


class Programs:
    """The Programs of one kernel, by the sizes of its symbols."""

    def __init__(
        self,
        func: tirx.PrimFunc,
        symbols: tuple[tirx.Var, ...],
        lower: Lowering,
        overlap: str | int,
        compile_kernel: Callable[[tirx.PrimFunc], object],
    ) -> None:
        self._func, self._lower, self._overlap = func, lower, overlap
        self._compile_kernel = compile_kernel
        self._symbols = symbols
        self._numbers = _numbers(func, symbols) if symbols else {}
        self._families: dict[tuple[tuple[int, ...], SplitDims], _Family | None] = {}
        self._as_alone: dict[tuple[_Family, tuple[int, ...]], bool] = {}
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
        if not self._symbols or self._split_at is None or isinstance(self._overlap, int) or min(sizes.values()) < 1:
            return None
        numbers = tuple(
            next(number for number in self._numbers[var] if sizes[var] % number == 0) for var in self._symbols
        )
        key = numbers, self._split_at(sizes)
        if key not in self._families:
            self._families[key] = self._family(*key)
        family = self._families[key]
        return self._filled(family, sizes) if family and self._loses_nothing(family, sizes) else None

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
        """The family of these multiples with that split, if it can be lowered as one."""
        unknowns = tuple(tirx.Var(var.name, var.dtype) for var in self._symbols)
        wholes = zip(self._symbols, unknowns, numbers, strict=True)
        sizes = {var: unknown * number if number > 1 else unknown for var, unknown, number in wholes}
        try:
            return _Family(numbers, split, self._lower(specialize(self._func, sizes), unknowns, split))
        except MeshTensorError:
            return None

    def _loses_nothing(self, family: _Family, sizes: Sizes) -> bool:
        """Whether sizes like these of a family have the plan that they have alone, and its kernels compile."""
        like = self._like(family, sizes)
        key = family, tuple(like.values())
        if key not in self._as_alone:
            self._as_alone[key] = self._is_as_alone(family, like)
        return self._as_alone[key]

    def _is_as_alone(self, family: _Family, sizes: Sizes) -> bool:
        assert self._split_at is not None
        try:
            program = self._filled(family, sizes)
            decided = self._split_at(sizes) == family.split
            if _plan(program) != _plan(self.exact(sizes, None if decided else family.split)):
                return False
            for step in program.kernels:
                self._compile_kernel(step.func)
        except MeshTensorError:
            return False
        return True

    def _like(self, family: _Family, sizes: Sizes) -> dict[tirx.Var, int]:
        """Sizes of the family, and of none of larger numbers, of the same magnitudes: a plan may depend on which
        tensors are larger, and by how much."""
        like = {}
        for var, number in zip(self._symbols, family.numbers, strict=True):
            largest = self._numbers[var][0]
            times = next((times for times in _MAGNITUDES if sizes[var] <= 3 * times * largest), _MAGNITUDES[-1])
            is_part = sizes[var] < largest
            like[var] = largest - number if is_part else times * largest + (number if number < largest else 0)
        return like


def _plan(program: Program) -> tuple[object, ...]:
    """What a Program does, but for the code of its kernels."""
    return (program.parameters, program.values, [(step.words, step.uses, step.writes) for step in program.steps])


def _numbers(func: tirx.PrimFunc, found: tuple[tirx.Var, ...]) -> dict[tirx.Var, tuple[int, ...]]:
    """Per symbol, what its families are multiples of, the largest first."""
    devices = read_annotations(func)[0].num_devices
    blocks: dict[tirx.Var, set[int]] = {var: {1} for var in found}
    for division in nodes(func.body, *DIVISIONS):
        if isinstance(division.b, tirx.IntImm) and int(division.b) > 0:
            for var in tirx.analysis.undefined_vars(division.a):
                blocks.get(var, set()).add(int(division.b))
    most = {var: math.lcm(*numbers) * devices for var, numbers in blocks.items()}
    return {var: tuple(dict.fromkeys((n if n <= _MOST else devices, devices, 1))) for var, n in most.items()}
