"""Calls of TIR functions in a Graph: each becomes the kernels that the function is made of, as nodes of their own.

A function as TE makes it is a list of loop nests with buffers between them. Each nest is a kernel, and the buffers are
values of the graph: so what one nest sums up can be split, reduced, and carried like any value.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from tvm import ir, relax, tirx
from tvm.ir import Range

from mesh_tensor.annotations.annotate import TILES_ATTR, sized
from mesh_tensor.annotations.names import Fresh
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.rules.kernel.statements import body_statements
from mesh_tensor.rules.operator.call import OpCall, op_call
from mesh_tensor.tir.effects import side_effect, written
from mesh_tensor.tir.memory import named
from mesh_tensor.tir.nodes import function_name, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import row_by_row
from mesh_tensor.tir.tile_position import helpers_in
from mesh_tensor.tir.views import left_views, resolve_views

from .ir import Graph, Node, Value
from .tir_nests import compact, is_count, kernel_of, loaded


def expand_kernels(graph: Graph) -> None:
    """Put in place of each call of a TIR function one node per kernel. A node's kernel has the node's operands and then
    its results as parameters, and no others. Refused where a function does not fit its call, or is scheduled for
    threads; the message names the binding."""
    fresh = Fresh([value.name for value in graph.values()])
    graph.nodes = [made for node in graph.nodes for made in (_expanded(node, fresh) if node.kernel else [node])]


def _expanded(node: Node, fresh: Fresh) -> list[Node]:
    try:
        return list(_nodes(node, fresh))
    except MeshTensorError as error:
        raise MeshTensorError(f"{error}\n  binding: {node.where}") from None


def _nodes(node: Node, fresh: Fresh) -> Iterator[Node]:
    assert node.kernel is not None
    numbers = tuple(n for literal in node.call.literals for n in (literal if isinstance(literal, tuple) else ()))
    name = node.call.expr.args[0].name_hint
    parts = _parts(node.kernel, node.call.inputs, node.call.outputs, numbers, name)
    if parts.is_tile_kernel:
        yield replace(node, kernel=parts.kernels[0])
        return
    values = dict(zip(parts.buffers, (*node.inputs, *node.outputs), strict=True))
    for stage, kernel in zip(parts.stages, parts.kernels, strict=True):
        for buffer in stage.writes:
            if buffer not in values:
                values[buffer] = Value(fresh.name(f"{node.outputs[0].name}_{_plain(buffer.name)}"), _type(buffer))
        reads, writes = (tuple(values[buffer] for buffer in buffers) for buffers in (stage.reads, stage.writes))
        yield _reshape(node, reads, writes) if is_reshape(kernel) else _node(node, kernel, reads, writes)


@dataclass(frozen=True, eq=False)
class _Parts:
    """What a function is made of: the buffers that are its parameters, stages, and the kernel of each."""

    buffers: tuple[tirx.Buffer, ...]
    stages: tuple[_Stage, ...]
    kernels: tuple[tirx.PrimFunc, ...]
    is_tile_kernel: bool = False


@lru_cache(maxsize=1024)
def _parts(
    func: tirx.PrimFunc,
    inputs: tuple[TensorType, ...],
    outputs: tuple[TensorType, ...],
    numbers: tuple[int, ...],
    name: str,
) -> _Parts:
    """Calls of one function on tensors of the same types have the same kernels."""
    func = sized(func, inputs, outputs, numbers)
    buffers = tuple(func.buffer_map[param] for param in func.params)
    if is_tile_kernel(func):
        _check_view(func, name)
        return _Parts(buffers, (), (func.with_attr("global_symbol", name),), is_tile_kernel=True)
    func = _without_views(func.with_attr("global_symbol", name))
    stages = tuple(_stages(func, buffers[: len(inputs)]))
    _check_written(name, buffers[len(inputs) :], stages)
    kernels = []
    for number, stage in enumerate(stages):
        taken = Fresh([])
        params = {buffer: compact(buffer, taken.name(_plain(buffer.name))) for buffer in (*stage.reads, *stage.writes)}
        kernels.append(kernel_of(stage.stmts, params, name if len(stages) == 1 else f"{name}_{number}"))
    return _Parts(buffers, stages, tuple(kernels))


def _without_views(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """The function with one buffer per memory: what is written through a view is read through the buffer."""
    func = resolve_views(func)
    left = left_views(func)
    if left:
        refuse(
            [f"buffer {named(view)} is a view of {owner.name!r}" for view, owner in left.items()],
            where=f"TIR function {function_name(func)!r}",
            why="its elements are none of the buffer's own",
            fix="use the buffer itself",
        )
    return func


def _check_view(func: tirx.PrimFunc, name: str) -> None:
    """A module lays out what its kernels take: they are over whole tensors."""
    if TILES_ATTR in (func.attrs or {}) or helpers_in(func.body):
        refuse(
            f"kernel {name!r} asks for tiles (get_tile_shape, get_tile_offset, ...)",
            why="kernels in a module are written over whole tensors: the module decides what devices hold",
            fix="size its loops by the whole tensors; or compile it by itself with mesh_tensor.compile",
        )


def _node(node: Node, kernel: tirx.PrimFunc, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
    """A call of one of the kernels that the function of `node` is made of."""
    operands = [value.variable() for value in inputs]
    infos = [value.info for value in outputs]
    callee = ir.GlobalVar(str(kernel.attrs["global_symbol"]))
    expr = relax.op.call_tir(callee, relax.Tuple(operands), infos if len(infos) > 1 else infos[0])
    call = OpCall("call_tir", expr, tuple(v.type for v in inputs), tuple(v.type for v in outputs))
    return replace(node, call=call, inputs=inputs, outputs=outputs, kernel=kernel)


def _reshape(node: Node, inputs: tuple[Value, ...], outputs: tuple[Value, ...]) -> Node:
    """The operator that takes the place of a function that only regroups dims: its tiles may be split in more ways."""
    (src,), (dst,) = inputs, outputs
    operand = src.variable()
    call = op_call(relax.BlockBuilder().normalize(relax.op.reshape(operand, dst.type.shape)))
    return replace(node, call=call, inputs=inputs, outputs=outputs, kernel=None)


def is_tile_kernel(func: tirx.PrimFunc) -> bool:
    """Whether the function is a TileLang kernel: a body in a T.Kernel."""
    return any(block.name_hint == "tilelang_root" for block in nodes(func.body, tirx.SBlock))


@dataclass(frozen=True)
class _Stage:
    """Statements of a function that make one kernel. Buffers that are only for it are among those that it writes."""

    stmts: tuple[tirx.Stmt, ...]
    reads: tuple[tirx.Buffer, ...]
    writes: tuple[tirx.Buffer, ...]


def _stages(func: tirx.PrimFunc, operands: Sequence[tirx.Buffer]) -> Iterator[_Stage]:
    """The function's statements; those between two that write the same buffer go together."""
    root = func.body
    if not isinstance(root, tirx.SBlockRealize) or root.block.name_hint != "root" or len(root.block.iter_vars):
        refuse(
            "a TIR function has no root block",
            fix="give a function in the form that TVMScript parses, or a TileLang kernel",
        )
    stmts = body_statements(root.block.body)
    writes = [list(dict.fromkeys(written(stmt))) for stmt in stmts]
    groups = _groups(stmts, writes)
    made: set[tirx.Buffer] = set(operands)
    for group in groups:
        mine = dict.fromkeys(buffer for index in group for buffer in writes[index])
        both = next((buffer for buffer in mine if buffer in operands), None)
        if both is not None:
            refuse(
                f"a TIR function writes its operand {both.name!r}",
                why="R.call_tir computes new tensors and leaves its operands as they are",
                fix="write to an output; operators that work in place can't be distributed",
            )
        reads = [b for b in loaded([stmts[index] for index in group]) if b not in mine]
        unknown = next((buffer for buffer in reads if buffer not in made), None)
        if unknown is not None:
            refuse(f"a TIR function reads {unknown.name!r} before it writes it", fix="write it first")
        made |= set(mine)
        yield _Stage(tuple(stmts[index] for index in group), tuple(reads), tuple(mine))


