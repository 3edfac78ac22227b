"""The kernels of a function: one `T.Kernel` after the other, each as a function of its own; and what is between the
barriers of a whole grid (`T.sync_grid`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import tilelang.language as T
from tvm import ir, tirx

from mesh_tensor.base.errors import refuse

from .effects import is_hint, leaves_kernel, op_name
from .nodes import function_name, is_const, nodes, used
from .rewrite import block_like, replace_block, rewritten, sequence, statements, with_body
from .tile_calls import parse_tile_op


@dataclass(frozen=True, eq=False)
class Grids:
    """A function's kernels in order, each with the parameters that it uses. `own` are tensors that only the function
    has (`T.alloc_global`): parameters of the kernels that use them."""

    funcs: tuple[tirx.PrimFunc, ...]
    own: tuple[tirx.Buffer, ...] = ()


def grids_of(func: tirx.PrimFunc) -> Grids:
    """The function's kernels; a function with one kernel, or none, is left as it is. Refused where something else
    stands between the kernels."""
    func = without_grid_barriers(func)
    root = func.body.block if isinstance(func.body, tirx.SBlockRealize) else None
    stmts = statements(func.body if root is None else root.body)
    kernels = [stmt for stmt in stmts if any(block.name_hint == "tilelang_root" for block in nodes(stmt, tirx.SBlock))]
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
            funcs.append(alone(func, [*bound, stmt], handles))
    return Grids(tuple(funcs), tuple(own))


def alone(func: tirx.PrimFunc, stmts: Sequence[tirx.Stmt], own: dict[tirx.Buffer, tirx.Var]) -> tirx.PrimFunc:
    """A kernel of the function, with the parameters that it uses, or of which it uses the size."""
    body = sequence(stmts)
    if isinstance(func.body, tirx.SBlockRealize):
        block = func.body.block
        allocs = [buffer for buffer in block.alloc_buffers if buffer not in own]
        root = tirx.SBlock([], block.reads, block.writes, block.name_hint, body, block.init, allocs)
        body = tirx.SBlockRealize([], func.body.predicate, root)
    buffers = {**dict(func.buffer_map.items()), **{handle: buffer for buffer, handle in own.items()}}
    named = used(body)
    kept = {param: buffer for param, buffer in buffers.items() if buffer.data in named}
    for param, buffer in buffers.items():  # a size that no used tensor tells
        told = {size for other in kept.values() for size in other.shape if isinstance(size, tirx.Var)}
        if any(isinstance(size, tirx.Var) and size in named and size not in told for size in buffer.shape):
            kept[param] = buffer
    params = [p for p in (*func.params, *own.values()) if p in kept or (p in func.params and p not in func.buffer_map)]
    return tirx.PrimFunc(params, body, func.ret_type, {p: kept[p] for p in params if p in kept}, func.attrs)


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


#: The loops and branches around a statement, outermost first.
_Around = tuple[tuple[tirx.Stmt, bool], ...]


def without_grid_barriers(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function, whose kernels are those between barriers of the whole grid, one after the other. A kernel stays as
    it is where it has barriers elsewhere than at its outermost level, or something on chip is needed on both sides."""
    if not any(map(_is_barrier, nodes(func.body, tirx.Evaluate))):
        return func

    def apart(node: tirx.SBlock) -> tirx.SBlock | None:
        if node.name_hint != "root":
            return None
        kernels = [part for stmt in statements(node.body) for part in _between_barriers(stmt)]
        return with_body(node, sequence(kernels))

    return rewritten(func, apart, tirx.SBlock)


def _between_barriers(kernel: tirx.Stmt) -> list[tirx.Stmt]:
    blocks = [block for block in nodes(kernel, tirx.SBlock) if block.name_hint == "tilelang_root"]
    if len(blocks) != 1 or not isinstance(kernel, (tirx.For, tirx.SBlockRealize)):
        return [kernel]
    (block,) = blocks
    hints, body = _unwrapped(block.body)
    parts: list[list[tirx.Stmt]] = [[]]
    for stmt in statements(body):
        if _is_barrier(stmt):
            parts.append([])
        else:
            parts[-1].append(stmt)
    if len(parts) == 1 or leaves_kernel(body) or any(map(_is_barrier, _inside(sum(parts, [])))):
        return [kernel]
    found: list[tirx.Stmt] = []
    before: list[tirx.Stmt] = []
    for part in parts:
        bound = _bound(before, part)
        if bound is None or not all(_is_filled_first(data, part) for data in _on_chip(block, before, part)):
            return [kernel]
        if not all(isinstance(stmt, tirx.Bind) for stmt in part):
            found.append(_with_body(kernel, block, hints, [*bound, *part]))
        before += part
    return found or [kernel]


def _is_barrier(stmt: tirx.Stmt) -> bool:
    return isinstance(stmt, tirx.Evaluate) and op_name(stmt.value) == "tl.sync_grid"


