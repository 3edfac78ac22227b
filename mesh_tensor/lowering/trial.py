"""A part of a loop by itself, to try on it what is stated of its state."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import tirx

from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import body_statements
from mesh_tensor.tir.rewrite import loop_like, over_elements

from .cut import make_param, part_of


def part_of_loop(analysis: Analysis, top: int, held: Sequence[LiveRange], *, last: bool) -> tirx.PrimFunc:
    """The first or `last` program of a grid's, with the blocks from `start` to `end` of the loop that is the top-level
    statement `top`. It takes the kernel's parameters that it uses, tensors for what is `held` in the end, `start`
    and `end`."""
    stmts = body_statements(analysis.kernel.root.body)
    loop = stmts[top]
    assert isinstance(loop, tirx.For)
    start, end = tirx.Var("start", "int32"), tirx.Var("end", "int32")
    extent = tirx.max(tirx.min(end, loop.extent) - start, 0)
    part = loop_like(loop, extent, loop.body, start=loop.min + start)
    made = [make_param(f"{r.buffer.name}_made", list(r.buffer.shape), r.buffer.dtype) for r in held]
    saves = [_saved(r.buffer, buffer) for r, (_, buffer) in zip(held, made, strict=True)]
    func = part_of(analysis, [*stmts[:top], part, *saves], [])
    params = [*func.params, *(handle for handle, _ in made), start, end]
    grid = {x.var: x.extent - 1 if last else tirx.IntImm(x.var.dtype, 0) for x in analysis.kernel.grid}
    body = tirx.stmt_functor.substitute(_of_one_program(func.body, set(grid)), grid)
    return tirx.PrimFunc(params, body, func.ret_type, {**func.buffer_map, **dict(made)})


def _saved(on_chip: tirx.Buffer, tensor: tirx.Buffer) -> tirx.Stmt:
    return over_elements(on_chip, lambda at: tirx.BufferStore(tensor, tirx.BufferLoad(on_chip, at), at))


def _of_one_program(body: tirx.Stmt, grid: set[tirx.Var]) -> tirx.Stmt:
    """The body without its grid's loops."""

    def inside(node: tirx.For) -> tirx.Stmt | None:
        return node.body if node.loop_var in grid else None

    return tirx.stmt_functor.ir_transform(body, None, inside, ["tirx.For"])
