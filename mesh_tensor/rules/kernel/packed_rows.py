"""Rows at places that data says for a whole program: `Q[starts[b] + block * 64 + i]`, of sequences of different lengths
that are packed one after the other.

Such places walk their dim in no order. But where all that a program makes of a row goes into the same row of results,
and nowhere else, devices that run all programs need no rows of others: what is made of these, of which every device has
some on chip, is dropped. So dims at the same places are one factor, of which nothing is partial.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from tvm import tirx

from mesh_tensor.tir.linear import linear_form, loop_ranges, vars_of
from mesh_tensor.tir.nodes import DIVISIONS, loads, nodes
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.rewrite import rewritten
from mesh_tensor.tir.tile_ops import Copy

from .bounded_indices import deciding, only_writes
from .coordinates import Coordinates
from .factor_derivation import Dim
from .factors import Factor
from .reader import known_uses, read_kernel
from .statements import Access, Kernel, Statement, without_binds


def packed_rows(kernel: Kernel, coordinates: Coordinates) -> list[Factor]:
    """The dims at such places, those that belong together as one factor without a name."""
    analyzer = loop_ranges(kernel.func.body)
    groups: list[tuple[tirx.PrimExpr, tirx.PrimExpr, dict[str, int]]] = []
    for param, dim in coordinates.detached:
        start, size = _start(kernel, (param, dim), analyzer), kernel.params[param].shape[dim]
        if start is None:
            continue
        alike = (dims for at, of, dims in groups if _is_same(at, start, analyzer) and _is_same(of, size, analyzer))
        together = next(alike, None)
        if together is None:
            groups.append((start, size, {param: dim}))
        elif param in together:
            return []
        else:
            together[param] = dim
    return [
        Factor("", size, tuple(dims.items()), {})
        for _, size, dims in groups
        if len(dims) > 1 and _Rows(kernel, dims, analyzer).stay()
    ]


def _is_same(a: tirx.PrimExpr, b: tirx.PrimExpr, analyzer: Prover) -> bool:
    return bool(analyzer.can_prove_equal(a, b))


def _start(kernel: Kernel, place: Dim, analyzer: Prover) -> tirx.PrimExpr | None:
    """The row from which all that uses a dim counts; None if that is none that is loaded, or no single one."""
    found: list[tirx.PrimExpr] = []
    for statement, access in known_uses(kernel, kernel.params[place[0]]):
        row = _row(kernel, statement, access, place[1], analyzer)
        if row is None or (found and not _is_same(found[0], row[0], analyzer)):
            return None
        found.append(row[0])
    return found[0] if found else None


def _row(
    kernel: Kernel, statement: Statement, access: Access, dim: int, analyzer: Prover
) -> tuple[tirx.PrimExpr, tirx.Var] | None:
    """The row of the program from which an access counts, which is loaded of what nothing writes any more, and the loop
    that counts on from there one by one."""
    if access.forms[dim] is not None or dim in statement.element_dims(access):
        return None
    index = without_binds(access.indices[dim], kernel)
    inner = {x.var: tirx.IntImm(x.var.dtype, 0) for x in statement.loops if x.kind != "grid"}
    divisors = [node.b for node in nodes(index, *DIVISIONS)]
    if not loads(index) or not vars_of(divisors, {}).isdisjoint(inner):  # where a loop starts, it may be 0
        return None
    start = analyzer.simplify(tirx.stmt_functor.substitute(index, inner))
    known = {*(loop.var for loop in kernel.grid), *kernel.func.params}
    is_settled = all(_is_settled(kernel, load.buffer) for load in loads(start))
    if not loads(start) or not vars_of([start], {}) <= known or not is_settled:
        return None
    counted = linear_form(analyzer.simplify(index - start), {})
    return None if counted is None or counted.variable is None else (start, counted.variable)


def _is_settled(kernel: Kernel, buffer: tirx.Buffer) -> bool:
    """Whether all that is made of what a buffer holds is made of the same: on chip, of what it holds in the end."""
    if kernel.is_param(buffer):
        return kernel.keeps(buffer)
    last = max((statement.top for statement in kernel.statements if statement.writes(buffer)), default=-1)
    users = (s for s in kernel.statements if not s.writes(buffer) and any(a.buffer.same_as(buffer) for a in s.reads))
    return buffer.scope() != "global" and all(statement.top > last for statement in users)


class _Rows:
    """What a kernel makes of the rows of some parameters, of each of which it has the dim of rows."""

    def __init__(self, kernel: Kernel, dims: Mapping[str, int], analyzer: Prover) -> None:
        self._kernel, self._analyzer = kernel, analyzer
        self._params = {kernel.params[name]: dim for name, dim in dims.items()}
        self._chip: dict[tirx.Buffer, int] = {}  # the dim that rows are in, of what is made of them

    def stay(self) -> bool:
        """Whether what is made of a row goes into that row of the results alone."""
        if any(buffer.scope() == "global" for buffer in self._kernel.on_chip):
            return False
        known = -1
        while known < len(self._chip):
            known = len(self._chip)
            if not all(self._stays(statement) for statement in self._kernel.statements):
                return False
        written = [s for s in self._kernel.statements if s.write is not None and s.write.buffer in self._params]
        return bool(written) and all(only_writes(s, s.target) for s in written)

    def _stays(self, statement: Statement) -> bool:
        """Whether a statement keeps rows apart; what it writes on chip is of rows from then on."""
        counted = [self._counted(statement, access) for access in statement.reads if self._is_of_rows(access.buffer)]
        rows = {var for var in counted if var is not None}
        if not counted:
            return True
        if statement.unknown or statement.write is None or len(rows) != 1 or any(var is None for var in counted):
            return False
        if self._decides(statement):
            return False
        target = statement.target
        if self._kernel.is_param(target.buffer):
            return target.buffer in self._params and self._counted(statement, target) in rows
        dims = [dim for dim, form in enumerate(target.forms) if form is not None and form.variable in rows]
        return len(dims) == 1 and self._chip.setdefault(target.buffer, dims[0]) == dims[0]

    def _is_of_rows(self, buffer: tirx.Buffer) -> bool:
        return buffer in self._params or buffer in self._chip

    def _counted(self, statement: Statement, access: Access) -> tirx.Var | None:
        """The loop that counts the rows of an access."""
        if access.buffer in self._chip:
            form = access.forms[self._chip[access.buffer]]
            return None if form is None else form.variable
        row = _row(self._kernel, statement, access, self._params[access.buffer], self._analyzer)
        return None if row is None else row[1]

    def _decides(self, statement: Statement) -> bool:
        """Whether what is made of rows, which may be of others, says where something is, how often something is done,
        or what integers are divided by."""
        used = [without_binds(expr, self._kernel) for expr in (*deciding(statement), *statement.bounds)]
        return any(self._is_of_rows(load.buffer) for expr in used for load in loads(expr))


def row_by_row(func: tirx.PrimFunc, whole: Sequence[Dim]) -> tirx.PrimFunc | None:
    """The kernel, in which copies of blocks at loaded places of the dims in `whole` are loops over their elements; None
    if there are none."""
    kernel, made = read_kernel(func), dict[tirx.Stmt, tirx.Stmt]()
    for name, dim in whole:
        for statement, access in known_uses(kernel, kernel.params[name]):
            index = without_binds(access.indices[dim], kernel)
            if isinstance(statement.tile_op, Copy) and dim in statement.element_dims(access) and loads(index):
                made[statement.node] = _by_elements(statement)
    if not made:
        return None
    return rewritten(func, made.get, tirx.Evaluate)


def _by_elements(copy: Statement) -> tirx.Stmt:
    source, target = copy.reads[0], copy.target
    value = tirx.BufferLoad(source.buffer, source.indices).astype(target.buffer.dtype)
    stmt: tirx.Stmt = tirx.BufferStore(target.buffer, value, target.indices)
    for loop in reversed([loop for loop in copy.loops if loop.kind == "tile"]):
        stmt = tirx.For(loop.var, loop.min, loop.extent, tirx.ForKind.PARALLEL, stmt)
    return stmt
