"""simulate: how long a Program takes on a Machine, what its devices hold, and what that comes from. How often something
runs that only data says it knows nothing of: `left_out`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from tvm import tirx

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, machine_named
from mesh_tensor.pipelining.schedule import Schedule
from mesh_tensor.program.from_kernel import lower_to_program
from mesh_tensor.program.loop_step import LoopStep
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import KernelStep, Step, of_kinds
from mesh_tensor.program.verify import held_bytes, peak_bytes
from mesh_tensor.rules.kernel.cost import unknown_extents
from mesh_tensor.rules.kernel.reader import read_kernel

from .costs import COMPUTE, StepCosts, working_bytes
from .pipelines import PipelineSimulation, simulate_pipeline
from .streams import RUN, WAIT, Event, Events, called_seconds, critical, play
from .summary import Group, Simulated, check_count, groups, named_kinds, page, table, trace, why

_ONCE = "which data says: they count as once"


def left_out(program: Program) -> tuple[str, ...]:
    """In words, each once."""
    return tuple(dict.fromkeys(_left_out(program.steps)))


def _left_out(steps: Iterable[Step]) -> Iterator[str]:
    return chain.from_iterable(of_kinds(steps, {LoopStep: _of_loop, KernelStep: _of_kernel}))


def _of_loop(step: LoopStep) -> Iterator[str]:
    if step.count is None:
        yield f"how often the steps of loop {step.where} run, {_ONCE}"
    yield from _left_out(step.inner)


def _of_kernel(step: KernelStep) -> Iterator[str]:
    known = step.func.params[len(step.args) + len(step.scalars) :]
    if unknown := unknown_extents(read_kernel(step.func), known):
        yield f"how often loops of kernel {step.name} run ({'; '.join(unknown)}), {_ONCE}"


def simulate(what: Any, machine: Machine | str | None = None) -> Simulation | PipelineSimulation:
    """Predict the time and the memory of a run on a machine; nothing is run, and no tensors are allocated.

    Args:
        what: an annotated kernel (planned for the machine), a MeshKernel, MeshModule, TrainingRun or Pipeline (as they
            were planned), or a Program; all of known sizes.
        machine: a Machine, or a preset's name ("h100x16"); None: this project's CPU ranks.

    Returns:
        The Simulation: time, memory, and where they come from; of a pipeline a PipelineSimulation.

    Raises:
        MeshTensorError: it is nothing that runs, or the machine can't hold it.
    """
    on = machine_named(machine) or CPU
    if isinstance(getattr(what, "schedule", None), Schedule):
        return simulate_pipeline(what, on, Simulation)
    return Simulation(_program_of(what, on), on, getattr(what, "not_simulated", ()))


def _program_of(what: Any, machine: Machine) -> Program:
    if isinstance(what, tirx.PrimFunc):
        check_sizes_known(what)
        return lower_to_program(what, machine=machine)
    program = what if isinstance(what, Program) else getattr(what, "program", None)
    if not isinstance(program, Program):
        refuse(
            f"{shown(what)} can't be simulated",
            fix="pass an annotated kernel, what mt.compile or mt.distribute_module gave, or its .program",
        )
    return program


def check_sizes_known(func: tirx.PrimFunc) -> None:
    """Refuse a kernel whose buffers have dims of unknown sizes."""
    sizes = [size for buffer in func.buffer_map.values() for size in buffer.shape]
    if symbols := [str(size) for size in sizes if not isinstance(size, tirx.IntImm)]:
        refuse(
            f"a kernel with symbolic dims can't be simulated: {', '.join(dict.fromkeys(symbols))}",
            fix="give them sizes (mt.simulate takes a compiled kernel after a call, too)",
        )


@dataclass(frozen=True)
class StepTime:
    """A step from `start` to `end` seconds on a stream of the device; `bound` is what it takes most of that for, and
    `held` the bytes on the device meanwhile. `number` is the step's in the program."""

    number: int
    kind: str
    stream: str
    start: float
    end: float
    bound: str
    flops: int
    nbytes: int
    held: int


