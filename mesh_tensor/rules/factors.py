"""Factors of a kernel: which dims of which buffers are walked together.

Every dim of a parameter starts as a factor of its own. A statement that touches two dims at one coordinate (`C[x] =
A[x]`) joins their factors. An on-chip buffer's dim gets the coordinate that its elements stand for: after
`copy(A[by * 64], A_s)`, element i of A_s is coordinate `by * 64 + i` of A's factor, so its *base* is `by * 64`.

What does not fit is never guessed: a parameter's dim is *detached* (the whole dim is needed wherever it is used), or
the factor is *blocked* (nothing may split it); both keep the reason.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from tvm import tirx

from .coverage import why_not_covered
from .linear import Linear
from .live_ranges import LiveRange, LiveRanges
from .statements import Access, Kernel, Statement

#: A dim of a live range.
Node = tuple[LiveRange, int]


@dataclass(eq=False)
class Factor:
    """One iteration dimension. `dims` are the parameters' dims it indexes, `roles` its loop variables with their
    coefficients, `blocked` why it can't be split at all, `aligned` why tiles have to be whole blocks."""

    name: str
    size: tirx.PrimExpr
    dims: list[tuple[str, int]]
    roles: dict[tirx.Var, int] = field(default_factory=dict)
    blocked: str | None = None
    aligned: str | None = None

    @property
    def block(self) -> int:
        """What one iteration of the outermost loops handles: the least common multiple, where they differ."""
        return math.lcm(*self.roles.values())


class Conflict(Exception):
    """A factor that can't be explained; `node` is a parameter's dim to detach instead, where there is one."""


