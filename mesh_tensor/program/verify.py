"""What has to hold of a Program: kernels without collectives, memory that lives while it is used, values that exist;
and how much memory there is at most."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from mesh_tensor.lowering.verify import collectives_in, enabled, leftovers, raise_on
from mesh_tensor.redistribution.plan import Move, illegal_move
from mesh_tensor.rules.operator.call import OpCall

from .loop_step import LoopStep
from .program import Program, ProgramValue
from .steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, Step


def verify_program(program: Program) -> None:
    """Check a Program. Raises a VerificationError that lists what is wrong with it."""
    raise_on([*_unknown_values(program), *_kernels(program.kernels)], f"program {program.name}")
    raise_on([*_lifetimes(program), *_unmade(program), *_waits(program)], f"program {program.name}")
    for part in program.parts[1:]:
        verify_program(part)
    for step in program.collectives:
        verify_collective(step, program.values[step.src], program.values[step.dst])


def verify_collective(step: CollectiveStep, src: ProgramValue, dst: ProgramValue) -> None:
    """Check that a collective's kind leads from the layout of `src` to that of `dst`."""
    move = Move(step.kind, step.axes, dst.sharding, step.op, step.src_dim, step.dst_dim)
    raise_on(illegal_move(src.sharding, move), f"{step.kind} of {step.src} into {step.dst}")


def checked(program: Program) -> Program:
    """The program, which was checked if checks are on."""
    if enabled():
        verify_program(program)
    return program


def _unknown_values(program: Program) -> Iterator[str]:
    named = [name for step in program.steps for name in step.uses]
    named += [name for p in program.parameters for name in (p.input, p.output) if name is not None]
    yield from (f"there is no value {name}" for name in dict.fromkeys(named) if name not in program.values)


def _kernels(steps: Iterable[KernelStep]) -> Iterator[str]:
    for step in steps:
        yield from (f"kernel {step.name}: {fact}" for fact in (*collectives_in(step.func), *leftovers(step.func)))
        tiles = [buffer for param, buffer in step.func.buffer_map.items() if param in step.func.params]
        scalars = len(step.func.params) - len(tiles)
        if len(tiles) != len(step.args):
            yield f"kernel {step.name} takes {len(tiles)} tensors, and is given {len(step.args)}"
        elif scalars != (given := len(step.scalars) + len(step.sizes) + len(step.axes)):
            yield f"kernel {step.name} takes {scalars} scalars, and is given {given}"
        yield from (f"kernel {step.name} writes {w}, no argument" for w in step.writes if w not in step.args)


def _lifetimes(program: Program) -> list[str]:
    """Storages are owned by a parameter, or allocated before their first use; workspaces are freed after their last."""
    found: list[str] = []
    alive, lasting = set(program.inputs), program.inputs | program.outputs
    for number, step in enumerate(program.steps):
        there = [storage for storage in step.begins if storage in alive]
        found += [f"step {number}: {storage} is allocated, but is already there" for storage in there]
        lost = [storage for storage in step.ends if storage not in alive or storage in lasting]
        found += [f"step {number}: {storage} is freed, but is no workspace that is there" for storage in lost]
        alive.difference_update(step.ends)
        alive.update(step.begins, (program.values[name].storage for name in step.makes))
        gone = {program.values[name].storage for name in step.uses} - alive
        found += [f"step {number}: {storage} is used while it has no memory" for storage in sorted(gone)]
    found += [f"workspace {storage} is never freed" for storage in sorted(alive - lasting)]
    found += [f"output {storage} has no memory in the end" for storage in sorted(program.outputs - alive)]
    return found


def _unmade(program: Program) -> Iterator[str]:
    """What steps read is there by then."""
    made = set(program.inputs)
    for number, step in enumerate(program.steps):
        for name in step.needs:
            if program.values[name].storage not in made:
                yield f"step {number}: {name} is read before anything makes it"
        made |= {program.values[name].storage for name in step.writes}


def _waits(program: Program) -> list[str]:
    """What was started is waited for, once, and until then nothing writes what it reads, or uses what it makes."""
    found: list[str] = []
    pending: dict[str, CollectiveStep] = {}
    for number, step in enumerate(program.steps):
        collective, begun = step.collective, step.starts
        if collective is not None and begun is None:
            if pending.pop(collective.dst, None) != collective:
                found.append(f"step {number}: nothing that makes {collective.dst} was started")
            continue
        for started in pending.values():
            found += [f"step {number}: {fact}" for fact in _too_early(program, step, started)]
        if begun is not None and not begun.wait:
            pending[begun.dst] = begun
    return [*found, *(f"{name} is never waited for" for name in pending)]


def _too_early(program: Program, step: Step, started: CollectiveStep) -> Iterator[str]:
    values = program.values
    for name in step.uses:
        if values[name].overlaps(values[started.dst]):
            yield f"{name} is used before {started.kind} has made {started.dst}"
        elif name in step.writes and values[name].overlaps(values[started.src]):
            yield f"{name} is written while {started.kind} reads {started.src}"


Beside = Callable[[OpCall], int]  # the bytes that a call takes while it runs, beside its operands and results


def _nothing(_: OpCall) -> int:
    return 0


def held_bytes(program: Program, beside: Beside = _nothing) -> list[int]:
    """The bytes of tiles, padding included, that one device holds during each step. Inputs and outputs are there from
    the beginning, but for outputs that operators make."""
    return program.mean(_Held(program, beside))


def peak_bytes(program: Program, beside: Beside = _nothing) -> int:
    """The most bytes of tiles and workspaces that one device holds at once."""
    return _peak(program, _Held(program, beside))


def _peak(program: Program, held: _Held) -> int:
    first = held.now
    return max([first, *program.mean(held)])


class _Held:
    """What there is; every step means the bytes that are there with it. `inside`: of a loop, which brings no memory for
    what its steps give."""

    def __init__(self, program: Program, beside: Beside, inside: bool = False) -> None:
        self._values, self._beside = program.values, beside
        self._sizes = {storage: value.tile_bytes for storage, value in program.stored.items()}
        made = {program.values[name].storage for step in program.steps for name in step.makes}
        self._there: set[str] = set()
        self.now = 0
        for storage in program.inputs | (set() if inside else program.outputs - made):
            self._add(storage)

    def kernel(self, step: Step) -> int:
        """It works on what is there, as collectives do."""
        return self.now

    collective = wait = kernel

    def loop(self, step: LoopStep) -> int:
        """What is there, its results, and what its steps make on the way."""
        for name in step.makes:
            self._add(self._values[name].storage)
        bodies = [body for body in (step.body, step.test) if isinstance(body, Program)]
        taken = [sum(body.values[name].tile_bytes for name in body.takes) for body in bodies]
        peaks = [_peak(body, _Held(body, self._beside, inside=True)) for body in bodies]
        return self.now + max(peak - there for peak, there in zip(peaks, taken, strict=True))

    def op(self, step: OpStep) -> int:
        """Its results come with their memory."""
        for name in step.makes:
            self._add(self._values[name].storage)
        return self.now + self._beside(step.call)

    def alloc(self, step: AllocStep) -> int:
        """Memory that nobody brought comes to life."""
        self._add(step.storage)
        return self.now

    def free(self, step: FreeStep) -> int:
        """The memory is gone."""
        self._there.remove(step.storage)
        self.now -= self._sizes[step.storage]
        return self.now

    def _add(self, storage: str) -> None:
        if storage not in self._there:
            self._there.add(storage)
            self.now += self._sizes[storage]
