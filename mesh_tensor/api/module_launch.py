"""A planned module on a virtual mesh; what it writes, kept there between its calls; and what it asks of whatever
records its calls for torch.autograd."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from tvm import relax

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.plan.ir import STATE_ATTR, leaves, map_tree
from mesh_tensor.program.builder import Overwritten
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import ProgramValue
from mesh_tensor.runtime.backend import Leave, Memory, may_overwrite
from mesh_tensor.runtime.elementwise import not_finite
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.virtual.launch import Launch
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, of_tiles
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import has_own_memory
from mesh_tensor.targets.totals import can_be_totals

from .module_ports import HeldWeights, ModulePort, Refined, constant_tensor, module_port, picked, ports_of, whole
from .own_memory import apart, in_own_memory, kept_apart, memories_of, parts_of

if TYPE_CHECKING:
    from .module_calls import AnyLaunch


# Whether steps may overwrite what a caller brings, asked before the first one that does.
LeaveFor = Callable[[Memory], bool]


class PlannedLaunch(ABC):
    """A plan, ready to run on the devices of this process."""

    plan: ModulePlan
    _result: Any
    _ports: dict[str, Any]
    _inputs: Mapping[str, str]
    _held: Mapping[str, Any]

    @abstractmethod
    def _entered(self, name: str, tensor: Any) -> Any:
        """A parameter's tensor as the program takes it for a call."""

    @abstractmethod
    def _ran(self, tensors: Mapping[str, Any], given: Mapping[str, Any], leave: LeaveFor | None) -> Mapping[str, Any]:
        """What the program makes of values that are `given`, of which `tensors` are a caller's."""

    @abstractmethod
    def _valid(self, value: ProgramValue, tiles: Any) -> list[torch.Tensor]:
        """The parts, without padding, of a value that is held as these tiles."""

    def leave(self, name: str, value: Any, full: bool) -> Any:
        """What the program has for a parameter, as callers know it: whole, or on the mesh."""
        return self._port(name).leave(value, not full)

    def _anywhere(self, flags: Sequence[bool]) -> Sequence[bool]:
        """Flag by flag, whether it is set in any process that has devices."""
        return flags

    def step(
        self, tensors: Mapping[str, Any], state: Mapping[str, Any], watched: Collection[str], leave: Leave
    ) -> tuple[Any, dict[str, Any], list[str]]:
        """The first result, whole, for these tensors and this state (of parameters, by name); the state that comes
        out, of which nothing else has the memory; and what of the `watched` state is not finite then, on any device.
        With `leave` it may be in the memory of `state`, and is finite then."""
        values, others = self.plan.made.program.values, [self._result[0], *map(self.plan.state.get, watched)]
        rest = [name for name in others if values[name].storage not in self._overwritten.storages]

        def may(memory: Memory) -> bool:
            def parts(name: str) -> list[torch.Tensor]:
                return self._valid(values[name], memory.held[values[name].storage])

            def tiles(storage: str) -> list[torch.Tensor]:
                held = memory.held[storage]
                return held if isinstance(held, list) else [held]

            sure = leave.given and may_overwrite(self._overwritten, rest, parts, tiles)
            leave.used = not self._anywhere([not sure])[0]
            return leave.used

        known, made = self._advanced(tensors, state, may)
        loss = self._given_out(self._result[:1], known, False, (*tensors.values(), *state.values(), *made.values()))[0]
        if leave.used:
            return loss, made, []
        bad = not_finite({name: parts_of(made[name]) for name in watched})
        found = self._anywhere([name in bad for name in watched])
        return loss, made, [name for name, is_bad in zip(watched, found, strict=True) if is_bad]

    def advance(self, tensors: Mapping[str, Any], state: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As a call, with this state; the results that are no state, and the state that comes out."""
        known, made = self._advanced(tensors, state, None)
        laid = any(isinstance(tensor, MeshTensor) or is_dtensor(tensor) for tensor in tensors.values())
        others = self._result[: len(self._result) - len(made)]
        return self._given_out(others, known, laid, (*tensors.values(), *state.values(), *made.values())), made

    @cached_property
    def _overwritten(self) -> Overwritten:
        return Overwritten.of(self.plan.made.program)

    def _advanced(
        self, tensors: Mapping[str, Any], state: Mapping[str, Any], leave: LeaveFor | None
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """All values, and what replaces the state."""
        given = {self._inputs[name]: self._entered(name, tensor) for name, tensor in tensors.items()}
        given |= {self._inputs[name]: tensor for name, tensor in state.items()}
        known = {**self._held, **given, **self._ran(tensors, given, leave)}
        return known, {name: known[result] for name, result in self.plan.state.items()}

    def _given_out(self, names: Any, values: Mapping[str, Any], laid: bool, others: Iterable[Any]) -> Any:
        """Results as callers know them, each in memory that no other one, nothing that is held, and none of the
        `others` has: what a caller writes into one changes nothing else."""
        taken = self._held_memories | memories_of(others) if self._may_share else set[int]()

        def leave(name: str) -> Any:
            result = self._ports[name].leave(values[name], laid)
            return in_own_memory(result, taken) if name in self._may_share else result

        return map_tree(names, leave)

    @cached_property
    def _held_memories(self) -> set[int]:
        return memories_of(self._held.values())

    @cached_property
    def _may_share(self) -> Collection[str]:
        """The results that may be in memory which something else has."""
        count = Counter(leaves(self._result))
        return {name for name in count if count[name] > 1 or not has_own_memory(self.plan.made.program, name)}

    def _port(self, parameter: str) -> Any:
        return self._ports[self._inputs[parameter]]


class ModuleLaunch(PlannedLaunch):
    """A plan, ready to run on a virtual mesh: weights and constants lie on the mesh already."""

    def __init__(
        self,
        plan: ModulePlan,
        target: Target,
        weights: HeldWeights,
        *,
        poison: bool = False,
        totals: Collection[int] = (),
    ) -> None:
        """`totals`: the numbers of results that may be added to totals."""
        self.plan = plan
        self._kin = plan.kin if plan.tells else None  # of the plans for which this can be `resized`
        made = plan.made
        self._result = made.result
        self._ports = {port.name: port for port in ports_of(plan)}
        self._inputs = dict(zip(plan.params, made.inputs, strict=True))
        self._held = {
            name: constant_tensor(constant, made.program.values[name]) for name, constant in made.constants.items()
        }
        self._held |= {self._inputs[name]: weights.laid_out(name, self._port(name), self.lay_out) for name in weights}
        found = can_be_totals(made.program, made.result) if totals else {}
        self._totals = {number: found[made.result[number]] for number in totals if made.result[number] in found}
        added = frozenset(self._totals.values())
        self._run = Launch(made.program, target, poison=poison, fixed=self._held, totals=added)

    def resized(self, plan: ModulePlan) -> ModuleLaunch | None:
        """The same for a plan that differs in sizes only; None where it has to be made anew."""
        if plan.kin is None or plan.kin is not self._kin:
            return None
        before, values = self.plan.made.program.values, plan.made.program.values
        if any(values[name] is not before[name] for name in self._held):
            return None
        run = self._run.resized(plan.made.program)
        if run is None:
            return None
        made = copy(self)
        for known in ("_overwritten", "_may_share", "_entries", "_exits"):
            vars(made).pop(known, None)
        made.plan, made._run = plan, run
        made._ports = self._ports | {
            new.name: module_port(plan, new)
            for new, old in zip(plan.ports, self.plan.ports, strict=True)
            if new is not old
        }
        return made

    def __call__(self, tensors: Mapping[str, torch.Tensor | MeshTensor]) -> Any:
        """What the function returns for these tensors; weights are there already."""
        given = {self._inputs[name]: self._port(name).refine(tensor) for name, tensor in tensors.items()}
        as_mesh_tensors = any(isinstance(tensor, MeshTensor) for tensor in tensors.values())
        made = self._run(given, {}, as_mesh_tensors=as_mesh_tensors)
        known = {**self._held, **given, **made}
        return self._given_out(self._result, known, as_mesh_tensors, tensors.values())

    def parts(self, given: Sequence[MeshTensor], totals: dict[int, MeshTensor]) -> list[Any]:
        """What the function returns for all of its parameters, in their order; results may be in memory of these.
        `totals`: as `call_parts` of a module takes them."""
        own = {port.name: port.refine(tensor) for port, tensor in zip(self._entries, given, strict=True)}
        made = self._run(own, {}, as_mesh_tensors=True, totals=self._added(totals))
        known = {**self._held, **own, **made}
        return [port.merge(known[port.name]) for port in self._exits]

    @cached_property
    def _entries(self) -> list[ModulePort]:
        return [self._ports[name] for name in self._inputs.values()]

    @cached_property
    def _exits(self) -> list[ModulePort]:
        return [self._ports[name] for name in self._result]

    def _added(self, totals: dict[int, MeshTensor]) -> dict[str, MeshTensor]:
        """Those that lie as the results do, by the values of these; they are taken out."""
        found: dict[str, MeshTensor] = {}
        for number, name in self._totals.items():
            total, value = totals.get(number), self.plan.made.program.values[name]
            if total is None:
                continue
            own = self._ports[self._result[number]].refine(total)
            assert isinstance(own, MeshTensor)
            lies_so = own.layout is layout_of(value.shape, torch_dtype(value.dtype), value.sharding)
            if lies_so and all(tile.is_contiguous() for tile in own.tiles()):
                found[name] = own
                del totals[number]
        return found

    def enter(self, name: str, tensor: torch.Tensor | MeshTensor | StoredTensor) -> MeshTensor:
        """A parameter's tensor as the program takes it."""
        if is_dtensor(tensor):
            refuse(
                f"parameter {name!r}: a DTensor, which lies on ranks, but this call runs on a virtual mesh",
                fix="go on with DTensors; reset_state() and load_state_dict() start anew",
            )
        return self.lay_out(self._port(name), tensor)[0]

    @staticmethod
    def lay_out(port: ModulePort, tensor: Any) -> tuple[MeshTensor, Any]:
        """A tensor as the program takes it, and the same memory as something to hold."""
        if isinstance(tensor, (StoredTensor, Refined)):
            tensor = tensor.read() if isinstance(tensor, StoredTensor) else tensor.full()
        made = port.spread(tensor) if isinstance(tensor, torch.Tensor) else port.refine(tensor)
        assert isinstance(made, MeshTensor)
        return made, Refined(made, port) if port.plain is None else port.merge(made)

    def reordered(self, name: str, tensor: MeshTensor, places: torch.Tensor) -> MeshTensor | None:
        """A parameter, as the program has it, with each row in place of another; None if rows change devices."""
        rows = self._port(name).rows(places)
        if rows is None:
            return None
        made: dict[int, torch.Tensor] = {}
        for tile, own in zip(tensor.tiles(), rows, strict=True):
            made.setdefault(id(tile), picked(tile, own))
        return of_tiles([made[id(tile)] for tile in tensor.tiles()], tensor.layout)

    def _entered(self, name: str, tensor: torch.Tensor | MeshTensor) -> torch.Tensor | MeshTensor:
        return self._port(name).refine(tensor)

    def _ran(self, _: Mapping[str, Any], given: Mapping[str, Any], leave: LeaveFor | None) -> Mapping[str, Any]:
        return self._run(given, {}, as_mesh_tensors=True, leave=leave)

    def _valid(self, value: ProgramValue, tiles: Any) -> list[torch.Tensor]:
        return layout_of(value.shape, torch_dtype(value.dtype), value.sharding).parts(tiles)


class ModuleState(Collection[str]):
    """Parameters that the results of one call replace in the next one, laid out as the launch that ran last has them.

    first   their values before the first call, by name, in any form that weights have"""

    def __init__(self, first: Mapping[str, Any]) -> None:
        self.first = dict(first)
        self._launch: AnyLaunch | None = None
        self._kept: dict[str, Any] = {}

    def call(self, launch: AnyLaunch, tensors: Mapping[str, Any]) -> Any:
        """The results that are no state for these tensors; a call that raises leaves the state as it was."""
        results, new = launch.advance(tensors, self._of(launch))
        new = kept_apart(new, tensors.values())
        self._launch, self._kept = launch, new
        return results[0] if len(results) == 1 else results

    def values(self, full: bool) -> dict[str, Any]:
        """As callers know it: whole, or as MeshTensors (DTensors)."""
        if self._launch is None:
            return {name: whole(tensor).clone() if full else tensor for name, tensor in self.first.items()}
        launch: Any = self._launch
        return {name: launch.leave(name, tensor, full) for name, tensor in self._kept.items()}

    def reorder(self, places: torch.Tensor) -> None:
        """Each row of what the last call left becomes what the row at its place was; it lies as it did."""
        launch: Any = self._launch
        for name, tensor in self._kept.items():
            made = launch.reordered(name, tensor, places)
            if made is None:
                whole = launch.leave(name, tensor, True)
                made = launch.enter(name, whole[places.to(whole.device)])
            self._kept[name] = made

    def __contains__(self, name: object) -> bool:
        return name in self.first

    def __iter__(self) -> Iterator[str]:
        return iter(self.first)

    def __len__(self) -> int:
        return len(self.first)

    def _of(self, launch: AnyLaunch) -> dict[str, Any]:
        """The state as this launch takes it."""
        if self._launch is launch:
            return self._kept
        return {name: launch.enter(name, tensor) for name, tensor in self.values(False).items()}


def state_of(func: relax.Function, weights: Mapping[str, Any], donated: bool) -> ModuleState:
    """The state of a module's function, if its parameters are among the weights; without them it is empty: they are
    passed at every call, and their new values are results. `donated`: nobody else has the tensors. Refused where some
    are among the weights, and some are not."""
    names = list((func.attrs or {}).get(STATE_ATTR, {}))
    missing = [name for name in names if name not in weights]
    if not names or len(missing) == len(names):
        return ModuleState({})
    if missing:
        refuse(f"the weights lack {listing(missing)}, which the module writes", fix="give all that it writes, or none")
    return ModuleState({name: weights[name] if donated else apart(weights[name]) for name in names})
