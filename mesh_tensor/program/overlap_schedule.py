"""The steps of a kernel in slabs, with its collectives beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mesh_tensor.lowering.slabs import Bounds, SlabKernel
from mesh_tensor.rules.kernel.cost import count_flops

from .overlap_sites import Site
from .program import Slab, Value, bytes_moved
from .steps import CollectiveStep, KernelStep, Step, WaitStep


def slab_steps(
    site: Site, bounds: Sequence[Bounds], kernels: Sequence[SlabKernel], values: Mapping[str, Value]
) -> tuple[list[Step], dict[str, Value]]:
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

    def __init__(self, site: Site, values: Mapping[str, Value]):
        self.made: dict[str, Value] = {}
        self._step, self._values = site.step, values
        self._dims = {site.step.args[position]: dim for position, dim in site.slabs.dims(site.factor).items()}

    def kernel(self, index: int, bound: Bounds, kernel: SlabKernel) -> KernelStep:
        """The call on one slab."""
        step, (func, axes) = self._step, kernel
        slabs = {name: self._slab(name, dim, bound) for name, dim in self._dims.items()}
        return replace(
            step,
            name=f"{step.name}[{index}]",
            func=func,
            axes=axes,
            args=tuple(slabs.get(name, name) for name in step.args),
            writes=tuple(slabs[name] for name in step.writes),
            flops=count_flops(func),
            slabs=None,
        )

    def collective(self, step: CollectiveStep, at_kernel: str, bound: Bounds) -> CollectiveStep:
        """The start of the collective of one slab; the kernel's value that it is about is `at_kernel`."""
        src, dst = (self._slab(name, self._dims[at_kernel], bound) for name in (step.src, step.dst))
        size = bytes_moved(step.kind, self.made[src], self.made[dst], step.axes)
        return replace(step, src=src, dst=dst, bytes=size, wait=False)

    def _slab(self, name: str, dim: int, bound: Bounds) -> str:
        """The slab of a value, which is a value: as long as the slabs of all devices that split the dim."""
        whole, (start, stop) = self._values[name], bound
        made = f"{name}[{', '.join([*([':'] * dim), f'{start}:{stop}'])}]"
        shape = list(whole.shape)
        shape[dim] = (stop - start) * whole.sharding.num_shards(dim)
        self.made[made] = replace(whole, name=made, shape=tuple(shape), slab=Slab(dim, start, stop))
        return made
