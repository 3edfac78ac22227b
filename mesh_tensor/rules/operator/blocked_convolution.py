"""Convolutions as oneDNN runs them for torch on a CPU: operands and results are copied into blocks of channels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from mesh_tensor.base.dtypes import TensorType, dtype_bits

from .call import OpCall
from .conv import CONV_ADD

_FLOATS = {"float32", "bfloat16"}  # what oneDNN convolves
_LARGE, _BATCH = 20480, 16  # elements of one image, and images, from which torch gives a convolution to oneDNN


def is_convolution(call: OpCall) -> bool:
    """Whether it is a convolution of rows of channels, not transposed."""
    if call.name not in (*CONV_ADD, *CONV_ADD.values()):
        return False
    layouts = call.attr("data_layout"), call.attr("out_layout") or call.attr("data_layout")
    return all(layout.startswith("NC") for layout in layouts)


@dataclass(frozen=True)
class Convolution:
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

    def copied_bytes(self) -> int:
        """The bytes of operands and result, in blocks: all of them are copied."""
        data = self._data.nbytes if self._few else self._in_blocks(self._data)
        return data + self._weights_in_blocks(self._few) + self._in_blocks(self._made)

    def whole_blocks(self, wrt: int | None) -> float:
        """How many times the call's operations are done where channels fill blocks; of the gradient of operand `wrt`,
        if one is given: that of the data has blocks of its channels, too. Groups of channels aren't filled."""
        if self._groups > 1:
            return 1.0
        data, made = self._data.channels, self._made.channels
        filled = data if self._few and wrt != 0 else self._whole(data)
        return filled * self._whole(made) / max(1, data * made)

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
