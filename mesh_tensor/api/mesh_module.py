"""MeshModule: a Relax module on a mesh, called with tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from tvm import ir

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import MODULE_SIZES, Recent
from mesh_tensor.importers.imported import call_tensors
from mesh_tensor.program.explain import explain, summary
from mesh_tensor.program.plan_module import ModulePlan
from mesh_tensor.program.program import Program
from mesh_tensor.runtime.ambient import undisturbed
from mesh_tensor.runtime.module_inputs import ModuleParam, bound
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.ranks.alike import values_of
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .module_calls import ModuleCalls, requires_gradients
from .module_launch import ModuleState
from .module_ports import HeldWeights, Refined, checked_state, whole
from .own_memory import apart

if TYPE_CHECKING:
    from .module_gradient import RecordedModule


class MeshModule(ModuleCalls):
    """A Relax module that is distributed over a mesh, as a callable. A call takes the function's inputs (its parameters
    that are no weights) by position or by name; a parameter that is a tuple takes one tensor per field: `t_0`, `t_1`,
    ... They are global torch tensors, MeshTensors or DTensors, and the call returns what the function returns. If any
    argument is a MeshTensor (a DTensor), all results are. torch.autograd records calls with inputs that require a
    gradient; weights are constants.

    It runs on a virtual mesh; if it was made for a DeviceMesh, or is called with DTensors, on the ranks of that
    DeviceMesh, all of which have to make the same calls with the same global tensors. What is said to be collective has
    to be called on all ranks, too."""

    @undisturbed
    def state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """The weights and the state that calls update (caches, running statistics), by all names that they had in
        torch.

        full   global tensors (collective, if weights are DTensors). Otherwise tensors as they are held: distributed
               ones as MeshTensors or DTensors, others as copies of what was given
        """
        held = list(self._weights.values())
        if full and any(map(is_dtensor, held)):  # torch gathers them: before, ranks make sure that all of them come
            self.on_all_ranks("weights to gather", lambda _: None, held)
        made = {**{name: self.weight(name, full) for name in self._weights}, **self._state_values(full)}
        return {theirs: tensor for name, tensor in made.items() for theirs in self._signature.names[name]}

    def weight(self, name: str, full: bool) -> Any:
        """The weight of one parameter, as in `state_dict`. Plain tensors are copies: writing to them changes no
        weight."""
        tensor = self._weights[name]
        if full or isinstance(tensor, Refined):
            return whole(tensor).clone() if isinstance(tensor, torch.Tensor) else whole(tensor)
        return tensor if isinstance(tensor, MeshTensor) or is_dtensor(tensor) else apart(tensor)

    @undisturbed
    def load_state_dict(self, state: Mapping[str, Any], *, strict: bool = True) -> None:
        """Replace weights and state. `state` is as `weights` of `distribute_module`: global tensors, DTensors,
        MeshTensors, or what `open_weights` gives, by name. Collective.

        strict   refuse a `state` that lacks weights, instead of keeping those that the module has

        Raises:
            MeshTensorError: names are unknown or missing, or shapes or dtypes differ; the weights stay as they were.
        """

        def new() -> dict[str, Any]:
            held = {**self._weights, **self._state.values(False)}
            new = self._constants.left_out(state, whole)
            return checked_state(self._signature, held, new, self._target.device_type, strict)

        given = state.values() if isinstance(state, Mapping) else ()
        with self._turn("a state that is loaded", given):
            made = self.on_all_ranks("weights to load", lambda _: new(), given, values_of)
            self._state = ModuleState({name: made.pop(name) for name in self._state})
            self._weights = HeldWeights(made, donated=True)
            self._launches, self._recordings = Recent(MODULE_SIZES), Recent(MODULE_SIZES)

    def reset_state(self) -> None:
        """Set the state that calls update back to what it was before the first call, or as it was loaded last.
        Collective."""
        with self._turn("a state that is reset"):
            self._state = self.on_all_ranks("a state that is reset", lambda _: ModuleState(self._state.first))

    @property
    def state_shapes(self) -> dict[str, tuple[int, ...]]:
        """The global shapes of the state that calls update, by the names that it had in torch."""
        names = self._signature.names
        return {theirs: tuple(first.shape) for name, first in self._state.first.items() for theirs in names[name]}

    def reorder_state(self, places: torch.Tensor) -> None:
        """Reorder the rows (dim 0) of the state that calls update: row i becomes what row `places[i]` was.
        Collective."""
        with torch.no_grad(), self._turn("a state that is reordered"):
            self.on_all_ranks("state", lambda _: self._state.reorder(places))

    def _turn(self, what: str, given: Iterable[Any] = ()) -> AbstractContextManager[None]:
        """A turn, where calls go on from what the module wrote."""
        return self.turns.one(what, given) if self._state else nullcontext()

    def _state_values(self, full: bool) -> dict[str, Any]:
        """What the module writes, by parameter. On ranks all have to ask."""
        if not self._state:
            return {}
        return self.on_all_ranks("state", lambda _: self._state.values(full))

    @undisturbed
    def __call__(self, *args: Any, **named: Any) -> Any:
        try:
            arguments, named = call_tensors(self._form, args, named)
        except Exception as error:
            self.refuse_call(error, (*args, *named.values()))
        given = [*arguments, *named.values()]

        def bind() -> dict[str, Any]:
            return self._signature.passed(self._held, arguments, named)

        if self._recorder is not None and requires_gradients(given):
            result = self._recorded(given, bind)
        else:
            with self._turn(f"a call of {self._function!r}, which goes on from what it wrote", given):
                result = self._run(given, bind, self._state.call if self._state else None)
        if self._form is None:
            return result
        return self._form.result(result if isinstance(result, tuple) else [result])

    def _recorded(self, given: Sequence[Any], bind: Callable[[], dict[str, Any]]) -> Any:
        with torch.no_grad():
            tensors, sizes = self._checked(given, bind, lambda tensors, sizes, _: (tensors, sizes))
        wanted = tuple(name for name, tensor in tensors.items() if tensor.requires_grad)
        recorded = self._recordings.made((self._plans.key(sizes), wanted), lambda: self._recording(sizes, wanted))
        if not recorded.wanted:
            with torch.no_grad():
                return self._run(given, bind)
        return recorded(tensors)

    def _recording(self, sizes: Mapping[Any, int], wanted: Sequence[str]) -> RecordedModule:
        problems = [f"it writes {self._signature.names[name][0]!r}" for name in self._state]
        problems += [f"its weight {name!r} requires a gradient, but is a constant" for name in self._with_gradients]
        if problems or self._recorder is None:
            refuse(
                problems or "it is part of something else",
                where=f"call of {self._function!r} with a tensor that requires a gradient",
                why="what the result's gradients are would not be all of them",
                fix="pass parameters that are trained at each call, by name, instead of as weights, or "
                "requires_grad_(False); export a model in eval mode, or use training_step",
            )
        mod, mesh = bound(self._mod, self._function, sizes), self._device_mesh or self._plans.stated.mesh
        return self._recorder(mod, self._function, mesh, wanted, self._weights)

    def bind(self, *args: Any, **named: Any) -> tuple[dict[str, Any], ModulePlan]:
        """Check the arguments of a call without running it: all tensors by parameter, weights included, and the plan
        for their sizes, in which no mesh axis is split into sub-axes."""
        arguments, named = call_tensors(self._form, args, named)
        tensors = self._signature.bind(self._held, arguments, named)
        self._plan = self._planned(self._signature.check(tensors), whole_axes=True)
        return tensors, self._plan

    @property
    def program(self) -> Program:
        """The steps that every device runs, for the sizes of the last call."""
        return self.plan.made.program

    @property
    def inputs(self) -> tuple[ModuleParam, ...]:
        """The parameters that calls pass, in order; unknown sizes in their shapes are symbols."""
        return tuple(param for param in self._signature.params if param.name not in self._held)

    @property
    def function(self) -> str:
        """The name of the function that is run."""
        return self._function

    @property
    def annotated_module(self) -> ir.IRModule:
        """The module in global view, with its annotations."""
        return self._mod

    @property
    def local_module(self) -> ir.IRModule:
        """The Relax module that one device runs, for the sizes of the last call."""
        return self.plan.local_module

    def twin(self) -> MeshModule:
        """A module that shares this one's plans and weights, for calls from another thread at the same time."""
        made = object.__new__(MeshModule)
        vars(made).update(vars(self), _launches=Recent(MODULE_SIZES), _last_of_parts=None)
        return made

    def with_parts(self, numbers: Iterable[int]) -> MeshModule:
        """A module of known sizes whose results of these numbers (positions) stay partial sums, where this one reduces
        them over devices at its end."""
        made = self.twin()
        made._plans = self._plans.with_parts(numbers)
        made._plan = made._planned({})
        return made

    def __reduce__(self) -> NoReturn:
        refuse(
            "a MeshModule can't be pickled", fix="pickle the weights, save the module, and distribute it again there"
        )

    def __repr__(self) -> str:
        names = ", ".join(param.name for param in self.inputs)
        return f"MeshModule({self._function}({names}), {self.mesh}, target={self._target.name!r})"

    def explain(self, *, short: bool = False) -> str:
        """The plan as text: layouts with their reasons, the steps, and their cost in bytes. `short`: a line for each
        kind of layer and of collective instead of all steps."""
        return summary(self.program, self._signature.places()) if short else explain(self.program)
