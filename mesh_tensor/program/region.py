"""A region of sizes: the plans for the corners of a box, and what plans for sizes within are by these."""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from mesh_tensor.plan.index_checks import IndexCheck
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.cost import count_flops

from .family import decided_in, same_data, shaped
from .plan_module import ModulePlan, Port
from .program import ProgramValue, bytes_received
from .size_terms import Box, Sizes, Terms
from .sized_calls import NotSizedError, numbers_of, with_sizes
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
    it, with their plan. `constants`: sizes of the function that are the same for all of these. `exact` plans sizes.

    Raises:
        NotRegionError: the plan within is not what those of the corners say.
    """

    def __init__(
        self,
        box: Box,
        corners: Sequence[ModulePlan],
        within: tuple[Sizes, ModulePlan],
        constants: Collection[int],
        exact: Callable[[Sizes], ModulePlan],
    ) -> None:
        sizes, plan = within
        self.box, self._constants, self._exact, self._plan = box, constants, exact, plan
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
        """The plan within is what the corners say."""
        values, more = self._terms.at(sizes), self._beside.at(sizes)
        if values is None or more is None or _flops_beside(plan) != [more[slot] for slot in self._more]:
            raise NotRegionError
        for place, slots in zip(_places(plan), self._slots, strict=True):
            if place.numbers != tuple([values[slot] for slot in slots]):
                raise NotRegionError

    def _prepare(self) -> None:
        """What has numbers that change, each kind once."""
        made, slots = self._plan.made.program, iter(self._slots)
        self._values = [(name, value, self._changing(next(slots))) for name, value in made.values.items()]
        self._ports = [(port, self._changing(next(slots))) for port in self._plan.ports]
        self._checks = [(check, self._changing(next(slots))) for check in self._plan.index_checks]
        self._calls: dict[_Key, OpCall] = {}
        self._ops: dict[
            int, tuple[_Key, int]
        ] = {}  # of steps by number, those that change: their call, and flops beside
        ops = [(number, step) for number, step in enumerate(made.steps) if isinstance(step, OpStep)]
        for (number, op), own, of_call in zip(ops, self._more, slots, strict=True):
            if self._changing(of_call) is not None or self._beside.is_open(own):
                key = id(op.call), of_call
                self._calls[key] = op.call
                self._ops[number] = key, own

    def _changing(self, slots: _Slots) -> _Slots | None:
        return slots if any(map(self._terms.is_open, slots)) else None

    def sized(self, sizes: Sizes) -> ModulePlan | None:
        """The plan for sizes of the box; None for those that are to be planned by themselves."""
        numbers, more = self._terms.at(sizes), self._beside.at(sizes)
        if numbers is None or more is None or self._terms.coincide(numbers, self._constants):
            return None
        known: dict[_Slots, tuple[int, ...]] = {}

        def at(slots: _Slots) -> tuple[int, ...]:
            found = known.get(slots)
            if found is None:
                found = known[slots] = tuple([numbers[slot] for slot in slots])
            return found

        values = {name: value if slots is None else shaped(value, at(slots)) for name, value, slots in self._values}
        calls = {key: with_sizes(call, at(key[1])) for key, call in self._calls.items()}
        plan, stages = self._plan, cache(lambda: self._exact(sizes).stages())
        program = replace(
            plan.made.program,
            values=values,
            steps=self._sized_steps(values, calls, more),
            decided=lambda: decided_in(stages().made.program),
        )
        return replace(
            plan,
            made=replace(plan.made, program=program),
            ports=tuple([port if slots is None else _port(port, at(slots)) for port, slots in self._ports]),
            index_checks=tuple([c if slots is None else _check(c, at(slots)) for c, slots in self._checks]),
            stages=stages,
        )

    def _sized_steps(
        self, values: Mapping[str, ProgramValue], calls: Mapping[_Key, OpCall], more: Sequence[int]
    ) -> tuple[Step, ...]:
        counted = {key: count_flops(call) for key, call in calls.items()}
        collectives: dict[int, CollectiveStep] = {}
        steps: list[Step] = []
        for number, step in enumerate(self._plan.made.program.steps):
            if isinstance(step, OpStep) and number in self._ops:
                key, beside = self._ops[number]
                flops, call = counted[key] + more[beside], calls[key]
                step = OpStep(call, step.args, step.results, step.whole, flops, step.where, None, step.checked)
            elif isinstance(step, (CollectiveStep, WaitStep)):
                own = collectives.get(id(step.collective))
                if own is None:
                    own = collectives[id(step.collective)] = _sized_collective(step.collective, values)
                step = WaitStep(own) if isinstance(step, WaitStep) else own
            steps.append(step)
        return tuple(steps)


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


def _sized_collective(step: CollectiveStep, values: Mapping[str, ProgramValue]) -> CollectiveStep:
    moved = bytes_received(step.kind, values[step.src], values[step.dst], step.axes)
    return step if step.bytes == moved else replace(step, bytes=moved)
