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

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .errors import refuse
from .lowering import verify
from .lowering.layouts import LocalKernel
from .lowering.slabs import Bounds, local_size, slab_bounds, slab_dims, slab_kernels, why_no_slabs
from .overlap_cost import COUNTS, Rates, Work, choose
from .program import CollectiveStep, KernelStep, Program, Slab, Step, Value, WaitStep, bytes_moved, with_lifetimes
from .propagation import dtype_bits
from .rules.cost import count_flops
from .rules.factors import Blocked, Factor

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
        f"overlap={overlap!r} is unknown",
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
    return any(isinstance(step, CollectiveStep) and step.bytes for step in program.steps)


def overlapped(program: Program, wanted: int | Rates) -> Program:
    """The program with collectives beside kernels: in (at most) `wanted` slabs wherever that can be done, or where
    and as it is predicted to pay on a machine of these Rates. Its `overlap` says what was done, and why."""
    lowered = program.lowered
    if lowered is None or any(isinstance(step, WaitStep) for step in program.steps):
        return program
    steps: list[Step] = [step for step in program.steps if isinstance(step, (KernelStep, CollectiveStep))]
    kernels = {
        position: kernel
        for position, (step, kernel) in enumerate(zip(steps, lowered.steps, strict=True))
        if isinstance(kernel, LocalKernel) and isinstance(step, KernelStep)
    }
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
        from .verify_program import verify_program  # as in `program`

        verify_program(made)
    return made


def why_in_bulk(program: Program, rates: Rates) -> str:
    """Why slabs pay nowhere in a program, by how long its steps take; nothing if they may."""
    kernels = [step for step in program.steps if isinstance(step, KernelStep)]
    touched = sum(_tile_bytes(program.values[name]) for step in kernels for name in step.args)
    sent = tuple(step.bytes for step in program.steps if isinstance(step, CollectiveStep) and step.bytes)
    choice = choose(Work(sum(step.flops for step in kernels), touched, 0, sent), rates)
    times = f"predicted {choice.bulk * 1e3:.2f} ms, at best {choice.slabs * 1e3:.2f} ms in slabs ({rates.name})"
    return times if choice.count == 1 else ""


@dataclass(frozen=True)
class _Site:
    """A kernel with the collectives `before` and `after` it that can go along with its slabs along `factor`."""

    step: KernelStep
    kernel: LocalKernel
    factor: Factor
    before: tuple[CollectiveStep, ...]
    after: tuple[CollectiveStep, ...]

    @property
    def collectives(self) -> tuple[CollectiveStep, ...]:
        return (*self.before, *self.after)


