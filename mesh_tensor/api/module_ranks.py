"""A planned module on the ranks of a process group: each rank runs the steps on its own tiles, in parts: until what
others wait for is there, and then; and what is added up on the way."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cached_property, partial
from typing import Any

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.plan.ir import leaves
from mesh_tensor.program.from_graph import ModuleProgram
from mesh_tensor.program.overlap import with_overlap_on
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import Program, ProgramValue
from mesh_tensor.program.steps import Step
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.alike import told, values_of
from mesh_tensor.runtime.ranks.faults import Faults, agree, anywhere, digest_of, program_facts
from mesh_tensor.runtime.ranks.rank_backend import RankBackend, in_parts
from mesh_tensor.runtime.ranks.rank_launch import RankLaunch
from mesh_tensor.runtime.ranks.ranks import Ranks
from mesh_tensor.runtime.ranks.redistribution import Part, one_of
from mesh_tensor.runtime.ranks.tiling import Tiling, tiling_of
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import Records
from mesh_tensor.targets.totals import can_be_totals, total_of

from .module_launch import LeaveFor, PlannedLaunch
from .module_ports import HeldWeights, ModulePort, Refined, constant_tensor, constants_digest, picked, ports_of
from .rank_ports import RankPort

HandOn = Callable[[dict[int, Part]], None]  # of results, by their numbers


class RankModuleLaunch(PlannedLaunch):
    """A plan, ready to run on `ranks`, as one thread calls it. Every rank has to make the same calls."""

    def __init__(
        self,
        plan: ModulePlan,
        target: Target,
        ranks: Ranks,
        weights: HeldWeights,
        overlap: str | int,
        carried: Records | None = None,
        *,
        whole: Mapping[str, Any],
        settled: bool = True,
        ends: Collection[int] = (),
        totals: Collection[int] = (),
        handed_on: Collection[int] = (),
    ) -> None:
        """`whole`: what is held, the same on all ranks. `settled`: the module was made for this DeviceMesh. One that
        was not may go on with other process groups, so weights stay whole beside what is laid out of them, unless they
        were given away. `ends`: the numbers of the parameters that `parts` forgets after their last use; `totals`:
        those of results that may be added to totals, `handed_on` of those that are wanted as soon as may be."""
        self.plan, self.ranks, self.lane = plan, ranks, ranks.calls.lane()
        self._settled = settled
        made = plan.made
        self._faults = faults = Faults(ranks, made.program.name)
        facts = program_facts(made.program, target.name, overlap) | {"constants": constants_digest(made.constants)}
        self.compare(whole, facts)
        self._digest = digest_of(facts)
        self.lane.run(self._digest)
        program = with_overlap_on(ranks.machine, made.program) if overlap == "auto" else made.program
        self._totals = added_up(made, program, totals)
        apart = by_names(made, ends, self._totals, handed_on)
        backend = RankBackend(program, target, ranks, faults, carried=carried, **apart)
        self._run, self._result, self._handed_on = RankLaunch(backend), made.result, sorted(handed_on)
        self._ports = {port.name: RankPort(port, ranks, self._run) for port in ports_of(plan)}
        self._inputs = dict(zip(plan.params, made.inputs, strict=True))
        values = made.program.values
        self._held = {n: constant_tensor(c, values[n]).padded_tile(ranks.rank) for n, c in made.constants.items()}
        self._held |= {self._inputs[name]: self._weight(name, weights) for name in weights}

    def compare(self, whole: Mapping[str, Any], facts: Mapping[str, str] | None = None) -> None:
        """Refuse on all ranks where what they are given whole, to be kept, is not the same on all of them."""
        facts = facts or {"kernel": self.plan.made.program.name}
        agree(self.ranks, self._faults, {**facts, **values_of(whole)})

    def _begin(self, tensors: Mapping[str, Any]) -> None:
        """What is sent from here on is of this run, on tensors that are the same on all ranks where they are whole."""
        given = told(tensors)
        self.lane.run(self._digest, given)
        if given and self._alone:
            anywhere(self.ranks, self._faults, [False])  # nothing else would tell

    @cached_property
    def _alone(self) -> bool:
        """Whether nothing is exchanged."""
        return not any(part.collectives for part in self.plan.made.program.parts)

    def __call__(self, tensors: Mapping[str, Any], alike: bool = False) -> Any:
        """What the function returns: DTensors if any argument is one, else global tensors, the same on every rank.
        `alike`: DTensors are known to lie alike on all ranks, so what lies as it has to needs no agreement."""
        entered = {self._inputs[n]: self._port(n).enter(n, tensor, alike=alike) for n, tensor in tensors.items()}
        known = {**self._held, **entered}
        self._begin(tensors)
        made = self._run(known, {})
        as_dtensors = any(is_dtensor(tensor) for tensor in tensors.values())
        return self._given_out(self._result, {**known, **made}, as_dtensors, tensors.values())

    def parts(
        self,
        given: list[Part],
        kept: dict[str, Any] | None = None,
        totals: dict[int, Part] | None = None,
        hand_on: HandOn | None = None,
    ) -> list[Part]:
        """What the function returns, as this rank's parts, for those of its parameters, in their order. Every
        rank has to make the same calls. `given` is empty afterwards. `kept`: as RankLaunch takes it; `totals` and
        `hand_on`: as `call_parts` of a module takes them."""
        held = {storage: tile() for storage, tile in self._fixed}
        for (storage, tiling, enter), part in zip(self._entries, given, strict=True):
            tile = part.tile if part.tiling is tiling and (part.is_ready or part.serves()) else None
            held[storage] = enter(part) if tile is None else tile
        given.clear()  # or what is forgotten on the way would stay
        self.lane.run(self._digest)
        added = self._added(totals, held) if totals else {}
        if hand_on is not None and self._run.hands_on:
            leaving = [(number, *self._exits[number]) for number in self._handed_on]
            self._run.on_tiles(held, kept, lambda: hand_on({n: leave(held[storage]) for n, storage, leave in leaving}))
        else:
            self._run.on_tiles(held, kept)
        exits = enumerate(self._exits)
        return [added[number] if number in added else leave(held[storage]) for number, (storage, leave) in exits]

    def _added(self, totals: dict[int, Part], held: dict[str, Any]) -> dict[int, Part]:
        """Those that lie as the results do, by their numbers; they are held for the run, and taken out."""
        found: dict[int, Part] = {}
        for number, (name, tiling, layout) in self._addable.items():
            total = totals.get(number)
            if total is not None and total.lies_in(tiling, layout):
                found[number] = totals.pop(number)
                held[name] = total.tile
        return found

    @cached_property
    def _addable(self) -> dict[int, tuple[str, Tiling, Sharding]]:
        """By the number of a result that may be added to a total: the name of that in a run, and how both lie."""
        made: dict[int, tuple[str, Tiling, Sharding]] = {}
        for number in self._totals:
            result = self._ports[self._result[number]]
            port = self._run.ports[self._result[number]]
            if result.stays and port.output is not None:
                made[number] = total_of(port.output_storage), port.output, one_of(result.names[1])
        return made

    @cached_property
    def _fixed(self) -> list[tuple[str, Callable[[], torch.Tensor]]]:
        """Per storage of what nobody passes: its tile. What is only a result has the storage of its name."""
        ports, found = self._run.ports, list[tuple[str, Callable[[], torch.Tensor]]]()
        for name, local in self._held.items():
            if name in ports:
                found.append((ports[name].input_storage, partial(self._run.entered, name, local)))
            else:
                found.append((name, partial(torch.Tensor.detach, local)))
        return found

    @cached_property
    def _entries(self) -> list[tuple[str, Tiling | None, Callable[[Part], torch.Tensor]]]:
        """Per parameter: its storage; how it lies there, if a part may lie so; and from a part to its tile."""
        return [self._tiled(name, own) for name, own in self._inputs.items()]

    def _tiled(self, parameter: str, own: str) -> tuple[str, Tiling | None, Callable[[Part], torch.Tensor]]:
        enter, port = self._port(parameter).entry(parameter), self._run.ports.get(own)
        if port is None or port.input is None:  # a result of the module is all that it is used for
            return own, None, enter
        tiling = None if port.fresh else port.input

        def tile(part: Part) -> torch.Tensor:
            made = self._run.entered(own, enter(part))
            if tiling is not None and made.data_ptr() == part.local.data_ptr():
                part.entered(made, tiling)
            return made

        return port.input_storage, tiling, tile

    @cached_property
    def _exits(self) -> list[tuple[str, Callable[[torch.Tensor], Part]]]:
        """Per result: its storage, and from what is there to a part."""
        return [self._left(name) for name in self._result]

    def _left(self, name: str) -> tuple[str, Callable[[torch.Tensor], Part]]:
        result, port = self._ports[name], self._run.ports.get(name)
        leave, named, shape = result.exit(), one_of(result.names[1]), result.port.shape
        if port is None:
            return name, lambda local: Part(leave(local), named, shape)
        tiling, storage = port.output or port.tiling, port.output_storage or port.input_storage
        if not result.stays:  # all ranks take part
            return storage, lambda tile: Part(leave(tiling.valid(tile)), named, shape)
        return storage, lambda tile: Part(None, named, shape, tile, tiling, lambda tile: leave(tiling.valid(tile)))

    def enter(self, name: str, tensor: Any) -> torch.Tensor:
        """This rank's part of a parameter's tensor."""
        return self._port(name).enter(name, tensor, keep=True)

    def reordered(self, name: str, local: torch.Tensor, places: torch.Tensor) -> torch.Tensor | None:
        """As `ModuleLaunch.reordered`, of this rank's part: the same on all ranks is None."""
        rows = self._port(name).port.rows(places)
        return None if rows is None else picked(local, rows[self.ranks.rank])

    def _entered(self, name: str, tensor: Any) -> torch.Tensor:
        return self._port(name).enter(name, tensor)

    def _ran(
        self, tensors: Mapping[str, Any], given: Mapping[str, Any], leave: LeaveFor | None
    ) -> Mapping[str, torch.Tensor]:
        self._begin(tensors)
        return self._run({**self._held, **given}, {}, leave=leave)

    def _valid(self, value: ProgramValue, tiles: Any) -> list[torch.Tensor]:
        return [tiling_of(value, self.ranks.rank).valid(tiles)]

    def _anywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        return anywhere(self.ranks, self._faults, flags)

    def _weight(self, name: str, weights: HeldWeights) -> torch.Tensor:
        """This rank's part of a weight. That of a DTensor may take a collective, so all ranks have to ask at once."""
        mine = self._port(name)
        if is_dtensor(weights[name]):
            return mine.enter(name, weights[name], keep=True)

        def lay_out(port: ModulePort, tensor: Any) -> tuple[torch.Tensor, Any]:
            part = mine.enter(name, tensor.full() if isinstance(tensor, (MeshTensor, Refined)) else tensor, keep=True)
            stays = isinstance(tensor, StoredTensor) or not (self._settled or weights.donated)
            return part, None if stays else mine.held(part)

        return weights.laid_out(name, mine.port, lay_out, self.ranks.rank)


