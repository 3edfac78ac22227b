"""Global view to local view: `lower`, and `LowerToLocalView` for a Sequential of TVM passes."""

from .lower import LowerToLocalView, lower
