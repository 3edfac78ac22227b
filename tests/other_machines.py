"""Planning for machines unlike this one, so that tensors of a test's size are split as large ones are."""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.plan import prices
from mesh_tensor.plan.ir import Node

AT_ONCE = replace(CPU, name="collectives start at once", links=[replace(link, start=0.0) for link in CPU.links])
SLOW_WORK = replace(CPU, name="operations count", flops={dtype: rate / 1e8 for dtype, rate in CPU.flops.items()})
WORK_COUNTS = replace(AT_ONCE, flops={dtype: rate / AT_ONCE.flops_per_byte for dtype, rate in AT_ONCE.flops.items()})
_MACHINES = (CPU, AT_ONCE, SLOW_WORK)


@dataclass(frozen=True, eq=False)
class _Whims(prices.Prices):
    """Prices that nothing has: whatever is legal may be what costs least, and has to be right. One `number`, one price
    for the same thing; some changes of layout cost next to nothing, and with some numbers all work does."""

    number: int = 0

    def work(self, node: Node, flops: int) -> int:
        return self._drawn(flops) * (self.number % 3)

    def change(self, shape: tuple[int, ...], dtype: str, src: Sharding, dst: Sharding) -> int:
        price = self._drawn(shape, dtype, src, dst)
        return 0 if src == dst else max(1, price - 100 * (self.number % 7))

    def _drawn(self, *what: object) -> int:
        return zlib.crc32(repr((self.number, *what)).encode()) % 1000


@contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """What is planned in it is planned for the machine, where nothing else is said."""
    with patch.object(prices, "PRICES", prices.Prices(machine)):
        yield


@contextmanager
def any_plan(number: int) -> Iterator[None]:
    """What is planned in it is planned for one of the machines below, or, mostly, by whim."""
    if number % 3 == 0:
        with machine(number // 3):
            yield
        return
    with patch.object(prices, "PRICES", _Whims(CPU, number)):
        yield


def machine(number: int) -> AbstractContextManager[None]:
    """What is planned in it is planned for one of three machines: this one, one on which collectives start at once, and
    one on which operations are all that counts."""
    return planned_for(_MACHINES[number % len(_MACHINES)])
