"""A kernel as a flat list of statements: what is read and written, at which index, inside which loops.

Tile operations become statements of the same kind as stores: their element loops get variables of their own (loops of
kind "tile"). Everything that follows - live ranges, factors, reductions - looks at statements and not at TIR.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

from tvm import tirx

from mesh_tensor.base.reductions import REDUCTIONS, reduction
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.effects import chosen, is_hint, op_name
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import is_const, loads, same_expression
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.regions import Region
from mesh_tensor.tir.rewrite import block_like, number, replace_block
from mesh_tensor.tir.tile_ops import TileOp


@dataclass(eq=False)
class Loop:
    """One loop variable. `kind` is grid, serial (unrolled too), parallel (T.Parallel, vectorized) or tile (an element
    loop of a tile operation). `node` is the TIR loop, None for tile loops and for `while`, of which nothing counts the
    iterations: the extent is its condition, so that whoever asks what it depends on is told."""

    var: tirx.Var
    min: tirx.PrimExpr
    extent: tirx.PrimExpr
    kind: str
    node: tirx.For | None


@dataclass(eq=False)
class Access:
    """`buffer[indices]`; `forms` are the indices as linear forms (None where an index is none)."""

    buffer: tirx.Buffer
    indices: tuple[tirx.PrimExpr, ...]
    forms: tuple[Linear | None, ...]

    def same_forms(self, other: Access) -> bool:
        """Whether all indices have forms, and these are those of the other's."""
        pairs = zip(self.forms, other.forms, strict=True)
        return all(a is not None and b is not None and a.same_as(b) for a, b in pairs)


@dataclass(eq=False)
class Statement:
    """`write = value` (`op` None) or `write = write op value`, for every value of the loops' variables.

    `fresh` marks an update that first sets what it writes to the operation's neutral element. `values` are the
    expressions in which a loop variable would be a value and not an index; `conditions` guard the statement, outermost
    first. `top` counts the statements of the kernel's body, the outermost level at which a kernel can be cut.
    `unknown` says why the statement is not understood; it then has no `write`, but `may_write` has the buffers that it
    may store to. `may_be_skipped`: something leaves a loop around it early, or the kernel."""

    node: tirx.Stmt
    loops: tuple[Loop, ...]
    conditions: tuple[tirx.PrimExpr, ...]
    top: int
    write: Access | None
    reads: tuple[Access, ...]
    values: tuple[tirx.PrimExpr, ...]
    op: str | None = None
    fresh: bool = False
    tile_op: tile_ops.TileOp | None = None
    unknown: str | None = None
    may_write: tuple[tirx.Buffer, ...] = ()
    may_be_skipped: bool = False

    def writes(self, buffer: tirx.Buffer) -> bool:
        """Whether the statement stores to the buffer, or may if it is not understood."""
        if self.write is not None:
            return bool(buffer.same_as(self.write.buffer))
        return any(buffer.same_as(other) for other in self.may_write)

    @property
    def target(self) -> Access:
        """What a statement that is known to write writes."""
        assert self.write is not None
        return self.write

    @property
    def operation(self) -> str:
        """The operation of a statement that is known to combine."""
        assert self.op is not None
        return self.op

    @property
    def subtracts(self) -> bool:
        """Whether it is `b[i] = b[i] - e`, an update of the sum with what is left of 0 without its value."""
        return self.op == "sum" and isinstance(self.node, tirx.BufferStore) and isinstance(self.node.value, tirx.Sub)

    @cached_property
    def accesses(self) -> tuple[Access, ...]:
        return self.reads if self.write is None else (self.write, *self.reads)

    @cached_property
    def vars(self) -> frozenset[tirx.Var]:
        return frozenset(loop.var for loop in self.loops)

    @cached_property
    def element_vars(self) -> frozenset[tirx.Var]:
        """The variables of a tile operation's element loops."""
        return frozenset(loop.var for loop in self.loops if loop.kind == "tile")

    def element_dims(self, access: Access) -> dict[int, tirx.Var]:
        """Per dim of a tile operation's access, the variable that runs over its elements; dims at one place have
        none."""
        elements = self.element_vars
        return {dim: var for dim, index in enumerate(access.indices) for var in vars_of([index], {}) & elements}

    @property
    def ranges(self) -> tirx.PrimExpr:
        """That the loops around it are within their ranges."""
        inside: tirx.PrimExpr = tirx.const(True, "bool")
        for loop in self.loops:
            inside = tirx.And(inside, tirx.And(loop.var >= loop.min, loop.var < loop.min + loop.extent))
        return inside

    @cached_property
    def bounds(self) -> tuple[tirx.PrimExpr, ...]:
        """Where the loops around it start, and how far they go, but for constants."""
        return tuple(e for loop in self.loops for e in (loop.min, loop.extent) if not isinstance(e, tirx.IntImm))


