"""Tile operations, each a handful of numpy calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from mesh_tensor.base.dtypes import numpy_dtype
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.reductions import neutral, reduction
from mesh_tensor.tir.regions import Region, deeper
from mesh_tensor.tir.tile_ops import Atomic, Copy, Fill, Gemm, Reduce, Scan, TileOp, Transpose

from .access import box_view, read_box, write_box
from .expressions import compile_expr
from .intrinsics import UFUNCS, assign, convert, wide
from .scope import Action, Code, Frame, FunctionScope, Storage, constant


def compile_tile_op(op: TileOp, scope: FunctionScope) -> Action:
    """A tile operation as a closure."""
    return _BUILDERS[type(op)](op, scope)


@dataclass(frozen=True)
class _Box:
    """A region of a buffer: `mins` and `extents` (None: a single index) at run time; `known`, the same as an index of
    the array, where that is known to be inside it at compile time."""

    storage: Storage
    array: Callable[[Frame], np.ndarray]
    mins: Callable[[Frame], list[int]]
    extents: Callable[[Frame], list[int | None]]
    known: tuple[Any, ...] | None

    def view(self, frame: Frame) -> np.ndarray:
        """The box as a view with all its dims; it has to be inside the buffer."""
        array = self.array(frame)
        if self.known is not None:
            return array[tuple(slice(i, i + 1) if isinstance(i, int) else i for i in self.known)]
        return box_view(array, self.mins(frame), [1 if n is None else n for n in self.extents(frame)], self.storage)

    def read(self, frame: Frame, fill: Any) -> np.ndarray:
        """The box without its single-index dims; what is outside the buffer is `fill`."""
        array = self.array(frame)
        if self.known is not None:
            return array[self.known]
        return read_box(array, self.mins(frame), self.extents(frame), fill, self.storage)

    def write(self, frame: Frame, block: Any) -> None:
        """Write what of the box is inside the buffer."""
        array = self.array(frame)
        if self.known is not None:
            assign(array, self.known, block)
        else:
            write_box(array, self.mins(frame), self.extents(frame), block, self.storage)


def _box(region: Region, scope: FunctionScope, base: Region | None = None) -> _Box:
    """A region; its long dims have the extents of `base`'s, if that is given."""
    sizes: list[tirx.PrimExpr | None] = [None] * len(region.mins)
    base = region if base is None else base
    for dim, from_dim in zip(region.long_dims, base.long_dims, strict=True):
        sizes[dim] = base.extents[from_dim]
    mins = [compile_expr(m, scope) for m in region.mins]
    extents = [None if n is None else compile_expr(n, scope) for n in sizes]
    return _Box(
        scope.storage(region.buffer),
        scope.array(region.buffer),
        _integers(mins),
        _integers(extents),
        _known(mins, extents, region.buffer),
    )


def _integers(codes: Sequence[Code | None]) -> Callable[[Frame], list[Any]]:
    if all(code is None or code.const is not None for code in codes):
        known = [None if code is None else int(code.const) for code in codes]
        return lambda frame: known
    runs = [None if code is None else code.run for code in codes]
    return lambda frame: [None if run is None else int(run(frame)) for run in runs]


def _known(mins: Sequence[Code], extents: Sequence[Code | None], buffer: tirx.Buffer) -> tuple[Any, ...] | None:
    index: list[Any] = []
    for low, extent, n in zip(mins, extents, buffer.shape, strict=True):
        if low.const is None or not isinstance(n, tirx.IntImm) or (extent is not None and extent.const is None):
            return None
        size = 1 if extent is None else extent.const
        if low.const < 0 or low.const + size > int(n):
            return None
        index.append(low.const if extent is None else slice(low.const, low.const + size))
    return (*index, Ellipsis)


def _base(src: Region, dst: Region) -> Region:
    """Whose extents both sides of a copy have: TileLang takes the one that is deeper in the memory hierarchy."""
    if len(src.long_dims) != len(dst.long_dims):
        raise MeshTensorError(
            f"a copy from {src.buffer.name}{list(src.extents)} to {dst.buffer.name}{list(dst.extents)} pairs "
            f"{len(src.long_dims)} dims with {len(dst.long_dims)}"
        )
    return deeper(src, dst)


def _copy(op: Copy, scope: FunctionScope) -> Action:
    base = _base(op.src, op.dst)
    src, dst = _box(op.src, scope, base), _box(op.dst, scope, base)
    outside = scope.safe_values.get(hash(op.src.buffer.data), constant(0)).run
    return lambda frame: dst.write(frame, src.read(frame, outside(frame)))


