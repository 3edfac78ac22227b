"""A region of sizes: the plans for the corners of a box, and what plans for sizes within are by these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import overload

from mesh_tensor.plan.orders import IndexCheck
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.cost import count_flops

from .family import decided_in, same_data, shaped
from .plan_module import ModulePlan, Port, Stages
from .program import ProgramValue, bytes_received
from .size_terms import Box, Sizes, Terms
from .sized_calls import NotSizedError, SizedCall, is_plain, numbers_of
from .steps import AllocStep, CollectiveStep, FreeStep, OpStep, Step, WaitStep

_Slots = tuple[int, ...]  # numbers of terms
_Key = tuple[int, _Slots]  # of a call: whose it is in the plan that is known, and its numbers


class NotRegionError(Exception):
    """Plans differ in more than numbers, or in numbers that don't follow from the corners'."""


@dataclass(frozen=True)
class _Place:
    """A part of a plan in which there are numbers: what of it is none, and these."""

    kind: Hashable
    numbers: tuple[int, ...]


class Region:
    """The plans for the sizes of a box, which have one outline. `corners`: those for its corners; `within`: sizes in
    it, with their plan. `constants`: sizes of the function that are the same for all of these. `again` makes what is
    made on the way to the plan for sizes with the outline of another one. Raises NotRegionError where the plan within
    is not what those of the corners say."""

    def __init__(
        self,
        box: Box,
        corners: Sequence[ModulePlan],
        within: tuple[Sizes, ModulePlan],
        constants: Collection[int],
        again: Callable[[Sizes, ModulePlan], Stages],
    ) -> None:
        sizes, plan = within
        self.box, self._constants, self._again, self._plan = box, constants, again, plan
        self._terms, self._beside = Terms(box), Terms(box)
        if not all(_are_sized(other) and _same_constants(plan, other) for other in (plan, *corners)):
            raise NotRegionError
        self._slots = [self._slots_of(places) for places in zip(*map(_places, corners), strict=True)]
        more = [_flops_beside(other) for other in corners]
        self._more = [self._beside.term(at) for at in zip(*more, strict=True)]
        self._check(sizes, plan)
        self._prepare()

    def _slots_of(self, places: Sequence[_Place]) -> _Slots:
        if any(place.kind != places[0].kind for place in places):
            raise NotRegionError
        return tuple([self._terms.term(at) for at in zip(*(place.numbers for place in places), strict=True)])

    def _check(self, sizes: Sizes, plan: ModulePlan) -> None:
        values, more = self._terms.at(sizes), self._beside.at(sizes)
        if values is None or more is None or _flops_beside(plan) != [more[slot] for slot in self._more]:
            raise NotRegionError
        for place, slots in zip(_places(plan), self._slots, strict=True):
            if place.numbers != tuple([values[slot] for slot in slots]):
                raise NotRegionError

    def _prepare(self) -> None:
        """What has numbers that change, each kind once."""
        made, slots = self._plan.made.program, iter(self._slots)
        self.steps = tuple(made.steps)
        self.values = {name: (value, self._changing(next(slots))) for name, value in made.values.items()}
        self._ports = [(port, self._changing(next(slots))) for port in self._plan.ports]
        self._checks = [(check, self._changing(next(slots))) for check in self._plan.index_checks]
        self.calls: dict[_Key, tuple[OpCall, bool]] = {}  # and whether it `is_plain`
        self.ops: dict[
            int, tuple[_Key, int]
        ] = {}  # of steps by number, those that change: their call, and flops beside
        ops = [(number, step) for number, step in enumerate(made.steps) if isinstance(step, OpStep)]
        for (number, op), own, of_call in zip(ops, self._more, slots, strict=True):
            if self._changing(of_call) is not None or self._beside.is_open(own):
                key = id(op.call), of_call
                self.calls.setdefault(key, (op.call, is_plain(op.call)))
                self.ops[number] = key, own

    def _changing(self, slots: _Slots) -> _Slots | None:
        return slots if any(map(self._terms.is_open, slots)) else None

    def sized(self, sizes: Sizes) -> ModulePlan | None:
        """The plan for sizes of the box; None where a number of it would be no whole one."""
        numbers, more = self._terms.at(sizes), self._beside.at(sizes)
        if numbers is None or more is None:
            return None
        plan, filled = self._plan, _Filled(self, numbers, more)
        stages = cache(lambda: self._again(sizes, plan))
        made, at = plan.made, filled.at
        program = replace(
            made.program, values=filled, steps=filled.steps, decided=lambda: decided_in(stages().made.program)
        )
        return replace(
            plan,
            made=replace(made, program=program),
            ports=tuple([port if slots is None else _port(port, at(slots)) for port, slots in self._ports]),
            index_checks=tuple([c if slots is None else _check(c, at(slots)) for c, slots in self._checks]),
            stages=stages,
            kin=self,
            tells=not self._terms.coincide(numbers, self._constants),
        )


class _Filled(Mapping[str, ProgramValue]):
    """The values of a region's plan for some sizes, and its `steps`, each made once, when somebody asks for it.
    `numbers`, `beside`: what terms are then, and those of flops of what was fused."""

    def __init__(self, region: Region, numbers: Sequence[int], beside: Sequence[int]) -> None:
        self._region, self._numbers, self._beside = region, numbers, beside
        self._known: dict[_Slots, tuple[int, ...]] = {}
        self._values: dict[str, ProgramValue] = {}
        self._calls: dict[_Key, tuple[OpCall, int]] = {}
        self._collectives: dict[int, CollectiveStep] = {}
        self.steps = _Steps(region.steps, self._step)

    def at(self, slots: _Slots) -> tuple[int, ...]:
        """The numbers of these terms."""
        found = self._known.get(slots)
        if found is None:
            found = self._known.setdefault(slots, tuple([self._numbers[slot] for slot in slots]))
        return found

    def __getitem__(self, name: str) -> ProgramValue:
        value, slots = self._region.values[name]
        if slots is None:
            return value
        found = self._values.get(name)
        if found is None:
            found = self._values.setdefault(name, shaped(value, self.at(slots)))
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(self._region.values)

    def __len__(self) -> int:
        return len(self._region.values)

    def _step(self, number: int, step: Step) -> Step:
        if isinstance(step, OpStep) and number in self._region.ops:
            key, beside = self._region.ops[number]
            call, counted = self._call(key)
            flops = counted + self._beside[beside]
            return replace(step, call=call, flops=flops)
        if isinstance(step, CollectiveStep):
            return self._collective(step)
        return WaitStep(self._collective(step.collective)) if isinstance(step, WaitStep) else step

    def _call(self, key: _Key) -> tuple[OpCall, int]:
        found = self._calls.get(key)
        if found is None:
            of, plain = self._region.calls[key]
            call = SizedCall(of, self.at(key[1]), plain)
            found = self._calls.setdefault(key, (call, count_flops(call)))
        return found

    def _collective(self, step: CollectiveStep) -> CollectiveStep:
        """One object for the collective, whoever starts it or waits for it."""
        found = self._collectives.get(id(step))
        if found is None:
            moved = bytes_received(step.kind, self[step.src], self[step.dst], step.axes)
            own = step if step.bytes == moved else replace(step, bytes=moved)
            found = self._collectives.setdefault(id(step), own)
        return found


class _Steps(Sequence[Step]):
    """Steps, each made of another one and its number when somebody asks for it."""

    def __init__(self, of: Sequence[Step], make: Callable[[int, Step], Step]) -> None:
        self._of, self._make = of, make
        self._made: dict[int, Step] = {}

    @overload
    def __getitem__(self, at: int) -> Step: ...
    @overload
    def __getitem__(self, at: slice) -> tuple[Step, ...]: ...
    def __getitem__(self, at: int | slice) -> Step | tuple[Step, ...]:
        if isinstance(at, slice):
            return tuple([self[number] for number in range(*at.indices(len(self)))])
        number = range(len(self))[at]
        found = self._made.get(number)
        if found is None:
            found = self._made.setdefault(number, self._make(number, self._of[number]))
        return found

    def __len__(self) -> int:
        return len(self._of)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and tuple(self) == tuple(other)


def _are_sized(plan: ModulePlan) -> bool:
    """Whether it is known where all numbers of the plan's steps are."""
    steps = plan.made.program.steps
    known = (OpStep, CollectiveStep, WaitStep, AllocStep, FreeStep)
    return all(isinstance(step, known) for step in steps) and all(op.kernel is None for op in plan.made.program.ops)


