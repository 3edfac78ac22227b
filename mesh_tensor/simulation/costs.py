"""What steps cost on a Machine: seconds on the stream that they keep busy.

A step is priced for the busiest device. Kernels and operators keep the device's own stream busy, collectives that of
the outermost link that they cross. What a step reads comes from the nearest memory that holds all that was touched
since it was touched last.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from mesh_tensor.base.collectives import collective_time, reach
from mesh_tensor.base.machine import Machine, Work
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import CollectiveStep, FreeStep, KernelStep, OpStep
from mesh_tensor.rules.kernel.cost import has_products, loaded_again, loaded_bytes
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.cost import class_of, operator_work, pays_apart, read_bytes, touched_bytes
from mesh_tensor.rules.operator.vjp import VJP, called_with, can_be_recorded, vjp_of
from mesh_tensor.rules.operator.workspace import workspace_bytes

COMPUTE = -1  # the stream of the device itself; others are numbers of the machine's links


@dataclass(frozen=True)
class StepCost:
    """`seconds` on a `stream`, most of them because of what `bound` says: start, flops, memory, or a link's name.
    `nbytes` are read and written, or received. `kind` is what steps are grouped by."""

    kind: str
    stream: int
    seconds: float
    bound: str
    flops: int = 0
    nbytes: int = 0


NOTHING = StepCost("wait", COMPUTE, 0.0, "start")  # what waits, and memory that comes and goes, cost by themselves


def working_bytes(machine: Machine) -> Callable[[OpCall], int]:
    """What a call takes while it runs, on a device of the machine, beside its operands and results."""
    return lambda call: workspace_bytes(call, machine.channel_block)


class StepCosts:
    """What each kind of step costs, of a program; calls that are alike are priced once. `elsewhere`: bytes that others
    touch from one run of the program to the next."""

    def __init__(self, program: Program, machine: Machine, elsewhere: int = 0) -> None:
        machine.check_holds(program.mesh.num_devices, str(program.mesh))
        self._program, self._machine = program, machine
        # ... and how often processors go round for it, and whether they work at the same time
        self._known: dict[tuple, tuple[StepCost, int, bool]] = {}
        self._transposed: set[str] = set()  # values whose elements lie in another order than their dims
        self._handed = True  # whether processors worked at the same time at the last step; else others are cold
        self._apart: dict[str, frozenset[str]] = {}  # value -> axes along which devices have it in other memory
        self._all = elsewhere + sum(value.tile_bytes for value in program.stored.values())
        self._now, self._touched = self._all, dict[str, int]()  # bytes touched so far, and when a value was, at last
        self._ran = dict[object, int]()  # ... when a step of a kind started, at last
        self._freed: dict[int, list[int]] = {}  # ... when so many bytes were given back
        self._calls = set[tuple[str, tuple[str, ...]]]()  # of operators that have run, with their operands

    def inside(self, body: Program) -> StepCosts:
        """Prices of a loop's body: what it takes was touched before it when it was here."""
        made = StepCosts(body, self._machine)
        made._now, made._ran, made._freed = self._now, self._ran.copy(), self._freed
        made._touched = {name: self._touched[name] for name in body.takes if name in self._touched}
        return made

    def after(self, bodies: Iterable[StepCosts], count: int) -> None:
        """A loop has run so many times, of which its bodies' prices have seen up to two."""
        before, ran = self._now, self._ran.copy()
        for body in bodies:
            self._now += (body._now - before) // min(2, count) * count
            again = {kind: then for kind, then in body._ran.items() if then != ran.get(kind)}
            self._ran |= {kind: self._now - (body._now - then) for kind, then in again.items()}
        for body in bodies:
            taken = [name for name in body._program.takes if body._touched.get(name, 0) > self._touched.get(name, 0)]
            self._touched |= dict.fromkeys(taken, self._now)

    def kernel(self, step: KernelStep) -> StepCost:
        """Its operations, on the dtype of its first tile, or all of its tiles once, and what it loads again."""
        values = [self._program.values[name] for name in step.args]
        self._apart |= dict.fromkeys(step.writes, frozenset(self._program.mesh))
        nbytes = sum(value.tile_bytes for value in values)
        dtype = values[0].dtype if values else "float32"
        rows = () if has_products(step.func) else ("kernel rows",)
        names = f"kernel {step.name}", *rows, "kernel", "product"
        again, between = 0.0, 0.0
        if self._machine.roofline(*names).again:
            tiles, places = (value.tile_shape for value in values), map(self._program.mesh.size, step.axes)
            loaded = loaded_bytes(step.func, tuple(tiles), step.sizes, tuple(places))
            again, between = loaded_again(loaded, [value.tile_bytes for value in values])
        work = self._machine.work(step.flops, nbytes, dtype, *names, again=again, between=between)
        rounds = self._machine.rounds(self._program.mesh.num_devices)
        work = self._from(work, self._levels(step.args, nbytes), [value.tile_bytes for value in values], nbytes)
        seconds = self._in_turn(work, rounds, self._program.mesh.num_devices > 1) + self._colder(step.name)
        self._handed = True
        self._touch(step.args, rounds)
        return StepCost(f"kernel {step.name}", COMPUTE, seconds, work.bound, step.flops, nbytes)

    def op(self, step: OpStep) -> StepCost:
        """Its operations, or its operands and results once; views of operands move nothing."""
        copied = any(name in step.whole for name in step.results) or self._strided(step)
        apart = self._differ((*step.args, *step.results))
        self._apart |= dict.fromkeys(step.results, apart)
        different = math.prod(self._program.mesh.size(axis) for axis in apart)
        name = step.call.operator
        levels: tuple[int, ...] = ()
        if len(self._machine.memory) > 1:
            made = () if class_of(name) == "view" and not copied else self._made(step.results)
            levels = (*self._levels(step.args, touched_bytes(step.call)), *made)
        of = step.call.literals if name == VJP else ()  # gradients of which operator
        colder, again = self._colder((name, of)), self._runs_again(step)
        state = copied, different, levels, colder, again, self._handed
        key = name, of, step.call.inputs, step.call.outputs, step.flops, *state
        if key not in self._known:
            together = different > 1 and self._machine.processors is not None and pays_apart(step.call)
            rounds = self._machine.rounds(different, together)
            self._known[key] = self._priced(step, copied, rounds, levels, together, colder, again), rounds, together
        found, rounds, together = self._known[key]
        if found.nbytes:
            self._touch((*step.args, *step.results), rounds)
            self._handed = together
        else:  # views
            last = max((self._touched.get(name, 0) for name in step.args), default=0)
            self._touched |= dict.fromkeys(step.results, last)
        return found

    def collective(self, step: CollectiveStep) -> StepCost:
        """What is sent over links; what only changes on the device, its tiles once."""
        mesh, machine = self._program.mesh, self._machine
        seconds, colder = collective_time(machine, step.kind, step.bytes, mesh, step.axes), self._colder(step.kind)
        name = f"{step.kind} over {', '.join(step.axes)}"
        self._apart[step.dst] = self._differ((step.src, step.dst))
        self._touch((step.src, step.dst), self._machine.rounds(mesh.num_devices))
        if seconds:
            self._apart[step.dst] = (frozenset(mesh) - set(step.axes)) | self._split(step.dst)
            groups = reach(machine, mesh, step.axes)
            bound = groups.link.name if step.bytes / groups.rate > seconds / 2 else "start"
            rounds = self._machine.rounds(mesh.num_devices)
            return StepCost(name, groups.level, seconds * rounds + colder, bound, 0, step.bytes)
        nbytes = sum(self._program.values[name].tile_bytes for name in (step.src, step.dst))
        work = Work(machine.launch, 0.0, nbytes / machine.memory_rate(nbytes))
        return StepCost(name, COMPUTE, work.seconds + colder, work.bound, 0, nbytes)

    def _priced(
        self,
        step: OpStep,
        copied: bool,
        rounds: int,
        levels: tuple[int, ...],
        together: bool,
        colder: float,
        again: bool,
    ) -> StepCost:
        work, name = operator_work(step.call, self._machine, copied, again), step.call.operator
        sizes = [*read_bytes(step.call), *(self._program.values[name].tile_bytes for name in step.results)]
        work = self._from(work, levels, sizes, touched_bytes(step.call))
        if name == VJP:
            name = f"gradient of {vjp_of(step.call).calls[-1][0].operator}"
        nbytes = touched_bytes(step.call) if work.memory else 0
        seconds = self._in_turn(work, rounds, together) + colder
        return StepCost(name, COMPUTE, seconds, work.bound, step.flops if work.flops else 0, nbytes)

    def _runs_again(self, step: OpStep) -> bool:
        """Whether gradients run their operator once more, where devices share processors: nothing of its call was kept
        if they took turns at it, or another program ran it."""
        if self._machine.processors is None:  # as ranks: they keep it, and carry it from program to program
            return False
        if step.call.operator != VJP:
            self._calls.add((step.call.name, step.args))
            return False
        if not can_be_recorded(step.call):
            return False
        forward, operands = called_with(step.call, step.args)
        return self._program.mesh.num_devices > 1 or (forward.name, operands) not in self._calls

    def free(self, step: FreeStep) -> None:
        """A later result of as many bytes may lie there."""
        self._freed.setdefault(self._program.stored[step.storage].tile_bytes, []).append(self._now)

    def _in_turn(self, work: Work, rounds: int, together: bool) -> float:
        """Seconds of a step. A processor that had nothing to do at the last one is cold, too."""
        idle = self._machine.cold_start if together and not self._handed else 0.0
        return self._machine.in_turn(work, rounds, self._program.mesh.num_devices, together) + idle

    def _strided(self, step: OpStep) -> bool:
        """Whether it is a reshape of what a transposition left in another order: torch copies that."""
        name = step.call.operator
        if name == "permute_dims" and step.args[0] not in self._transposed:  # else: back in order
            self._transposed.update(step.results)
        return name == "reshape" and step.args[0] in self._transposed

    def _colder(self, kind: object) -> float:
        """What starting a step takes more now, by what was touched since one of its kind started, or the run did."""
        last, self._ran[kind] = self._ran.get(kind, self._all), self._now
        return self._machine.colder(self._now - last)

    def _made(self, names: Iterable[str]) -> tuple[int, ...]:
        """Per result, the number of the memory that is given to it: the last that one as large gave back."""
        sizes = [self._program.values[name].tile_bytes for name in names]
        then = [(self._freed.get(size) or [0]).pop() for size in sizes]
        return tuple([self._level(max(size, self._now - each)) for size, each in zip(sizes, then, strict=True)])

    def _levels(self, names: Iterable[str], nbytes: int) -> tuple[int, ...]:
        """Per value of a step that touches so many bytes: the number of the memory that it is in."""
        return tuple([self._level(max(nbytes, self._now - self._touched.get(name, 0))) for name in names])

    def _level(self, nbytes: int) -> int:
        """The number of the nearest memory that holds so many bytes, or of the last."""
        levels = self._machine.memory
        return next((number for number, level in enumerate(levels) if nbytes <= level.size), len(levels) - 1)

    def _from(self, work: Work, levels: tuple[int, ...], sizes: Sequence[int], nbytes: int) -> Work:
        """The work, for values of these sizes that come from memory of these levels, instead of that of `nbytes`."""
        if not levels or not work.memory:
            return work
        near = self._machine.memory_rate(nbytes)
        pairs = zip(sizes, levels, strict=True)
        far = sum(size / self._machine.memory[level].rate - size / near for size, level in pairs)
        return replace(work, far=work.far + far)

    def _touch(self, names: Iterable[str], rounds: int) -> None:
        """A step of so many rounds goes through the values."""
        names = tuple(dict.fromkeys(names))
        self._now += rounds * sum(self._program.values[name].tile_bytes for name in names)
        self._touched |= dict.fromkeys(names, self._now)

    def _differ(self, names: Iterable[str]) -> frozenset[str]:
        """The axes along which devices have tensors of their own of these values. What is sent differs between all
        groups, even where it is equal."""
        return frozenset().union(*(self._apart.get(name) or self._split(name) for name in names))

    def _split(self, name: str) -> frozenset[str]:
        """The axes along which a value's layout differs."""
        layout = self._program.values[name].sharding
        return frozenset(axis for axes in layout.dims for axis in axes) | {axis for axis, _ in layout.partial}
