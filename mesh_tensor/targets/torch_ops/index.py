"""Operators that read where an index tensor says."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import torch

from mesh_tensor.base.dtypes import poison_value
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype

from .table import Function, Place, placed_torch_op, torch_op

Tensor = torch.Tensor


@placed_torch_op("take")
def _take(call: OpCall, place: Place) -> Function:
    """`clip` takes the nearest of indices out of range, `wrap` goes round; with `nan` they are refused, or poison in
    tiles; with `fast` they are undefined in TVM: negative ones count from the end, others are as with `nan`."""
    axis, mode, shape = call.attr("axis"), call.attr("mode", "fast"), call.outputs[0].shape
    dim = 0 if axis is None else call.axis(axis)
    size = math.prod(call.inputs[0].shape) if axis is None else call.inputs[0].shape[dim]
    rows = _rows(call, dim, shape, size, mode, place)
    fixed = None if len(call.inputs) > 1 else torch.tensor([call.literals[0]], device="cpu")

    def take(x: Tensor, index: Tensor | None = fixed) -> Tensor:
        assert index is not None
        return rows(x.reshape(-1) if axis is None else x, index.to(x.device))

    return take


def _rows(call: OpCall, dim: int, shape: tuple[int, ...], size: int, mode: str, place: Place) -> Function:
    """The rows along `dim` (of `size`) that an index tensor names, in this shape."""
    if mode not in ("fast", "clip", "nan", "wrap"):
        refuse(f"R.take has no mode {mode!r} here", where=str(call.expr), fix="use fast, clip, nan or wrap")
    check = Range(call, place, from_end=mode == "fast")

    def rows(x: Tensor, index: Tensor) -> Tensor:
        tile, index = index, index.reshape(-1).long()
        if mode in ("fast", "nan") and x.device.type == "cpu":
            try:
                return x.index_select(dim, index).reshape(shape)
            except (IndexError, RuntimeError):  # some are negative, or outside
                pass
        if mode in ("fast", "nan"):
            index, valid = check(index, size, (1, tile) if len(call.inputs) > 1 else None)
        else:
            index, valid = index.clamp(0, size - 1) if mode == "clip" else index.remainder(size), None
        found = x.index_select(dim, index)
        if valid is not None:
            lanes = [-1 if d == dim else 1 for d in range(x.ndim)]
            found = torch.where(valid.reshape(lanes), found, poison_like(found))
        return found.reshape(shape)

    return rows


class _Held:
    """What a device holds along a dim that is split. Literals of the call: its name, the whole shape, the layout
    as text, the dim and, optionally, how indices outside are meant."""

    def __init__(self, call: OpCall, place: Place, instead: str) -> None:
        _, shape, text, axis, *self.mode = call.literals
        if place.mesh is None:
            name = call.operator
            refuse(f"{name} is an operator of one device of a mesh", fix=f"use {instead} in a module in global view")
        sharding, self.dim, self._call, self._place = (
            Sharding.parse(place.mesh, len(shape), text),
            axis % len(shape),
            call,
            place,
        )
        self.size, self.held = shape[self.dim], sharding.valid_extent(shape, place.rank)[self.dim]
        self._first = sharding.tile_offset(shape, place.rank)[self.dim]

    def check(self, index: Tensor, lowest: int) -> None:
        """The first device refuses valid indices that are not from `lowest` on, or outside."""
        if self._first == 0 and self._place.valid is not None:
            refuse_outside(self._call, self._place.valid[1].of(index), lowest, self.size)

    def found(self, index: Tensor, look_up: Callable[[Tensor], Tensor], lanes: Sequence[int]) -> Tensor:
        """What is looked up at these indices, in this shape, if the device holds it, and 0 if another one does. Of an
        index outside the dim the first device makes poison."""
        mine = (index >= self._first) & (index < self._first + self.held)
        made = self._cleared(look_up(torch.where(mine, index - self._first, 0)), ~mine, lanes)
        outside = (index < 0) | (index >= self.size)
        if self._first or (made.device.type == "cpu" and not outside.any()):
            return made
        return torch.where(outside.reshape(lanes), poison_like(made), made)

    def _cleared(self, made: Tensor, others: Tensor, lanes: Sequence[int]) -> Tensor:
        """What was looked up, with 0 for others; on a CPU in its place: most of the work would be to copy the rest."""
        bits = _BITS.get(made.itemsize)
        if others.ndim != 1 or bits is None or made.device.type != "cpu" or made.requires_grad:
            return torch.where(others.reshape(lanes), torch.zeros((), dtype=made.dtype, device=made.device), made)
        made.view(bits).index_fill_(self.dim, others.nonzero().squeeze(1), 0)
        return made


_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes: dtypes of which 0 has no bit set


@placed_torch_op("mesh.local_take")
def _local_take(call: OpCall, place: Place) -> Function:
    """`R.take` from a table whose dim is split: the rows that this device holds, 0 for those of the others, so that the
    sum over the devices is the result."""
    table = _Held(call, place, "R.take")
    dim, size, mode, shape = table.dim, table.size, table.mode, call.outputs[0].shape
    lowest, checks = (0 if "nan" in mode else -size), not {"clip", "wrap"} & set(mode)

    def local_take(x: Tensor, index: Tensor) -> Tensor:
        if checks:
            table.check(index, lowest)
        index = index.reshape(-1).long()
        if "clip" in mode:
            index = index.clamp(0, size - 1)
        elif "wrap" in mode:
            index = index.remainder(size)
        elif "nan" not in mode:
            index = torch.where(index < 0, index + size, index)
        lanes = [-1 if d == dim else 1 for d in range(x.ndim)]
        nothing = [index.numel() if d == dim else n for d, n in enumerate(x.shape)]
        rows = partial(x.index_select, dim) if table.held else lambda _: x.new_zeros(nothing)
        return table.found(index, rows, lanes).reshape(shape)

    return local_take


@placed_torch_op("mesh.local_gather")
def _local_gather(call: OpCall, place: Place) -> Function:
    """`R.gather_elements` along a dim that is split: the elements that this device holds, 0 for those of the others, so
    that the sum over the devices is the result."""
    data = _Held(call, place, "R.gather_elements")

    def local_gather(x: Tensor, index: Tensor) -> Tensor:
        data.check(index, -data.size)
        index = index.long()
        index = torch.where(index < 0, index + data.size, index)
        elements = partial(torch.gather, x, data.dim) if data.held else lambda at: x.new_zeros(at.shape)
        return data.found(index, elements, index.shape)

    return local_gather


class Range:
    """Checks indices against a dim's size; negative ones count from its end (`from_end`), which is what frontends mean
    by them unless they say otherwise. Those outside are refused, on whole tensors and in what is valid of a tile; what
    else is outside is brought inside, and which ones were inside already comes along (None: all)."""

    def __init__(self, call: OpCall, place: Place, *, from_end: bool = True) -> None:
        self._call, self._place, self._from_end = call, place, from_end

    def __call__(
        self, index: Tensor, size: int, operand: tuple[int, Tensor] | None = None, column: slice = slice(None)
    ) -> tuple[Tensor, Tensor | None]:
        """`index` in a dim of `size`. It has the elements of the `operand` of that number, or a `column` of them."""
        if not index.numel():
            return index, None
        low, high = (int(bound) for bound in torch.aminmax(index))
        lowest = -size if self._from_end else 0
        if low >= lowest and high < size:
            return (torch.where(index < 0, index + size, index) if low < 0 else index), None
        if operand is not None and self._place.valid is not None:
            number, tile = operand
            refuse_outside(self._call, self._place.valid[number].of(tile).reshape(-1)[column], lowest, size)
        elif not self._place.padded:
            refuse_outside(self._call, index, lowest, size)
        index = torch.where(index < 0, index + size, index) if self._from_end else index
        return index.clamp(0, max(0, size - 1)), (index >= 0) & (index < size)


def refuse_outside(call: OpCall, index: Tensor, lowest: int, size: int) -> None:
    """Refuse indices of which some are not from `lowest` to `size` - 1."""
    if not index.numel():
        return
    low, high = (int(bound) for bound in torch.aminmax(index))
    if low < lowest or high >= size:
        refuse(
            f"R.{call.operator}: indices from {low} to {high} into a dim of {size}",
            where=str(call.expr),
            fix="keep indices inside the dim; on a mesh, check_indices=False leaves this out, and gives NaN for them",
        )


def poison_like(like: Tensor) -> Tensor:
    return torch.tensor(poison_value(dtype_name(like.dtype)), dtype=like.dtype, device=like.device)


@placed_torch_op("gather_elements")
def _gather_elements(call: OpCall, place: Place) -> Function:
    dim = call.axis(call.attr("axis"))
    size, check = call.inputs[0].shape[dim], Range(call, place)

    def gather(x: Tensor, index: Tensor) -> Tensor:
        index, valid = check(index.long(), size, (1, index))
        found = torch.gather(x, dim, index)
        return found if valid is None else torch.where(valid, found, poison_like(found))

    return gather


@placed_torch_op("gather_nd")
def _gather_nd(call: OpCall, place: Place) -> Function:
    """The last dim of the indices names a position in the data's dims after the batch dims."""
    data, indices = call.inputs
    batch, count = call.attr("batch_dims", 0), indices.shape[-1]
    indexed = data.shape[batch : batch + count]
    batches, shape = math.prod(data.shape[:batch]), call.outputs[0].shape
    linear = Linear(Range(call, place), indexed)
    rest = math.prod(data.shape[batch + count :])

    def gather_nd(x: Tensor, index: Tensor) -> Tensor:
        places, valid = linear(index.reshape(-1, count), (1, index))
        places = places.reshape(batches, -1, 1).expand(-1, -1, rest)
        found = torch.gather(x.reshape(batches, math.prod(indexed), rest), 1, places)
        if valid is not None:
            found = torch.where(valid.reshape(batches, -1, 1), found, poison_like(found))
        return found.reshape(shape)

    return gather_nd