def _groups(stmts: Sequence[tirx.Stmt], writes: Sequence[Sequence[tirx.Buffer]]) -> list[range]:
    """Ranges of statements: all in one if something besides loops and stores happens."""
    if any(not isinstance(stmt, (tirx.For, tirx.SBlockRealize)) or _has_effects(stmt) for stmt in stmts):
        return [range(len(stmts))]
    last = {buffer: index for index, found in enumerate(writes) for buffer in found}
    groups: list[range] = []
    start = end = 0
    for index, found in enumerate(writes):
        end = max([end, index, *(last[buffer] for buffer in found)])
        if index == end:
            groups.append(range(start, index + 1))
            start = index + 1
    return groups


def _has_effects(stmt: tirx.Stmt) -> bool:
    return any(isinstance(part, tirx.Evaluate) or side_effect(part) is not None for part in nodes(stmt, tirx.Stmt))


def _check_written(name: str, results: Sequence[tirx.Buffer], stages: Sequence[_Stage]) -> None:
    made = {buffer for stage in stages for buffer in stage.writes}
    missing = [buffer.name for buffer in results if buffer not in made]
    if missing:
        refuse(
            [f"TIR function {name!r} never writes its output {output!r}" for output in missing],
            fix="R.call_tir takes operands first, then outputs, then numbers",
        )


