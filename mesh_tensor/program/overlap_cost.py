"""Whether a collective beside a kernel pays: what it costs in bulk, and what in slabs.

In bulk the kernel runs, then the collective. In n slabs every collective but the first (or last) has a kernel beside
it, and a step takes as long as the longer of the two. Against that stand the latency of n collectives instead of one,
what every slab of the kernel reads again, and what the collective takes from the kernel beside it: on a CPU that has
one core per rank, the threads that move the bytes need the core that computes, and nothing is gained at all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

COUNTS = (2, 4, 8)
_WORTH = 0.95  # of the bulk's time: a prediction is no better than this


@dataclass(frozen=True)
class Rates:
    """What a machine does.

    flops     floating-point operations of a kernel, per second
    memory    bytes that a kernel reads and writes, per second
    network   bytes that a device sends in a collective, per second
    latency   seconds that a collective takes without its bytes
    busy      the share of a collective's time that the kernel beside it loses: 0 .. 1
    """

    name: str
    flops: float
    memory: float
    network: float
    latency: float
    busy: float


# Measured on 2 cores of an AMD EPYC, gloo over the loopback: torch.mm on one thread beside an all-to-all of 1 to 16 MB
# took as long as one after the other or longer, and the all-to-all used 0.8 s of CPU time per second.
GLOO = Rates("gloo with a core per rank", flops=1e11, memory=1e10, network=3e9, latency=2e-4, busy=1.0)
# Not measured: with a core for gloo's threads the memory's bandwidth is still shared.
GLOO_BESIDE = replace(GLOO, name="gloo with cores to spare", busy=0.25)


@dataclass(frozen=True)
class Work:
    """A kernel and the collectives that can go along with its slabs, on one device.

    `touched`: bytes of all its tiles; `repeated`: of those that every slab needs whole. `sent`: bytes, per collective.
    """

    flops: int
    touched: int
    repeated: int
    sent: tuple[int, ...]


@dataclass(frozen=True)
class Choice:
    """How many slabs (1: bulk), and the predicted seconds in bulk and in that many, or the best other number."""

    count: int
    bulk: float
    slabs: float


def choose(work: Work, rates: Rates, counts: tuple[int, ...] = COUNTS) -> Choice:
    """The number of slabs, of `counts`, that is predicted to take least, or 1 where none is worth it."""
    bulk = predict(work, rates, 1)
    best = min(counts, key=lambda count: predict(work, rates, count))
    slabs = predict(work, rates, best)
    return Choice(best if slabs < _WORTH * bulk else 1, bulk, slabs)


def predict(work: Work, rates: Rates, count: int) -> float:
    """Seconds of the kernel and its collectives in `count` slabs."""
    own = max(work.flops / rates.flops, (work.touched - work.repeated) / rates.memory) / count
    kernel = own + work.repeated / rates.memory
    collective = len(work.sent) * rates.latency + sum(work.sent) / count / rates.network
    return kernel + (count - 1) * max(kernel + rates.busy * collective, collective) + collective