@dataclass(eq=False)
class Kernel:
    """One grid of a function: its parameters, on-chip buffers, statements, and the nesting they came from.

    `tree` mirrors the body for passes that need program order: a list of Statement | ("loop", Loop, tree) |
    ("if", tree, tree). `own`: parameters that take what every device has of a state, with what completes it there, ""
    for nothing."""

    func: tirx.PrimFunc
    params: dict[str, tirx.Buffer]
    on_chip: tuple[tirx.Buffer, ...]
    grid: tuple[Loop, ...]
    root: tirx.SBlock
    statements: list[Statement]
    tree: list
    binds: dict[tirx.Var, tirx.PrimExpr]
    loops: dict[tirx.Var, Loop] = field(default_factory=dict)
    own: Mapping[str, str] = field(default_factory=dict)
    _of_thread: threading.local = field(default_factory=threading.local)
    _once: dict[tirx.Var, bool] = field(default_factory=dict)

    @property
    def analyzer(self) -> Prover:
        """What proves what holds whatever runs. Each thread has its own: another one's may be under a condition."""
        if not hasattr(self._of_thread, "analyzer"):
            self._of_thread.analyzer = Prover()
        analyzer: Prover = self._of_thread.analyzer
        return analyzer

    def runs_once(self, var: tirx.Var) -> bool:
        """Whether a loop has a single iteration. Every factor asks, and to find no proof takes long."""
        if var not in self._once:
            self._once[var] = self.analyzer.can_prove_equal(self.loops[var].extent, 1)
        return self._once[var]

    def is_idle(self, var: tirx.Var) -> bool:
        """Whether a loop has a single iteration, and no place depends on it: it neither walks nor carries anything."""
        return is_const(self.loops[var].extent, 1) and var not in self._placing

    @cached_property
    def _placing(self) -> set[tirx.Var]:
        return vars_of([index for s in self.statements for a in s.accesses for index in a.indices], self.binds)

    def with_body(self, body: tirx.Stmt, on_chip: Sequence[tirx.Buffer] | None = None) -> tirx.PrimFunc:
        """The function with another body in its block, and these buffers on chip, if they are others."""
        block = block_like(self.root, body, self.root.alloc_buffers if on_chip is None else on_chip)
        return self.func.with_body(replace_block(self.func.body, block, {}))

    def is_param(self, buffer: tirx.Buffer) -> bool:
        return any(buffer.same_as(param) for param in self.params.values())

    def keeps(self, buffer: tirx.Buffer) -> bool:
        """Whether it is a parameter that nothing writes."""
        return self.is_param(buffer) and not any(s.writes(buffer) for s in self.statements)

    def uses(self, buffer: tirx.Buffer, since: int = 0) -> bool:
        """Whether a statement accesses the buffer, or may, from the top-level statement `since` on."""
        return any(
            s.top >= since and (s.writes(buffer) or any(a.buffer.same_as(buffer) for a in s.accesses))
            for s in self.statements
        )


def buffer_params(func: tirx.PrimFunc) -> dict[str, tirx.Buffer]:
    """The function's buffer parameters by name, in order."""
    return {func.buffer_map[p].name: func.buffer_map[p] for p in func.params if p in func.buffer_map}


def body_statements(stmt: tirx.Stmt) -> list[tirx.Stmt]:
    """The statements of a sequence, nested sequences flattened, and what hints stand around."""
    if isinstance(stmt, tirx.SeqStmt):
        return [inner for child in stmt.seq for inner in body_statements(child)]
    return body_statements(stmt.body) if is_hint(stmt) else [stmt]


def hinted_like(stmt: tirx.Stmt, body: tirx.Stmt) -> tirx.Stmt:
    """Another body under the hints that stand around statements of this one."""
    if isinstance(stmt, tirx.SeqStmt):
        for child in reversed(stmt.seq):
            body = hinted_like(child, body)
        return body
    if is_hint(stmt):
        return tirx.AttrStmt(stmt.node, stmt.attr_key, stmt.value, hinted_like(stmt.body, body))
    return body


#: A function attribute: `Kernel.own`.
OWN_ATTR = "mesh_tensor_own"

#: On the function of a part of a kernel: groups of dims, as (parameter, dim), that are split together, although nothing
#: in the part says so: a factor of the whole kernel walks them.
TOGETHER_ATTR = "mesh_tensor_together"

#: Marks a loop that carries what the devices before left.
RESUMED = "mesh_tensor.resumed"

#: Marks such a loop for which devices take turns: whose it is, ALL_TURNS where every device has what it starts from.
TURN = "mesh_tensor.turn"
ALL_TURNS = -1

#: What an update's value is in TIR -> the reduction that it makes.
_UPDATES = {"Sub": "sum"} | {
    r.tir if r.tir[0].isupper() else f"tirx.{r.tir}": r.name for r in REDUCTIONS.values() if r.magnitudes is None
}


def split_update(stmt: tirx.BufferStore) -> tuple[str | None, tirx.PrimExpr]:
    """`b[i] = b[i] op e` as (op, e); any other store as (None, its value)."""
    value = stmt.value
    op = _UPDATES.get(op_name(value) or type(value).__name__)
    if op is None:
        return None, value
    a, b = value.args if isinstance(value, tirx.Call) else (value.a, value.b)
    if is_load_of(a, stmt) and not mentions(b, stmt.buffer):
        return op, b
    if is_load_of(b, stmt) and not mentions(a, stmt.buffer) and not isinstance(value, tirx.Sub):
        return op, a
    return None, value


