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

from collections.abc import Sequence
from dataclasses import replace

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.lowering import verify
from mesh_tensor.lowering.layouts import LocalKernel
from mesh_tensor.lowering.slabs import local_size, slab_bounds, slab_dims, slab_kernels
from mesh_tensor.rules.kernel.factors import Blocked

from .lifetimes import with_lifetimes
from .overlap_cost import COUNTS, Work, choose
from .overlap_schedule import schedule
from .overlap_sites import Site, Sites
from .steps import KernelStep, Program, Step, Value
from .verify import verify_program

_MOST = 64


def check_overlap(overlap: object) -> str | int:
    """`overlap` as a user gives it: "auto", "off" or a number of slabs.

    Raises:
        MeshTensorError: it is none of these.
    """
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
    """The program as `compile` makes it: before it is known what runs it, only a number of slabs is followed."""
    if isinstance(overlap, int):
        return overlapped(program, overlap)
    if not has_collectives(program):
        return program
    why = "auto: in bulk on a virtual mesh, whose cores also move the bytes; ranks decide at their first call"
    return replace(program, overlap=(why if overlap == "auto" else "off: everything in bulk",))


def has_collectives(program: Program) -> bool:
    """Whether anything is sent."""
    return any(step.bytes for step in program.collectives)


def overlapped(program: Program, wanted: int | Machine) -> Program:
    """The program with collectives beside kernels: in (at most) `wanted` slabs wherever that can be done, or where
    and as it is predicted to pay on that Machine. Its `overlap` says what was done, and why."""
    lowered = program.lowered
    if lowered is None or not all(step.wait for step in program.collectives):
        return program
    steps = [step for step in program.steps if step.uses]
    positions = [position for position, step in enumerate(steps) if step.collective is None]
    local_kernels = [step for step in lowered.steps if isinstance(step, LocalKernel)]
    kernels = list(zip(positions, program.kernels, local_kernels, strict=True))
    rewriter = _Rewriter(program, steps, kernels, wanted)
    rewriter.run()
    values = program.values | rewriter.values
    made = replace(
        program,
        values=values,
        steps=with_lifetimes(rewriter.result, values, program.parameters),
        overlap=tuple(rewriter.notes),
    )
    if verify.enabled():
        verify_program(made)
    return made


def why_in_bulk(program: Program, machine: Machine) -> str:
    """Why slabs pay nowhere in a program, by how long its steps take; nothing if they may."""
    touched = sum(program.values[name].tile_bytes for step in program.kernels for name in step.args)
    sent = tuple(step.bytes for step in program.collectives if step.bytes)
    choice = choose(Work(sum(step.flops for step in program.kernels), touched, 0, sent), machine)
    times = f"predicted {choice.bulk * 1e3:.2f} ms, at best {choice.slabs * 1e3:.2f} ms in slabs ({machine.name})"
    return times if choice.count == 1 else ""


class _Rewriter:
    """Goes through a program's steps; `result` are the new ones, `values` the slabs, `notes` what was decided."""

    def __init__(
        self,
        program: Program,
        steps: Sequence[Step],
        kernels: Sequence[tuple[int, KernelStep, LocalKernel]],
        wanted: int | Machine,
    ) -> None:
        self.program, self.steps, self.kernels, self.wanted = program, steps, kernels, wanted
        self.values: dict[str, Value] = {}
        self.notes: list[str] = []
        self.result: list[Step] = []
        self._sites = Sites(steps, program.values)

    def run(self) -> None:
        slabs_at: dict[int, list[Step]] = {}
        taken: set[int] = set()
        for position, call, kernel in self.kernels:
            site = self._sites.at(position, call, kernel, taken)
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
                self.notes.append(f"{step.words}: in bulk: {why}")

    def _in_slabs(self, site: Site) -> list[Step]:
        """The steps of a site in slabs; none if it stays in bulk."""
        count, why = self._decide(site)
        bounds = slab_bounds(site.kernel, site.factor, count)
        if count > 1 and len(bounds) == 1:
            size, block = local_size(site.kernel, site.factor), site.factor.block
            why = f"{size} of {site.factor.name}, in blocks of {block}, are too few for slabs"
        kernels = []
        if len(bounds) > 1:
            try:
                kernels = slab_kernels(site.kernel, site.factor, bounds, self.program.mesh)
            except Blocked as error:
                why = str(error)
        if not kernels:
            self._sites.why_in_bulk |= {id(collective): why for collective in site.collectives}
            return []
        sizes = ", ".join(dict.fromkeys(str(stop - start) for start, stop in bounds))
        what = f"beside kernel {site.step.name} in {len(bounds)} slabs of {sizes} of {site.factor.name}"
        self.notes += [f"{collective.words}: {what}: {why}" for collective in site.collectives]
        steps, slabs = schedule(site, bounds, kernels, self.program.values)
        self.values |= slabs
        return steps

    def _decide(self, site: Site) -> tuple[int, str]:
        """How many slabs, and why."""
        if isinstance(self.wanted, int):
            return self.wanted, f"overlap={self.wanted}"
        counts = tuple(n for n in COUNTS if len(slab_bounds(site.kernel, site.factor, n)) == n)
        if not counts:
            return 2, ""
        choice = choose(self._work(site), self.wanted, counts)
        times = f"predicted {choice.slabs * 1e3:.2f} ms, in bulk {choice.bulk * 1e3:.2f} ms ({self.wanted.name})"
        return choice.count, times

    def _work(self, site: Site) -> Work:
        sliced = slab_dims(site.kernel, site.factor)
        sizes = [self.program.values[name].tile_bytes for name in site.step.args]
        repeated = sum(size for position, size in enumerate(sizes) if position not in sliced)
        return Work(site.step.flops, sum(sizes), repeated, tuple(c.bytes for c in site.collectives))
