"""A family of plans: which step of a whole plan is which of a plan of fewer layers, and the whole plan for other sizes.

Two plans for the same sizes make a `Family` where every step of the whole one is a step of the small one. Another small
plan of the same outline then says what the whole one is for its sizes: its shapes, calls and bytes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, TypeVar

from mesh_tensor.plan.ir import leaves
from mesh_tensor.rules.operator.call import Structure

from .from_graph import ModuleProgram
from .loop_step import LoopStep
from .plan_module import ModulePlan, Port, Stages
from .program import Program, ProgramValue
from .steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step, WaitStep

T = TypeVar("T")


def way(step: CollectiveStep) -> tuple:
    """What a collective does, but for the tensor."""
    return step.kind, step.axes, step.op, step.src_dim, step.dst_dim


@dataclass(frozen=True, eq=False)
class Family:
    """`whole` and `small` are plans for some sizes. `steps`: per step of the whole program, the number of the small one
    that it is. `values`, `ports`, `checks`: the same of these, by name and by number. `same`: values of the small
    program that have to have one shape: in the whole one, a step takes the one where the small step takes the other."""

    whole: ModulePlan
    small: ModulePlan
    steps: tuple[int | None, ...]
    values: Mapping[str, str]
    ports: tuple[int, ...]
    checks: tuple[int, ...]
    same: tuple[tuple[str, str], ...]

    def sized(self, small: ModulePlan, stages: Callable[[], Stages]) -> ModulePlan | None:
        """The whole plan for the sizes of a small one of the same outline; None if shapes don't go together."""
        values, steps = small.made.program.values, small.made.program.steps
        if any(values[one].shape != values[other].shape for one, other in self.same):
            return None
        known = cache(stages)
        whole, before = self.whole.made, self.small.made.program.values
        moved = {name for name, value in values.items() if value.shape != before[name].shape}
        sized = {
            name: shaped(value, values[self.values[name]].shape) if self.values[name] in moved else value
            for name, value in whole.program.values.items()
        }
        made = [
            step if number is None else _SIZED[type(step)](step, steps[number])
            for step, number in zip(whole.program.steps, self.steps, strict=True)
        ]
        program = replace(
            whole.program, values=sized, steps=tuple(made), decided=lambda: decided_in(known().made.program)
        )
        ports = zip(self.whole.ports, self.ports, strict=True)
        checks = zip(self.whole.index_checks, (small.index_checks[number] for number in self.checks), strict=True)
        return ModulePlan(
            replace(whole, program=program, constants=self._constants(small.made)),
            tuple([_as_port(port, small.ports[number]) for port, number in ports]),
            self.whole.params,
            self.whole.state,
            tuple([replace(its, parameter=check.parameter, where=check.where) for check, its in checks]),
            self.whole.base,
            known,
        )

    def _constants(self, small: ModuleProgram) -> dict[str, Any]:
        """The constants' data; where it changes with sizes, the small plan's."""
        before, made = self.small.made.constants, dict(self.whole.made.constants)
        for name in made:
            mine = self.values[name]
            if not same_data(before[mine], small.constants[mine]):
                made[name] = small.constants[mine]
        return made


def decided_in(program: Program) -> Any:
    assert program.decided is not None
    return program.decided()


def shaped(value: ProgramValue, shape: tuple[int, ...]) -> ProgramValue:
    return ProgramValue(value.name, shape, value.dtype, value.sharding, value.storage, value.slab, value.inner)


def _as_port(port: Port, small: Port) -> Port:
    return port if port.dims == small.dims else replace(port, dims=small.dims)


def _sized_op(step: OpStep, small: OpStep) -> OpStep:
    if step.call is small.call:
        return step
    flops, kernel = small.flops, small.kernel
    return OpStep(small.call, step.args, step.results, step.whole, flops, step.where, kernel, step.checked)


def _sized_collective(step: CollectiveStep, small: CollectiveStep | WaitStep) -> CollectiveStep:
    moved = small.collective.bytes
    return step if step.bytes == moved else replace(step, bytes=moved)


def _sized_wait(step: WaitStep, small: CollectiveStep | WaitStep) -> WaitStep:
    return WaitStep(_sized_collective(step.collective, small))


_SIZED: dict[type, Callable[[Any, Any], Step]] = {
    OpStep: _sized_op,
    CollectiveStep: _sized_collective,
    WaitStep: _sized_wait,
}


def family_of(whole: ModulePlan, small: ModulePlan, stands: Mapping[str, str]) -> Family | None:
    """The family of two plans for the same sizes, if every step of the whole one is one of the small one."""
    try:
        return _Matcher(whole, small, stands).family()
    except _DiffersError:
        return None


class _DiffersError(Exception):
    """Some part of the whole plan is no part of the small one."""


