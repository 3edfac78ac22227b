"""Parameters with gaps between their rows, or whose columns lie one after the other (`T.StridedTensor`).

Devices hold what they have of a tensor in contiguous rows, and kernels are called with such tensors: where an element
lies in memory is no matter of what a kernel computes.
"""

from __future__ import annotations

from tvm import arith, tirx

from mesh_tensor.base.errors import refuse

from .memory import is_compact, row_strides
from .nodes import function_name, is_const, nodes
from .rewrite import exchange_buffers


def with_contiguous_rows(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, with parameters whose rows are contiguous, from their first element on; it stays as it is where
    other buffers are views of such memory, which are refused when they are read.

    Raises:
        MeshTensorError: a variable is the stride of several parameters that would need different ones.
    """
    analyzer = arith.Analyzer()
    others = {b: _contiguous(b) for b in func.buffer_map.values() if not _is_contiguous(b, analyzer)}
    if not others or _has_views(func, others):
        return func
    strides = _strides(func, others, analyzer)
    buffers = {param: others.get(buffer, buffer) for param, buffer in func.buffer_map.items()}
    body = tirx.stmt_functor.substitute(exchange_buffers(func.body, others), strides)
    params = [param for param in func.params if param not in strides]
    return tirx.PrimFunc(params, body, func.ret_type, buffers, func.attrs)


def _is_contiguous(buffer: tirx.Buffer, analyzer: arith.Analyzer) -> bool:
    starts = buffer.elem_offset is None or is_const(buffer.elem_offset, 0)
    return starts and (not len(buffer.strides) or is_compact(buffer, analyzer))


def _contiguous(buffer: tirx.Buffer) -> tirx.Buffer:
    strides = row_strides(buffer.shape)
    return tirx.decl_buffer(buffer.shape, buffer.dtype, buffer.name, buffer.data, strides, 0, buffer.scope())


def _has_views(func: tirx.PrimFunc, buffers: dict[tirx.Buffer, tirx.Buffer]) -> bool:
    memory = {buffer.data for buffer in buffers}
    accesses = nodes(func.body, tirx.BufferLoad, tirx.BufferStore, tirx.DeclBuffer)
    named = {access.buffer for access in accesses if access.buffer.data in memory}
    return not named <= buffers.keys()


def _strides(
    func: tirx.PrimFunc, others: dict[tirx.Buffer, tirx.Buffer], analyzer: arith.Analyzer
) -> dict[tirx.Var, tirx.PrimExpr]:
    """What the variables are that a function has for strides and offsets."""
    sizes = {size for buffer in func.buffer_map.values() for size in buffer.shape}
    found: dict[tirx.Var, tirx.PrimExpr] = {}
    for old, new in others.items():
        for was, now in zip([*old.strides, old.elem_offset], [*new.strides, new.elem_offset], strict=False):
            if not isinstance(was, tirx.Var) or was in sizes:
                continue
            value = found.setdefault(was, tirx.Cast(was.dtype, now) if now.dtype != was.dtype else now)
            if not analyzer.can_prove_equal(value, now):
                refuse(
                    f"the stride {was.name} would be both {value} and {now}",
                    where=f"kernel {function_name(func)!r}",
                    why="devices hold tensors in contiguous rows",
                    fix="give every dim a stride of its own, or declare the parameters with T.Tensor",
                )
    return found
