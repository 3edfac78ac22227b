"""Planning for machines unlike this one, so that tensors of a test's size are split as large ones are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from mesh_tensor.plan import prices

# Operations while a byte is received, and bytes while a collective starts.
_MACHINES = (
    (prices._FLOPS_PER_BYTE, prices._BYTES_PER_START),
    (prices._FLOPS_PER_BYTE, 0),
    (1e-6, prices._BYTES_PER_START),
)


@contextmanager
def machine(number: int) -> Iterator[None]:
    """What is planned in it is planned for one of three machines: this one, one on which collectives start at once, and
    one on which operations are all that counts."""
    flops, start = _MACHINES[number % len(_MACHINES)]
    with patch.multiple(prices, _FLOPS_PER_BYTE=flops, _BYTES_PER_START=start):
        yield