class _Rewriter:
    """Goes through a program's steps; `result` are the new ones, `values` the slabs, `notes` what was decided."""

    def __init__(
        self, program: Program, steps: Sequence[Step], kernels: dict[int, LocalKernel], wanted: int | Rates
    ) -> None:
        self.program, self.steps, self.kernels, self.wanted = program, steps, kernels, wanted
        self.values: dict[str, Value] = {}
        self.notes: list[str] = []
        self.result: list[Step] = []
        self._reasons: dict[int, str] = {}
        self._done: set[int] = set()

    def run(self) -> None:
        slabs_at = {}
        for position in self.kernels:
            site = self._site(position)
            if site is not None and (steps := self._in_slabs(site)):
                slabs_at[position] = steps
                self._done |= {id(collective) for collective in site.collectives}
        for position, step in enumerate(self.steps):
            if position in slabs_at:
                self.result += slabs_at[position]
            elif id(step) not in self._done:
                self.result.append(step)
            if isinstance(step, CollectiveStep) and id(step) not in self._done and step.bytes:
                why = self._reasons.get(id(step), "no kernel directly before or after it")
                self.notes.append(f"{_words(step)}: in bulk: {why}")

    # -- where ---------------------------------------------------------------------------------------------------------

    def _site(self, position: int) -> _Site | None:
        """What can be done at a kernel: along the factor with the most bytes to send."""
        step, kernel = self.steps[position], self.kernels[position]
        assert isinstance(step, KernelStep)
        found: dict[Factor, tuple[list[CollectiveStep], list[CollectiveStep]]] = {}
        for is_after, collective in self._beside(position, step):
            reason = self._why_not(kernel, step, collective, is_after)
            if isinstance(reason, str):
                self._reasons.setdefault(id(collective), reason)
            else:
                found.setdefault(reason, ([], []))[is_after].append(collective)
        if not found:
            return None
        best = max(found, key=lambda factor: sum(c.bytes for side in found[factor] for c in side))
        for factor, sides in found.items():
            for collective in (*sides[0], *sides[1]):
                if factor is not best:
                    self._reasons[id(collective)] = f"the kernel is split along {best.name} instead"
        return _Site(step, kernel, best, tuple(found[best][0]), tuple(found[best][1]))

    def _beside(self, position: int, step: KernelStep) -> Iterator[tuple[bool, CollectiveStep]]:
        """The collectives right before the kernel that feed it and nothing in between, and those right after it that
        take what it wrote."""
        start = stop = position
        while start > 0 and isinstance(self.steps[start - 1], CollectiveStep):
            start -= 1
        while stop + 1 < len(self.steps) and isinstance(self.steps[stop + 1], CollectiveStep):
            stop += 1
        before = [c for c in self.steps[start:position] if isinstance(c, CollectiveStep)]
        after = [c for c in self.steps[position + 1 : stop + 1] if isinstance(c, CollectiveStep)]
        for index, collective in enumerate(before):
            later = {other.src for other in before[index + 1 :]}
            free = collective.dst in step.args and collective.dst not in later and id(collective) not in self._done
            if free and collective.bytes:
                yield False, collective
        for collective in after:
            if collective.src in step.writes and collective.bytes:
                yield True, collective

    def _why_not(
        self, kernel: LocalKernel, step: KernelStep, collective: CollectiveStep, is_after: bool
    ) -> Factor | str:
        """The factor along which the collective can go in slabs, or why there is none."""
        values = self.program.values
        inner, outer = values[collective.src], values[collective.dst]
        if not is_after:
            inner, outer = outer, inner
        dim = next((d for d, size in enumerate(inner.tile_shape) if size > 1), 0)
        param = list(kernel.analysis.kernel.params)[step.args.index(inner.name)]
        factor = kernel.analysis.factor_of(param, dim) if inner.shape else None
        if factor is None:
            return f"dim {dim} of {param} is needed whole"
        if inner.sharding.dims[dim] != outer.sharding.dims[dim]:
            return f"it changes how dim {dim}, along which slabs would be, is split"
        if any(size != 1 for size in outer.tile_shape[:dim]):
            return f"slabs of {outer.name} don't lie in one piece"
        return why_no_slabs(kernel, factor) or factor

    # -- whether -------------------------------------------------------------------------------------------------------

    def _in_slabs(self, site: _Site) -> list[Step]:
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
            self._reasons |= {id(collective): why for collective in site.collectives}
            return []
        sizes = ", ".join(dict.fromkeys(str(stop - start) for start, stop in bounds))
        what = f"beside kernel {site.step.name} in {len(bounds)} slabs of {sizes} of {site.factor.name}"
        self.notes += [f"{_words(collective)}: {what}: {why}" for collective in site.collectives]
        return self._schedule(site, bounds, kernels)

    def _decide(self, site: _Site) -> tuple[int, str]:
        """How many slabs, and why."""
        if isinstance(self.wanted, int):
            return self.wanted, f"overlap={self.wanted}"
        counts = tuple(n for n in COUNTS if len(slab_bounds(site.kernel, site.factor, n)) == n)
        if not counts:
            return 2, ""
        choice = choose(self._work(site), self.wanted, counts)
        times = f"predicted {choice.slabs * 1e3:.2f} ms, in bulk {choice.bulk * 1e3:.2f} ms ({self.wanted.name})"
        return choice.count, times

    def _work(self, site: _Site) -> Work:
        sliced = slab_dims(site.kernel, site.factor)
        sizes = [_tile_bytes(self.program.values[name]) for name in site.step.args]
        repeated = sum(size for position, size in enumerate(sizes) if position not in sliced)
        return Work(site.step.flops, sum(sizes), repeated, tuple(c.bytes for c in site.collectives))

    # -- how -----------------------------------------------------------------------------------------------------------

    def _schedule(self, site: _Site, bounds: Sequence[Bounds], kernels: Sequence[tuple]) -> list[Step]:
        """While slab i is computed, what slab i + 1 needs is on its way, and what slabs i - 1 and i - 2 gave (an
        all-reduce may go in two rounds)."""
        dims = slab_dims(site.kernel, site.factor)
        feeds = [[self._slab_collective(c, c.dst, site, dims, bound) for c in site.before] for bound in bounds]
        takes = [[self._slab_collective(c, c.src, site, dims, bound) for c in site.after] for bound in bounds]
        steps: list[Step] = [*feeds[0]]
        for index, (bound, (func, axes)) in enumerate(zip(bounds, kernels, strict=True)):
            steps += feeds[index + 1] if index + 1 < len(bounds) else []
            steps += map(WaitStep, feeds[index])
            names = {
                site.step.args[position]: self._slab(site.step.args[position], dim, bound)
                for position, dim in dims.items()
            }
            steps.append(
                replace(
                    site.step,
                    name=f"{site.step.name}[{index}]",
                    func=func,
                    axes=axes,
                    args=tuple(names.get(name, name) for name in site.step.args),
                    writes=tuple(names[name] for name in site.step.writes),
                    flops=count_flops(func),
                )
            )
            steps += map(WaitStep, takes[index - 2] if index > 1 else [])
            steps += takes[index]
        return [*steps, *map(WaitStep, [*takes[-2], *takes[-1]])]

    def _slab_collective(
        self, step: CollectiveStep, at_kernel: str, site: _Site, dims: dict[int, int], bound: Bounds
    ) -> CollectiveStep:
        dim = dims[site.step.args.index(at_kernel)]
        src, dst = (self._slab(name, dim, bound) for name in (step.src, step.dst))
        size = bytes_moved(step.kind, self.values[src], self.values[dst], step.axes)
        return replace(step, src=src, dst=dst, bytes=size, wait=False)

    def _slab(self, name: str, dim: int, bound: Bounds) -> str:
        """The slab of a value, which is a value: as long as the slabs of all devices that split the dim."""
        whole, (start, stop) = self.program.values[name], bound
        made = f"{name}[{', '.join([*([':'] * dim), f'{start}:{stop}'])}]"
        shape = list(whole.shape)
        shape[dim] = (stop - start) * whole.sharding.num_shards(dim)
        self.values[made] = replace(whole, name=made, shape=tuple(shape), slab=Slab(dim, start, stop))
        return made


def _words(step: CollectiveStep) -> str:
    return f"{step.kind} of {step.src} over {', '.join(step.axes)}"


def _tile_bytes(value: Value) -> int:
    return math.prod(value.tile_shape) * dtype_bits(value.dtype) // 8
