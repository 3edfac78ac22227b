"""What the kernels have in common that a kernel is cut into around a loop which carries a state: the part of the loop
that the state needs, and the workspaces by which devices hand the state on."""

from __future__ import annotations

from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.scans import Scan
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import RESUMED, TURN, Statement, body_statements
from mesh_tensor.tir.effects import changes_nothing
from mesh_tensor.tir.rewrite import loop_like, sequence, without_mark

from .cut import Workspace, check_padding, make_workspace, with_leading_dim


@dataclass(frozen=True, eq=False)
class Places:
    """A workspace as one device has it, and of all devices."""

    one: Workspace
    all: Workspace


class StateLoop:
    """A kernel's loop that carries a state. `device`: the place of one of so many `devices` in their workspaces."""

    def __init__(self, analysis: Analysis, scan: Scan, devices: int, suffix: str):
        self.analysis, self.scan, self.devices, self.suffix = analysis, scan, devices, suffix
        self.kernel, self.ranges = analysis.kernel, analysis.coordinates.ranges
        self.stmts = body_statements(self.kernel.root.body)
        self.by_node = {s.node: s for s in self.kernel.statements}
        self.device = tirx.Var("device", "int32")
        self.zero = tirx.IntImm("int32", 0)

    def workspace(self, held: LiveRange, name: str) -> Workspace:
        """A workspace for what a live range holds.

        Raises Blocked where that may count past its end, where a workspace reads as 0."""
        check_padding(held, self.analysis)
        return make_workspace(held, self.analysis, f"{name}_{self.suffix}")

    def places(self, made: Workspace) -> Places:
        """A workspace for every device's own."""
        return Places(with_leading_dim(made, 1, self.zero), with_leading_dim(made, self.devices, self.device))

    def check_binds(self) -> None:
        """Raises Blocked for scalars that whole programs bind before the loop."""
        before = [s for s in self.kernel.statements if isinstance(s.node, tirx.Bind) and s.top < self.scan.top]
        for statement in before:
            if all(loop.kind == "grid" for loop in statement.loops):
                name = statement.node.var.name
                raise Blocked(f"{name} is loaded before the point where the kernel would be cut")

    def is_used_inside(self) -> bool:
        """Whether the loop does anything but carry its state."""
        binds = {s for s in self.scan.body if isinstance(s.node, tirx.Bind)}
        return any(
            not changes_nothing(s.node) if s.write is None else self.ranges.of(s.write).is_param
            for s in self.scan.body
            if s not in binds
        )

    def needed(self, wanted: set[LiveRange], end: int) -> set[Statement]:
        """The statements before a top-level one that what is wanted depends on."""
        known, kept = set(wanted), set[Statement]()
        todo = list(wanted)
        while todo:
            live_range = todo.pop()
            for statement in [s for s, _ in live_range.writes if s.top < end and s not in kept]:
                kept.add(statement)
                for access in statement.reads:
                    source = self.ranges.of(access)
                    if source.is_param and source.writes:
                        raise Blocked(f"{access.buffer.name} is read and written where a state is carried")
                    if not source.is_param and source not in known:
                        known.add(source)
                        todo.append(source)
        binds = {s for s in self.kernel.statements if isinstance(s.node, tirx.Bind) and s.top < end}
        return kept | binds

    def sliced(self, stmt: tirx.Stmt, kept: set[Statement], scales: bool = False) -> tirx.Stmt | None:
        """A statement with what is kept of it; None if nothing is. `scales`: it is one of the loop's own."""
        if stmt in self.by_node:
            return stmt if self.by_node[stmt] in kept else None
        if isinstance(stmt, tirx.SeqStmt):
            return self._sequence(stmt, kept, scales)
        if isinstance(stmt, tirx.For):
            body = self._sequence(stmt.body, kept, stmt.loop_var.same_as(self.scan.loop.var))
            return None if body is None else _with_fewer(loop_like(stmt, stmt.extent, body), stmt)
        if isinstance(stmt, tirx.IfThenElse):
            then = self._sequence(stmt.then_case, kept, scales)
            other = None if stmt.else_case is None else self._sequence(stmt.else_case, kept, scales)
            is_empty = then is None and other is None
            return None if is_empty else tirx.IfThenElse(stmt.condition, then or tirx.Evaluate(0), other)
        raise Blocked("a state is carried by a loop that is more than loops, conditions and statements")

    def _sequence(self, stmt: tirx.Stmt, kept: set[Statement], scales: bool) -> tirx.Stmt | None:
        """Statements in order; before those that scale a state, what it is scaled with is multiplied up."""
        made: list[tirx.Stmt] = []
        for inner in body_statements(stmt):
            made += self.added_before(inner) if scales else []
            sliced = self.sliced(inner, kept, scales)
            made += [] if sliced is None else [sliced]
        return sequence(made) if made else None

    def added_before(self, stmt: tirx.Stmt) -> list[tirx.Stmt]:
        """What comes before one of the loop's own statements that is kept."""
        return []


#: What authors say of a pipeline's statements, one by one.
_OF_STATEMENTS = ("tl_pipeline_order", "tl_pipeline_stage")


def _with_fewer(loop: tirx.For, before: tirx.For) -> tirx.For:
    """A loop of some of the statements of what it was before: nothing is said of each of them any more."""
    if len(body_statements(loop.body)) < len(body_statements(before.body)):
        for mark in _OF_STATEMENTS:
            loop = without_mark(loop, mark)
    return loop


def resumed(loop: tirx.Stmt, turn: int | None = None) -> tirx.For:
    """The loop, which is resumed; `turn`: as in TURN."""
    if not isinstance(loop, tirx.For):
        raise Blocked("a state is carried by more than a loop")
    marks = {**dict(loop.annotations), RESUMED: True, **({} if turn is None else {TURN: turn})}
    return tirx.For(loop.loop_var, loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding, marks, loop.step)
