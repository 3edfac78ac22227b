"""Tile operations, each a handful of numpy calls."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tvm import tirx

from mesh_tensor.errors import MeshTensorError
from mesh_tensor.rules.tile_ops import Atomic, Copy, Fill, Gemm, Reduce, Region, Scan, TileOp, Transpose

from .expressions import compile_expr
from .memory import box_view, read_box, write_box
from .numerics import UFUNCS, neutral, numpy_dtype, wide
from .scope import Action, Frame, Scope, Storage

_DEPTH = {"local.fragment": 2, "local": 2, "shared": 1, "shared.dyn": 1, "shared.tmem": 1}


def compile_tile_op(op: TileOp, scope: Scope) -> Action:
    """A tile operation as a closure."""
    if scope.axes:
        raise MeshTensorError(f"the interpreter can't run {type(op).__name__} inside a loop that runs all at once")
    return _BUILDERS[type(op)](op, scope)


@dataclass(frozen=True)
class _Box:
    """A region whose corner and size are computed when it is used."""

    storage: Storage
    array: Callable[[Frame], np.ndarray]
    mins: Callable[[Frame], list[int]]
    extents: Callable[[Frame], list[int]]
    long_dims: tuple[int, ...]

    def view(self, frame: Frame) -> np.ndarray:
        """The box, with all its dims; it has to be inside the buffer."""
        return box_view(self.array(frame), self.mins(frame), self.extents(frame), self.storage)

    def read(self, frame: Frame, long_extents: Sequence[int], fill: Any) -> np.ndarray:
        """The box at this corner whose long dims have these extents; what is outside the buffer is `fill`."""
        return read_box(self.array(frame), self.mins(frame), self._spread(long_extents), fill, self.storage)

    def write(self, frame: Frame, long_extents: Sequence[int], block: Any) -> None:
        """Write what of the box is inside the buffer."""
        write_box(self.array(frame), self.mins(frame), self._spread(long_extents), block, self.storage)

    def long_extents(self, frame: Frame) -> list[int]:
        """The extents of the dims that are not single indices."""
        extents = self.extents(frame)
        return [extents[d] for d in self.long_dims]

    def _spread(self, long_extents: Sequence[int]) -> list[int | None]:
        spread: list[int | None] = [None] * len(self.storage_dims)
        for dim, extent in zip(self.long_dims, long_extents, strict=True):
            spread[dim] = extent
        return spread

    @property
    def storage_dims(self) -> Sequence[Any]:
        """The buffer's dims."""
        return self.storage.buffer.shape


def _box(region: Region, scope: Scope) -> _Box:
    return _Box(
        scope.storage(region.buffer),
        scope.array(region.buffer),
        _integers(region.mins, scope),
        _integers(region.extents, scope),
        region.long_dims,
    )


def _integers(exprs: Sequence[tirx.PrimExpr], scope: Scope) -> Callable[[Frame], list[int]]:
    codes = [compile_expr(e, scope) for e in exprs]
    if all(code.const is not None for code in codes):
        known = [int(code.const) for code in codes]
        return lambda frame: known
    runs = [code.run for code in codes]
    return lambda frame: [int(run(frame)) for run in runs]


def _base(src: Region, dst: Region) -> Region:
    """Whose extents both sides of a copy have: TileLang takes the one that is deeper in the memory hierarchy."""
    if len(src.long_dims) != len(dst.long_dims):
        raise MeshTensorError(
            f"a copy from {src.buffer.name}{list(src.extents)} to {dst.buffer.name}{list(dst.extents)} pairs "
            f"{len(src.long_dims)} dims with {len(dst.long_dims)}"
        )
    depth = [_DEPTH.get(r.buffer.scope(), 0) for r in (src, dst)]
    return src if depth[0] >= depth[1] else dst


def _copy(op: Copy, scope: Scope) -> Action:
    src, dst, base = _box(op.src, scope), _box(op.dst, scope), _box(_base(op.src, op.dst), scope)

    def run(frame: Frame) -> None:
        extents = base.long_extents(frame)
        dst.write(frame, extents, src.read(frame, extents, 0))

    return run


def _transpose(op: Transpose, scope: Scope) -> Action:
    src, dst = _box(op.src, scope), _box(op.dst, scope)
    if len(src.long_dims) < 2 or len(src.long_dims) != len(dst.long_dims):
        raise MeshTensorError(f"the interpreter can't transpose {op.src.buffer.name} into {op.dst.buffer.name}")

    def run(frame: Frame) -> None:
        block = src.read(frame, src.long_extents(frame), 0).swapaxes(-1, -2)
        dst.write(frame, block.shape, block)

    return run


