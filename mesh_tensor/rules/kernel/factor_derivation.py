"""The factors of a kernel: which dims of which buffers are walked together.

Every dim of a parameter starts as a factor of its own. A statement that touches two dims at one coordinate (`C[x] =
A[x]`) joins their factors. An on-chip buffer's dim gets the coordinate that its elements stand for: after
`copy(A[by * 64], A_s)`, element i of A_s is coordinate `by * 64 + i` of A's factor, so its *base* is `by * 64`.

What does not fit is never guessed: a parameter's dim is *detached* (the whole dim is needed wherever it is used), or
the factor is *blocked* (nothing may split it); both keep the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import NamedTuple

from tvm import tirx

from mesh_tensor.base.joined import Joined
from mesh_tensor.tir.effects import thread_indices
from mesh_tensor.tir.linear import Linear

from .bounded_indices import beside_walks
from .factors import Factor, goes_beyond, why_not_covered
from .live_ranges import LiveRange, LiveRanges
from .statements import TOGETHER_ATTR, Access, Kernel, Statement

#: A dim of a live range.
Node = tuple[LiveRange, int]

#: A dim of a parameter.
Dim = tuple[str, int]


@dataclass(frozen=True, eq=False)
class Derivation:
    """`factors`, in the parameters' order, still without names. `types`: the factor and the base of every live range's
    dim that has one. `detached`: why some parameters' dims have no factor."""

    factors: tuple[Factor, ...]
    types: Mapping[Node, tuple[Factor, Linear]]
    detached: Mapping[Dim, str]


def derive(kernel: Kernel, ranges: LiveRanges, without: Sequence[Dim] = ()) -> Derivation:
    """The factors of a kernel, without those of some dims. A dim that gives way takes with it all that was derived from
    it, so the next round starts without it."""
    detached: dict[Dim, str] = dict.fromkeys(without, "it is read in windows")
    staged: set[Node] = set()
    while (found := _Round(kernel, ranges, detached, staged)).gave_way():
        detached |= found.detached
        staged |= found.staged
    return found.settled()


@dataclass(eq=False)
class _Class:
    """A factor in the making: the parameters' dims that are known to be walked together."""

    size: tirx.PrimExpr
    dims: list[Dim]
    blocked: str | None = None
    roles: dict[tirx.Var, int] = field(default_factory=dict)


class _Walked(NamedTuple):
    """A dim of an access, with the factor that its index walks and the coordinate."""

    access: Access
    dim: int
    factor: _Class
    form: Linear

    def __str__(self) -> str:
        return f"{self.access.buffer.name} dim {self.dim} (index {self.access.indices[self.dim]})"


