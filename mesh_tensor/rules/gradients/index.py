"""Gradients of operators that take or put elements by index, and of torch's own."""

from __future__ import annotations

from mesh_tensor.rules.operator.aten import ATEN

from .table import differentiated, gradient

gradient("take", "gather_elements", "gather_nd", "index_tensor", "scatter_elements", "scatter_nd", "index_put")(
    differentiated
)
# Their gradients are unknown to torch, or zero without being so said.
_WITHOUT = (
    "aten.heaviside.default",
    "aten.histc.default",
    "aten.nextafter.default",
    "aten.searchsorted.Tensor",
    "aten._embedding_bag_forward_only.default",
)
gradient(*(name for name in ATEN if name not in _WITHOUT))(differentiated)