def _transpose(op: Transpose, scope: FunctionScope) -> Action:
    src, dst = _box(op.src, scope), _box(op.dst, scope)
    if len(op.src.long_dims) != len(op.dst.long_dims):
        raise MeshTensorError(f"the interpreter can't transpose {op.src.buffer.name} into {op.dst.buffer.name}")
    rank = len(op.src.extents)
    if not {rank - 2, rank - 1} <= set(op.src.long_dims):  # a row becomes a column
        return lambda frame: dst.write(frame, src.read(frame, 0))
    return lambda frame: dst.write(frame, src.read(frame, 0).swapaxes(-1, -2))


def _fill(op: Fill, scope: FunctionScope) -> Action:
    dst, value = _box(op.dst, scope), compile_expr(op.value, scope)

    def run(frame: Frame) -> None:
        if dst.storage.is_param:
            dst.write(frame, value.run(frame))
        else:
            assign(dst.view(frame), ..., value.run(frame))

    return run


def _gemm(op: Gemm, scope: FunctionScope) -> Action:
    a, b, c = _box(op.a, scope), _box(op.b, scope), _box(op.dst, scope)
    dtypes = [numpy_dtype(r.buffer.dtype) for r in (op.a, op.b, op.dst)]
    work = _gemm_dtype(*dtypes)

    def run(frame: Frame) -> None:
        left, right = _matrix(a.view(frame), op.trans_a), _matrix(b.view(frame), op.trans_b)
        product = np.matmul(left.astype(work, copy=False), right.astype(work, copy=False))
        target = _matrix(c.view(frame), False)
        assign(target, ..., product if op.clears else target + product.astype(wide(dtypes[2]), copy=False))

    return run


def _gemm_dtype(a: np.dtype, b: np.dtype, c: np.dtype) -> np.dtype:
    """What to multiply in: the accumulator's dtype, or one that is exact for it and that BLAS knows."""
    if c.kind in "iu" and a.itemsize == 1 and b.itemsize == 1 and c.itemsize >= 4:
        return np.dtype(np.float64)
    return wide(c)


def _matrix(view: np.ndarray, transposed: bool) -> np.ndarray:
    matrix = view.reshape(view.shape[-2:]) if view.ndim > 2 else view
    return matrix.T if transposed else matrix


def _reduce(op: Reduce, scope: FunctionScope) -> Action:
    src, dst = _box(op.src, scope), _box(op.dst, scope)
    if op.reduction not in UFUNCS:
        raise MeshTensorError(f"the interpreter does not know the reduction {op.reduction!r}")
    combine, dtype = UFUNCS[op.reduction], numpy_dtype(op.dst.buffer.dtype)
    work, absolute = wide(dtype), reduction(op.reduction).magnitudes
    start = neutral(op.reduction, work.name)

    def run(frame: Frame) -> None:
        values = convert(src.view(frame), dtype).astype(work, copy=False)
        result = combine.reduce(np.abs(values) if absolute else values, axis=op.dim, dtype=work, initial=start)
        target = dst.view(frame)
        result = result.reshape(target.shape)
        assign(target, ..., result if op.clears else combine(target.astype(work, copy=False), result))

    return run


def _scan(op: Scan, scope: FunctionScope) -> Action:
    src, dst, combine = _box(op.src, scope), _box(op.dst, scope), UFUNCS[op.reduction]
    dtype = numpy_dtype(op.dst.buffer.dtype)

    def run(frame: Frame) -> None:
        values = src.view(frame).astype(dtype, copy=False)
        values = np.flip(values, op.dim) if op.reverse else values
        result = combine.accumulate(values, axis=op.dim, dtype=dtype)
        target = dst.view(frame)
        target[...] = (np.flip(result, op.dim) if op.reverse else result).reshape(target.shape)

    return run


def _atomic(op: Atomic, scope: FunctionScope) -> Action:
    combine, dtype = UFUNCS[op.reduction], numpy_dtype(op.dst.buffer.dtype)
    if not isinstance(op.value, Region):
        dst, value = _box(op.dst, scope), compile_expr(op.value, scope)
        return lambda frame: dst.write(frame, combine(dst.read(frame, 0), convert(value.run(frame), dtype)))
    base = _base(op.value, op.dst)
    target, src = _box(op.dst, scope, base), _box(op.value, scope, base)
    start = neutral(op.reduction, op.value.buffer.dtype)

    def run(frame: Frame) -> None:
        value = src.read(frame, start).astype(dtype, copy=False)
        target.write(frame, combine(target.read(frame, 0), value))

    return run


_BUILDERS: dict[type, Callable[[Any, FunctionScope], Action]] = {
    Copy: _copy,
    Fill: _fill,
    Gemm: _gemm,
    Reduce: _reduce,
    Atomic: _atomic,
    Scan: _scan,
    Transpose: _transpose,
}
