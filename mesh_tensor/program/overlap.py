"""Overlap: run a kernel slab by slab, and the collectives that feed it or take its result beside it.

    in bulk        with the result reduced             with an input gathered
    kernel C       kernel C[0:32]                      start all_gather A[0:32]
    all_reduce C   start all_reduce C[0:32]            start all_gather A[32:64]
                   kernel C[32:64]                     wait for A[0:32]
                   start all_reduce C[32:64]           kernel A[0:32]
                   wait for C[0:32]                    wait for A[32:64]
                   wait for C[32:64]                   kernel A[32:64]

Slabs are along the first dim of what is communicated, so that each lies in one piece; `lowering.slabs` says when a
kernel may be run so. Every element is computed and combined as in bulk, in the same order. What can't be done in
slabs, or is not predicted to pay, stays as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from mesh_tensor.base.collectives import BETWEEN, COLLECTIVES
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.placement import Partial, Shard
from mesh_tensor.rules.kernel.factors import Blocked

from .builder import with_lifetimes
from .later_products import products_later
from .overlap_sites import COUNTS, Sent, Site, Sites, Work, choose, slab_steps
from .program import Program, ProgramValue
from .steps import CollectiveStep, Step, WaitStep
from .verify import checked

_MOST = 64


def check_overlap(overlap: object) -> str | int:
    """`overlap` as a user gives it: "auto", "off" or a number of slabs. Refused where it is none of these."""
    if isinstance(overlap, str) and overlap in ("auto", "off"):
        return overlap
    if isinstance(overlap, int) and not isinstance(overlap, bool) and 1 <= overlap <= _MOST:
        return overlap
    return refuse(
        f"overlap={shown(overlap)} is unknown",
        why=f"it is 'auto', 'off', or into how many slabs (1 .. {_MOST}) a kernel beside a collective is split",
        fix="leave it out: then it is 'auto', and a cost model decides",
    )


def with_overlap(program: Program, overlap: str | int) -> Program:
    """The program as it is before it is known what runs it: collectives start early, and only a number of slabs is
    followed."""
    if isinstance(overlap, int):
        return overlapped(program, overlap)
    if not has_collectives(program):
        return program
    if overlap == "off":
        return replace(program, overlap=("off: everything in bulk",))
    why = "auto: no slabs on a virtual mesh, whose cores also move the bytes; ranks decide at their first call"
    return _with_early_starts(program, [step for step in program.steps if step.uses], program.values, [why])


def with_overlap_on(
    machine_of: Callable[[], Machine | None], program: Program, exactly: Callable[[], Program] | None = None
) -> Program:
    """The program as it is when it is known what runs it, if it is left to a cost model; None is an unknown machine.
    `exactly` makes it for its very sizes, if this one was made for more."""
    if not has_collectives(program) or not (exactly or any(step.slabs for step in program.kernels)):
        return program
    machine = machine_of()
    if machine is None:
        return replace(program, overlap=("auto: no slabs: nothing was measured on ranks of this kind",))
    if exactly is not None and (why := _why_no_slabs(program, machine)):
        return replace(program, overlap=(f"auto: no slabs: {why}",))
    return overlapped(program if exactly is None else exactly(), machine)


def has_collectives(program: Program) -> bool:
    """Whether anything is sent."""
    return any(step.bytes for step in program.collectives)


def overlapped(program: Program, wanted: int | Machine) -> Program:
    """The program with collectives beside kernels: in (at most) `wanted` slabs wherever that can be done, or where
    and as it is predicted to pay on that Machine. Its `overlap` says what was done, and why."""
    if not any(step.slabs for step in program.kernels):
        return program
    rewriter = _Rewriter(program, wanted)
    rewriter.run()
    return _with_early_starts(program, rewriter.result, {**program.values, **rewriter.values}, rewriter.notes)


def _with_early_starts(
    program: Program, steps: Sequence[Step], values: Mapping[str, ProgramValue], notes: Sequence[str]
) -> Program:
    """The program with other steps, whose collectives start early, and with the memory that they need."""
    early = early_starts(steps, values)
    if early is steps and values is program.values:
        return replace(program, overlap=tuple(notes))
    steps = with_lifetimes(early, values, program.parameters)
    return checked(replace(program, values=values, steps=steps, overlap=tuple(notes)))


def _in_bulk(program: Program) -> list[Step]:
    """The steps, without those about memory, and with one step for each collective: right after what makes what it
    sends, if it starts there, else where it was waited for."""
    result: list[Step] = []
    placed: set[CollectiveStep] = set()
    just_made: tuple[str, ...] = ()
    for step in program.steps:
        collective = step.collective
        if collective is None:
            just_made = step.writes if step.uses else just_made
            result += [step] if step.uses else []
        elif collective not in placed and (step.starts is None or collective.wait or collective.src in just_made):
            placed.add(collective)
            result.append(replace(collective, wait=True))
    return result


def _sent(program: Program, step: CollectiveStep) -> Sent:
    return Sent(step.kind, step.bytes, program.mesh, step.axes)


def _why_no_slabs(program: Program, machine: Machine) -> str:
    """Why slabs pay nowhere in a program, by how long its steps take; nothing if they may."""
    touched = sum(program.values[name].tile_bytes for step in program.kernels for name in step.args)
    sent = tuple(_sent(program, step) for step in program.collectives if step.bytes)
    choice = choose(Work(sum(step.flops for step in program.kernels), touched, 0, sent), machine)
    times = f"predicted {choice.bulk * 1e3:.2f} ms, at best {choice.slabs * 1e3:.2f} ms in slabs ({machine.name})"
    return times if choice.count == 1 else ""


class _Rewriter:
    """Goes through a program's steps; `result` are the new ones, `values` the slabs, `notes` what was decided."""

    def __init__(self, program: Program, wanted: int | Machine) -> None:
        self.program, self.wanted = program, wanted
        self.steps = _in_bulk(program)
        self.values: dict[str, ProgramValue] = {}
        self.notes: list[str] = []
        self.result: list[Step] = []
        self._sites = Sites(self.steps, program.values)

    def run(self) -> None:
        slabs_at: dict[int, list[Step]] = {}
        taken: set[int] = set()
        kernels = {id(step): step for step in self.program.kernels}
        for position, step in enumerate(self.steps):
            kernel = kernels.get(id(step))
            site = None if kernel is None else self._sites.at(position, kernel, taken)
            if site is not None and (steps := self._in_slabs(site)):
                slabs_at[position] = steps
                taken |= {id(collective) for collective in site.collectives}
        for position, step in enumerate(self.steps):
            if position in slabs_at:
                self.result += slabs_at[position]
            elif id(step) not in taken:
                self.result.append(step)
            if step.bytes and id(step) not in taken:
                why = self._sites.why_in_bulk.get(id(step), "no kernel directly before or after it")
                self.notes += [] if self.program.ops else [f"{step.words}: in bulk: {why}"]

    def _in_slabs(self, site: Site) -> list[Step]:
        """The steps of a site in slabs; none if it stays in bulk."""
        count, why = self._decide(site)
        bounds = site.slabs.bounds(site.factor, count)
        if count > 1 and len(bounds) == 1:
            size, block = site.slabs.size(site.factor), site.factor.block
            why = f"{size} of {site.factor.name}, in blocks of {block}, are too few for slabs"
        kernels = []
        if len(bounds) > 1:
            try:
                kernels = site.slabs.kernels(site.factor, bounds)
            except Blocked as error:
                why = str(error)
        if not kernels:
            self._sites.why_in_bulk |= {id(collective): why for collective in site.collectives}
            return []
        sizes = ", ".join(dict.fromkeys(str(stop - start) for start, stop in bounds))
        what = f"beside kernel {site.step.name} in {len(bounds)} slabs of {sizes} of {site.factor.name}"
        self.notes += [f"{collective.words}: {what}: {why}" for collective in site.collectives]
        steps, slabs = slab_steps(site, bounds, kernels, self.program.values)
        self.values |= slabs
        return steps

    def _decide(self, site: Site) -> tuple[int, str]:
        """How many slabs, and why."""
        if isinstance(self.wanted, int):
            return self.wanted, f"overlap={self.wanted}"
        counts = tuple(n for n in COUNTS if len(site.slabs.bounds(site.factor, n)) == n)
        if not counts:
            return 2, ""
        choice = choose(self._work(site), self.wanted, counts)
        times = f"predicted {choice.slabs * 1e3:.2f} ms, in bulk {choice.bulk * 1e3:.2f} ms ({self.wanted.name})"
        return choice.count, times

    def _work(self, site: Site) -> Work:
        sliced = site.slabs.dims(site.factor)
        sizes = [self.program.values[name].tile_bytes for name in site.step.args]
        repeated = sum(size for position, size in enumerate(sizes) if position not in sliced)
        return Work(site.step.flops, sum(sizes), repeated, tuple(_sent(self.program, c) for c in site.collectives))