def added_up(made: ModuleProgram, program: Program, numbers: Collection[int]) -> dict[int, str]:
    """Those results, by these numbers, that may be added to totals, as the values that they are in the program."""
    if not numbers:
        return {}
    found, there = (can_be_totals(each, made.result) for each in (made.program, program))
    return {n: found[made.result[n]] for n in numbers if made.result[n] in found and made.result[n] in there}


def by_names(
    made: ModuleProgram, ends: Collection[int], totals: Mapping[int, str], handed_on: Collection[int]
) -> dict[str, Any]:
    """Parameters and results, by their numbers, by the program's names, as RankBackend takes them."""
    return {
        "ends": {made.inputs[number] for number in ends} - set(leaves(made.result)),
        "totals": frozenset(totals.values()),
        "handed_on": {made.result[number] for number in handed_on},
    }


def around_handing_on(
    plan: ModulePlan, carried: Records, *, ends: Collection[int], totals: Collection[int], handed_on: Collection[int]
) -> tuple[Sequence[Step], Sequence[Step]]:
    """What a rank runs of a plan until the results `handed_on` are there, nothing where that comes last, and what it
    runs then; all as RankModuleLaunch takes it."""
    made = plan.made
    apart = by_names(made, ends, added_up(made, made.program, totals), handed_on)
    before, first, _ = in_parts(made.program, carried=carried, **apart)
    return before, first
