"""Loops of a module's plan as steps of its Program: what is run several times is a Program of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from mesh_tensor.plan.explicit import ExplicitStep, Form
from mesh_tensor.plan.ir import Graph, Scope, Value

from .loop_step import Carried, LoopStep
from .program import Parameter, Program, ProgramValue
from .steps import Step

# The steps of a part of the plan as those of a program: made quick, and with lifetimes.
Finish = Callable[[Sequence[Step], Sequence[Parameter]], tuple[Step, ...]]


@dataclass(eq=False)
class Loops:
    """The loops of a graph. `values`: those of the program, by name; `finish`: of steps what programs are made of."""

    graph: Graph
    values: Mapping[str, ProgramValue]
    finish: Finish
    entered: dict[Value, tuple[str, str]] = field(default_factory=dict)

    def groups(self, steps: Sequence[ExplicitStep], depth: int) -> Iterator[tuple[Scope | None, list[ExplicitStep]]]:
        """The steps cut into those of loops that stand in `depth` others, and what is between them."""
        if not self.graph.loops:
            yield None, list(steps)
            return
        for scope, group in groupby(steps, lambda step: self._scope(step, depth)):
            yield scope, list(group)

    def _scope(self, step: ExplicitStep, depth: int) -> Scope | None:
        found = [scope for scope in step.scopes if scope in self.graph.loops]
        return found[depth] if len(found) > depth else None

    def enter(self, step: ExplicitStep) -> None:
        """Note what a loop begins with."""
        self.entered[step.outputs[0].value] = step.inputs[0].name, step.outputs[0].name

    def step(
        self, scope: Scope, steps: Sequence[ExplicitStep], made: Callable[[Sequence[ExplicitStep]], Sequence[Step]]
    ) -> LoopStep:
        """A loop's step; `made` gives the steps of a program that stand for those of the plan."""
        loop = self.graph.loops[scope]
        ends = [step for step in steps if step.mark in _ENDS and step.scopes[-1] == scope]
        carried, stacked, goes_on, tested = [], [], "", 0
        for run in ends:
            src, dst = run.inputs[0].name, run.outputs[0].name
            if run.mark == "loop.next":
                carried.append(Carried(*self.entered[loop.entered[run.outputs[0].value]], src, dst))
            elif run.mark == "loop.stack":
                stacked.append((src, dst))
            else:
                goes_on, tested = src, steps.index(run)
        before = steps[:tested]
        after = [step for step in steps[tested:] if step not in ends]
        results = [*(each.then for each in carried), *(row for row, _ in stacked)]
        body = self._program(f"{loop.where}: steps", made(after), results)
        test = None if not goes_on else self._program(f"{loop.where}: test", made(before), [goes_on])
        return LoopStep(body, loop.count, test, goes_on, tuple(carried), tuple(stacked), loop.where)

    def _program(self, name: str, steps: Sequence[Step], results: Iterable[str]) -> Program:
        written = {name for step in steps for name in step.writes}
        named = [*(name for step in steps for name in step.uses), *results]
        taken = dict.fromkeys(name for name in named if name not in written)
        given = dict.fromkeys(results)
        parameters = [
            *(Parameter(name, name, name if name in given else None) for name in taken),
            *(Parameter(name, None, name) for name in given if name not in taken),
        ]
        lasting = self.finish(steps, parameters)
        known = dict.fromkeys([*named, *(name for step in lasting for name in step.uses)])
        return Program(name, self.graph.mesh, tuple(parameters), {n: self.values[n] for n in known}, lasting)


_ENDS = ("loop.next", "loop.stack", "loop.test")


def carried_forms(steps: Iterable[ExplicitStep]) -> Iterator[Form]:
    """What goes into loops, and from one time to the next."""
    for step in steps:
        if step.mark:
            yield from step.inputs
