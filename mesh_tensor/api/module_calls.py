"""ModuleCalls: the way of a call of a module on a mesh, from tensors to what runs them."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from tvm import ir

from mesh_tensor.annotations.annotate_module import read_module_annotations
from mesh_tensor.annotations.names import with_flat_parameters
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import MODULE_SIZES, Recent, uncollected
from mesh_tensor.importers.constants import Constants
from mesh_tensor.importers.imported import CallForm
from mesh_tensor.program.plan_module import ModulePlan, PlanOptions
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import FreeStep, Step
from mesh_tensor.rules.operator.vjp import VJP
from mesh_tensor.rules.operator.workspace import recorded_bytes
from mesh_tensor.runtime.ambient import Computing, undisturbed
from mesh_tensor.runtime.backend import Leave
from mesh_tensor.runtime.module_inputs import ModuleSignature, refuse_outside
from mesh_tensor.runtime.ranks import ranks_of
from mesh_tensor.runtime.ranks.dtensor import mesh_of
from mesh_tensor.runtime.ranks.lane import Lane
from mesh_tensor.runtime.ranks.ranks import Ranks
from mesh_tensor.runtime.ranks.redistribution import Part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.kernels import find_target
from mesh_tensor.targets.op_steps import Records
from mesh_tensor.targets.totals import can_be_totals

from .module_launch import ModuleLaunch, state_of
from .module_plans import ModulePlans
from .module_ports import HeldWeights
from .module_ranks import HandOn, RankModuleLaunch, around_handing_on
from .on_ranks import OnRanks, Turns, device_mesh_of
from .own_memory import kept_apart

if TYPE_CHECKING:
    from .module_gradient import RecordedModule

T = TypeVar("T")
AnyLaunch: TypeAlias = "ModuleLaunch | RankModuleLaunch"


# Of a module's function on a mesh, where gradients of some parameters are asked for; the weights are constants.
Recorder = Callable[[ir.IRModule, str, Any, Sequence[str], HeldWeights], "RecordedModule"]


def requires_gradients(given: Sequence[Any]) -> bool:
    """Whether autograd is to record a call with these. MeshTensors carry no gradients."""
    return (
        torch.is_grad_enabled()
        and any(isinstance(value, torch.Tensor) and value.requires_grad for value in given)
        and not any(isinstance(value, MeshTensor) for value in given)
    )


class ModuleCalls(OnRanks):
    """What calls of a module have in common: on which ranks they run, and what these agree on; their tensors, checked;
    the plan for their sizes, and what is ready to run it. Training and pipelines call modules by what stands here."""

    def __init__(
        self,
        mod: ir.IRModule,
        mesh: Any,
        *,
        weights: Mapping[str, Any],
        function: str,
        target: str,
        strict: bool,
        poison: bool,
        options: PlanOptions,
        donate: bool = False,
        form: CallForm | None = None,
        constants: Constants | None = None,
        recorder: Recorder | None = None,
        kept: Collection[str] = (),
    ) -> None:
        """`kept`: parameters that callers have as plans want them, from one call to the next."""
        self._function, self._target = function, find_target(target)
        self._form, self._constants, self._recorder = form, constants or Constants(), recorder
        self._poison, self._options = poison, options
        mod = with_flat_parameters(mod, function)
        self._signature = ModuleSignature(mod, function)
        given = self._signature.weights(weights, self._target.device_type)
        self._state, self.turns = state_of(mod[function], given, donate), Turns(self.as_call)
        self._weights = HeldWeights.of({n: t for n, t in given.items() if n not in self._state}, weights, donate)
        self._laid_out = frozenset({*self._weights, *self._state, *kept})
        self._with_gradients = [n for n, t in weights.items() if isinstance(t, torch.Tensor) and t.requires_grad]
        self._recordings: Recent[tuple, RecordedModule] = Recent(MODULE_SIZES)
        self._device_mesh = mesh if type(mesh).__name__ == "DeviceMesh" else device_mesh_of(self._weights.values())
        named = mesh_of(mesh) if mesh is self._device_mesh and mesh is not None else mesh
        stated = read_module_annotations(mod, function, None if named is None else Mesh(named), strict=strict)
        self._mod, self.mesh = stated.module, stated.mesh if named is None else Mesh(named)
        self._plans = ModulePlans(stated, function, self.mesh, self._signature.symbols, strict, options)
        self._launches: Recent[tuple, AnyLaunch] = Recent(MODULE_SIZES)
        self._last_of_parts: RankModuleLaunch | None = None
        self._carried: Records = {}
        self._ends: Collection[int] = ()
        self._totals: Collection[int] = ()
        self._handed_on: Collection[int] = ()
        self._plan: ModulePlan | None = None
        self._open = self._signature.is_open(given)
        self._looked_up: tuple[ModulePlan | None, HeldWeights | None] = None, None
        if not self._signature.symbols:
            self._plan = self._planned({})
        if donate:
            weights.clear()  # type: ignore[attr-defined]  # a MutableMapping, as was checked
            gc.collect()  # exported programs, which have the weights too, are cycles

    @undisturbed
    def call_alike(self, *args: Any) -> Any:
        """A call with MeshTensors, or with DTensors known to lie alike on all ranks: these are not compared."""
        use = self._state.call if self._state else _call_alike
        return self._run(args, lambda: self._signature.passed(self._held, args, {}), use)

    def call_tiles(self, tensors: Sequence[MeshTensor], totals: dict[int, MeshTensor]) -> list[MeshTensor]:
        """As `call_parts`, on a virtual mesh."""
        launch = self._launches.get(((), None)) or self._launch({}, None)
        assert isinstance(launch, ModuleLaunch)
        with Computing():
            return launch.parts(tensors, totals)

    def carry(self, records: Records) -> None:
        """From now on what torch keeps in these steps is carried to another module, or from one, by `call_parts`."""
        self._carried = records

    def carried_bytes(self) -> int:
        """What a call leaves on a device for another module (see `carry`), beside its results."""
        steps = [step for step in self.plan.made.program.ops if step.results[0] in self._carried]
        return sum(recorded_bytes(step.call) for step in steps if step.call.operator != VJP)

    def forget(self, numbers: Collection[int]) -> None:
        """From now on `call_parts` forgets these parameters, by their numbers, after their last use."""
        self._ends = numbers

    def add_up(self, numbers: Collection[int]) -> None:
        """From now on the results of these numbers may be added to totals that are given with a call."""
        self._totals = numbers

    def hand_on_first(self, numbers: Collection[int]) -> None:
        """From now on `call_parts` may hand on the results of these numbers before others are computed."""
        self._handed_on = numbers

    def around_handing_on(self) -> tuple[Sequence[Step], Sequence[Step]]:
        """What a rank runs in `call_parts` until it hands on what comes first, nothing where all is handed on at the
        end, and what it runs then."""
        ways = {"ends": self._ends, "totals": self._totals, "handed_on": self._handed_on}
        return around_handing_on(self.plan, self._carried, **ways)

    def in_memory(self, forgets: bool, added_up: bool = True) -> Program:
        """The program as far as memory goes. `forgets`: parameters that `call_parts` forgets end with their last use.
        `added_up`: there are totals for all results that may be added to some, which have no memory of their own."""
        made = self.plan.made
        program, inputs = made.program, [made.inputs[number] for number in self._ends] if forgets else []
        names = can_be_totals(program, made.result)
        totals = self._totals if added_up else ()
        added = [names[name] for number in totals if (name := made.result[number]) in names]
        none = {name: replace(program.values[name], shape=(0,) * len(program.values[name].shape)) for name in added}
        ended = {program.values[name].storage for name in inputs} - program.outputs
        steps = list[Step]()
        for step in reversed(program.steps):
            used = dict.fromkeys(program.values[name].storage for name in step.uses)
            steps += [FreeStep(storage) for storage in used if storage in ended]
            ended -= used.keys()
            steps.append(step)
        return replace(program, steps=tuple(reversed(steps)), values={**program.values, **none})

    def call_parts(
        self,
        parts: list[Part],
        device_mesh: Any,
        kept: dict[str, Any] | None = None,
        totals: dict[int, Part] | None = None,
        hand_on: HandOn | None = None,
    ) -> list[Part]:
        """A call with this rank's parts of all parameters, in order: nothing is checked, and nothing is said of how
        torch computes. The function has known sizes, returns a tuple of tensors, and has no weights here. `parts` is
        empty afterwards. `kept` has what is carried to this call (see `carry`), and gets what is carried from it.
        `totals` has by the number of a result (see `add_up`) what it is to be added to, of which nobody else has the
        memory: the result is the sum then, and it is no longer there. `hand_on` gets those results that may be
        handed on early (see `hand_on_first`), if they are there before the rest is computed."""
        launch = self._last_of_parts
        ranks = launch.ranks if launch else ranks_of(self.mesh, device_mesh, self._target.device_type)
        with ranks.calls.lane() as lane:
            if launch is None or launch.lane is not lane:
                made = self._launch({}, ranks)
                assert isinstance(made, RankModuleLaunch)
                launch = self._last_of_parts = made
            return launch.parts(parts, kept, totals, hand_on)

    @undisturbed
    def step(
        self, tensors: Mapping[str, Any], state: Mapping[str, Any], watched: Collection[str], leave: Leave
    ) -> tuple[Any, dict[str, Any], list[str]]:
        """The function's first result for these tensors; what replaces `state` (of `as_state`) in the next call; and
        the names of the `watched` that hold NaN or infinity then, alike on all ranks. With `leave` it may be in the
        memory of `state`, and is finite then."""
        return self._run(
            tensors.values(), lambda: dict(tensors), lambda launch, given: launch.step(given, state, watched, leave)
        )

    @undisturbed
    def as_state(self, tensors: Mapping[str, Any]) -> dict[str, Any]:
        """Tensors for parameters, laid out as the program takes them; they share no memory with those given."""

        def enter(launch: AnyLaunch, given: Mapping[str, Any]) -> dict[str, Any]:
            if isinstance(launch, RankModuleLaunch):
                launch.compare(given)
            entered = {name: launch.enter(name, tensor) for name, tensor in given.items()}
            return kept_apart(entered, given.values())

        return self._run(tensors.values(), lambda: dict(tensors), enter)

    @undisturbed
    def whole_state(self, state: Mapping[str, Any], full: bool | None) -> dict[str, Any]:
        """What `as_state` laid out, or a step left, as callers know it: whole (on ranks DTensors, unless `full`)."""

        def leave(launch: AnyLaunch, _: Mapping[str, Any]) -> dict[str, Any]:
            whole = isinstance(launch, ModuleLaunch) if full is None else full
            return {name: launch.leave(name, tensor, whole) for name, tensor in state.items()}

        return self._run((), dict, leave)

    def _run(
        self, given: Iterable[Any], bind: Callable[[], dict[str, Any]], use: Callable[[Any, Any], Any] | None = None
    ) -> Any:
        """What the launch, or its `use`, gives for the tensors that `bind` gives by parameter, but for weights, once
        they are checked."""

        def used(tensors: Mapping[str, Any], sizes: Mapping[Any, int], ranks: Ranks | None) -> Any:
            launch = self._launch(sizes, ranks)
            with Computing():
                return launch(tensors) if use is None else use(launch, tensors)

        return self._checked(given, bind, used)

    def _checked(
        self,
        given: Iterable[Any],
        bind: Callable[[], dict[str, Any]],
        then: Callable[[dict[str, Any], Mapping[Any, int], Ranks | None], T],
    ) -> T:
        """What `then` gives for the tensors that `bind` gives by parameter, checked; the sizes of symbols; and the
        ranks that it runs on."""
        device_mesh = self._device_mesh or device_mesh_of(given)
        if device_mesh is None:
            return then(*self._bound(bind, None), None)
        ranks = ranks_of(self.mesh, device_mesh, self._target.device_type)
        with self.as_call(given):
            return then(*self._bound(bind, ranks), ranks)

    def _has_run(self, lane: Lane) -> bool:
        modules = [self, *(module for recorded in self._recordings for module in recorded.modules)]
        launches = [launch for module in modules for launch in module._launches]
        return any(launch.lane is lane for launch in launches if isinstance(launch, RankModuleLaunch))

    def _bound(
        self, bind: Callable[[], dict[str, Any]], ranks: Ranks | None
    ) -> tuple[dict[str, Any], Mapping[Any, int]]:
        """What is no weight of a call's tensors, checked, and the sizes of symbols, for which there is a plan then."""
        passed = bind()
        tensors = {**self._held, **passed} if self._open else passed
        sizes = self._signature.check(tensors, self._target.device_type)
        plan = self._plan = self._planned(sizes, ranks)
        if self._options.check_indices:
            checked, weights = self._looked_up  # what is held stays the same
            is_known = checked is plan and weights is self._weights
            tensors = passed if is_known else {**self._held, **passed}
            refuse_outside(plan.index_checks, tensors, self._function, self._signature.places)
            self._looked_up = plan, self._weights
        return passed, sizes

    @property
    def _held(self) -> Mapping[str, Any]:
        """The parameters that calls don't pass; those that are written as they were first."""
        return {**self._weights, **self._state.first} if self._state else self._weights

    @property
    def plan(self) -> ModulePlan:
        """Every stage of the module's way, for the sizes of the last call."""
        if self._plan is None:
            refuse(
                f"module function {self._function!r} has no plan yet: it has symbolic sizes",
                fix="call it first; its plan is then that of the sizes it was called with",
            )
        return self._plan

    def plan_as_passed(self) -> ModulePlan:
        """A plan whose parameters, weights too, are all in the order in which callers have them, on the axes that they
        have."""
        if not any(port.order for port in self.plan.ports) and self.plan.refinement is None:
            return self.plan
        return self._plans.new(self._sizes, (), whole_axes=True)

    @uncollected
    def _launch(self, sizes: Mapping[Any, int], ranks: Ranks | None) -> AnyLaunch:
        key = (self._plans.key(sizes), None if ranks is None else ranks.calls.lane())
        launch = self._launches.get(key)
        if launch is None:
            plan = self._plan = self._planned(sizes, ranks)
            self._launches.drop(lambda key: key[1] is not None and not key[1].is_current())
            if ranks is None:
                launch = self._resized(plan) or ModuleLaunch(
                    plan, self._target, self._weights, poison=self._poison, totals=self._totals
                )
            else:
                made_for = plan, self._target, ranks, self._weights, self._options.overlap, self._carried
                settled = self._device_mesh is not None
                launch = RankModuleLaunch(
                    *made_for,
                    whole=self._held,
                    settled=settled,
                    ends=self._ends,
                    totals=self._totals,
                    handed_on=self._handed_on,
                )
            self._launches.put(key, launch)
        return launch

    def _resized(self, plan: ModulePlan) -> ModuleLaunch | None:
        """A launch as there is one for other sizes."""
        if plan.kin is None:
            return None
        others = (launch for launch in self._launches if isinstance(launch, ModuleLaunch))
        return next((made for launch in others if (made := launch.resized(plan)) is not None), None)

    def _planned(self, sizes: Mapping[Any, int], ranks: Ranks | None = None, whole_axes: bool = False) -> ModulePlan:
        self._sizes = sizes
        return self._plans.of(sizes, self._laid_out, whole_axes, on_ranks=ranks is not None)


def _call_alike(launch: AnyLaunch, tensors: Mapping[str, Any]) -> Any:
    return launch(tensors, alike=True) if isinstance(launch, RankModuleLaunch) else launch(tensors)
