"""Every kernel of this package as a :class:`KernelCase`: what tests, sweeps and benchmarks iterate over."""

from .case import KernelCase
from .elementwise import ELEMENTWISE_CASES
from .fused import FUSED_CASES
from .inference import INFERENCE_CASES
from .neighbourhoods import NEIGHBOURHOOD_CASES
from .products import PRODUCT_CASES
from .rows import ROW_CASES
from .schedules import SCHEDULE_CASES
from .sparse import SPARSE_CASES

CASES: tuple[KernelCase, ...] = (
    *PRODUCT_CASES,
    *ROW_CASES,
    *ELEMENTWISE_CASES,
    *INFERENCE_CASES,
    *SPARSE_CASES,
    *SCHEDULE_CASES,
    *NEIGHBOURHOOD_CASES,
    *FUSED_CASES,
)

__all__ = ["CASES", "KernelCase"]
