"""Cut a kernel around a loop that carries a state in order (rules.kernel.scans): every device starts where the devices
before it end.

    totals     the loop, as far as the state needs it, from 0: what a device makes of its part, and how much of what it
               takes over is left in the end
    starts     a fold over the devices: what each starts from, and the state in the end
    rest       the kernel, whose loop starts from there

The totals of all devices are gathered between the first two; that is all that is exchanged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.recent import made_once
from mesh_tensor.base.reductions import neutral
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.scans import Carried, Scan
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import OWN_ATTR, Statement, body_statements
from mesh_tensor.rules.kernel.states import Best, Stated
from mesh_tensor.tir.loops import BACKWARD, is_backward
from mesh_tensor.tir.rewrite import buffer_like, constant, exchange_buffers, fill, over_elements, sequence

from .cut import Workspace, is_live, part_of
from .scan_scales import Scale, scale_of
from .state_loop import Places, StateLoop, resumed


@dataclass(frozen=True, eq=False)
class Resumption:
    """The three kernels. `totals`: what devices leave for the second, `starts`: what they take from it, both by how
    many there are; `ends`: the state in the end."""

    first: tirx.PrimFunc
    second: tirx.PrimFunc
    rest: tirx.PrimFunc
    totals: tuple[Workspace, ...]
    starts: tuple[Workspace, ...]
    ends: tuple[Workspace, ...]


@made_once(ANALYSES)
def resume(analysis: Analysis, scan: Scan, devices: int, suffix: str) -> Resumption:
    """The kernel, whose loop every device resumes.

    Raises Blocked where the state's part of the kernel can't be told from the rest."""
    return _Resumer(analysis, scan, devices, suffix).made()


class _Resumer(StateLoop):
    def __init__(self, analysis: Analysis, scan: Scan, devices: int, suffix: str):
        super().__init__(analysis, scan, devices, suffix)
        self.again = [part for part in scan.carried if self.is_used_inside()]
        self.scales = {part: scale_of(self.analysis, part) for part in scan.carried if part.scaled}
        self.multiplied: set[Statement] = set()  # statements whose scales are multiplied up

    def made(self) -> Resumption:
        self.check_binds()
        if len({part.held.buffer for part in self.scan.carried}) < len(self.scan.carried):
            raise Blocked("one buffer is carried as two states")
        named = {part: self._workspaces(part, "total") for part in self.scan.carried}
        scales = {part: self._workspaces(part, "scale", scale) for part, scale in self.scales.items()}
        starts = {part: self._workspaces(part, "start") for part in self.again}
        after = [part for part in self.scan.carried if is_live(part.held, self.scan.top + 1)]
        ends = {part: self.workspace(part.held, "end") for part in after}
        first = self._first([w.one for w in (*named.values(), *scales.values())])
        second = self._second(named, scales, starts, ends)
        rest = self._rest({part: w.one for part, w in starts.items()}, ends)
        totals = tuple(w.all for w in (*named.values(), *scales.values()))
        return Resumption(first, second, rest, totals, tuple(w.all for w in starts.values()), tuple(ends.values()))

    def _workspaces(self, part: Carried, name: str, scale: Scale | None = None) -> Places:
        made = self.workspace(part.held, name)
        return self.places(made if scale is None else scale.of_workspace(made))

    # -- the three kernels ---------------------------------------------------------------------------------------------

    def _first(self, left: Sequence[Workspace]) -> tirx.PrimFunc:
        """The state's part of the loop, from its neutral element."""
        kept = self.needed({part.held for part in self.scan.carried}, self.scan.top + 1)
        loop = self.sliced(self.stmts[self.scan.top], kept)
        if any(scaled not in self.multiplied for part in self.scales for scaled in part.scaled):
            raise Blocked("a state is scaled where a condition says so for each of its elements")
        before = [self.sliced(stmt, kept) for stmt in self.stmts[: self.scan.top]]
        fresh = [p for p in self.scan.carried if p.starts_neutral]
        fills = [fill(p.held.buffer, constant(neutral(p.op, p.held.buffer.dtype), p.held.buffer.dtype)) for p in fresh]
        fills += [fill(scale.buffer, constant(1.0, scale.buffer.dtype)) for scale in self.scales.values()]
        stmts = [*(s for s in before if s is not None), *fills, *([] if loop is None else [resumed(loop)])]
        made = part_of(
            self.analysis, [*stmts, *(w.save() for w in left)], list(left), [s.buffer for s in self.scales.values()]
        )
        own = {**self.kernel.own, **{str(w.buffer.name): "" for w in left}}
        return made.with_attr(OWN_ATTR, own)

    def _second(
        self,
        named: Mapping[Carried, Places],
        scales: Mapping[Carried, Places],
        starts: Mapping[Carried, Places],
        ends: Mapping[Carried, Workspace],
    ) -> tirx.PrimFunc:
        """From where the kernel starts, device by device."""
        kept = self.needed({part.held for part in self.scan.carried}, self.scan.top)
        stmts = [s for stmt in self.stmts[: self.scan.top] if (s := self.sliced(stmt, kept)) is not None]
        body, beside, chips = list[tirx.Stmt](), list[tirx.Buffer](), dict[LiveRange, tirx.Buffer]()
        for part, workspace in named.items():
            chip = buffer_like(part.held.buffer, "total")
            beside.append(chip)
            body += [starts[part].all.save()] if part in starts else []
            body.append(workspace.all.into(chip).restore())
            if part in scales:
                beside.append(self.scales[part].buffer)
                body.append(scales[part].all.restore())
            chips[part.held] = chip
        body += [self._folded(part, chips[part.held]) for part in named if part.starts_neutral]
        body += [self._replaced(best, chips) for best in dict.fromkeys(part.best for part in named if part.best)]
        for stated in dict.fromkeys(part.stated for part in named if part.stated):
            combined, needed = self._combined(stated, chips)
            body.append(combined)
            beside += needed
        marks = {BACKWARD: True} if is_backward(self.scan.loop.node) else None
        stmts.append(tirx.For(self.device, 0, self.devices, tirx.ForKind.SERIAL, sequence(body), None, marks))
        stmts += [workspace.save() for workspace in ends.values()]
        used = [w.all for w in (*named.values(), *scales.values(), *starts.values())]
        return part_of(self.analysis, stmts, [*used, *ends.values()], beside)

    def _rest(self, starts: Mapping[Carried, Workspace], ends: Mapping[Carried, Workspace]) -> tirx.PrimFunc:
        top = self.scan.top
        loop = [resumed(self.stmts[top])] if self.again else []
        stmts = [*self.stmts[:top], *(w.restore() for w in starts.values()), *loop]
        stmts += [*(w.restore() for w in ends.values()), *self.stmts[top + 1 :]]
        return part_of(self.analysis, stmts, [*starts.values(), *ends.values()])

    def _folded(self, part: Carried, total: tirx.Buffer) -> tirx.Stmt:
        """What a device makes of the state that it takes over."""
        held = part.held.buffer

        def fold(at: list[tirx.PrimExpr]) -> tirx.Stmt:
            before: tirx.PrimExpr = tirx.BufferLoad(held, at)
            if part in self.scales:
                # 0 stays 0, whatever it is scaled with: a product may be infinite
                zero, scale = tirx.const(0, held.dtype), self.scales[part].load(at)
                is_zero = before == zero
                if part.starts_anew:
                    # Where it is NaN for another reason, so is the device's own
                    is_zero = tirx.Or(is_zero, tirx.isnan(scale))
                before = tirx.Select(is_zero, zero, before * scale)
            mine = tirx.BufferLoad(total, at)
            return tirx.BufferStore(held, _FOLDS[part.op](before, mine), at)

        return over_elements(held, fold)

    def _combined(self, stated: Stated, totals: Mapping[LiveRange, tirx.Buffer]) -> tuple[tirx.Stmt, list[tirx.Buffer]]:
        """What the author says that a device makes of the state that it takes over, and what that needs on chip."""
        made = stated.combination
        own = {buffer: buffer_like(buffer, self.suffix) for buffer in made.own}
        before = {b: held.buffer for b, held in zip(made.before, stated.held, strict=True)}
        after = {b: totals[held] for b, held in zip(made.after, stated.held, strict=True)}
        return exchange_buffers(made.body, {**own, **before, **after}), list(own.values())

    def _replaced(self, best: Best, totals: Mapping[LiveRange, tirx.Buffer]) -> tirx.Stmt:
        """The better one of what a device takes over and its own, with what comes along."""
        held, ranges = best.best.buffer, (*best.along, best.best)

        def replace(at: list[tirx.PrimExpr]) -> tirx.Stmt:
            better = best.better(tirx.BufferLoad(totals[best.best], at), tirx.BufferLoad(held, at))
            stores = [tirx.BufferStore(r.buffer, tirx.BufferLoad(totals[r], at), at) for r in ranges]
            return tirx.IfThenElse(better, sequence(stores), None)

        return over_elements(held, replace)

    def added_before(self, stmt: tirx.Stmt) -> list[tirx.Stmt]:
        """What multiplies up the scales of a nest of loops that scales states."""
        node = stmt
        while isinstance(node, tirx.For):
            node = node.body
        here = body_statements(node)
        found = [(scale, part, s) for part, scale in self.scales.items() for s in part.scaled if s.node in here]
        self.multiplied |= {statement for _, _, statement in found}
        return [scale.multiplied(statement, part.scaled[statement]) for scale, part, statement in found]


#: How what a device makes of nothing goes into what it takes over.
_FOLDS = {"sum": tirx.Add, "max": tirx.Max, "min": tirx.Min}