class _Round:
    """One round, without the dims that gave way in earlier ones.

    `detached`, `staged`: the dims that gave way in this round; if there are any, nothing else in it counts."""

    def __init__(self, kernel: Kernel, ranges: LiveRanges, without: Mapping[Dim, str], without_staged: Set[Node]):
        self.detached: dict[Dim, str] = {}
        self.staged: set[Node] = set()
        self._kernel, self._ranges, self._without, self._without_staged = kernel, ranges, without, without_staged
        self._threads = thread_indices(kernel.func)
        self._types: dict[Node, tuple[_Class, Linear]] = {}
        self._made: list[_Class] = []
        self._joined = Joined[_Class]()
        self._root = self._joined.root
        self._roles: dict[tirx.Var, tuple[_Class, int]] = {}

    def gave_way(self) -> bool:
        """Derive the factors; returns whether a dim gave way."""
        self._start()
        self._derive()
        return bool(self.detached or self.staged)

    def settled(self) -> Derivation:
        """What the unions came to."""
        for var, (walked, coefficient) in self._roles.items():
            self._root(walked).roles[var] = coefficient
        order = list(self._kernel.params)
        factors = {
            made: Factor(
                "",
                made.size,
                tuple(sorted(made.dims, key=lambda d: (order.index(d[0]), d[1]))),
                made.roles,
                made.blocked,
            )
            for made in self._made
            if self._root(made) is made
        }
        types = {node: (factors[self._root(made)], base) for node, (made, base) in self._types.items()}
        return Derivation(tuple(factors.values()), types, self._without)

    # -- classes and their union ---------------------------------------------------------------------------------------

    def _start(self) -> None:
        """A class for every dim of a parameter."""
        params = {r.buffer: r for r in self._ranges.all if r.is_param}
        for name, buffer in self._kernel.params.items():
            for dim, size in enumerate(buffer.shape):
                if (name, dim) not in self._without and buffer in params:
                    self._types[(params[buffer], dim)] = (_Class(size, [(name, dim)]), Linear({}))
        self._made = [made for made, _ in self._types.values()]
        for group in (self._kernel.func.attrs or {}).get(TOGETHER_ATTR, ()):
            nodes = [(params.get(self._kernel.params.get(str(name))), int(dim)) for name, dim in group]
            walked = [self._types[node][0] for node in nodes if node in self._types]
            for other in walked[1:]:
                first, second = self._root(walked[0]), self._root(other)
                if first is not second:
                    self._join_if_as_long(first, second)

    def _join_if_as_long(self, a: _Class, b: _Class) -> bool:
        """Make two classes one, the one that was first, unless their sizes differ."""
        if not self._kernel.analyzer.can_prove_equal(a.size, b.size):
            return False
        first, second = sorted((a, b), key=self._made.index)
        self._joined.join(first, second)
        first.dims += second.dims
        first.blocked = first.blocked or second.blocked
        return True

    def _block(self, made: _Class, reason: str) -> None:
        root = self._root(made)
        root.blocked = root.blocked or reason

    def _detach(self, access: Access, dim: int, reason: str) -> None:
        self.detached.setdefault((access.buffer.name, dim), reason)

    # -- derivation ----------------------------------------------------------------------------------------------------

    def _derive(self) -> None:
        """Go over the statements until nothing changes, or a dim has to give way."""
        for statement in self._kernel.statements:
            self._check_params(statement)
        changed = True
        while changed and not (self.detached or self.staged):
            changed = False
            for statement in self._kernel.statements:
                walked = self._walked(statement)
                changed |= self._join(statement, walked)
                changed |= self._extend(statement, walked)
                if self.detached or self.staged:
                    return
            if not changed:
                self._roles.clear()
                for statement in self._kernel.statements:
                    changed |= self._assign_roles(statement)

    def _check_params(self, statement: Statement) -> None:
        """Detach the parameters' dims that no nest of loops walks from end to end."""
        for live_range, dim in self._types:
            if live_range.is_param and any(live_range.buffer.same_as(buffer) for buffer in statement.may_write):
                reason = f"the statement that writes it is not understood: {statement.unknown}"
                self.detached.setdefault((live_range.buffer.name, dim), reason)
        for access in statement.accesses:
            live_range = self._ranges.of(access)
            for dim, form in enumerate(access.forms):
                if not live_range.is_param or (live_range, dim) not in self._types:
                    continue
                problem = (
                    "the statement is not understood"
                    if statement.unknown
                    else self._by_threads(form)
                    or why_not_covered(form, access.buffer.shape[dim], statement, self._kernel.analyzer, or_beyond=True)
                )
                if problem and not beside_walks(self._kernel, statement, access, dim):
                    self._detach(access, dim, f"index {access.indices[dim]}: {problem}")

    def _by_threads(self, form: Linear | None) -> str | None:
        found = [] if form is None else [var.name for var in form.terms if var in self._threads]
        if not found:
            return None
        return f"it goes by the thread index {', '.join(found)}, and what threads have of their own is not followed"

    def _walked(self, statement: Statement) -> list[_Walked]:
        """Every dim that the statement has a coordinate in."""
        found = []
        for access in statement.accesses:
            live_range = self._ranges.of(access)
            for dim, form in enumerate(access.forms):
                entry = self._types.get((live_range, dim))
                if entry is not None and form is not None:
                    found.append(_Walked(access, dim, self._root(entry[0]), entry[1] + form))
        return found

    def _join(self, statement: Statement, walked: Sequence[_Walked]) -> bool:
        """Join factors whose dims the statement touches at one coordinate; detach or block what disagrees."""
        self._check_opaque(statement, [self._root(other.factor) for other in walked])
        changed = False
        for position, current in enumerate(walked):
            for earlier in walked[:position]:
                changed |= self._relate(current, earlier, statement)
        return changed

    def _check_opaque(self, statement: Statement, walked: Sequence[_Class]) -> None:
        """An on-chip dim that has a factor may not be used at an index that is no linear form; nor a parameter's in a
        statement that walks the factor: it is not where the index says."""
        for access in statement.accesses:
            live_range = self._ranges.of(access)
            for dim, form in enumerate(access.forms):
                entry = self._types.get((live_range, dim))
                if entry is None or form is not None:
                    continue
                if not live_range.is_param:
                    self._block(entry[0], f"{access.buffer.name} dim {dim} is indexed by {access.indices[dim]}")
                elif self._root(entry[0]) in walked:
                    self._detach(access, dim, f"index {access.indices[dim]}: it is data")

    def _relate(self, a: _Walked, b: _Walked, statement: Statement) -> bool:
        """What one statement's walking two dims says of their factors; returns whether they became one."""
        factor, other = self._root(a.factor), self._root(b.factor)
        if factor is not other and a.form.terms.keys().isdisjoint(b.form.terms):
            return False
        if a.form.same_as(b.form) and not (a.access.buffer.same_as(b.access.buffer) and a.dim != b.dim):
            if factor is other:
                return False
            if self._join_if_as_long(factor, other):
                return True
        first, second = sorted((a, b), key=lambda at: not self._is_left_behind(at, statement))
        self._disagree(first, second, statement.unknown)
        return False

    def _is_left_behind(self, at: _Walked, statement: Statement) -> bool:
        """Whether loops go on behind a dim's end."""
        extents = {loop.var: loop.extent for loop in statement.loops}
        (var, step), *_ = at.form.ordered or [(None, 0)]
        return var in extents and goes_beyond(extents[var], step, at.access.buffer.shape[at.dim])

    def _disagree(self, a: _Walked, b: _Walked, unknown: str | None) -> None:
        """Two dims that share loops but not coordinates: one parameter's dim gives way, else both factors do. What is
        staged on chip gives way before."""
        staged = next((at for at in (a, b) if self._is_staged(at)), None)
        if staged is not None:
            self.staged.add((self._ranges.of(staged.access), staged.dim))
            return
        reads = [at for at in (a, b) if self._is_read_only(at.access)]
        params = [at for at in (a, b) if self._ranges.of(at.access).is_param]
        reason = f"{a} and {b} are walked together, but not element by element"
        if unknown is not None:
            reason = f"{unknown}, which is not understood, uses {a.access.buffer.name} and {b.access.buffer.name}"
        if not reads and (sources := [place for at in (a, b) for place in self._sources(at)]):
            for access, dim in sources:
                self._detach(access, dim, reason)
        elif reads or params:
            gives_way = (reads or params)[0]
            self._detach(gives_way.access, gives_way.dim, reason)
        else:
            self._block(a.factor, reason)
            self._block(b.factor, reason)

    def _is_staged(self, at: _Walked) -> bool:
        """Whether an on-chip buffer holds nothing but what is read from dims that no factor walks, and constants."""
        live_range = self._ranges.of(at.access)
        if live_range.is_param or any(at.access is write for _, write in live_range.writes):
            return False
        sources = [access for statement, _ in live_range.writes for access in statement.reads]
        return bool(sources) and not any(self._follows(access, at.factor) for access in sources)

    def _sources(self, at: _Walked) -> Iterator[tuple[Access, int]]:
        """The dims of parameters, which nothing writes, that an on-chip buffer is loaded from."""
        live_range = self._ranges.of(at.access)
        for statement, _ in () if live_range.is_param else live_range.writes:
            for access in statement.reads:
                for dim in range(len(access.indices)) if self._is_read_only(access) else ():
                    entry = self._types.get((self._ranges.of(access), dim))
                    if entry is not None and self._root(entry[0]) is self._root(at.factor):
                        yield access, dim

    def _follows(self, access: Access, factor: _Class) -> bool:
        """Whether some dim of an access walks the factor."""
        entries = (self._types.get((self._ranges.of(access), dim)) for dim in range(len(access.indices)))
        return any(entry is not None and self._root(entry[0]) is self._root(factor) for entry in entries)

    def _is_read_only(self, access: Access) -> bool:
        live_range = self._ranges.of(access)
        return live_range.is_param and not live_range.writes

    def _extend(self, statement: Statement, walked: Sequence[_Walked]) -> bool:
        """Give on-chip dims the coordinate of the parameters' dims that the statement touches with them."""
        changed = False
        for access in statement.accesses:
            live_range = self._ranges.of(access)
            for dim, form in enumerate(access.forms):
                node = (live_range, dim)
                if live_range.is_param or node in self._types or form is None or not form.terms:
                    continue
                if node in self._without_staged:
                    continue
                scope = {loop.var for loop in live_range.scope}
                for _, _, factor, coordinate in walked:
                    base = _base(coordinate, form, scope)
                    if base is not None:
                        self._types[node] = (factor, base)
                        changed = True
                        break
        return changed

    def _assign_roles(self, statement: Statement) -> bool:
        """Note which factor each loop variable walks. Factors that share a loop step by step are one; those that share
        one in different steps can't be split."""
        changed = False
        for access, dim, walked, form in self._walked(statement):
            factor = self._root(walked)
            problem = why_not_covered(form, factor.size, statement, self._kernel.analyzer, or_beyond=True)
            if problem and statement.unknown:
                self._block(factor, f"{statement.unknown}, which is not understood, uses {access.buffer.name}")
            elif problem:
                self._block(factor, f"{access.buffer.name} dim {dim}, index {access.indices[dim]}: {problem}")
            for var, coefficient in form.terms.items():
                known = self._roles.setdefault(var, (factor, coefficient))
                changed |= self._share_loop(var, known, (factor, coefficient))
        return changed

    def _share_loop(self, var: tirx.Var, known: tuple[_Class, int], now: tuple[_Class, int]) -> bool:
        (a, step), (b, other_step) = known, now
        a, b = self._root(a), self._root(b)
        if a is b and step == other_step:
            return False
        if step == other_step and self._join_if_as_long(a, b):
            return True
        reason = f"loop {var} walks two dims in different steps"
        self._block(a, reason)
        self._block(b, reason)
        return False


def _base(coordinate: Linear, form: Linear, scope: set[tirx.Var]) -> Linear | None:
    """Where an on-chip dim starts if `form`, an index into it, stands for `coordinate`; None if that would not be one
    place for all of the live range, which lies in one iteration of the loops in `scope`."""
    base = coordinate - form
    inner = any(v in coordinate.terms and v not in scope for v in form.terms)
    return base if inner and base.const == 0 and all(v in scope for v in base.terms) else None
