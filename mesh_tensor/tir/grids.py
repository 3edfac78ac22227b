"""The kernels of a function: one `T.Kernel` after the other, each as a function of its own; and what is between the
barriers of a whole grid (`T.sync_grid`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import tilelang.language as T  # type: ignore[import-untyped]
from tvm import tirx

from mesh_tensor.base.errors import refuse

from .grid_barriers import without_grid_barriers
from .nodes import function_name, nodes
from .rewrite import sequence, statements


@dataclass(frozen=True, eq=False)
class Grids:
    """A function's kernels in order, each with the parameters that it uses. `own` are tensors that only the function
    has (`T.alloc_global`): parameters of the kernels that use them."""

    funcs: tuple[tirx.PrimFunc, ...]
    own: tuple[tirx.Buffer, ...] = ()


def grids_of(func: tirx.PrimFunc) -> Grids:
    """The function's kernels; a function with one kernel, or none, is left as it is.

    Raises:
        MeshTensorError: something else stands between the kernels.
    """
    func = without_grid_barriers(func)
    root = func.body.block if isinstance(func.body, tirx.SBlockRealize) else None
    stmts = statements(func.body if root is None else root.body)
    kernels = [stmt for stmt in stmts if _has_kernel(stmt)]
    if len(kernels) < 2:
        return Grids((func,))
    others = [stmt for stmt in stmts if stmt not in kernels and not isinstance(stmt, tirx.Bind)]
    others += [stmt for stmt in kernels if not isinstance(stmt, (tirx.For, tirx.SBlockRealize))]
    loaded = [stmt for stmt in stmts if isinstance(stmt, tirx.Bind) and nodes(stmt, tirx.BufferLoad)]
    if others or loaded:
        found = [f"{type(stmt).__name__} between kernels" for stmt in others]
        found += [f"{stmt.var.name} is loaded between kernels" for stmt in loaded]
        refuse(
            list(dict.fromkeys(found)),
            where=f"function {function_name(func)!r}",
            why="its kernels are run one after the other, and nothing between them",
            fix="put it into a T.Kernel",
        )
    own = [] if root is None else [buffer for buffer in root.alloc_buffers if buffer.scope() == "global"]
    handles = {buffer: tirx.Var(f"{buffer.name}_handle", "handle") for buffer in own}
    funcs, bound = list[tirx.PrimFunc](), list[tirx.Stmt]()
    for stmt in stmts:
        if isinstance(stmt, tirx.Bind):
            bound.append(stmt)
        else:
            funcs.append(_alone(func, [*bound, stmt], handles))
    return Grids(tuple(funcs), tuple(own))


def _alone(func: tirx.PrimFunc, stmts: Sequence[tirx.Stmt], own: dict[tirx.Buffer, tirx.Var]) -> tirx.PrimFunc:
    """A kernel of the function, with the parameters that it uses, or of which it uses the size."""
    body = sequence(stmts)
    if isinstance(func.body, tirx.SBlockRealize):
        block = func.body.block
        allocs = [buffer for buffer in block.alloc_buffers if buffer not in own]
        root = tirx.SBlock([], block.reads, block.writes, block.name_hint, body, block.init, allocs)
        body = tirx.SBlockRealize([], func.body.predicate, root)
    buffers = {**dict(func.buffer_map.items()), **{handle: buffer for buffer, handle in own.items()}}
    used = {access.buffer.data for access in nodes(body, tirx.BufferLoad, tirx.BufferStore)}
    used |= set(nodes(body, tirx.Var))
    kept = {param: buffer for param, buffer in buffers.items() if buffer.data in used}
    for param, buffer in buffers.items():  # a size that no used tensor tells
        told = {size for other in kept.values() for size in other.shape if isinstance(size, tirx.Var)}
        if any(isinstance(size, tirx.Var) and size in used and size not in told for size in buffer.shape):
            kept[param] = buffer
    params = [p for p in (*func.params, *own.values()) if p in kept or (p in func.params and p not in func.buffer_map)]
    return tirx.PrimFunc(params, body, func.ret_type, {p: kept[p] for p in params if p in kept}, func.attrs)


def _has_kernel(stmt: tirx.Stmt) -> bool:
    return any(block.name_hint == "tilelang_root" for block in nodes(stmt, tirx.SBlock))


def zeros_like(buffer: tirx.Buffer) -> tirx.PrimFunc:
    """A kernel that fills a buffer with zeros."""
    rows, *rest = buffer.shape

    @T.prim_func
    def zeros(content: T.Tensor((rows, *rest), buffer.dtype)):  # type: ignore[valid-type]
        with T.Kernel(rows, threads=128) as row:
            for at in T.Parallel(*rest, 1):
                content[(row, *at[:-1])] = T.cast(0, buffer.dtype)

    def into(store: tirx.BufferStore) -> tirx.BufferStore:
        return tirx.BufferStore(buffer, store.value, store.indices)

    (param,) = zeros.params
    body = tirx.stmt_functor.ir_transform(zeros.body, None, into, ["tirx.BufferStore"])
    return tirx.PrimFunc([param], body, zeros.ret_type, {param: buffer})
