"""Cut a kernel around a loop for which devices take turns (rules.kernel.scans): nothing is known of what a device makes
of the state that it takes over but by running its part of the loop.

    turn       the loop, as far as the state needs it: the device whose turn it is runs it, from what it took over; the
               others leave what they have
    handover   what the next device starts from is what this one ended with
    starts     what every device started from
    ends       how the state is in the end
    rest       the kernel, whose loop starts from there

Turns are followed by handovers, the last but one by that to all devices, `starts`; the last turn is there for the state
in the end alone. States move from neighbour to neighbour, and nothing else does; what the loop does beside carrying its
state is left to the rest, which all devices do at the same time.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.recent import made_once
from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.scans import Scan
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import ALL_TURNS, OWN_ATTR
from mesh_tensor.tir.loops import is_backward
from mesh_tensor.tir.rewrite import buffer_like, over_elements, sequence

from .cut import Workspace, is_live, part_of
from .state_loop import Places, StateLoop, resumed

#: More devices than that don't wait for each other: each turn is a kernel of its own.
MOST_TURNS = 16


@dataclass(frozen=True, eq=False)
class Turn:
    """A kernel, or one that hands over (`moves`). `taken`, `left`: the workspaces of all devices from which it starts,
    and that it leaves; of the last one, without those, `ends` has the state in the end."""

    func: tirx.PrimFunc
    moves: bool
    taken: tuple[Workspace, ...]
    left: tuple[Workspace, ...]
    ends: tuple[Workspace, ...] = ()


@dataclass(frozen=True, eq=False)
class Turns:
    """The kernels in order, and the rest, which takes the `starts`, each of all devices, if its loop is run again."""

    kernels: tuple[Turn, ...]
    rest: tirx.PrimFunc
    starts: tuple[Workspace, ...]
    ends: tuple[Workspace, ...]

    @property
    def workspaces(self) -> list[Workspace]:
        """All of them, each of all devices."""
        return [w for kernel in self.kernels for w in (*kernel.left, *kernel.ends)]


@made_once(ANALYSES)
def take_turns(analysis: Analysis, scan: Scan, devices: int, suffix: str) -> Turns:
    """The kernel, whose loop so many devices run one after the other.

    Raises Blocked where there are too many, or the state's part of the kernel can't be told from the rest."""
    if devices > MOST_TURNS:
        names = ", ".join(scan.names)
        raise Blocked(
            f"{names} would be handed on from device to device {devices - 1} times, of at most {MOST_TURNS - 1}"
        )
    return _Turns(analysis, scan, devices, suffix).made()


class _Turns(StateLoop):
    def __init__(self, analysis: Analysis, scan: Scan, devices: int, suffix: str):
        super().__init__(analysis, scan, devices, suffix)
        self.held = [part.held for part in scan.carried if part.copied is None]
        self.copied = {part.held: part.copied for part in scan.carried if part.copied is not None}
        self.order = range(devices)[::-1] if is_backward(scan.loop.node) else range(devices)
        self.again = self.is_used_inside()
        live = [part.held for part in scan.carried if is_live(part.held, scan.top + 1)]
        of = self.ranges.of
        self.live = list(dict.fromkeys(of(self.copied[r].reads[0]) if r in self.copied else r for r in live))

    def made(self) -> Turns:
        self.check_binds()
        if len({part.held.buffer for part in self.scan.carried}) < len(self.scan.carried):
            raise Blocked("one buffer is carried as two states")
        kernels, left = list[Turn](), dict[LiveRange, Places]()
        starts = taken = self._of_all("start")
        for number, device in enumerate(self.order):
            is_last = number == self.devices - 1
            if number:
                taken = starts if is_last else self._of_all(f"next{number}")
                kernels.append(self._starts(left, taken) if is_last else self._handover(device, left, taken))
            if self.live or not is_last:
                before, left = taken if number else {}, self._of_all(f"turn{number}")
                kernels.append(self._turn(device, before, left))
        ends = {held: self.workspace(held, "end") for held in self.live}
        if ends:
            kernels.append(self._ends(left, ends))
        starts = starts if self.again else {}
        return Turns(tuple(kernels), self._rest(starts, ends), _all(starts), tuple(ends.values()))

    def _of_all(self, name: str) -> dict[LiveRange, Places]:
        return {held: self.places(self.workspace(held, name)) for held in self.held}

    def _before(self, end: int) -> list[tirx.Stmt]:
        """What the state, and its part of the loop if that is before `end`, need of what is before the loop."""
        kept = self.needed(set(self.held), end)
        found = [self.sliced(stmt, kept) for stmt in self.stmts[: self.scan.top]]
        return [stmt for stmt in found if stmt is not None]

    def _turn(self, device: int, taken: Mapping[LiveRange, Places], left: Mapping[LiveRange, Places]) -> Turn:
        top = self.scan.top
        loop = self.sliced(self.stmts[top], self.needed(set(self.held), top + 1))
        assert loop is not None
        stmts = [*self._before(top + 1), *self._taken_over(taken), resumed(loop, device)]
        stmts += [workspace.one.save() for workspace in left.values()]
        used = [w.one for w in (*taken.values(), *left.values())]
        made = part_of(self.analysis, stmts, used)
        own = {**self.kernel.own, **{str(w.one.buffer.name): "" for w in left.values()}}
        return Turn(made.with_attr(OWN_ATTR, own), False, _all(taken), _all(left))

    def _handover(self, device: int, left: Mapping[LiveRange, Places], taken: Mapping[LiveRange, Places]) -> Turn:
        """The device takes over what the one before it has; the others keep what they have."""
        body, beside = list[tirx.Stmt](), list[tirx.Buffer]()
        for held, workspace in left.items():
            mine, theirs = self._two(held)
            beside += [mine, theirs]
            body += [workspace.all.into(mine).restore(), self._neighbour(workspace).into(theirs).restore()]
            body += [_chosen(self.device == device, theirs, mine), taken[held].all.into(mine).save()]
        made = part_of(self.analysis, [self._of_each(body)], self._used(left, taken), beside)
        return Turn(made, True, (), _all(taken))

    def _starts(self, left: Mapping[LiveRange, Places], starts: Mapping[LiveRange, Places]) -> Turn:
        """The first device starts as the kernel does, every other one from what the one before it has."""
        body, beside = list[tirx.Stmt](), list[tirx.Buffer]()
        for held, workspace in left.items():
            mine, theirs = self._two(held)
            beside += [mine, theirs]
            body += [self._neighbour(workspace).into(theirs).restore(), _copied(held.buffer, mine)]
            body += [_chosen(self.device != self.order[0], theirs, mine), starts[held].all.into(mine).save()]
        stmts = [*self._before(self.scan.top), self._of_each(body)]
        return Turn(part_of(self.analysis, stmts, self._used(left, starts), beside), True, (), _all(starts))

    def _ends(self, left: Mapping[LiveRange, Places], ends: Mapping[LiveRange, Workspace]) -> Turn:
        """The state in the end is what the last device has."""
        last = {held: _at(left[held].all, tirx.IntImm("int32", self.order[-1])) for held in ends}
        stmts = [stmt for held, end in ends.items() for stmt in (last[held].restore(), end.save())]
        made = part_of(self.analysis, stmts, [*last.values(), *ends.values()])
        return Turn(made, False, (), (), tuple(ends.values()))

    def _rest(self, starts: Mapping[LiveRange, Places], ends: Mapping[LiveRange, Workspace]) -> tirx.PrimFunc:
        top = self.scan.top
        loop = [resumed(self.stmts[top], ALL_TURNS)] if self.again else []
        stmts = [*self.stmts[:top], *self._taken_over(starts), *loop]
        stmts += [*(w.restore() for w in ends.values()), *self._copies(ends), *self.stmts[top + 1 :]]
        return part_of(self.analysis, stmts, [*(w.one for w in starts.values()), *ends.values()])

    def _taken_over(self, taken: Mapping[LiveRange, Places]) -> list[tirx.Stmt]:
        """The state of a device's own place, and what is a copy of it."""
        return [*(w.one.restore() for w in taken.values()), *self._copies(taken)]

    def _copies(self, there: Collection[LiveRange]) -> list[tirx.Stmt]:
        return [made.node for made in self.copied.values() if self.ranges.of(made.reads[0]) in there]

    def _two(self, held: LiveRange) -> tuple[tirx.Buffer, tirx.Buffer]:
        return buffer_like(held.buffer, "mine"), buffer_like(held.buffer, "theirs")

    def _neighbour(self, workspace: Places) -> Workspace:
        """What the device before this one has; of the first, its own."""
        back = is_backward(self.scan.loop.node)
        at = tirx.min(self.device + 1, self.devices - 1) if back else tirx.max(self.device - 1, 0)
        return _at(workspace.all, at)

    def _of_each(self, body: Sequence[tirx.Stmt]) -> tirx.Stmt:
        return tirx.For(self.device, 0, self.devices, tirx.ForKind.SERIAL, sequence(list(body)))

    def _used(self, *workspaces: Mapping[LiveRange, Places]) -> list[Workspace]:
        return [w.all for each in workspaces for w in each.values()]


def _all(workspaces: Mapping[LiveRange, Places]) -> tuple[Workspace, ...]:
    return tuple(workspace.all for workspace in workspaces.values())


def _at(workspace: Workspace, device: tirx.PrimExpr) -> Workspace:
    """A device's place in the workspace of all."""
    return workspace.at((device, *workspace.mins[1:]))


def _chosen(condition: tirx.PrimExpr, theirs: tirx.Buffer, mine: tirx.Buffer) -> tirx.Stmt:
    def store(at: list[tirx.PrimExpr]) -> tirx.Stmt:
        value = tirx.Select(condition, tirx.BufferLoad(theirs, at), tirx.BufferLoad(mine, at))
        return tirx.BufferStore(mine, value, at)

    return over_elements(mine, store)


def _copied(source: tirx.Buffer, target: tirx.Buffer) -> tirx.Stmt:
    return over_elements(target, lambda at: tirx.BufferStore(target, tirx.BufferLoad(source, at), at))