# Products, kernels or updates of parameters that may run between a collective's start and the use of its result.
_AHEAD = CPU.tuning.products_ahead
_SCATTERED = BETWEEN[Partial, Shard].name


def early_starts(steps: Sequence[Step], values: Mapping[str, ProgramValue]) -> Sequence[Step]:
    """The steps with collectives started early where something can run beside them, and products after them that could
    come before: `steps` itself if there is none. The order in which collectives start is the same on every device."""
    stored = {name: value.storage for name, value in values.items()}
    given, steps = steps, products_later(steps, stored)
    uses = [{stored[name] for name in step.uses} for step in steps]
    writes = [{stored[name] for name in step.writes} for step in steps]
    written: dict[str, int] = {}  # per storage: from where on what was written to it is there
    used: dict[str, int] = {}  # ... and from where on nothing before uses it
    before: dict[int, list[CollectiveStep]] = {}
    waits: dict[int, list[WaitStep]] = {}
    moved: set[int] = set()
    scattered: list[tuple[int, int, WaitStep]] = []  # where they start, and where they are waited for
    for index, step in enumerate(steps):
        collective, end = step.starts, index + 1
        if collective is not None and collective.wait and COLLECTIVES[collective.kind].sends:
            src, dst = stored[collective.src], stored[collective.dst]
            later = range(end, len(steps))
            first_use = next((i for i in later if dst in uses[i] or src in writes[i]), len(steps))
            start = _earliest(steps, max(written.get(src, 0), used.get(dst, 0)), index)
            if any(between.is_long for between in steps[start:first_use]):
                started, end = replace(collective, wait=False), first_use
                moved.add(index)
                before.setdefault(start, []).append(started)
                waits.setdefault(first_use, []).append(WaitStep(started))
                if collective.kind == _SCATTERED:
                    scattered.append((start, first_use, WaitStep(started)))
                    _wait_by(start, scattered[:-_AHEAD][-1:], waits)
        written |= dict.fromkeys(writes[index], end)
        used |= dict.fromkeys(uses[index], end)
    if not moved:
        return given
    result: list[Step] = []
    for index in range(len(steps) + 1):
        result += _here(before.get(index, []), waits.get(index, []), stored)
        result += steps[index : index + 1] if index not in moved else []
    return result


def _here(starts: list[CollectiveStep], waits: list[WaitStep], stored: Mapping[str, str]) -> list[Step]:
    """Collectives start before others are waited for, but for those that send, or write to, what is waited for."""
    made = {stored[wait.collective.dst] for wait in waits}
    sent = {stored[wait.collective.src] for wait in waits}
    later = [step for step in starts if stored[step.src] in made or stored[step.dst] in made | sent]
    return [*(step for step in starts if step not in later), *waits, *later]


def _wait_by(place: int, scattered: Sequence[tuple[int, int, WaitStep]], waits: dict[int, list[WaitStep]]) -> None:
    """What was scattered is waited for at a place, if that was to be later: what is sent is larger than what is made,
    and is there until then."""
    for start, until, wait in scattered:
        if start < place < until:
            waits[until].remove(wait)
            waits.setdefault(place, []).append(wait)


def _earliest(steps: Sequence[Step], ready: int, index: int) -> int:
    """From where a collective may start: not before it is ready, nor before too many products."""
    start, products = index, 0
    while start > ready and (products := products + steps[start - 1].is_long) <= _AHEAD:
        start -= 1
    return start
