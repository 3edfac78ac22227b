"""Whether a collective beside a kernel pays: what it costs in bulk, and what in slabs.

In bulk the kernel runs, then the collective. In n slabs every collective but the first (or last) has a kernel beside
it, and a step takes as long as the longer of the two. Against that stand the latency of n collectives instead of one,
what every slab of the kernel reads again, and what the collective takes from the kernel beside it: on a CPU that has
one core per rank, the threads that move the bytes need the core that computes, and nothing is gained at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from mesh_tensor.base.collective_time import collective_time
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh

COUNTS = (2, 4, 8)
_WORTH = 0.95  # of the bulk's time: a prediction is no better than this


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