def _inside(stmts: Sequence[tirx.Stmt]) -> list[tirx.Evaluate]:
    return [found for stmt in stmts for found in nodes(stmt, tirx.Evaluate)]


def _unwrapped(stmt: tirx.Stmt) -> tuple[list[tirx.AttrStmt], tirx.Stmt]:
    """The hints around all of a body, and the body."""
    hints = []
    while True:
        if is_hint(stmt):
            hints.append(stmt)
            stmt = stmt.body
        elif isinstance(stmt, tirx.SeqStmt) and is_hint(stmt.seq[-1]):
            hint = stmt.seq[-1]
            stmt = tirx.AttrStmt(hint.node, hint.attr_key, hint.value, sequence([*stmt.seq[:-1], hint.body]))
        else:
            return hints, stmt


def _with_body(
    kernel: tirx.Stmt, block: tirx.SBlock, hints: Sequence[tirx.AttrStmt], stmts: Sequence[tirx.Stmt]
) -> tirx.Stmt:
    body = sequence(list(stmts))
    named = used(body)
    for hint in reversed(hints):
        body = tirx.AttrStmt(hint.node, hint.attr_key, hint.value, body)
    allocated = [buffer for buffer in block.alloc_buffers if buffer.data in named]
    return replace_block(kernel, block_like(block, body, allocated), {})


def _bound(before: Sequence[tirx.Stmt], part: Sequence[tirx.Stmt]) -> list[tirx.Stmt] | None:
    """What binds the variables that a part takes from before, without memory or calls; None if that is not all."""
    named = {var for stmt in part for var in nodes(stmt, tirx.Var)}
    found: list[tirx.Stmt] = []
    for stmt in reversed(before):
        if not isinstance(stmt, tirx.Bind) or stmt.var not in named:
            continue
        if nodes(stmt.value, tirx.BufferLoad, tirx.Call):
            return None
        named |= set(nodes(stmt.value, tirx.Var))
        found.insert(0, stmt)
    return found


def _on_chip(block: tirx.SBlock, before: Sequence[tirx.Stmt], part: Sequence[tirx.Stmt]) -> set[tirx.Var]:
    """The memory on chip that is used on both sides."""
    own = {buffer.data for buffer in block.alloc_buffers}
    return own & set[tirx.Var]().union(*map(used, before)) & set[tirx.Var]().union(*map(used, part))


def _is_filled_first(data: tirx.Var, part: Sequence[tirx.Stmt]) -> bool:
    """Whether all of a buffer is written before anything else is done with it, wherever something is."""
    (first, around), *others = _uses(sequence(list(part)), data, ())
    return _fills(first, data) and all(other[: len(around)] == around for _, other in others)


def _uses(stmt: tirx.Stmt, data: tirx.Var, around: _Around) -> Iterator[tuple[tirx.Stmt, _Around]]:
    """The statements that use the memory, in their order; a loop that fills it is one of them."""
    if data not in used(stmt):
        return
    if isinstance(stmt, tirx.SeqStmt):
        for child in stmt.seq:
            yield from _uses(child, data, around)
    elif isinstance(stmt, tirx.For) and not _fills(stmt, data):
        if data in used(stmt.extent) | used(stmt.min):
            yield stmt, around
        yield from _uses(stmt.body, data, (*around, (stmt, True)))
    elif isinstance(stmt, tirx.IfThenElse):
        if data in used(stmt.condition):
            yield stmt, around
        yield from _uses(stmt.then_case, data, (*around, (stmt, True)))
        if stmt.else_case is not None:
            yield from _uses(stmt.else_case, data, (*around, (stmt, False)))
    else:
        yield stmt, around


def _fills(stmt: tirx.Stmt, data: tirx.Var) -> bool:
    """Whether a statement, or a nest of loops around a single store, overwrites all of a buffer, and does not read
    it."""
    if isinstance(stmt, tirx.Evaluate):
        record = parse_tile_op(stmt)
        if record is None or not record.dst.buffer.data.same_as(data):
            return False
        if any(source.buffer.data.same_as(data) for source in record.sources):
            return False
        return record.dst.is_whole and (not record.reduction or record.clears)
    loops: list[tirx.For] = []
    while isinstance(stmt, tirx.For):
        loops.append(stmt)
        stmt = stmt.body
    if not isinstance(stmt, tirx.BufferStore) or not stmt.buffer.data.same_as(data):
        return False
    if data in used(stmt.value) or not all(is_const(loop.min, 0) for loop in loops):
        return False
    places = [index for index in stmt.indices if not is_const(index, 0)]
    walked = {loop.loop_var: loop.extent for loop in loops}
    if len(places) != len(loops) or {*places} != walked.keys():
        return False
    one = tirx.IntImm("int32", 1)
    return ir.structural_equal([walked.get(index, one) for index in stmt.indices], [*stmt.buffer.shape])
