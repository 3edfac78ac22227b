"""Kernels that a sharding compiler is likely to get wrong, each for a reason of its own, as :class:`KernelCase`."""

from kernels.catalogue import KernelCase

from .accumulation import ACCUMULATION_CASES
from .atomics import ATOMIC_CASES
from .grids import GRID_CASES, PERSISTENT_CASE
from .index_values import INDEX_VALUE_CASES
from .neighbours import NEIGHBOUR_CASES
from .order import ORDER_CASES
from .roles import ROLE_CASES

ADVERSARIAL_CASES: tuple[KernelCase, ...] = (
    *GRID_CASES,
    *INDEX_VALUE_CASES,
    *NEIGHBOUR_CASES,
    *ACCUMULATION_CASES,
    *ATOMIC_CASES,
    *ORDER_CASES,
    *ROLE_CASES,
)

__all__ = ["ADVERSARIAL_CASES", "PERSISTENT_CASE"]
