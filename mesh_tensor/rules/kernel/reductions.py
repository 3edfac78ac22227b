"""How each factor combines: parallel, a reduction, or nothing that may be split.

Splitting a factor leaves a *partial* value wherever something is combined over it (`partial_values` follows those).
Whatever would depend on how coordinates are grouped into blocks, on their order, or on how often a loop runs, blocks
the factor or asks for tiles of whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

from tvm import tirx

from mesh_tensor.base.reductions import reduction
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import same_expression
from mesh_tensor.tir.tile_position import text_of

from .coordinates import Coordinates, is_of_programs, why_whole_blocks, without_loads
from .factors import Factor
from .live_ranges import LiveRange, Taints
from .padding import has_blocks_beyond, padding_is_neutral, takes_whole_blocks
from .partial_values import PartialValues, keeps_partial
from .reused_buffers import mixed_dims
from .scans import Scan, find_scans, goes_in_turns
from .state_finder import find_states
from .statements import Access, Kernel, Statement, describe, used_vars
from .states import State
from .verdicts import Reduction, Verdict


def judge(kernel: Kernel, coordinates: Coordinates, factor: Factor, taints: Taints) -> Verdict:
    """Check a factor against every statement."""
    if factor.blocked is not None:
        return Verdict(factor.blocked)
    if goes_in_turns(kernel, factor):
        scans = find_scans(kernel, coordinates, factor, in_turns=True)
        return _Judgement(kernel, coordinates, factor, taints, (), scans).verdict()
    verdict = _Judgement(kernel, coordinates, factor, taints).verdict()
    if verdict.blocked is None or has_blocks_beyond(kernel, factor):
        return verdict
    if states := find_states(kernel, coordinates, factor):
        with_states = _Judgement(kernel, coordinates, factor, taints, states).verdict()
        if with_states.blocked is None:
            return with_states
    for in_turns in (False, True):
        scans = find_scans(kernel, coordinates, factor, in_turns=in_turns)
        in_order = _Judgement(kernel, coordinates, factor, taints, (), scans).verdict() if scans else None
        if in_order is not None and in_order.blocked is None:
            return in_order
    return verdict


class _Judgement:
    """What is known of a factor so far.

    `lanes`: accumulators with one value per position in a block, as `sums` in `sums[i] += A[ko * 32 + i]`."""

    def __init__(
        self,
        kernel: Kernel,
        coordinates: Coordinates,
        factor: Factor,
        taints: Taints,
        states: tuple[State, ...] = (),
        scans: tuple[Scan, ...] = (),
    ):
        self.kernel, self.coordinates, self.factor, self.taints = kernel, coordinates, factor, taints
        self.states = states
        self.explained = {statement: state for state in states for statement in state.explained}
        self.scans, self.in_order = scans, frozenset().union(*(scan.body for scan in scans))
        self.vars = set(factor.roles)
        self.partial = PartialValues(kernel, coordinates, factor, states, self.in_order)
        self.updates: dict[Statement, Linear] = {}
        self.lanes: dict[LiveRange, None] = {}
        self.gated: list[Statement] = []
        self.aligned: str | None = None
        self.why_lanes: str | None = None

    def verdict(self) -> Verdict:
        blocked = next(self._obstacles(), None)
        if blocked is not None:
            return Verdict(blocked)
        masked = not self._padding_is_neutral(past_the_end=False)
        made = Reduction(
            self.partial.ops,
            self.updates,
            tuple(self.gated),
            self.partial.cut,
            self.partial.completed,
            masked,
            self.states,
            self.scans,
        )
        return Verdict(None, self.aligned, self.why_lanes, self._first(), made)

    def _first(self) -> str | None:
        """Why the first tile has to hold the first block: what is taken from the lowest value there is not to be."""
        names = [part.held.buffer.name for state in self.states if state.guarded for part in state.maxima]
        return f"{', '.join(names)} may stay at its start in a part of the first block" if names else None

    def _obstacles(self) -> Iterator[str]:
        """What keeps the factor from being split: after the first one, nothing is looked at any more."""
        yield from self._mixed_ranges()
        yield from self._leaks()
        yield from self._out_of_order()
        for state in self.states:
            for running in state.maxima:
                if running.of_block:
                    self._align(f"{running.held.buffer.name} is the maximum of one block")
        forms = {s: self._coordinate(s) for s in self.kernel.statements}
        for statement, form in forms.items():
            if statement.unknown and not self._by_programs:
                yield f"{statement.unknown} is not understood"
            yield from self._untyped_indices(statement)
            if form is not None:
                self._align(why_whole_blocks(statement, form, self.factor, self.kernel, self.coordinates))
                yield from self._write(statement, form)
            yield from self._lookup(statement, form)
        if problem := self.partial.follow():
            yield problem
        self._find_lanes()
        for statement, form in forms.items():
            if form is None:
                self._align(why_whole_blocks(statement, None, self.factor, self.kernel, self.coordinates))
            yield from self._repeats(statement, form)
        for statement, problem in self.partial.starts():
            if problem:
                yield problem
            self.gated.append(statement)
        if problem := self.partial.why_not_cut():
            yield problem
        yield from self._past_the_end()

    @cached_property
    def _by_programs(self) -> bool:
        return is_of_programs(self.kernel, self.coordinates, self.factor)

    def _align(self, reason: str | None) -> None:
        """Where loop variables are values, only the coordinate may count, or tiles must be whole blocks."""
        self.aligned = self.aligned or reason

    def _range(self, access: Access) -> LiveRange:
        return self.coordinates.ranges.of(access)

    def _coordinate(self, statement: Statement) -> Linear | None:
        """The statement's coordinate: that of the buffers it touches, or that of the loops around it."""
        form = self.coordinates.of_statement(statement).get(self.factor)
        return self.coordinates.around(statement, self.factor) if form is None else form

    def _mixed_ranges(self) -> Iterator[str]:
        """A buffer that holds the whole factor shrinks with it, so all its live ranges must agree on that."""
        for buffer, dim in mixed_dims(self.coordinates, self.factor):
            yield f"{buffer.name} dim {dim} holds the whole dim in one place and something else in another"

    def _leaks(self) -> Iterator[str]:
        """What depends on how far a state has come may be used in its update only."""
        written = {self._range(s.target) for s in self.explained}
        for state in self.states:
            for statement, used in state.uses.items():
                for live_range in used.keys() & written - state.ops.keys():
                    if statement not in self.explained:
                        yield f"{describe(statement)} uses {live_range.buffer.name}, which depends on the blocks before"

    def _out_of_order(self) -> Iterator[str]:
        """A loop that is resumed on every device leaves the state of its own part: nothing else may use that."""
        for scan in self.scans:
            self._align(f"{', '.join(scan.names)} is carried from block to block")
            for part in scan.carried if scan.is_resumed else ():
                for statement, access in part.held.reads:
                    own = statement.write is not None and statement.write.buffer.name in self.kernel.own
                    if statement.top > scan.top and statement not in self.in_order and not own:
                        yield f"{describe(statement)} uses {access.buffer.name} after the loop that carries it"

    def _untyped_indices(self, statement: Statement) -> Iterator[str]:
        """On-chip dims without a coordinate may be read at places that are loaded, and combined into: at places that
        are computed from the factor's loops, they then have `lanes`, or count whole blocks."""
        for access in statement.accesses:
            live_range = self._range(access)
            for dim, index in enumerate(access.indices):
                if live_range.is_param or self.coordinates.of_access(access, dim) is not None:
                    continue
                computed = vars_of([without_loads(index)], {}) & self.vars
                if access is statement.write and statement.op is not None:
                    if computed & self._block_loops:
                        self._align(f"{access.buffer.name} dim {dim} is indexed by {text_of(index)}")
                    elif computed:
                        self.lanes[live_range] = None
                elif computed and access is not statement.write and self._is_staged(live_range, computed):
                    self._align(f"{access.buffer.name} dim {dim} is indexed by positions in a block, {text_of(index)}")
                elif computed or (access is statement.write and bool(vars_of([index], self.kernel.binds) & self.vars)):
                    yield f"{access.buffer.name} dim {dim} is indexed by {text_of(index)}, which depends on the block"

    def _is_staged(self, live_range: LiveRange, computed: set[tirx.Var]) -> bool:
        """Whether a buffer on chip holds nothing of the factor's tiles, and positions in a block tell where it is read:
        on whole blocks, a device does what it would do on the whole tensor."""
        walked = (self.coordinates.of_statement(statement) for statement, _ in live_range.writes)
        return not computed & self._block_loops and not any(self.factor in places for places in walked)

    @cached_property
    def _block_loops(self) -> set[tirx.Var]:
        """The loops over blocks: a device counts them from where its tile starts."""
        return {form.ordered[0][0] for form in self.coordinates.forms[self.factor] if form.terms}

    def _write(self, statement: Statement, form: Linear) -> Iterator[str]:
        """What is written at many coordinates to one place is combined there, or is the same at all of them."""
        write = statement.write
        if write is None or self.coordinates.walks(write, self.factor):
            return
        scope = {loop.var for loop in self._range(write).scope}
        if set(form.terms) <= scope:
            return
        if statement in self.in_order:
            return
        if statement in self.explained:
            if statement in self.explained[statement].neutral:
                self.updates[statement] = form
            return
        if statement.op is not None and not self._starts_anew(statement, form, scope):
            if problem := self.partial.add(statement, statement.op, form.terms):
                yield problem
            self.updates[statement] = form
        elif not self._is_same_everywhere(statement):
            yield (
                f"{describe(statement)} keeps one of many coordinates' values: no reduction is known for it"
                if statement.op is None
                else f"{describe(statement)} starts anew in every block of it and keeps the last block's value only"
            )

    def _lookup(self, statement: Statement, form: Linear | None) -> Iterator[str]:
        """What data say of a dim of the factor is there on one device: what a statement makes of it is partial."""
        found = [
            (access, access.indices[dim])
            for access in statement.accesses
            for dim, index in enumerate(access.forms)
            if index is None and self._range(access).is_param and (access.buffer.name, dim) in self.factor.dims
        ]
        if found and form is not None:
            yield f"{describe(statement)} walks it, and takes of {found[0][0].buffer.name} what data say"
        if any(not same_expression(place, found[0][1]) for _, place in found):
            yield f"{describe(statement)} is at {len(found)} places of it that data say, maybe of several devices"
        is_whole = any(access is statement.write for access, _ in found)
        if found and not is_whole and (problem := self.partial.add(statement, statement.op or "sum", ())):
            yield problem

    def _starts_anew(self, statement: Statement, form: Linear, scope: set[tirx.Var]) -> bool:
        """Whether some loop of the coordinate gives the target a new start in every iteration, and only the last
        counts."""
        carried = self._range(statement.target).carried
        return any(
            v not in scope and not self._runs_once(v) and (statement.fresh or v not in carried) for v in form.terms
        )

    def _runs_once(self, var: tirx.Var) -> bool:
        """Whether one run of a statement takes all values of the variable, or there is only one."""
        return self.kernel.loops[var].kind == "tile" or self.kernel.runs_once(var)

    def _is_same_everywhere(self, statement: Statement) -> bool:
        """A store of a value that is the same at every coordinate of the factor, and not carried from one to the
        next."""
        return not self._tainted(statement) & self.vars and not self._range(statement.target).carried & self.vars

    def _tainted(self, statement: Statement) -> set[tirx.Var]:
        """The loop variables that what the statement writes may depend on, but for what was there before."""
        return used_vars(statement, self.kernel) | {v for a in statement.reads for v in self.taints[self._range(a)]}

    def _find_lanes(self) -> None:
        """What is in a single lane depends on where blocks start: unless only all lanes together are used, tiles have
        to be whole blocks."""
        for live_range in self.lanes:
            op = self.partial.op_of(live_range)
            for statement, access in live_range.reads:
                kept = op is not None and statement.op == op and keeps_partial(statement, access, op)
                if not kept:
                    self.why_lanes = f"{live_range.buffer.name} keeps one value per position in a block"
                    self._align(self.why_lanes)

    def _repeats(self, statement: Statement, form: Linear | None) -> Iterator[str]:
        """A statement inside loops of the factor that are not its coordinate runs once per block: it must not
        notice."""
        if statement.write is None or statement in self.explained or statement in self.in_order:
            return
        loops = {loop.var for loop in statement.loops if self._is_of_blocks(loop.var, statement)}
        scope = {loop.var for loop in self._range(statement.write).scope}
        around = loops - (set() if form is None else set(form.terms)) - self.partial.accounted(statement)
        if around <= scope:
            return
        contributes = self.partial.contributes(statement)
        counts = statement.op is not None and not statement.fresh
        if counts and not (contributes and reduction(statement.operation).idempotent):
            yield f"{describe(statement)} counts the blocks of it"
        same = not self._tainted(statement) & around if contributes else self._is_same_everywhere(statement)
        if not same:
            yield f"{describe(statement)} carries a value from one block of it to the next"

    def _is_of_blocks(self, var: tirx.Var, statement: Statement) -> bool:
        """Whether a loop walks blocks of the factor. One that runs once is left to the device that has its block, but
        where it stands within a block of a loop that devices split."""
        if var not in self.vars or self.kernel.loops[var].kind == "tile":
            return False
        steps = self.factor.roles
        around = [v for loop in statement.loops if (v := loop.var) in self.vars and not self._runs_once(v)]
        return not self._runs_once(var) or all(steps[v] < steps[var] for v in around)

    def _past_the_end(self) -> Iterator[str]:
        """Positions past the dim's end that the kernel's own blocks reach must not count, or the kernel means them."""
        if not takes_whole_blocks(self.kernel, self.factor) and not self._padding_is_neutral(past_the_end=True):
            yield f"blocks of {self.factor.block} reach past its end ({self.factor.size}), and what is there counts"

    def _padding_is_neutral(self, *, past_the_end: bool) -> bool:
        return all(
            past_the_end and self.explained[s].neutral[s]
            if s in self.explained
            else padding_is_neutral(s, self.kernel, self.coordinates, self.factor, past_the_end=past_the_end)
            for s in self.updates
        )
