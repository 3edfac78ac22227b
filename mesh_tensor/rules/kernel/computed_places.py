"""Blocks at computed places: `tile // 8 % rows * 64`, `(blocks - 1 - k) * 64`, loops that start where the row does.

Such an index walks its dim in an order that nobody follows. Where it is proved to be a block of the dim, the
statements around it go into a loop over all blocks of which one iteration does something (tir.short_loops): that
changes nothing, and the loop walks the dim in order, so an axis can split it. The local kernel then skips the blocks of
other devices.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tvm import arith, tirx

from mesh_tensor.tir.effects import leaves_kernel, leaves_loop, op_name
from mesh_tensor.tir.enumeration import holds_always
from mesh_tensor.tir.linear import Linear, linear_form, vars_of
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.ranges import loop_ranges
from mesh_tensor.tir.rewrite import with_other_dims
from mesh_tensor.tir.short_loops import one_iteration
from mesh_tensor.tir.user_reports import prints

from .coverage import why_not_covered
from .factor_derivation import Dim
from .reader import read_kernel
from .statements import Access, Kernel, Loop, Statement

_MOST = 16


def in_order(func: tirx.PrimFunc, whole: Sequence[Dim]) -> tirx.PrimFunc | None:
    """The kernel, in which blocks of the dims in `whole` that were at computed places are walked in order; None if
    there are none."""
    if prints(func.body):
        return None
    made, tried = func, set[Dim]()
    for _ in range(_MOST):
        kernel = read_kernel(made)
        places = list(_Places(kernel, loop_ranges(made.body)).of([dim for dim in whole if dim not in tried]))
        if not places:
            break
        dim, place = places[0]
        new = _walked(made, kernel, place)
        if new is None:
            tried.add(dim)
        else:
            made = new
    return None if made is func else made


@dataclass(frozen=True, eq=False)
class _Place:
    """A block's place: the `number` of a block that is `block` long, of `count` in the dim, computed of the variables
    of `loops`; the innermost of these is the one that it is computed in."""

    number: tirx.PrimExpr
    block: int
    count: int
    loops: tuple[Loop, ...]


@dataclass(frozen=True, eq=False)
class _Places:
    """Finds places in a kernel, of which an analyzer knows the loops' ranges."""

    kernel: Kernel
    analyzer: arith.Analyzer

    def of(self, dims: Sequence[Dim]) -> Iterator[tuple[Dim, _Place]]:
        """The dims that are accessed at computed places, with these."""
        for statement in self.kernel.statements:
            for access in () if statement.unknown else statement.accesses:
                for dim, (index, form) in enumerate(zip(access.indices, access.forms, strict=True)):
                    name = str(access.buffer.name)
                    if (name, dim) in dims and self.kernel.is_param(access.buffer):
                        place = self._place(statement, access, dim, index, form)
                        if place is not None:
                            yield (name, dim), place

    def _place(
        self, statement: Statement, access: Access, dim: int, index: tirx.PrimExpr, form: Linear | None
    ) -> _Place | None:
        size = access.buffer.shape[dim]
        if not isinstance(size, tirx.IntImm) or why_not_covered(form, size, statement, self.analyzer) is None:
            return None
        inner = [loop for loop in statement.loops if loop.kind in ("tile", "parallel")]
        start = tirx.stmt_functor.substitute(index, {loop.var: tirx.IntImm(loop.var.dtype, 0) for loop in inner})
        block = _block(linear_form(self.analyzer.simplify(index - start), {}), inner)
        used = vars_of([start], self.kernel.binds)
        loops = tuple(loop for loop in statement.loops if loop.kind in ("grid", "serial"))
        if block is None or not used or not used <= {loop.var for loop in loops}:
            return None
        if vars_of([start], {}) != used or nodes(tirx.Evaluate(start), tirx.BufferLoad):
            return None
        if not self.analyzer.can_prove_equal(tirx.floormod(start, block), 0):
            return None
        last = max(n for n, loop in enumerate(loops) if loop.var in used)
        number = self.analyzer.simplify(tirx.floordiv(start, block))
        return _Place(number, block, -(-int(size) // block), loops[: last + 1])


def _block(form: Linear | None, inner: Sequence[Loop]) -> int | None:
    """How long a block is whose positions the inner loops walk one by one; None if they don't."""
    if form is None or form.const:
        return None
    extents = {loop.var: loop.extent for loop in inner}
    length = 1
    for var, coefficient in reversed(form.ordered):
        if coefficient != length or var not in extents or not isinstance(extents[var], tirx.IntImm):
            return None
        length *= int(extents[var])
    return length


def _walked(func: tirx.PrimFunc, kernel: Kernel, place: _Place) -> tirx.PrimFunc | None:
    """The function with a loop over all blocks in the innermost of the place's loops; None if it is not proved that the
    place is one of them."""
    inside = place.loops[-1]
    body = kernel.root.body if inside.kind == "grid" or inside.node is None else inside.node.body
    if leaves_kernel(body) or leaves_loop(tirx.For(inside.var, 0, 1, tirx.ForKind.SERIAL, body)):
        return None
    conditions = list[tirx.PrimExpr]()
    while isinstance(body, tirx.IfThenElse) and body.else_case is None:
        conditions.append(body.condition)
        body = body.then_case
    bounds = [(loop.var, loop.min, loop.extent) for loop in place.loops]
    is_block = tirx.And(place.number >= 0, place.number < place.count)
    if not holds_always(is_block, bounds, conditions):
        return None
    var = tirx.Var("block", place.number.dtype)
    new = _in_blocks(body, place, var, loop_ranges(func.body))
    if new is None:
        return None
    chosen = one_iteration(var, place.count, place.number, new)

    def exchange(node: tirx.Stmt) -> tirx.Stmt | None:
        return chosen if node.same_as(body) else None

    changed = tirx.stmt_functor.ir_transform(func.body, exchange, None, [f"tirx.{type(body).__name__}"])
    return None if changed.same_as(func.body) else func.with_body(changed)


def _in_blocks(body: tirx.Stmt, place: _Place, var: tirx.Var, analyzer: arith.Analyzer) -> tirx.Stmt | None:
    """The statement, whose accesses at the place are at the block of this variable."""
    loads = nodes(body, tirx.BufferLoad, tirx.BufferStore)
    regions = [call for call in nodes(body, tirx.Call) if op_name(call) == "tl.region"]
    lengths = [*(loop.extent for loop in nodes(body, tirx.For)), *(n for call in regions for n in call.args[2:])]
    blocks = {place.block, 1, *(int(n) for n in lengths if isinstance(n, tirx.IntImm))}
    inner = {loop.loop_var: tirx.IntImm(loop.loop_var.dtype, 0) for loop in nodes(body, tirx.For)}
    used = vars_of([place.number], {})

    def replaced(low: tirx.PrimExpr) -> tirx.PrimExpr:
        if isinstance(low, tirx.IntImm):
            return low
        start = analyzer.simplify(tirx.stmt_functor.substitute(low, inner))
        if vars_of([start], {}) == used:
            for block in blocks:
                if analyzer.can_prove_equal(start, place.number * block):
                    return var * block + analyzer.simplify(low - start)
        return low

    def placed(_: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list]:
        return [replaced(low) for low in mins], [*extents]

    return with_other_dims(body, {load.buffer: load.buffer for load in loads}, placed)