def _fill(op: Fill, scope: Scope) -> Action:
    dst, value = _box(op.dst, scope), compile_expr(op.value, scope)

    def run(frame: Frame) -> None:
        dst.write(frame, dst.long_extents(frame), value.run(frame))

    return run


def _gemm(op: Gemm, scope: Scope) -> Action:
    a, b, c = _box(op.a, scope), _box(op.b, scope), _box(op.c, scope)
    dtypes = [numpy_dtype(r.buffer.dtype) for r in (op.a, op.b, op.c)]
    work = _gemm_dtype(*dtypes)

    def run(frame: Frame) -> None:
        left, right = _matrix(a.view(frame), op.trans_a), _matrix(b.view(frame), op.trans_b)
        product = np.matmul(left.astype(work, copy=False), right.astype(work, copy=False))
        target = _matrix(c.view(frame), False)
        target[...] = product if op.clear else target + product.astype(wide(dtypes[2]), copy=False)

    return run


def _gemm_dtype(a: np.dtype, b: np.dtype, c: np.dtype) -> np.dtype:
    """What to multiply in: the accumulator's dtype, or one that is exact for it and that BLAS knows."""
    if c.kind in "iu" and a.itemsize == 1 and b.itemsize == 1 and c.itemsize >= 4:
        return np.dtype(np.float64)
    return wide(c)


def _matrix(view: np.ndarray, transposed: bool) -> np.ndarray:
    matrix = view.reshape(view.shape[-2:]) if view.ndim > 2 else view
    return matrix.T if transposed else matrix


def _reduce(op: Reduce, scope: Scope) -> Action:
    src, dst = _box(op.src, scope), _box(op.dst, scope)
    if op.op not in UFUNCS:
        raise MeshTensorError(f"the interpreter does not know the reduction {op.op!r}")
    combine, dtype = UFUNCS[op.op], numpy_dtype(op.dst.buffer.dtype)
    work, absolute = wide(dtype), op.op.startswith("abs")

    def run(frame: Frame) -> None:
        values = src.view(frame).astype(dtype, copy=False).astype(work, copy=False)
        result = combine.reduce(
            np.abs(values) if absolute else values, axis=op.dim, dtype=work, initial=neutral(op.op, work)
        )
        target = dst.view(frame)
        result = result.reshape(target.shape)
        target[...] = result if op.clear else combine(target.astype(work, copy=False), result)

    return run


def _scan(op: Scan, scope: Scope) -> Action:
    src, dst, combine = _box(op.src, scope), _box(op.dst, scope), UFUNCS[op.op]
    dtype = numpy_dtype(op.dst.buffer.dtype)

    def run(frame: Frame) -> None:
        values = src.view(frame).astype(dtype, copy=False)
        values = np.flip(values, op.dim) if op.reverse else values
        result = combine.accumulate(values, axis=op.dim, dtype=dtype)
        target = dst.view(frame)
        target[...] = (np.flip(result, op.dim) if op.reverse else result).reshape(target.shape)

    return run


def _atomic(op: Atomic, scope: Scope) -> Action:
    dst, dtype = _box(op.dst, scope), numpy_dtype(op.dst.buffer.dtype)
    combine = UFUNCS[op.op]
    value: Callable[[Frame, Sequence[int]], Any]
    if isinstance(op.value, Region):
        src, base = _box(op.value, scope), _box(_base(op.value, op.dst), scope)
        start = neutral(op.op, numpy_dtype(op.value.buffer.dtype))
        value = lambda frame, extents: src.read(frame, extents, start)  # noqa: E731
    else:
        base, code = dst, compile_expr(op.value, scope)
        value = lambda frame, extents: np.asarray(code.run(frame))  # noqa: E731

    def run(frame: Frame) -> None:
        extents = base.long_extents(frame)
        old = dst.read(frame, extents, 0)
        dst.write(frame, extents, combine(old, value(frame, extents).astype(dtype, copy=False)))

    return run


_BUILDERS: dict[type, Callable[[Any, Scope], Action]] = {
    Copy: _copy,
    Fill: _fill,
    Gemm: _gemm,
    Reduce: _reduce,
    Atomic: _atomic,
    Scan: _scan,
    Transpose: _transpose,
}