def _type(buffer: tirx.Buffer) -> TensorType:
    sizes = list(buffer.shape)
    if not all(isinstance(size, tirx.IntImm) for size in sizes):
        refuse(f"buffer {buffer.name!r} of a TIR function has the symbolic shape {sizes}", fix="give it known sizes")
    return TensorType(tuple(int(size) for size in sizes), str(buffer.dtype))


def _plain(name: str) -> str:
    """A name that TVMScript can print: TE has "x_red_temp.v0"."""
    return "".join(c if c.isalnum() else "_" for c in name)


def is_reshape(kernel: tirx.PrimFunc) -> bool:
    """Whether a kernel of one operand and one result leaves each element at its place in row-major order."""
    buffers = [kernel.buffer_map[param] for param in kernel.params]
    stores, around = nodes(kernel.body, tirx.BufferStore), nodes(kernel.body, tirx.For)
    loops = {loop.loop_var: int(loop.extent) for loop in around if is_count(loop.min, loop.extent)}
    if len(buffers) != 2 or len(stores) != 1 or len(loops) < len(around) or nodes(kernel.body, tirx.IfThenElse):
        return False
    (store,), (source, target) = stores, buffers
    load = store.value
    if not isinstance(load, tirx.BufferLoad) or not load.buffer.same_as(source) or not store.buffer.same_as(target):
        return False
    if loaded(load.indices) or not _reaches_all(store, loops) or math.prod(_shape(source)) != math.prod(_shape(target)):
        return False
    analyzer = Prover()
    for var, extent in loops.items():
        analyzer.bind(var, Range(0, extent))
    return analyzer.can_prove_equal(row_by_row(load.indices, _shape(source)), row_by_row(store.indices, _shape(target)))


def _reaches_all(store: tirx.BufferStore, loops: dict[tirx.Var, int]) -> bool:
    """Whether each index is the variable of a loop over the whole dim, of no other, or 0 in a dim of size 1."""
    walked = [index for index in store.indices if index in loops]
    whole = all(
        loops[index] == size if index in loops else size == 1
        for index, size in zip(store.indices, _shape(store.buffer), strict=True)
    )
    return whole and len(set(walked)) == len(walked)


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(size) for size in buffer.shape)
