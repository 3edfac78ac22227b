"""The bytes that torch allocates on a CPU inside a call of an operator, beside its operands and results: convolutions
copy their operands into blocks of channels (oneDNN), or into columns; pooling goes dim by dim.

What oneDNN takes per thread, up to 120 KB, isn't counted, nor what convolutions in groups copy where it doesn't make
them, or those of other layouts than NCHW.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from mesh_tensor.base.dtypes import TensorType, dtype_bits

from .call import OpCall
from .conv import CONV_ADD
from .vjp import VJP, Vjp, vjp_of

_FLOATS = {"float32", "bfloat16"}  # what oneDNN convolves
_LARGE, _BATCH = 20480, 16  # elements of one image, and images, from which torch gives a convolution to oneDNN


def workspace_bytes(call: OpCall, block: int | None) -> int:
    """The most bytes that a call takes beside its operands and results, where layouts of convolutions have blocks of
    `block` channels; 0 where they have none, and of what isn't known to take any."""
    if not block:
        return 0
    if call.operator == VJP:
        return _of_gradient(vjp_of(call), block)
    if _is_pool(call):
        return _pooled(call)
    return _Convolution(call, block).forward() if _is_convolution(call) else 0


def _of_gradient(stated: Vjp, block: int) -> int:
    (of, operands), *others = stated.calls
    if others or operands != tuple(range(len(of.inputs))) or len(stated.wrt) != 1:
        return 0
    if _is_pool(of):
        return _unpooled(of)
    if not _is_convolution(of):
        return 0
    made = _Convolution(of, block)
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


def _is_convolution(call: OpCall) -> bool:
    """Whether it is a convolution of rows of channels, not transposed."""
    if call.name not in (*CONV_ADD, *CONV_ADD.values()):
        return False
    layouts = call.attr("data_layout"), call.attr("out_layout") or call.attr("data_layout")
    return all(layout.startswith("NC") for layout in layouts)


@dataclass(frozen=True)
class _Convolution:
    """A convolution's call, and the channels in a block."""

    call: OpCall
    block: int

    def forward(self) -> int:
        """Both operands in blocks, and the result; then the result twice. Channels that are fewer than a block's stay
        as they are."""
        if not self._blocked:
            return self._padded + self._columns
        data = 0 if self._few else self._in_blocks(self._data)
        made = self._in_blocks(self._made)
        most = max(data + self._weights_in_blocks(self._few) + made, made + self._made.nbytes)
        return self._padded + most - self._made.nbytes

    def of_data(self) -> int:
        """The gradient of the data is made in blocks, of the result's and the weights in blocks. Memory as large as the
        data stands for it."""
        if not self._blocked:
            return self._data.nbytes
        apart = self._groups == 1 and any(stride > 1 for stride in self.call.attr("strides"))
        data = self._data.nbytes if apart else self._in_blocks(self._data)  # then channels come last, and it is copied
        first = self._in_blocks(self._made) + self._weights_in_blocks(False) + data
        return max(first, data + (1 + apart) * self._data.nbytes)

    def of_weights(self) -> int:
        """The gradient of the weights is made in blocks, of both others in blocks. Memory as large stands for them."""
        if not self._blocked:
            return self._weights.nbytes + self._columns
        if self._few and 2 * self._data.channels >= self.block > 8:
            return replace(self, block=self.block // 2).of_weights()
        data, weights = 0 if self._few else self._in_blocks(self._data), self._weights_in_blocks(self._few)
        first = self._in_blocks(self._made) + data + weights
        return max(first, weights + self._weights.nbytes)

    @cached_property
    def _data(self) -> _Sizes:
        return _Sizes.of(self.call.inputs[0])

    @cached_property
    def _weights(self) -> _Sizes:
        return _Sizes.of(self.call.inputs[1])

    @cached_property
    def _made(self) -> _Sizes:
        return _Sizes.of(self.call.outputs[0])

    @property
    def _groups(self) -> int:
        return int(self.call.attr("groups"))

    @property
    def _few(self) -> bool:
        """Whether the data has fewer channels than a block, and windows have several elements."""
        alone = math.prod(self._weights.spatial) == 1
        return self._groups == 1 and self._data.channels < self.block and not alone

    @property
    def _blocked(self) -> bool:
        """Whether torch gives it to oneDNN (use_mkldnn of its Convolution.cpp, on one thread)."""
        data, window = self._data, self._weights.spatial
        if data.dtype not in _FLOATS:
            return False
        far = any(each > 1 for name in ("strides", "dilation") for each in self.call.attr(name))
        last = (1, *window)[-2:]
        image = data.channels * math.prod(data.spatial[:2])
        worth = far or data.rows >= _BATCH or last != (1, 1)
        large = self._groups > 1 or min(last) > 3 or data.rows > 1 or data.rows * image > _LARGE
        return data.dtype == "bfloat16" or (worth and large)

    @property
    def _columns(self) -> int:
        """The bytes of the elements under all windows, where there is more than one under each."""
        alone = math.prod(self._weights.spatial) == 1 and not any(self.call.attr("padding"))
        if alone and all(each == 1 for each in self.call.attr("strides")):
            return 0
        taps = self._weights.channels * math.prod(self._weights.spatial)
        return self._made.rows * math.prod(self._made.spatial) * taps * self._data.itemsize

    @property
    def _padded(self) -> int:
        """The bytes of the data with its margins, where these differ: that is a copy."""
        n, padding = len(self._data.spatial), self.call.attr("padding")
        if padding[:n] == padding[n:]:
            return 0
        sizes = map(sum, zip(self._data.spatial, padding[:n], padding[n:], strict=True))
        return self._data.rows * self._data.channels * math.prod(sizes) * self._data.itemsize

    def _in_blocks(self, sizes: _Sizes) -> int:
        return sizes.rows * self._whole(sizes.channels) * math.prod(sizes.spatial) * sizes.itemsize

    def _weights_in_blocks(self, few: bool) -> int:
        """In blocks of both kinds of channels; of groups that have one channel each, in blocks of groups."""
        weights = self._weights
        taps = math.prod(weights.spatial) * weights.itemsize
        if self._groups > 1:
            return self._whole(weights.rows) * taps if weights.channels == 1 else weights.nbytes
        return self._whole(weights.rows) * (weights.channels if few else self._whole(weights.channels)) * taps

    def _whole(self, channels: int) -> int:
        return -(-channels // self.block) * self.block


@dataclass(frozen=True)
class _Sizes:
    """A tensor of rows, channels and dims that a window slides over."""

    rows: int
    channels: int
    spatial: tuple[int, ...]
    dtype: str
    itemsize: int

    @staticmethod
    def of(tensor: TensorType) -> _Sizes:
        rows, channels, *spatial = tensor.shape
        return _Sizes(rows, channels, tuple(spatial), tensor.dtype, dtype_bits(tensor.dtype) // 8)

    @property
    def nbytes(self) -> int:
        return self.rows * self.channels * math.prod(self.spatial) * self.itemsize
