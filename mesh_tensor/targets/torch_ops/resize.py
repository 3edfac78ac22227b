"""Images made larger or smaller."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall

from .table import Function, torch_op

Tensor = torch.Tensor

_ROUNDED: dict[str, Callable[[Tensor], Tensor]] = {
    "ceil": torch.ceil,
    "floor": torch.floor,
    "round_prefer_ceil": lambda place: torch.floor(place + 0.5),
    "round_prefer_floor": lambda place: torch.ceil(place - 0.5),
}
# Where the element of a larger or smaller image is in the one of `size` elements, of `steps` new ones.
_PLACES: dict[str, Callable[[Tensor, int, int], Tensor]] = {
    "align_corners": lambda step, size, steps: step * ((size - 1) / max(1, steps - 1)),
    "asymmetric": lambda step, size, steps: step * (size / steps),
    "half_pixel": lambda step, size, steps: (step + 0.5) * (size / steps) - 0.5,
}
_MODES = {"linear": "bilinear", "cubic": "bicubic"}


@torch_op("image.resize2d")
def _resize2d(call: OpCall) -> Function:
    """Nearest elements by any coordinates; linear and cubic ones by those that torch has."""
    size, layout = call.literals[0], call.attr("layout")
    method, places, rounding = (
        call.attr(name) for name in ("method", "coordinate_transformation_mode", "rounding_method")
    )
    if method == "nearest_neighbor" and layout == "NCHW" and places in _PLACES and rounding in _ROUNDED:
        return lambda x: _nearest(x, size, _PLACES[places], _ROUNDED[rounding])
    usual = call.attr("cubic_alpha") == -0.75 and not call.attr("cubic_exclude") or method == "linear"
    if method not in _MODES or layout != "NCHW" or places not in ("half_pixel", "align_corners") or not usual:
        refuse(
            f"R.image.resize2d by {method!r} in {layout} with {places!r}, {rounding!r}",
            why="torch has no such resize",
            fix="resize NCHW by nearest elements, or linearly or cubically with half pixels or aligned corners",
        )
    return lambda x: F.interpolate(x, size, mode=_MODES[method], align_corners=places == "align_corners")


def _nearest(
    x: Tensor, sizes: tuple[int, ...], place: Callable[[Tensor, int, int], Tensor], rounded: Callable[[Tensor], Tensor]
) -> Tensor:
    for dim, steps in zip((2, 3), sizes, strict=True):
        size = x.shape[dim]
        found = rounded(place(torch.arange(steps, dtype=torch.float64, device=x.device), size, steps))
        x = x.index_select(dim, found.long().clamp(0, size - 1))
    return x
