"""Where collectives can go along with a kernel: beside it, slab by slab along one of its factors; and the steps of a
kernel in slabs, with its collectives beside them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from mesh_tensor.base.collectives import collective_time
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.lowering.slabs import SlabBounds, SlabKernel, Slabs
from mesh_tensor.rules.kernel.cost import coordinates_of, count_flops
from mesh_tensor.rules.kernel.factors import Factor

from .program import ProgramValue, Slab, bytes_received
from .steps import CollectiveStep, KernelStep, Step, WaitStep

COUNTS = (2, 4, 8)
_WORTH = 0.95  # of the bulk's time: a prediction is no better than this


@dataclass(frozen=True)
class Site:
    """A kernel with the collectives `before` and `after` it that can go along with its slabs along `factor`."""

    step: KernelStep
    slabs: Slabs
    factor: Factor
    before: tuple[CollectiveStep, ...]
    after: tuple[CollectiveStep, ...]

    @property
    def collectives(self) -> tuple[CollectiveStep, ...]:
        return (*self.before, *self.after)


class Sites:
    """The sites of a program's steps. `why_in_bulk`: why a collective (its id) goes with no kernel; what is decided
    later about those that could is written there too."""

    def __init__(self, steps: Sequence[Step], values: Mapping[str, ProgramValue]):
        self.why_in_bulk: dict[int, str] = {}
        self._steps, self._values = steps, values

    def at(self, position: int, step: KernelStep, taken: set[int]) -> Site | None:
        """What can be done at a kernel, the step at `position`, without the collectives that are `taken` (their ids):
        along the factor with the most bytes to send. None if nothing can."""
        slabs = step.slabs
        if slabs is None:
            return None
        found: dict[Factor, tuple[list[CollectiveStep], list[CollectiveStep]]] = {}
        for is_after, collective in self._beside(position, step, taken):
            factor = self._factor_or_why_not(slabs, step, collective, is_after)
            if isinstance(factor, str):
                self.why_in_bulk.setdefault(id(collective), factor)
            else:
                found.setdefault(factor, ([], []))[is_after].append(collective)
        if not found:
            return None
        best = max(found, key=lambda factor: sum(c.bytes for side in found[factor] for c in side))
        for factor, sides in found.items():
            if factor is not best:
                why = f"the kernel is split along {best.name} instead"
                self.why_in_bulk |= {id(collective): why for side in sides for collective in side}
        before, after = found[best]
        return Site(step, slabs, best, tuple(before), tuple(after))

    def _beside(self, position: int, step: KernelStep, taken: set[int]) -> Iterator[tuple[bool, CollectiveStep]]:
        """The collectives right before the kernel that feed it and nothing in between, and those right after it that
        take what it wrote; with each, whether it comes after."""
        before = _collectives(reversed(self._steps[:position]))
        later: set[str] = set()
        feeding = []
        for collective in before:
            free = collective.dst in step.args and collective.dst not in later and id(collective) not in taken
            if free and collective.bytes:
                feeding.append(collective)
            later.add(collective.src)
        yield from ((False, collective) for collective in reversed(feeding))
        for collective in _collectives(self._steps[position + 1 :]):
            if collective.src in step.writes and collective.bytes:
                yield True, collective

    def _factor_or_why_not(
        self, slabs: Slabs, step: KernelStep, collective: CollectiveStep, is_after: bool
    ) -> Factor | str:
        """The factor along which the collective can go in slabs, or why there is none."""
        inner, outer = self._values[collective.src], self._values[collective.dst]
        if not is_after:
            inner, outer = outer, inner
        dim = next((d for d, size in enumerate(inner.tile_shape) if size > 1), 0)
        position = step.args.index(inner.name)
        factor = slabs.factor(position, dim) if inner.shape else None
        if factor is None:
            return f"dim {dim} of {slabs.param(position)} is needed whole"
        if inner.sharding.dims[dim] != outer.sharding.dims[dim]:
            return f"it changes how dim {dim}, along which slabs would be, is split"
        if any(size != 1 for size in outer.tile_shape[:dim]):
            return f"slabs of {outer.name} don't lie in one piece"
        return slabs.why_not(factor) or factor


def _collectives(steps: Iterable[Step]) -> Iterator[CollectiveStep]:
    for step in steps:
        if step.collective is None:
            return
        yield step.collective


@dataclass(frozen=True)
class Sent:
    """A collective: its kind, the bytes that the busiest device receives, and the axes of the mesh that it is over."""

    kind: str
    bytes: int
    mesh: Mesh
    axes: tuple[str, ...]


@dataclass(frozen=True)
class Work:
    """A kernel and the collectives that can go along with its slabs, on one device.

    `touched`: bytes of all its tiles; `repeated`: of those that every slab needs whole.
    """

    flops: int
    touched: int
    repeated: int
    sent: tuple[Sent, ...]
    dtype: str = "float32"


@dataclass(frozen=True)
class Choice:
    """How many slabs (1: bulk), and the predicted seconds in bulk and in that many, or the best other number."""

    count: int
    bulk: float
    slabs: float


def choose(work: Work, machine: Machine, counts: tuple[int, ...] = COUNTS) -> Choice:
    """The number of slabs, of `counts`, that is predicted to take least, or 1 where none is worth it."""
    bulk = predict(work, machine, 1)
    best = min(counts, key=lambda count: predict(work, machine, count))
    slabs = predict(work, machine, best)
    return Choice(best if slabs < _WORTH * bulk else 1, bulk, slabs)


def predict(work: Work, machine: Machine, count: int) -> float:
    """Seconds of the kernel and its collectives in `count` slabs."""
    memory = machine.main_memory.rate
    own = max(work.flops / machine.peak(work.dtype), (work.touched - work.repeated) / memory) / count
    kernel = own + work.repeated / memory
    collective = sum(collective_time(machine, s.kind, s.bytes / count, s.mesh, s.axes) for s in work.sent)
    return kernel + (count - 1) * max(kernel + machine.busy * collective, collective) + collective


def slab_steps(
    site: Site, bounds: Sequence[SlabBounds], kernels: Sequence[SlabKernel], values: Mapping[str, ProgramValue]
) -> tuple[list[Step], dict[str, ProgramValue]]:
    """The steps of a site, per slab one of `bounds` and `kernels`, and the slabs of the program's `values`.

    While slab i is computed, what slab i + 1 needs is on its way, and what slabs i - 1 and i - 2 gave (an all-reduce
    may go in two rounds)."""
    slabs = _Slabs(site, values)
    feeds = [[slabs.collective(c, c.dst, bound) for c in site.before] for bound in bounds]
    takes = [[slabs.collective(c, c.src, bound) for c in site.after] for bound in bounds]
    steps: list[Step] = [*feeds[0]]
    for index, (bound, kernel) in enumerate(zip(bounds, kernels, strict=True)):
        steps += feeds[index + 1] if index + 1 < len(bounds) else []
        steps += map(WaitStep, feeds[index])
        steps.append(slabs.kernel(index, bound, kernel))
        steps += map(WaitStep, takes[index - 2] if index > 1 else [])
        steps += takes[index]
    return [*steps, *map(WaitStep, [*takes[-2], *takes[-1]])], slabs.made


class _Slabs:
    """Makes the steps of single slabs; `made` are the slabs of values that these use."""

    def __init__(self, site: Site, values: Mapping[str, ProgramValue]):
        self.made: dict[str, ProgramValue] = {}
        self._step, self._values = site.step, values
        self._dims = {site.step.args[position]: dim for position, dim in site.slabs.dims(site.factor).items()}

    def kernel(self, index: int, bound: SlabBounds, kernel: SlabKernel) -> KernelStep:
        """The call on one slab."""
        step, (func, axes) = self._step, kernel
        mesh = self._values[step.args[0]].sharding.mesh
        slabs = {name: self._slab(name, dim, bound) for name, dim in self._dims.items()}
        return replace(
            step,
            name=f"{step.name}[{index}]",
            func=func,
            axes=axes,
            args=tuple(slabs.get(name, name) for name in step.args),
            writes=tuple(slabs[name] for name in step.writes),
            counted=partial(count_flops, func, coordinates_of(func, axes, mesh)),
            slabs=None,
        )

    def collective(self, step: CollectiveStep, at_kernel: str, bound: SlabBounds) -> CollectiveStep:
        """The start of the collective of one slab; the kernel's value that it is about is `at_kernel`."""
        src, dst = (self._slab(name, self._dims[at_kernel], bound) for name in (step.src, step.dst))
        size = bytes_received(step.kind, self.made[src], self.made[dst], step.axes)
        return replace(step, src=src, dst=dst, bytes=size, wait=False)

    def _slab(self, name: str, dim: int, bound: SlabBounds) -> str:
        """The slab of a value, which is a value: as long as the slabs of all devices that split the dim."""
        whole, (start, stop) = self._values[name], bound
        made = f"{name}[{', '.join([*([':'] * dim), f'{start}:{stop}'])}]"
        shape = list(whole.shape)
        shape[dim] = (stop - start) * whole.sharding.num_shards(dim)
        self.made[made] = replace(whole, name=made, shape=tuple(shape), slab=Slab(dim, start, stop))
        return made
