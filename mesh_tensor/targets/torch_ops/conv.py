"""Convolutions and pooling, in any layout without channel blocks; images made larger or smaller."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from mesh_tensor.base.dtypes import extreme
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.conv import CONV_ADD
from mesh_tensor.targets.dtypes import torch_dtype, wide

from .table import Function, torch_op

Tensor = torch.Tensor
_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_CONV_TRANSPOSE = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
_ADAPTIVE = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}


def _spatial(call: OpCall) -> str:
    """The letters of the dims that the window slides over."""
    return next("DHW"[-n:] for n in (1, 2, 3) if f"{n}d" in call.name)


def _order(call: OpCall, source: str, target: str) -> tuple[int, ...]:
    """The permutation from one layout to the other; both are letters, as NHWC."""
    if sorted(source) != sorted(target):
        refuse(
            f"R.{call.name}: layout {source!r} is none of the dims {target}",
            where=str(call.expr),
            fix="use a layout without channel blocks, as NCHW or NHWC",
        )
    return tuple(source.index(letter) for letter in target)


def _orders(call: OpCall, channels: str) -> tuple[tuple[int, ...], ...]:
    """Data and kernel as torch has them, whose kernels start with these channels, and its result as it is wanted."""
    first = "NC" + _spatial(call)
    return (
        _order(call, call.attr("data_layout"), first),
        _order(call, call.attr("kernel_layout"), channels + first[2:]),
        _order(call, first, call.attr("out_layout") or call.attr("data_layout")),
    )


def _cast(call: OpCall, *tensors: Tensor) -> list[Tensor]:
    """Operands in the dtype of a convolution. Of integers torch has those of 64 bits on a CPU; for sums below 2^53, as
    those of smaller ones are, float64 is exact."""
    dtype = torch_dtype(call.outputs[0].dtype)
    if not (dtype.is_floating_point or (dtype is torch.int64 and tensors[0].device.type == "cpu")):
        dtype = torch.float64
    return [tensor.to(dtype) for tensor in tensors]


@torch_op(*CONV_ADD, *CONV_ADD.values())
def _conv(call: OpCall) -> Function:
    """With an `out_dtype`, the operands are cast to it first. A third operand is a number per channel, (1, C, 1, ...),
    which is added."""
    to_data, to_kernel, back = _orders(call, "OI")
    n = len(call.attr("strides"))
    conv, before, after = _CONV[n], call.attr("padding")[:n], call.attr("padding")[n:]
    even = before == after
    widths = _widths(before, after)
    strides, dilation, groups = call.attr("strides"), call.attr("dilation"), call.attr("groups")

    def convolve(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        x, w = _cast(call, x.permute(to_data), w.permute(to_kernel))
        if not even:
            x = F.pad(x, widths)
        return conv(
            x, w, None if bias is None else bias.reshape(-1), strides, before if even else 0, dilation, groups
        ).permute(back)

    return convolve


def conv_gradient(call: OpCall, wanted: int, dtype: torch.dtype) -> Function | None:
    """(the other operand, the gradient of the result): the gradient of a convolution's operand `wanted`, by torch's own
    function, which doesn't convolve first; None where torch computes it in other steps than one."""
    n, floats = len(call.attr("strides")), (torch.float32, torch.float64)
    before, after = call.attr("padding")[:n], call.attr("padding")[n:]
    if before != after or dtype not in floats or torch_dtype(call.outputs[0].dtype) is not dtype:
        return None
    to_data, to_kernel, back = _orders(call, "OI")
    orders = to_data, to_kernel
    window = call.attr("strides"), before, call.attr("dilation"), False, [0] * n, call.attr("groups")
    shape = [call.inputs[wanted].shape[dim] for dim in orders[wanted]]
    mask = [wanted == 0, wanted == 1, False]

    def gradient(other: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        other = other.to(dtype).permute(orders[1 - wanted])
        seed = seed.to(dtype).permute(_inverse(back))
        operands = [other, other]
        operands[wanted] = other.new_empty(shape)  # which nothing reads; anything else torch would copy
        made = torch.ops.aten.convolution_backward(seed, *operands, None, *window, mask)
        return (made[wanted].permute(_inverse(orders[wanted])),)

    return gradient


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


@torch_op("nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
def _conv_transpose(call: OpCall) -> Function:
    """The padding is cut from what each input element spreads over; output padding adds to its end."""
    to_data, to_kernel, back = _orders(call, "IO")
    n = len(call.attr("strides"))
    conv, before, after = _CONV_TRANSPOSE[n], call.attr("padding")[:n], call.attr("padding")[n:]
    more = call.attr("output_padding")
    widths = _widths([-low for low in before], [add - high for add, high in zip(more, after, strict=True)])
    strides, dilation, groups = call.attr("strides"), call.attr("dilation"), call.attr("groups")

    def spread(x: Tensor, w: Tensor) -> Tensor:
        x, w = _cast(call, x.permute(to_data), w.permute(to_kernel))
        return F.pad(conv(x, w, None, strides, 0, 0, groups, dilation), widths).permute(back)

    return spread


def _widths(before: Sequence[int], after: Sequence[int]) -> list[int]:
    """As F.pad takes them: the last dim first."""
    return [width for pair in reversed(list(zip(before, after, strict=True))) for width in pair]


@torch_op("nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d", "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d")
def _pool(call: OpCall) -> Function:
    """The largest element, or the mean (in float32 at least), under a window. Dim by dim, as both combine; padding
    counts in a mean if `count_include_pad` says so, and what a window reaches beyond it (`ceil_mode`) never does."""
    letters, layout = _spatial(call), call.attr("layout")
    n, largest = len(letters), "max" in call.name
    _order(call, layout, "NC" + letters)
    back = _order(call, layout, call.attr("out_layout") or layout)
    padding, dtype = call.attr("padding"), torch_dtype(call.inputs[0].dtype)
    fill = extreme(call.inputs[0].dtype, -1) if largest else 0
    rows = [layout.index(letter) for letter in letters]
    sizes = tuple(call.inputs[0].shape[dim] for dim in rows)
    outs = [call.outputs[0].shape[back.index(dim)] for dim in rows]
    taps = [
        _Taps(*window)
        for window in zip(
            rows, sizes, padding[:n], padding[n:], call.attr("pool_size"), call.attr("strides"), call.attr("dilation"),
            outs, strict=True,
        )
    ]  # fmt: skip
    counts = torch.ones((), dtype=torch.int64, device="cpu")
    for tap in taps if not largest else ():
        lanes = [-1 if dim == tap.dim else 1 for dim in range(len(layout))]
        counts = counts * tap.counts(bool(call.attr("count_include_pad"))).reshape(lanes)

    def pool(x: Tensor) -> Tensor:
        first = largest and x.requires_grad
        x = x if largest else wide(x)
        for tap in reversed(taps):  # rows last: of equal elements torch's gradient is that of the first one by rows
            x = tap.reduce(x, fill, _first_largest if first else torch.maximum if largest else torch.add)
        if not largest:
            divisor = counts.to(device=x.device, dtype=x.dtype)
            x = x / divisor if dtype.is_floating_point else torch.div(x, divisor, rounding_mode="trunc")
        return x.permute(back)

    return pool


def _first_largest(one: Tensor, other: Tensor) -> Tensor:
    """The larger of two, to whose elements alone gradients go: of equal ones, to the first."""
    return torch.where((other > one) | other.isnan(), other, one)


class _Taps:
    """The positions of one dim that the windows see."""

    def __init__(
        self, dim: int, size: int, before: int, after: int, window: int, stride: int, dilation: int, out: int
    ) -> None:
        self.dim, self._size, self._before, self._after = dim, size, before, after
        self._window, self._stride, self._dilation, self._out = window, stride, dilation, out
        self._span = (out - 1) * stride + 1

    def reduce(self, x: Tensor, fill: float | int, combine: Function) -> Tensor:
        """Each window's elements, combined."""
        reach = (self._window - 1) * self._dilation + self._span
        widths = [0] * (2 * x.ndim)
        widths[2 * (x.ndim - 1 - self.dim)] = self._before
        widths[2 * (x.ndim - 1 - self.dim) + 1] = max(0, reach - self._before - self._size)
        x = F.pad(x, widths, value=fill)
        total = self._tap(x, 0)
        for tap in range(1, self._window):
            total = combine(total, self._tap(x, tap))
        return total

    def _tap(self, x: Tensor, tap: int) -> Tensor:
        every = x.narrow(self.dim, tap * self._dilation, self._span)
        index = [slice(None)] * x.ndim
        index[self.dim] = slice(None, None, self._stride)
        return every[tuple(index)]

    def counts(self, with_padding: bool) -> Tensor:
        """How many elements each window's mean is of."""
        start = torch.arange(self._out, device="cpu")[:, None] * self._stride - self._before
        at = start + torch.arange(self._window, device="cpu")[None] * self._dilation
        low, high = (-self._before, self._size + self._after) if with_padding else (0, self._size)
        return ((at >= low) & (at < high)).sum(1).clamp(min=1)


@torch_op("nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d")
def _adaptive_avg_pool(call: OpCall) -> Function:
    letters, layout = _spatial(call), call.attr("layout")
    channels_first = "NC" + letters
    to_data = _order(call, layout, channels_first)
    out_layout = call.attr("out_layout") or layout
    back = _order(call, channels_first, out_layout)
    size = [call.outputs[0].shape[out_layout.index(letter)] for letter in letters]
    pool: Function = _ADAPTIVE[len(letters)]
    return lambda x: pool(x.permute(to_data), size).permute(back)


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
