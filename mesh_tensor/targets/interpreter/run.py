"""Running a PrimFunc on numpy arrays: binding arguments and symbolic sizes, and the cache of compiled functions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any

import numpy as np
from tvm import tirx

from mesh_tensor.base.dtypes import numpy_dtype
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.tir.effects import refuse_thread_groups
from mesh_tensor.tir.grids import without_grid_barriers
from mesh_tensor.tir.nodes import function_name

from .expressions import compile_expr
from .scope import Action, Frame, FunctionScope
from .statements import compile_stmt

Argument = np.ndarray | int | float


def interpret(func: tirx.PrimFunc, args: Sequence[Argument], *, poison: bool = False) -> None:
    """Run a TileLang kernel on numpy arrays and scalars, given in the order of `func.params`; what it writes, it writes
    in place. Sizes that are symbolic are bound from the arrays' shapes.

    Without `poison`, on-chip buffers start at 0, and loads and stores outside a parameter read 0 and are dropped, as in
    TileLang. With `poison`, on-chip buffers start at :func:`poisoned` values, and those accesses raise. In both, copies
    clip at the buffers' ends, and an access outside an on-chip buffer raises.

    >>> c = np.empty((64, 64), np.float32)
    >>> interpret(matmul, [a, b, c])
    """
    program = _compiled(func, poison)
    with np.errstate(all="ignore"):
        frame: Frame = [None] * program.size
        program.bind(frame, args)
        try:
            program.run(frame)
        except ZeroDivisionError:
            raise MeshTensorError(f"kernel {program.name!r} divides an integer by zero") from None


@dataclass(frozen=True)
class _Program:
    name: str
    size: int
    params: tuple[Callable[[Frame, Any], None], ...]
    checks: tuple[Callable[[Frame], None], ...]
    run: Action

    def bind(self, frame: Frame, args: Sequence[Argument]) -> None:
        """Put the arguments and the sizes that follow from them into the frame."""
        if len(args) != len(self.params):
            raise MeshTensorError(f"kernel {self.name!r} takes {len(self.params)} arguments, not {len(args)}")
        for bind, arg in zip(self.params, args, strict=True):
            bind(frame, arg)
        for check in self.checks:
            check(frame)


@lru_cache(maxsize=512)
def _compiled(func: tirx.PrimFunc, poison: bool) -> _Program:
    refuse_thread_groups(func, "interpret")
    func = without_grid_barriers(func)
    scope = FunctionScope(poison)
    with np.errstate(all="ignore"):
        buffers = {hash(param): buffer for param, buffer in func.buffer_map.items()}
        params, shapes = [], []
        for param in func.params:
            buffer = buffers.get(hash(param))
            if buffer is None:
                params.append(_bind_scalar(param, scope.define(param)))
            else:
                params.append(_bind_array(buffer, scope.define_buffer(buffer, is_param=True)))
                shapes.append(buffer)
        checks = [check for buffer in shapes for check in _bind_sizes(buffer, scope)]
        checks += [check for buffer in shapes for check in _check_sizes(buffer, scope)]
        run = compile_stmt(func.body, scope)
    name = function_name(func)
    return _Program(name, scope.size, tuple(params), tuple(checks), run)


def _bind_scalar(param: tirx.Var, slot: int) -> Callable[[Frame, Any], None]:
    dtype = numpy_dtype(param.dtype)

    def bind(frame: Frame, arg: Any) -> None:
        if isinstance(arg, np.ndarray) and arg.ndim:
            raise MeshTensorError(f"scalar parameter {param.name!r} was given an array of shape {arg.shape}")
        frame[slot] = int(arg) if dtype.kind == "i" and dtype.itemsize >= 4 else dtype.type(arg)

    return bind


def _bind_array(buffer: tirx.Buffer, slot: int) -> Callable[[Frame, Any], None]:
    name, dtype, ndim = buffer.name, numpy_dtype(buffer.dtype), len(buffer.shape)

    def bind(frame: Frame, arg: Any) -> None:
        if not isinstance(arg, np.ndarray):
            raise MeshTensorError(f"parameter {name!r} takes a numpy array, not {type(arg).__name__}")
        if arg.dtype != dtype:
            raise MeshTensorError(f"parameter {name!r} has dtype {dtype}, the array given has {arg.dtype}")
        if arg.ndim != ndim:
            raise MeshTensorError(f"parameter {name!r} has {ndim} dims, the array given has shape {arg.shape}")
        frame[slot] = arg

    return bind


def _bind_sizes(buffer: tirx.Buffer, scope: FunctionScope) -> list[Callable[[Frame], None]]:
    """What binds the symbolic sizes that nothing has bound so far."""
    actions: list[Callable[[Frame], None]] = []
    source = scope.storage(buffer).slot
    for dim, extent in enumerate(buffer.shape):
        if isinstance(extent, tirx.Var) and hash(extent) not in scope.slots:
            actions.append(partial(_size_from, scope.define(extent), source, dim))
    return actions


def _size_from(slot: int, source: int, dim: int, frame: Frame) -> None:
    frame[slot] = frame[source].shape[dim]


def _check_sizes(buffer: tirx.Buffer, scope: FunctionScope) -> list[Callable[[Frame], None]]:
    source, sizes = scope.storage(buffer).slot, [compile_expr(n, scope) for n in buffer.shape]

    def check(frame: Frame) -> None:
        shape = frame[source].shape
        expected = tuple(int(n.run(frame)) for n in sizes)
        if shape != expected:
            raise MeshTensorError(
                f"parameter {buffer.name!r} has shape {list(buffer.shape)} = {expected}, the array given has {shape}"
            )

    return [check]
