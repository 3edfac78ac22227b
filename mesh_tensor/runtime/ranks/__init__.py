"""Programs on the ranks of torch.distributed: one process per device, DTensors or local tensors in and out."""

from .device_meshes import named
from .dtensor import (
    axes_out_of_order,
    check_order,
    dtensor_maker,
    from_dtensor,
    from_placements,
    gradient_like,
    is_dtensor,
    lies_like_torch,
    to_dtensor,
    to_placements,
)
from .ranks import are_current, ranks_of
from .redistribution import redistribute, resume