def is_load_of(expr: tirx.PrimExpr, place: tirx.BufferStore | Access) -> bool:
    """Whether an expression loads an element."""
    return isinstance(expr, tirx.BufferLoad) and expr.buffer.same_as(place.buffer) and same_indices(expr, place)


def same_indices(a: tirx.BufferLoad | Access, b: tirx.BufferStore | Access) -> bool:
    """Whether two elements, perhaps of different buffers, are at the same indices."""
    return len(a.indices) == len(b.indices) and all(map(same_expression, a.indices, b.indices))


def lowest_or(expr: tirx.PrimExpr) -> tuple[tirx.BufferLoad, float, tirx.PrimExpr] | None:
    """Of a choice: the element that is asked for the lowest value, the number that it is where the element is that, and
    what it is elsewhere; None if it is no such choice."""
    condition, then, otherwise = chosen(expr) or [None, None, None]
    if isinstance(condition, tirx.NE):
        then, otherwise = otherwise, then
    elif not isinstance(condition, tirx.EQ):
        return None
    sides = [(condition.a, number(condition.b)), (condition.b, number(condition.a))]
    load = next((a for a, b in sides if b == -math.inf and isinstance(a, tirx.BufferLoad)), None)
    there = number(then)
    return None if load is None or there is None else (load, there, otherwise)


def mentions(expr: tirx.PrimExpr, buffer: tirx.Buffer) -> bool:
    """Whether an expression reads a buffer."""
    return any(load.buffer.same_as(buffer) for load in loads(expr))


def without_binds(expr: tirx.PrimExpr, kernel: Kernel) -> tirx.PrimExpr:
    """The expression, with what its variables are bound to in their places."""
    while bound := {var: kernel.binds[var] for var in vars_of([expr], {}) if var in kernel.binds}:
        expr = tirx.stmt_functor.substitute(expr, bound)
    return expr


def used_vars(statement: Statement, kernel: Kernel) -> set[tirx.Var]:
    """Every loop variable that the statement's values, conditions, loop bounds or indices mention."""
    indices = [i for access in statement.accesses for i in access.indices]
    return vars_of([*statement.values, *statement.bounds, *indices], kernel.binds)


def describe(statement: Statement) -> str:
    """What a message calls the statement: `T.copy into A_shared`, `the store to C`."""
    if statement.tile_op is not None:
        return f"T.{type(statement.tile_op).__name__.lower()} into {statement.target.buffer.name}"
    return "a statement" if statement.write is None else f"the store to {statement.write.buffer.name}"


class StatementMaker(Protocol):
    """What a tile operation needs of the kernel around it."""

    analyzer: Prover

    def access(self, buffer: tirx.Buffer, indices: Sequence[tirx.PrimExpr]) -> Access: ...

    def loads(self, nodes: Sequence[Any]) -> tuple[Access, ...]: ...

    def statement(self, node: tirx.Stmt, **parts: Any) -> Statement: ...


class TileReader:
    """Turns one tile operation into one statement."""

    def __init__(self, reader: StatementMaker, stmt: tirx.Evaluate):
        self.reader, self.stmt = reader, stmt

    def read(self, record: TileOp) -> Statement:
        """The statement.

        Raises:
            Unmatched: the operation's regions do not pair up."""
        elements = record.elements(self.reader.analyzer.can_prove_equal)
        zero = tirx.IntImm("int32", 0)
        loops = [Loop(tirx.Var(f"t{n}", "int32"), zero, e.extent, "tile", None) for n, e in enumerate(elements)]
        whole = record.in_order
        write, *reads = (
            self._at(
                region, {e.dims[n]: loop.var for e, loop in zip(elements, loops, strict=True) if n in e.dims}, whole
            )
            for n, region in enumerate((record.dst, *record.sources))
        )
        values = () if record.value is None or record.sources else (record.value,)
        mins = [index for access in (write, *reads) for index in access.indices]
        return self.reader.statement(
            self.stmt,
            write=write,
            reads=(*reads, *self.reader.loads(values), *self.reader.loads(mins)),
            values=values,
            extra=loops,
            tile_op=record,
            op=None if record.reduction is None or whole is not None else reduction(record.reduction).completed_by,
            fresh=record.clears,
        )

    def _at(self, region: Region, element: dict[int, tirx.Var], whole: int | None) -> Access:
        """The access to a region's elements; the index into a dim that is needed whole stands for all of it."""
        indices = [low + element[d] if d in element else low for d, low in enumerate(region.mins)]
        access = self.reader.access(region.buffer, indices)
        return access if whole is None else replace(access, forms=_without(access.forms, whole))


def _without(forms: tuple[Linear | None, ...], dim: int) -> tuple[Linear | None, ...]:
    return (*forms[:dim], None, *forms[dim + 1 :])
