"""Planning for machines unlike this one, so that tensors of a test's size are split as large ones are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from unittest.mock import patch

from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.plan import prices

AT_ONCE = replace(CPU, name="collectives start at once", links=[replace(link, start=0.0) for link in CPU.links])
SLOW_WORK = replace(CPU, name="operations count", flops={dtype: rate / 1e8 for dtype, rate in CPU.flops.items()})
WORK_COUNTS = replace(AT_ONCE, flops={dtype: rate / AT_ONCE.flops_per_byte for dtype, rate in AT_ONCE.flops.items()})
_MACHINES = (CPU, AT_ONCE, SLOW_WORK)


@contextmanager
def planned_for(machine: Machine) -> Iterator[None]:
    """What is planned in it is planned for the machine, where nothing else is said."""
    with patch.object(prices, "PRICES", prices.Prices(machine)):
        yield


def machine(number: int) -> AbstractContextManager[None]:
    """What is planned in it is planned for one of three machines: this one, one on which collectives start at once, and
    one on which operations are all that counts."""
    return planned_for(_MACHINES[number % len(_MACHINES)])
