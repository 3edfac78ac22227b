"""The bytes that torch allocates on a CPU inside a call of an operator, beside its operands and results: convolutions
copy their operands into blocks of channels (oneDNN), or into columns; pooling goes dim by dim. Dropout has numbers of
64 bits for all elements.

What oneDNN takes per thread, up to 120 KB, isn't counted, nor what convolutions in groups copy where it doesn't make
them, or those of other layouts than NCHW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from mesh_tensor.base.dtypes import TensorType, dtype_bits

from .blocked_convolution import Convolution, is_convolution
from .call import OpCall
from .dropout import DROPOUT, dropout_of
from .vjp import VJP, Vjp, vjp_of


def workspace_bytes(call: OpCall, block: int | None) -> int:
    """The most bytes that a call takes beside its operands and results, where layouts of convolutions have blocks of
    `block` channels; of these and of pooling 0 where they have none, and of what isn't known to take any."""
    if call.operator == DROPOUT:
        return _drawn(call)
    if not block:
        return 0
    if call.operator == VJP:
        return _of_gradient(vjp_of(call), block)
    if _is_pool(call):
        return _pooled(call)
    return Convolution(call, block).forward() if is_convolution(call) else 0


def recorded_bytes(call: OpCall) -> int:
    """What torch keeps of an operator's call for its gradients, beside operands and results: of a layer norm two
    numbers per row, of attention one per row of scores. 0 of what isn't known to keep any."""
    x = call.inputs[0]
    if call.name == "nn.layer_norm":
        return 2 * x.elements // math.prod(x.shape[axis] for axis in call.axes(call.attr("axes"))) * _itemsize(x)
    return math.prod(x.shape[:3]) * _itemsize(x) if call.name == "nn.attention" else 0


def _itemsize(tensor: TensorType) -> int:
    return dtype_bits(tensor.dtype) // 8


def _drawn(call: OpCall) -> int:
    """An element's number, and its higher bits, of which the result follows that lies in other memory."""
    (made,) = call.outputs
    drawn = 0 < dropout_of(call).probability < 1
    return drawn * made.elements * max(0, 2 * 8 - dtype_bits(made.dtype) // 8)


def _of_gradient(stated: Vjp, block: int) -> int:
    (of, operands), *others = stated.calls
    if others or operands != tuple(range(len(of.inputs))) or len(stated.wrt) != 1:
        return 0
    if _is_pool(of):
        return _unpooled(of)
    if not is_convolution(of):
        return 0
    made = Convolution(of, block)
    return made.of_data() if stated.wrt == (0,) else made.of_weights()


def _is_pool(call: OpCall) -> bool:
    return call.name.startswith(("nn.max_pool", "nn.avg_pool"))


def _pooled(call: OpCall) -> int:
    """Per dim a padded copy, and results of two pairs of elements under its windows; means are divided then."""
    made, live, most = call.outputs[0].elements, 0, 0
    for dim in _pool_dims(call):
        most = max(most, live + dim.padded + min(2, dim.window - 1) * dim.made)
        live = dim.made if dim.window > 1 else dim.padded
    if "avg" in call.name:
        most = max(most, 2 * made)
    return (most - made) * _pool_itemsize(call)


def _unpooled(call: OpCall) -> int:
    """Two gradients of the padded copy of all elements, and one on its way there, beside the result and the gradients
    of other elements under windows."""
    dim = next(_pool_dims(call))
    between = dim.spanned if dim.stride > 1 else 0
    others = dim.made if dim.window > 2 else 0
    most = call.outputs[0].elements + between + 2 * dim.padded + others
    return (most - call.inputs[0].elements) * _pool_itemsize(call)


def _pool_itemsize(call: OpCall) -> int:
    """Means are computed in float32 at least."""
    return max(dtype_bits(call.inputs[0].dtype) // 8, 4 if "avg" in call.name else 1)


@dataclass(frozen=True)
class _PoolDim:
    """A dim that windows slide over, when those after it are pooled: elements of the padded copy, of what windows span
    of it, and of the result; and the window's size and stride."""

    padded: int
    spanned: int
    made: int
    window: int
    stride: int


def _pool_dims(call: OpCall) -> Iterator[_PoolDim]:
    """The last one first."""
    layout, n = call.attr("layout"), len(call.attr("pool_size"))
    shape, given = list(call.inputs[0].shape), call.attr("out_layout") or call.attr("layout")
    for number in reversed(range(n)):
        letter = "DHW"[3 - n + number]
        dim, out = layout.index(letter), call.outputs[0].shape[given.index(letter)]
        window, stride = call.attr("pool_size")[number], call.attr("strides")[number]
        span = (out - 1) * stride + 1
        reach = (window - 1) * call.attr("dilation")[number] + span
        sizes = max(call.attr("padding")[number] + shape[dim], reach), span, out
        padded, spanned, made = (math.prod([*shape[:dim], size, *shape[dim + 1 :]]) for size in sizes)
        yield _PoolDim(padded, spanned, made, window, stride)
        shape[dim] = out
