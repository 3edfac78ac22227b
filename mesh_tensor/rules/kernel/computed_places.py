"""Blocks at computed places: `tile // 8 % rows * 64`, `(blocks - 1 - k) * 64`, loops that start where the row does,
pages that a table names, blocks of a loop that ends where data say.

Such an index walks its dim in an order that nobody follows. Where it is proved to be a block of the dim, the
statements around it go into a loop over all blocks of which one iteration does something (tir.loops): that
changes nothing, and the loop walks the dim in order, so an axis can split it. The local kernel then skips the blocks of
other devices. Of a place that is loaded or made of parameters, or computed in a loop whose end is, nothing is proved:
one that is no block counts as the nearest, of which what is copied is 0, as T.copy reads what lies outside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from tvm import ir, tirx

from mesh_tensor.tir.effects import leaves_kernel, leaves_loop, op_name
from mesh_tensor.tir.linear import Linear, holds_always, linear_form, loop_ranges, vars_of
from mesh_tensor.tir.loops import one_iteration
from mesh_tensor.tir.nodes import loads, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import region_call, tile_op, with_other_dims
from mesh_tensor.tir.user_reports import assert_call, prints

from .factor_derivation import Dim
from .factors import why_not_covered
from .reader import read_kernel
from .statements import Access, Kernel, Loop, Statement, without_binds

_MOST = 16


def in_order(func: tirx.PrimFunc, whole: Sequence[Dim]) -> tirx.PrimFunc | None:
    """The kernel, in which blocks of the dims in `whole` that were at computed places are walked in order; None if
    there are none."""
    if prints(func.body):
        return None
    made, tried = func, set[Dim]()
    for _ in range(_MOST):
        kernel = read_kernel(made)
        found = _Places(kernel, loop_ranges(made.body), whole).all()
        places = [(dim, place) for dim, place in found if dim not in tried]
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
    of `loops`; the innermost of these is the one that it is computed in. `is_loaded`: it is read from memory.
    `on_chip`: it is one of a buffer on chip, in which nothing may be outside. `is_proved`: it certainly is a block."""

    number: tirx.PrimExpr
    block: int
    count: int
    loops: tuple[Loop, ...]
    is_loaded: bool
    on_chip: bool = False
    is_proved: bool = False

    @property
    def may_be_outside(self) -> bool:
        return not self.is_proved and not self.on_chip

    @property
    def is_of_data(self) -> bool:
        """Whether it is loaded or made of parameters, or these or data say how far a loop goes that it is made of."""
        used = vars_of([self.number], {})
        if not used <= {loop.var for loop in self.loops}:
            return True
        bounds = [bound for loop in self.loops if loop.var in used for bound in (loop.min, loop.extent)]
        return self.is_loaded or not all(isinstance(bound, tirx.IntImm) for bound in bounds)

    @property
    def nearest(self) -> tirx.PrimExpr:
        """The number of a block: `number`, if that is one."""
        return tirx.max(tirx.min(self.number, self.count - 1), 0) if self.may_be_outside else self.number

    def ends_with(self, size: tirx.PrimExpr, block: int) -> bool:
        """Whether a number that is no block's of the dim is none of one so long, in blocks so long, either."""
        return not self.may_be_outside or (isinstance(size, tirx.IntImm) and -(-int(size) // block) == self.count)


@dataclass(frozen=True, eq=False)
class _Places:
    """Finds places in a kernel, of which an analyzer knows the loops' ranges, that the dims in `whole` are accessed
    at."""

    kernel: Kernel
    analyzer: Prover
    whole: Sequence[Dim]

    def all(self) -> Iterator[tuple[Dim, _Place]]:
        """The dims that are accessed at computed places, with these."""
        for statement in self.kernel.statements:
            for access in () if statement.unknown else statement.accesses:
                for dim, (index, form) in enumerate(zip(access.indices, access.forms, strict=True)):
                    place = None
                    if not self.kernel.is_param(access.buffer):
                        place = self._on_chip(statement, access, dim, index)
                    elif (access.buffer.name, dim) in self.whole:
                        place = self._place(statement, access, dim, index, form)
                    if place is not None:
                        yield (str(access.buffer.name), dim), place

    def _on_chip(self, statement: Statement, access: Access, dim: int, index: tirx.PrimExpr) -> _Place | None:
        """An element at a loaded place of a buffer that may hold all of a dim, as bins of a histogram."""
        size, index = access.buffer.shape[dim], without_binds(index, self.kernel)
        used, read = vars_of([index], {}), loads(index)
        loops = tuple(loop for loop in statement.loops if loop.kind != "tile")
        if not used or not read or not used <= {loop.var for loop in loops} or not isinstance(size, tirx.IntImm):
            return None
        if not any(ir.structural_equal(self.kernel.params[name].shape[at], size) for name, at in self.whole):
            return None
        last = max(n for n, loop in enumerate(loops) if loop.var in used)
        while loops[last].kind == "parallel" and last + 1 < len(loops):
            last += 1
        inside = [s for s in self.kernel.statements if loops[last] in s.loops]
        if any(s.writes(load.buffer) for s in inside for load in read):
            return None
        return _Place(index, 1, int(size), loops[: last + 1], True, on_chip=True)

    def _place(
        self, statement: Statement, access: Access, dim: int, index: tirx.PrimExpr, form: Linear | None
    ) -> _Place | None:
        size = access.buffer.shape[dim]
        if not isinstance(size, tirx.IntImm) or why_not_covered(form, size, statement, self.analyzer) is None:
            return None
        inner = [loop for loop in statement.loops if loop.kind in ("tile", "parallel")]
        index = without_binds(index, self.kernel)
        start = tirx.stmt_functor.substitute(index, {loop.var: tirx.IntImm(loop.var.dtype, 0) for loop in inner})
        block = _block(linear_form(self.analyzer.simplify(index - start), {}), inner)
        used, given = vars_of([start], {}), set(self.kernel.func.params)
        loops = tuple(loop for loop in statement.loops if loop.kind in ("grid", "serial"))
        if block is None or used <= given or not used <= {loop.var for loop in loops} | given:
            return None
        if not all(self.kernel.keeps(load.buffer) for load in loads(start)):
            return None
        if not self.analyzer.can_prove_equal(tirx.floormod(start, block), 0):
            return None
        last = max(n for n, loop in enumerate(loops) if loop.var in used)
        number = self.analyzer.simplify(tirx.floordiv(start, block))
        return _Place(number, block, -(-int(size) // block), loops[: last + 1], bool(loads(start)))


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
    while (guard := _only_guard(body)) is not None:
        conditions.append(guard.condition)
        body = guard.then_case
    bounds = [(loop.var, loop.min, loop.extent) for loop in place.loops]
    is_block = tirx.And(place.number >= 0, place.number < place.count)
    if not place.is_loaded:
        place = replace(place, is_proved=holds_always(is_block, bounds, conditions))
    if not place.is_proved and not place.is_of_data:
        return None
    var = tirx.Var("block", place.number.dtype)
    new = _in_blocks(body, kernel, place, var, loop_ranges(func.body))
    if new is None:
        return None
    chosen = one_iteration(var, place.count, place.nearest, new)

    def exchange(node: tirx.Stmt) -> tirx.Stmt | None:
        return chosen if node.same_as(body) else None

    changed = tirx.stmt_functor.ir_transform(func.body, exchange, None, [f"tirx.{type(body).__name__}"])
    return None if changed.same_as(func.body) else func.with_body(changed)


def _only_guard(body: tirx.Stmt) -> tirx.IfThenElse | None:
    """The condition under which all of a statement runs, but for what binds variables before it."""
    *before, last = body.seq if isinstance(body, tirx.SeqStmt) else [body]
    alone = isinstance(last, tirx.IfThenElse) and last.else_case is None
    return last if alone and all(isinstance(stmt, tirx.Bind) for stmt in before) else None


def _in_blocks(body: tirx.Stmt, kernel: Kernel, place: _Place, var: tirx.Var, analyzer: Prover) -> tirx.Stmt | None:
    """The statement, whose accesses at the place are at the block of this variable; None if one that may lie outside
    is none of a copy or a store."""
    accesses = nodes(body, tirx.BufferLoad, tirx.BufferStore)
    regions = [call for call in nodes(body, tirx.Call) if op_name(call) == "tl.region"]
    lengths = [*(loop.extent for loop in nodes(body, tirx.For)), *(n for call in regions for n in call.args[2:])]
    blocks = {place.block, 1, *(int(n) for n in lengths if isinstance(n, tirx.IntImm))}
    inner = {loop.loop_var: tirx.IntImm(loop.loop_var.dtype, 0) for loop in nodes(body, tirx.For)}
    used = vars_of([place.number], {})

    def replaced(low: tirx.PrimExpr, size: tirx.PrimExpr) -> tirx.PrimExpr:
        if isinstance(low, tirx.IntImm):
            return low
        plain = without_binds(low, kernel) if place.is_loaded else low
        if place.is_loaded and not loads(plain):
            return low
        start = analyzer.simplify(tirx.stmt_functor.substitute(plain, inner))
        if vars_of([start], {}) == used:
            for block in blocks:
                if place.ends_with(size, block) and analyzer.can_prove_equal(start, place.number * block):
                    return var * block + analyzer.simplify(plain - start)
        return low

    def placed(buffer: tirx.Buffer, mins: Sequence, extents: Sequence) -> tuple[list, list]:
        return [*map(replaced, mins, buffer.shape)], [*extents]

    def is_there(access: tirx.BufferLoad | tirx.BufferStore) -> bool:
        places = zip(access.indices, access.buffer.shape, strict=True)
        return any(not replaced(low, size).same_as(low) for low, size in places)

    def writes_there(statement: Statement) -> bool:
        start = {loop.var: tirx.IntImm(loop.var.dtype, 0) for loop in statement.loops if loop.kind == "tile"}
        target = statement.target
        indices = [tirx.stmt_functor.substitute(index, start) for index in target.indices]
        return any(not replaced(i, size).same_as(i) for i, size in zip(indices, target.buffer.shape, strict=True))

    if place.may_be_outside and _is_all_there(kernel, place, writes_there):
        body = tirx.IfThenElse(tirx.EQ(place.number, place.nearest), body, None)
    elif place.may_be_outside:
        body = _outside_is_zero(body, place, is_there)
    elif place.on_chip and any(kernel.is_param(access.buffer) and is_there(access) for access in accesses):
        return None
    return None if body is None else with_other_dims(body, {of.buffer: of.buffer for of in accesses}, placed)


def _is_all_there(kernel: Kernel, place: _Place, writes_there: Callable[[Statement], bool]) -> bool:
    """Whether all that a program writes is at its place: one whose place is no block does nothing."""
    if place.loops[-1].kind != "grid" or any(buffer.scope() == "global" for buffer in kernel.on_chip):
        return False
    asserts = any(isinstance(s.node, tirx.AssertStmt) or assert_call(s.node) is not None for s in kernel.statements)
    if asserts or any(s.unknown for s in kernel.statements):
        return False
    written = [s for s in kernel.statements if s.write is not None and kernel.is_param(s.write.buffer)]
    return bool(written) and all(map(writes_there, written))


def _outside_is_zero(
    body: tirx.Stmt, place: _Place, is_there: Callable[[tirx.BufferLoad | tirx.BufferStore], bool]
) -> tirx.Stmt | None:
    """The statement, in which what copies and stores read at a place that is no block is 0, and what they write there
    is dropped; None if others use it."""
    inside, seen = tirx.EQ(place.number, place.nearest), list[tirx.BufferLoad | tirx.BufferStore]()

    def zero(load: tirx.BufferLoad) -> tirx.PrimExpr | None:
        if not is_there(load):
            return None
        seen.append(load)
        return tirx.if_then_else(inside, load, tirx.const(0, load.dtype))

    def dropped(stmt: tirx.Stmt) -> tirx.Stmt:
        seen.extend(access for access in nodes(stmt, tirx.BufferLoad, tirx.BufferStore) if is_there(access))
        return tirx.IfThenElse(inside, stmt, None)

    def guarded(stmt: tirx.Evaluate | tirx.BufferStore) -> tirx.Stmt | None:
        if isinstance(stmt, tirx.BufferStore):
            if is_there(stmt):
                return dropped(stmt)
            value = tirx.stmt_functor.ir_transform(tirx.Evaluate(stmt.value), None, zero, ["tirx.BufferLoad"]).value
            return tirx.BufferStore(stmt.buffer, value, stmt.indices)
        if op_name(stmt.value) != "tl.tileop.copy":
            return None
        source, (target, _, *extents) = stmt.value.args[0].args[0], stmt.value.args[1].args
        if is_there(target):
            return dropped(stmt)
        if not is_there(source):
            return None
        seen.append(source)
        zeros = tile_op(
            "fill", region_call(target.buffer, target.indices, extents, 2), tirx.const(0, target.buffer.dtype)
        )
        return tirx.SeqStmt([stmt, tirx.IfThenElse(tirx.Not(inside), zeros, None)])

    new = tirx.stmt_functor.ir_transform(body, None, guarded, ["tirx.Evaluate", "tirx.BufferStore"])
    uses = [access for access in nodes(body, tirx.BufferLoad, tirx.BufferStore) if is_there(access)]
    return new if len(uses) == len(seen) else None