def _same_constants(one: ModulePlan, other: ModulePlan) -> bool:
    return all(same_data(data, other.made.constants[name]) for name, data in one.made.constants.items())


def _flops_beside(plan: ModulePlan) -> list[int]:
    """Per operator, the flops of what was fused into it."""
    return [step.flops - count_flops(step.call) for step in plan.made.program.ops]


def _places(plan: ModulePlan) -> Iterator[_Place]:
    """The parts of a plan in which there are numbers."""
    for value in plan.made.program.values.values():
        yield _Place((), value.shape)
    for port in plan.ports:
        yield _Place(tuple(map(len, port.dims)), tuple([size for dim in port.dims for size in dim]))
    for check in plan.index_checks:
        yield _Place((), (check.size, check.lowest))
    known: dict[int, _Place] = {}
    for step in plan.made.program.ops:
        if id(step.call) not in known:
            try:
                known[id(step.call)] = _Place(*numbers_of(step.call))
            except NotSizedError as error:
                raise NotRegionError from error
        yield known[id(step.call)]


def _port(port: Port, numbers: Sequence[int]) -> Port:
    left = iter(numbers)
    return replace(port, dims=tuple([tuple([next(left) for _ in dim]) for dim in port.dims]))


def _check(check: IndexCheck, numbers: Sequence[int]) -> IndexCheck:
    return replace(check, size=numbers[0], lowest=numbers[1])
