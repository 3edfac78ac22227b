"""Programs of a flat grid, each of which has a block of positions that may begin in one row and end in another,

    for bx in grid(6272): for i in parallel(256): p = bx * 256 + i; Y[p // 784, p // 28 % 28, p % 28] = f(p)

in blocks of whole rows: `p = bx * 784 + i`. What is done at a position is the same, whichever program has it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tvm import tirx

from mesh_tensor.tir.double_loops import simplified, unfuse
from mesh_tensor.tir.effects import leaves_kernel, thread_indices
from mesh_tensor.tir.nodes import conjuncts, int_or, is_const, nodes
from mesh_tensor.tir.rewrite import block_like, replace_block, sequence
from mesh_tensor.tir.user_reports import prints
from mesh_tensor.tir.views import left_views

from .live_ranges import LiveRanges
from .normalize import with_own_variables
from .statements import Kernel, Loop, body_statements, hinted_like


def in_whole_rows(kernel: Kernel) -> tirx.PrimFunc | None:
    """The kernel with programs that have whole rows each; None if it is no flat one, or programs know more of a
    position than which it is. Views and prints are told as they are written."""
    if left_views(kernel.func) or prints(kernel.func.body) or leaves_kernel(kernel.root.body):
        return None
    nests = [_Nest.of(stmt) for stmt in body_statements(kernel.root.body)]
    if not nests or not _keep_to_themselves(kernel, nests):
        return None
    for loop in kernel.grid:
        made = _reblocked(kernel, loop, nests)
        if made is not None:
            return made
    return None


class _Nest:
    """Parallel loops around what is done at a position."""

    def __init__(self, loops: Sequence[tirx.For], body: tirx.Stmt) -> None:
        self.loops, self.body = loops, body

    @property
    def length(self) -> int:
        return math.prod(int_or(loop.extent, 0) for loop in self.loops)

    @staticmethod
    def of(stmt: tirx.Stmt) -> _Nest:
        loops = []
        while isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL and is_const(stmt.min, 0):
            loops.append(stmt)
            stmt = stmt.body
        return _Nest(loops, stmt)

    def places(self, inside: tirx.PrimExpr) -> dict[tirx.Var, tirx.PrimExpr]:
        """The loops' variables at a position in the block."""
        found, below = dict[tirx.Var, tirx.PrimExpr](), 1
        for loop in reversed(self.loops):
            found[loop.loop_var] = tirx.floormod(tirx.floordiv(inside, below), int(loop.extent))
            below *= int(loop.extent)
        return found


def _keep_to_themselves(kernel: Kernel, nests: Sequence[_Nest]) -> bool:
    """Whether the nests have the same number of positions, and nothing is seen at more than one of them: on chip, or of
    what another nest wrote."""
    written = {s.target.buffer for s in kernel.statements if s.write is not None}
    if len(nests) > 1 and any(
        a.buffer in written for s in kernel.statements for a in s.reads if kernel.is_param(a.buffer)
    ):
        return False
    threads = thread_indices(kernel.func)
    if any(var in threads for var in nodes(kernel.root.body, tirx.Var)):
        return False
    if not all(nest.loops and nest.length == nests[0].length > 0 for nest in nests):
        return False
    if any(statement.unknown or statement.may_be_skipped for statement in kernel.statements):
        return False
    variables = [{loop.loop_var for loop in nest.loops} for nest in nests]
    for live_range in LiveRanges(kernel).all:
        scope = {loop.var for loop in live_range.scope}
        if not live_range.is_param and not any(own <= scope for own in variables):
            return False
    return True


def _reblocked(kernel: Kernel, grid: Loop, nests: Sequence[_Nest]) -> tirx.PrimFunc | None:
    """The kernel with other blocks of what a loop of the grid, and the nests in it, go over."""
    length, extent = nests[0].length, int_or(grid.extent, 0)
    if not extent or not is_const(grid.min, 0):
        return None
    position = tirx.Var("position", grid.var.dtype)
    bodies = [_at(grid.var, nest, tirx.floordiv(position, length), tirx.floormod(position, length)) for nest in nests]
    bodies = [_over(position, extent * length, body) for body in bodies]
    total = {_end(body, position, extent * length) for body in bodies}
    digits = sorted({by for body in bodies for by in _digits(body, position)})
    ends = zip(digits, [*digits[1:], *total], strict=False)
    if not digits or len(total) != 1 or any(more % less for less, more in ends):
        return None
    block = min(digits, key=lambda by: abs(math.log(by / length)))
    if block == length:
        return None
    made = [_in_blocks(body, position, grid.var, block) for body in bodies]
    func = kernel.func.with_body(
        replace_block(
            kernel.func.body,
            block_like(kernel.root, hinted_like(kernel.root.body, sequence(made)), kernel.root.alloc_buffers),
            {grid.var: tirx.IntImm(grid.var.dtype, total.pop() // block)},
        )
    )
    return unfuse(with_own_variables(func.with_body(simplified(func.body))), alone=True)


def _at(grid: tirx.Var, nest: _Nest, block: tirx.PrimExpr, inside: tirx.PrimExpr) -> tirx.Stmt:
    into: Mapping[tirx.Var, tirx.PrimExpr] = {grid: block, **nest.places(inside)}
    return tirx.stmt_functor.substitute(nest.body, into)


def _over(position: tirx.Var, extent: int, body: tirx.Stmt) -> tirx.Stmt:
    loop: tirx.For = simplified(tirx.For(position, 0, extent, tirx.ForKind.SERIAL, body))
    return loop.body


def _end(body: tirx.Stmt, position: tirx.Var, extent: int) -> int:
    """How many positions there are at which something is done."""
    parts = conjuncts(body.condition) if isinstance(body, tirx.IfThenElse) and body.else_case is None else []
    ends = [int_or(part.b, extent) for part in parts if isinstance(part, tirx.LT) and position.same_as(part.a)]
    return min([extent, *ends])


def _digits(body: tirx.Stmt, position: tirx.Var) -> Iterator[int]:
    """What the position is divided by, and what remainders are of."""

    def digit(expr: tirx.PrimExpr) -> tuple[int, int] | None:
        if position.same_as(expr):
            return 1, 0
        by = int_or(expr.b, 0) if isinstance(expr, (tirx.FloorDiv, tirx.FloorMod)) else 0
        inner = digit(expr.a) if by > 0 else None
        if inner is None:
            return None
        return (inner[0] * by, inner[1]) if isinstance(expr, tirx.FloorDiv) else (inner[0], inner[0] * by)

    found = map(digit, nodes(body, tirx.FloorDiv, tirx.FloorMod))
    return (by for pair in found if pair is not None for by in pair if by > 1)


def _in_blocks(body: tirx.Stmt, position: tirx.Var, grid: tirx.Var, block: int) -> tirx.Stmt:
    inside = tirx.Var("i", position.dtype)
    body = tirx.stmt_functor.substitute(body, {position: grid * block + inside})
    return tirx.For(inside, 0, block, tirx.ForKind.PARALLEL, body)
