"""How many of the first rows of blocks on chip count; what lies behind them is computed and dropped."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, TypeAlias

from tvm import tirx

from mesh_tensor.base.joined import Joined
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import conjuncts, int_or, is_const

from .statements import Access, Kernel, Loop, Statement

#: A buffer on chip and one of its dims; or a loop's variable.
Node: TypeAlias = Any  # tuple[tirx.Buffer, int] | tirx.Var


class PaddedRows:
    """How many of their first rows count of the dims of buffers on chip.

    Dims that are indexed by one loop's variable, in statements of which each iteration writes a row of its own, have as
    many rows that count: as many as are used otherwise."""

    def __init__(self, kernel: Kernel) -> None:
        self._kernel = kernel
        self._on_chip = {buffer: [int_or(size, 0) for size in buffer.shape] for buffer in kernel.on_chip}
        self._joined = Joined[Node]()
        self._needed: dict[Node, int] = {}
        self._loops: dict[tirx.Var, int] = {}
        self.used: set[tirx.Var] = set()

    def counts(self) -> dict[Node, int]:
        """Per dim or loop that is longer than what counts of it, how much that is."""
        if not any(length > 1 for lengths in self._on_chip.values() for length in lengths):
            return {}
        for statement in self._kernel.statements:
            self._read(statement)
        found: dict[Node, int] = {}
        lengths: dict[Node, int] = {(b, d): n for b, sizes in self._on_chip.items() for d, n in enumerate(sizes)}
        for node, length in {**lengths, **self._loops}.items():
            needed = self._needed.get(self._joined.root(node), 0)
            if 0 < needed < length:
                found[node] = needed
        return found

    def _join(self, node: Node, other: Node) -> None:
        needed = self._needed.pop(self._joined.root(other), 0)
        self._joined.join(node, other)
        self._need(node, needed)

    def _need(self, node: Node, rows: int) -> None:
        root = self._joined.root(node)
        self._needed[root] = max(self._needed.get(root, 0), rows)

    def _need_all(self, access: Access, dims: Iterable[int]) -> None:
        for dim in dims if access.buffer in self._on_chip else ():
            self._need((access.buffer, dim), self._on_chip[access.buffer][dim])

    def _read(self, statement: Statement) -> None:
        if statement.unknown:
            for access in statement.accesses:
                self._need_all(access, range(len(access.indices)))
            for buffer in statement.may_write:
                for dim, length in enumerate(self._on_chip.get(buffer, ())):
                    self._need((buffer, dim), length)
        rows = {loop.var: int_or(loop.extent, 0) for loop in statement.loops if _is_plain(loop)}
        self._loops |= {var: length for var, length in rows.items() if length}
        lengths = rows | {loop.var: int_or(loop.extent, 0) for loop in statement.loops if is_const(loop.min, 0)}
        for access in statement.accesses:
            self._indices(access, rows, lengths, is_write=access is statement.write)
        for var, length in rows.items():
            if not self._writes_rows(statement, var):
                self.used.add(var)
                self._need(var, _below(statement.conditions, var, length))

    def _indices(
        self, access: Access, rows: Mapping[tirx.Var, int], lengths: Mapping[tirx.Var, int], *, is_write: bool
    ) -> None:
        """The access's dims on chip have the rows of the loop that walks them, or are needed as far as it goes."""
        for dim, form in enumerate(access.forms) if access.buffer in self._on_chip else ():
            var = None if form is None else form.variable
            if var is not None and rows.get(var):
                self._join(var, (access.buffer, dim))
            else:
                self._need((access.buffer, dim), _reach(form, lengths, self._on_chip[access.buffer][dim]))
                for used in vars_of([access.indices[dim]], self._kernel.binds) if is_write else ():
                    if used in rows:
                        self._need(used, rows[used])

    def _writes_rows(self, statement: Statement, var: tirx.Var) -> bool:
        """Whether each iteration writes a row of its own on chip, of what is in that row elsewhere, or of what a tile
        operation reads elsewhere: outside a parameter it reads 0."""
        write = statement.write
        if write is None or write.buffer not in self._on_chip or statement.unknown:
            return False
        dims = [d for d, i in enumerate(write.indices) if var in vars_of([i], self._kernel.binds)]
        form = write.forms[dims[0]] if len(dims) == 1 else None
        if form is None or form.variable != var:
            return False
        return statement.tile_op is not None or not any(
            var in vars_of(access.indices, self._kernel.binds)
            for access in statement.reads
            if access.buffer not in self._on_chip
        )


def _is_plain(loop: Loop) -> bool:
    return loop.kind in ("tile", "parallel") and is_const(loop.min, 0)


def _reach(form: Linear | None, lengths: Mapping[tirx.Var, int], size: int) -> int:
    """How many rows of a dim an index may reach, all of them where that is not known."""
    if form is None or form.const < 0 or any(step < 0 or not lengths.get(var) for var, step in form.terms.items()):
        return size
    return min(size, form.const + sum(step * (lengths[var] - 1) for var, step in form.terms.items()) + 1)


def _below(conditions: Sequence[tirx.PrimExpr], var: tirx.Var, length: int) -> int:
    """How far the variable goes where the conditions hold."""
    for condition in chain.from_iterable(map(conjuncts, conditions)):
        if isinstance(condition, tirx.LT) and var.same_as(condition.a) and isinstance(condition.b, tirx.IntImm):
            length = min(length, max(int(condition.b), 0))
    return length