class Linear:
    """Positions (rows of indices, one column per dim) as indices into these dims, flattened."""

    def __init__(self, check: Range, sizes: tuple[int, ...]) -> None:
        self._check, self._sizes = check, sizes

    def __call__(self, positions: Tensor, operand: tuple[int, Tensor]) -> tuple[Tensor, Tensor | None]:
        """Of `positions`, which are those of an operand."""
        linear, all_valid = positions.new_zeros(positions.shape[0], dtype=torch.int64), None
        for number, (column, size) in enumerate(zip(positions.long().unbind(1), self._sizes, strict=True)):
            column, valid = self._check(column, size, operand, slice(number, None, len(self._sizes)))
            linear = linear * size + column
            if valid is not None:
                all_valid = valid if all_valid is None else all_valid & valid
        return linear, all_valid


@placed_torch_op("index_tensor")
def _index_tensor(call: OpCall, place: Place) -> Function:
    """data[indices]: the index tensors broadcast together."""
    check, sizes = Range(call, place), call.inputs[0].shape

    def index_tensor(x: Tensor, *indices: Tensor) -> Tensor:
        numbered = enumerate(zip(indices, sizes, strict=False), 1)
        checked = [check(index.long(), size, (number, index)) for number, (index, size) in numbered]
        found = x[tuple(index for index, _ in checked)]
        for _, valid in checked:
            if valid is not None:
                lanes = (*valid.shape, *[1] * (x.ndim - len(indices)))
                found = torch.where(valid.reshape(lanes), found, poison_like(found))
        return found

    return index_tensor


@torch_op("one_hot")
def _one_hot(call: OpCall) -> Function:
    on, off = call.literals
    depth, dtype = call.attr("depth"), torch_dtype(call.outputs[0].dtype)
    axis = call.attr("axis") % call.outputs[0].ndim
    lanes = [-1 if dim == axis else 1 for dim in range(call.outputs[0].ndim)]

    def one_hot(index: Tensor) -> Tensor:
        hit = index.unsqueeze(axis) == torch.arange(depth, device=index.device).reshape(lanes)
        return torch.full((), off, dtype=dtype, device=index.device).masked_fill(hit, on)

    return one_hot


@torch_op("loop.row")
def _loop_row(call: OpCall) -> Function:
    """The row that a count says; a view."""
    return lambda x, at: x[int(at)]