class Coordinates:
    """The result: factors, and the coordinate that every access has in them."""

    def __init__(self, kernel: Kernel, ranges: LiveRanges):
        self.kernel, self.ranges = kernel, ranges
        self.detached: dict[tuple[str, int], str] = {}
        while True:
            self._reset()
            before = len(self.detached)
            self._derive()
            if len(self.detached) == before:
                break
        self.factors = self._collect()
        self.forms = self._collect_forms()

    # -- queries ---------------------------------------------------------------------------------------------------

    def of_node(self, node: Node) -> tuple[Factor, Linear] | None:
        """The factor and base of a live range's dim, or None where it has none."""
        entry = self._types.get(node)
        return None if entry is None else (self._factor(entry[0]), entry[1])

    def of_access(self, access: Access, dim: int) -> tuple[Factor, Linear] | None:
        """The factor that an access's index in `dim` walks, and the coordinate."""
        entry = self._coordinate(access, dim)
        return None if entry is None else (self._factor(entry[0]), entry[1])

    def of_statement(self, statement: Statement) -> dict[Factor, Linear]:
        """Every factor that the statement has a coordinate in."""
        found: dict[Factor, Linear] = {}
        for access in statement.accesses:
            for dim in range(len(access.indices)):
                entry = self.of_access(access, dim)
                if entry is not None:
                    found.setdefault(*entry)
        return found

    def around(self, statement: Statement, factor: Factor) -> Linear | None:
        """The coordinate in the factor that the loops around a statement make, if they are a nest over it."""
        inner = self._loop_forms[factor]
        own = statement.vars
        for loop in statement.loops:
            form = inner.get(loop.var)
            if form is not None and set(form.terms) <= own:
                return form
        return None

    # -- derivation ------------------------------------------------------------------------------------------------

    def _reset(self) -> None:
        self._parent: list[int] = []
        self._sizes: list[tirx.PrimExpr] = []
        self._members: list[list[tuple[str, int]]] = []
        self._blocked: dict[int, str] = {}
        self._types: dict[Node, tuple[int, Linear]] = {}
        self._roles: dict[tirx.Var, tuple[int, int]] = {}
        params = {r.buffer: r for r in self.ranges.all if r.is_param}
        for name, buffer in self.kernel.params.items():
            for dim, size in enumerate(buffer.shape):
                if (name, dim) not in self.detached and buffer in params:
                    factor = len(self._parent)
                    self._parent.append(factor)
                    self._sizes.append(size)
                    self._members.append([(name, dim)])
                    self._types[(params[buffer], dim)] = (factor, Linear({}))

    def _find(self, factor: int) -> int:
        while self._parent[factor] != factor:
            factor = self._parent[factor]
        return factor

    def _factor(self, factor: int) -> Factor:
        return self._by_root[self._find(factor)]

    def _derive(self) -> None:
        for statement in self.kernel.statements:
            self._check_params(statement)
        if self._stale():
            return
        changed = True
        while changed and not self._stale():
            changed = False
            for statement in self.kernel.statements:
                changed |= self._join(statement)
                changed |= self._extend(statement)
                if self._stale():
                    return
            if not changed:
                self._roles.clear()
                for statement in self.kernel.statements:
                    changed |= self._assign_roles(statement)

    def _stale(self) -> bool:
        """A dim was detached: what was derived from it no longer holds."""
        return any((r.buffer.name, d) in self.detached for r, d in self._types if r.is_param)

    def _detach(self, access: Access, dim: int, reason: str) -> None:
        self.detached.setdefault((access.buffer.name, dim), reason)

    def _coordinate(self, access: Access, dim: int) -> tuple[int, Linear] | None:
        live_range = self.ranges.of(access)
        entry = self._types.get((live_range, dim))
        form = access.forms[dim]
        if entry is None or form is None:
            return None
        return self._find(entry[0]), entry[1] + form

    def _check_params(self, statement: Statement) -> None:
        """Detach the parameters' dims that no nest of loops walks from end to end."""
        for access in statement.accesses:
            live_range = self.ranges.of(access)
            if not live_range.is_param:
                continue
            for dim, form in enumerate(access.forms):
                if (live_range, dim) not in self._types:
                    continue
                size = access.buffer.shape[dim]
                problem = (
                    "the statement is not understood"
                    if statement.unknown
                    else why_not_covered(form, size, statement, self.kernel.analyzer)
                )
                if problem:
                    self._detach(access, dim, f"index {access.indices[dim]}: {problem}")

    def _join(self, statement: Statement) -> bool:
        """Join factors whose dims the statement touches at one coordinate; detach or block what disagrees."""
        changed = False
        seen: list[tuple[int, Linear, Access, int]] = []
        for access in statement.accesses:
            for dim in range(len(access.indices)):
                entry = self._coordinate(access, dim)
                if entry is None:
                    self._check_opaque(access, dim)
                    continue
                factor, form = entry
                for other, other_form, other_access, other_dim in seen:
                    related = form.shares_vars(other_form) or self._find(factor) == self._find(other)
                    if not related:
                        continue
                    if form.same_as(other_form) and not _same_buffer(access, dim, other_access, other_dim):
                        changed |= self._unite(factor, other, (access, dim), (other_access, other_dim))
                    elif not form.same_as(other_form) or dim != other_dim:
                        self._disagree((access, dim), (other_access, other_dim), factor, other)
                seen.append((self._find(factor), form, access, dim))
        return changed

    def _check_opaque(self, access: Access, dim: int) -> None:
        """An on-chip dim that has a factor is read at an index that is no linear form."""
        entry = self._types.get((self.ranges.of(access), dim))
        if entry is not None and access.forms[dim] is None:
            self._block(entry[0], f"{access.buffer.name} dim {dim} is indexed by {access.indices[dim]}")

    def _unite(self, a: int, b: int, at_a: tuple[Access, int], at_b: tuple[Access, int]) -> bool:
        a, b = self._find(a), self._find(b)
        if a == b:
            return False
        if not self.kernel.analyzer.can_prove_equal(self._sizes[a], self._sizes[b]):
            self._disagree(at_a, at_b, a, b)
            return False
        return self._merge(a, b)

    def _merge(self, a: int, b: int) -> bool:
        low, high = min(a, b), max(a, b)
        self._parent[high] = low
        self._members[low].extend(self._members[high])
        if high in self._blocked:
            self._blocked.setdefault(low, self._blocked[high])
        return True

    def _disagree(self, at_a: tuple[Access, int], at_b: tuple[Access, int], a: int, b: int) -> None:
        """Two dims that share loops but not coordinates: one parameter's dim gives way, else both factors do."""
        reads = [at for at in (at_a, at_b) if self._is_read_only(at[0])]
        params = [at for at in (at_a, at_b) if self.ranges.of(at[0]).is_param]
        reason = (
            f"{at_a[0].buffer.name} dim {at_a[1]} (index {at_a[0].indices[at_a[1]]}) and {at_b[0].buffer.name} dim "
            f"{at_b[1]} (index {at_b[0].indices[at_b[1]]}) are walked together, but not element by element"
        )
        if reads or params:
            access, dim = (reads or params)[0]
            self._detach(access, dim, reason)
        else:
            self._block(a, reason)
            self._block(b, reason)

    def _is_read_only(self, access: Access) -> bool:
        live_range = self.ranges.of(access)
        return live_range.is_param and not live_range.writes

    def _block(self, factor: int, reason: str) -> None:
        self._blocked.setdefault(self._find(factor), reason)

    def _extend(self, statement: Statement) -> bool:
        """Give on-chip dims the coordinate of the parameters' dims that the statement touches with them."""
        changed = False
        known = [
            entry
            for access in statement.accesses
            for dim in range(len(access.indices))
            if (entry := self._coordinate(access, dim)) is not None
        ]
        for access in statement.accesses:
            live_range = self.ranges.of(access)
            for dim, form in enumerate(access.forms):
                node = (live_range, dim)
                if live_range.is_param or node in self._types or form is None or not form.terms:
                    continue
                allowed = {loop.var for loop in live_range.scope}
                for factor, coordinate in known:
                    base = coordinate - form
                    inner = any(v in coordinate.terms and v not in allowed for v in form.terms)
                    if inner and base.const == 0 and all(v in allowed for v in base.terms):
                        self._types[node] = (factor, base)
                        changed = True
                        break
        return changed

    def _assign_roles(self, statement: Statement) -> bool:
        """Note which factor each loop variable walks. Factors that share a loop step by step are one; those that share
        one in different steps can't be split."""
        changed = False
        for access in statement.accesses:
            for dim in range(len(access.indices)):
                entry = self._coordinate(access, dim)
                if entry is None:
                    continue
                factor, form = entry
                problem = why_not_covered(form, self._sizes[factor], statement, self.kernel.analyzer)
                if problem:
                    self._block(factor, f"{access.buffer.name} dim {dim}, index {access.indices[dim]}: {problem}")
                for var, coefficient in form.terms.items():
                    known = self._roles.setdefault(var, (factor, coefficient))
                    changed |= self._share_loop(var, known, (self._find(factor), coefficient))
        return changed

    def _share_loop(self, var: tirx.Var, known: tuple[int, int], now: tuple[int, int]) -> bool:
        a, b = self._find(known[0]), self._find(now[0])
        if a == b and known[1] == now[1]:
            return False
        if known[1] == now[1] and self.kernel.analyzer.can_prove_equal(self._sizes[a], self._sizes[b]):
            return self._merge(a, b)
        reason = f"loop {var} walks two dims in different steps"
        self._block(a, reason)
        self._block(b, reason)
        return False

    def _collect(self) -> list[Factor]:
        self._by_root: dict[int, Factor] = {}
        for factor in range(len(self._parent)):
            root = self._find(factor)
            if root in self._by_root:
                continue
            roles = {v: c for v, (f, c) in self._roles.items() if self._find(f) == root}
            blocked = next((r for f, r in self._blocked.items() if self._find(f) == root), None)
            members = sorted(set(self._members[root]), key=self._param_order)
            self._by_root[root] = Factor("", self._sizes[root], members, roles, blocked)
        return list(self._by_root.values())

    def _collect_forms(self) -> dict[Factor, list[Linear]]:
        """The distinct coordinates in each factor; those made of the kernel's own loops also by their innermost
        loop."""
        forms: dict[Factor, dict[tuple, Linear]] = {f: {} for f in self.factors}
        for statement in self.kernel.statements:
            for factor, form in self.of_statement(statement).items():
                forms[factor].setdefault(form.key, form)
        self._loop_forms: dict[Factor, dict[tirx.Var, Linear]] = {f: {} for f in self.factors}
        for factor, distinct in forms.items():
            for form in distinct.values():
                if form.terms and all(self.kernel.loops[v].kind != "tile" for v in form.terms):
                    self._loop_forms[factor].setdefault(form.ordered[-1][0], form)
        return {factor: list(distinct.values()) for factor, distinct in forms.items()}

    def _param_order(self, dim: tuple[str, int]) -> tuple[int, int]:
        return list(self.kernel.params).index(dim[0]), dim[1]


def _same_buffer(access: Access, dim: int, other: Access, other_dim: int) -> bool:
    """Two dims of one parameter can't be one factor: an axis would split both."""
    return access.buffer.same_as(other.buffer) and dim != other_dim