class Simulation(Simulated):
    """The predicted run of a Program on a Machine.

    time         seconds, from the first step's start to the last one's end
    peak_bytes   the most bytes that a device holds at once: tiles, and what torch takes inside convolutions and pooling
    computing    seconds in which the device computes; what is left of `time` it waits for collectives
    """

    def __init__(self, program: Program, machine: Machine, beside: Sequence[str] = (), elsewhere: int = 0) -> None:
        """`beside`: what else callers do, in words, which is not simulated. `elsewhere`: bytes that others touch from
        one run of the program to the next."""
        self.program, self.machine, self._beside = program, machine, tuple(beside)
        self._events = Events(program, machine, StepCosts(program, machine, elsewhere))
        took, self._ends = play(self._events.all, len(machine.links), machine.busy)
        self._called = called_seconds(program, machine, elsewhere)
        self.time = took + self._called
        self.computing = sum(event.seconds for event in self._events.all if event.kind == RUN)

    @cached_property
    def left_out(self) -> tuple[str, ...]:
        """What is not simulated, in words."""
        return (*left_out(self.program), *self._beside)

    @property
    def events(self) -> list[Event]:
        """What its steps do to the streams of a device, in order, and `numbers` which steps of the program do it."""
        return self._events.all

    @property
    def numbers(self) -> list[int]:
        return self._events.steps

    @cached_property
    def held(self) -> list[int]:
        """The bytes that a device holds during each step of the program."""
        return held_bytes(self.program, working_bytes(self.machine))

    @cached_property
    def peak_bytes(self) -> int:
        """The most bytes that a device holds at once."""
        return peak_bytes(self.program, working_bytes(self.machine))

    @property
    def communicating(self) -> float:
        """Seconds of collectives, whether something runs beside them or not."""
        return sum(event.seconds for event, cost in self._timed() if cost.stream != COMPUTE)

    @property
    def exposed(self) -> float:
        """The share of the time, 0 to 1, that the device waits for collectives."""
        return max(0.0, self.time - self._called - self.computing) / self.time if self.time else 0.0

    @property
    def flops(self) -> int:
        """Floating-point operations of one device."""
        return sum(cost.flops for cost in self._events.costs)

    @cached_property
    def steps(self) -> tuple[StepTime, ...]:
        """Every step that takes time, or that is waited for, in the program's order."""
        return tuple(step for step in self._by_event if step is not None)

    @cached_property
    def critical_path(self) -> tuple[StepTime, ...]:
        """The steps that the end waited for, one after the other."""
        found = [self._by_event[each] for each in critical(self._events.all, self._ends, self.machine.busy)]
        return tuple(step for step in found if step is not None)

    @cached_property
    def _by_event(self) -> list[StepTime | None]:
        """The step of every event; those that only wait have none."""
        names = ["device", *(link.name for link in self.machine.links)]
        found: list[StepTime | None] = []
        for (event, cost), number, end in zip(self._timed(), self._events.steps, self._ends, strict=True):
            if event.kind == WAIT:
                found.append(None)
                continue
            stream = names[cost.stream + 1]
            start, held = end - event.seconds, self.held[number]
            found.append(StepTime(number, cost.kind, stream, start, end, cost.bound, cost.flops, cost.nbytes, held))
        return found

    def groups(self) -> list[Group]:
        """The steps by kind, the dearest first, with their share of the critical path and the time without them."""
        return groups(self.steps, self.critical_path, self.without)

    def without(self, kinds: Iterable[str] | str) -> float:
        """The seconds that everything would take if steps of these kinds, or of this one, took none. Kinds are what
        `print(simulation)` calls them ("all_reduce"); refused where no step is of such a kind."""
        gone = named_kinds(kinds, {cost.kind for _, cost in self._timed()})
        events = [e._replace(seconds=0.0) if c.kind in gone else e for e, c in self._timed()]
        return play(events, len(self.machine.links), self.machine.busy)[0] + self._called

    def why(self, most: int = 3) -> str:
        """The `most` kinds of steps that cost most, what for, and what would change that, in words."""
        check_count(most)
        return why(self.groups()[:most], self)

    def trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The timeline as Chrome's tracing and Perfetto read it (a dict, times in microseconds); written to `path` as
        JSON, if there is one: an OSError where that can't be."""
        return trace(self, path)

    def page(self, path: str | Path | None = None) -> str:
        """The timeline as the text of an HTML page that needs nothing else; written to `path`, if there is one: an
        OSError where that can't be."""
        return page(self, path)

    def __str__(self) -> str:
        return table(self)

    def __repr__(self) -> str:
        took = f"{self.time * 1e3:.4g} ms, {self.peak_bytes:,} bytes"
        return f"Simulation({self.program.name} on {self.machine.name}: {took})"

    def _timed(self) -> list[tuple[Any, Any]]:
        return list(zip(self._events.all, self._events.costs, strict=True))