class _Matcher:
    """What of the small plan the parts of the whole one are. Names say what to compare with what; nothing else is taken
    from them."""

    def __init__(self, whole: ModulePlan, small: ModulePlan, stands: Mapping[str, str]) -> None:
        self._whole, self._small, self._stands = whole, small, stands
        self._values: dict[str, str] = {}
        self._same: dict[tuple[str, str], None] = {}
        self._ops: dict[tuple[str, int], tuple[int, OpStep]] = {}
        self._collectives: dict[str, int] = {}
        self._counts: Counter[str] = Counter()
        numbers = {id(step): number for number, step in enumerate(small.made.program.steps)}
        for op in small.made.program.ops:
            self._ops[self._place(op.where)] = numbers[id(op)], op
        for collective in small.made.program.collectives:
            self._collectives[collective.dst] = numbers[id(collective)]
        self._counts.clear()

    def family(self) -> Family:
        whole, small = self._whole, self._small
        self._need(whole.mesh == small.mesh and whole.base == small.base)
        steps = tuple(whole.made.program.mean(self))
        for name in (*whole.made.program.values, *leaves(whole.made.result)):
            self._values.setdefault(name, self._name(name))
        self._check_values()
        numbers = {port.name: number for number, port in enumerate(small.ports)}
        ports = tuple([self._found(numbers, self._values[port.name]) for port in whole.ports])
        for port, number in zip(whole.ports, ports, strict=True):
            self._need(replace(small.ports[number], name=port.name) == port)
        return Family(whole, small, steps, self._values, ports, self._checks(), tuple(self._same))

    def kernel(self, step: KernelStep | LoopStep) -> int | None:
        """Kernels plan for their sizes by themselves, and loops are no layers."""
        raise _DiffersError

    loop = kernel

    def alloc(self, step: AllocStep | FreeStep) -> int | None:
        """It says nothing of sizes."""
        return None

    free = alloc

    def op(self, step: OpStep) -> int | None:
        """The number of the operator that is alike."""
        prefix, _, name = step.where.rpartition(".")
        place = f"{prefix}.{self._name(name)}" if prefix else self._name(name)
        self._counts[step.where] += 1
        number, other = self._found(self._ops, (place, self._counts[step.where]))
        self._need(_alike(step, other))
        self._pair(step.uses, other.uses)
        return number

    def collective(self, step: CollectiveStep | WaitStep) -> int | None:
        """The number of the collective that is alike, or whose end is."""
        mine = step.collective
        number = self._found(self._collectives, self._name(mine.dst))
        its = self._small.made.program.steps[number].collective
        self._need(its is not None and (way(mine), mine.bytes) == (way(its), its.bytes))
        self._pair(mine.uses, () if its is None else its.uses)
        return number

    wait = collective

    def _place(self, where: str) -> tuple[str, int]:
        self._counts[where] += 1
        return where, self._counts[where]

    def _name(self, name: str) -> str:
        """The name of what may stand for a value, or for a binding: as its variable's, with the same number."""
        if name in self._stands:
            return self._stands[name]
        base, _, number = name.rpartition("_")
        return f"{self._stands[base]}_{number}" if base in self._stands and number.isdigit() else name

    def _pair(self, mine: Sequence[str], its: Sequence[str]) -> None:
        """Values of a step that the small plan has those for, in order."""
        self._need(len(mine) == len(its))
        for name, other in zip(mine, its, strict=True):
            known = self._values.setdefault(name, other)
            if known != other:
                self._same[known, other] = None

    def _check_values(self) -> None:
        """Values are what stands for them; each has memory of its own."""
        mine, its = self._whole.made.program.values, self._small.made.program.values
        for name, stands in self._values.items():
            self._need(stands in its and mine[name].storage == name and its[stands].storage == stands)
            self._need(replace(its[stands], name=name, storage=name) == mine[name])
        for one, other in self._same:
            self._need(replace(its[one], name=other, storage=other) == its[other])
        mine, its = self._whole.made.constants, self._small.made.constants
        self._need(all(self._values[name] in its for name in mine))
        # Whether data depends on sizes shows when there are others: then it has to be that of the small plan.
        self._need(all(same_data(data, its[self._values[name]]) for name, data in mine.items()))

    def _checks(self) -> tuple[int, ...]:
        numbers = {check: n for n, check in enumerate(self._small.index_checks)}
        found = []
        for check in self._whole.index_checks:
            prefix, _, name = check.where.rpartition(".")
            place = f"{prefix}.{self._name(name)}"
            found.append(self._found(numbers, replace(check, parameter=self._name(check.parameter), where=place)))
        return tuple(found)

    def _found(self, numbers: Mapping[Any, T], key: Any) -> T:
        self._need(key in numbers)
        return numbers[key]

    @staticmethod
    def _need(holds: bool) -> None:
        if not holds:
            raise _DiffersError


def _alike(one: OpStep, other: OpStep) -> bool:
    """Whether they do the same with their operands."""
    kernels = one.kernel is other.kernel or (
        one.kernel is not None and other.kernel is not None and one.kernel.same_as(other.kernel)
    )
    whole = [name in one.whole for name in one.results] == [name in other.whole for name in other.results]
    called = one.call is other.call or (one.call.name == other.call.name and one.call.kind == other.call.kind)
    return called and kernels and whole and (one.flops, one.checked) == (other.flops, other.checked)


def same_data(one: Any, other: Any) -> bool:
    return one.same_as(other) or Structure(one) == Structure(other)
