"""Programs on the ranks of torch.distributed: one process per device, DTensors or local tensors in and out."""

from .dtensor import from_dtensor, from_placements, is_dtensor, to_dtensor, to_placements
from .ranks import ranks_of

__all__ = ["from_dtensor", "from_placements", "is_dtensor", "ranks_of", "to_dtensor", "to_placements"]
