"""Calls of a module that torch.autograd records: its forward, which gives what its backward takes, too; and that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from tvm import ir

from mesh_tensor.annotations.names import relax_function, source_names
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.stages import Stage, part
from mesh_tensor.plan.gradient import depending_on, readable
from mesh_tensor.plan.ir import leaves
from mesh_tensor.runtime.ranks import gradient_like, is_dtensor, lies_like_torch, redistribute
from mesh_tensor.runtime.ranks.dtensor import as_dtensor, local_part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute

from .fragments import Fragment, Options, StageFragments, training_fragments
from .module_weights import HeldWeights

Tensors = Mapping[str, Any]


class RecordedModule:
    """A module's function of known sizes, as autograd runs it where gradients of the parameters `wanted` are asked for.

    Gradients are laid out as what they are the gradients of; what the backward needs of the forward stays on the mesh.
    Parameters on which no result of floats depends have none, as in torch.

    Raises:
        MeshTensorError: an operator between them and the results has no gradient.
    """

    def __init__(
        self, mod: ir.IRModule, function: str, mesh: Any, wanted: Sequence[str], weights: HeldWeights, options: Options
    ) -> None:
        self.function, self._flow = function, Flow(mod, function)
        flow = self._flow
        self._device_mesh = mesh if type(mesh).__name__ == "DeviceMesh" else None
        self.wanted, self._differentiable = _with_influence(flow, wanted)
        self._gives = tuple(name for name in dict.fromkeys(flow.results) if name in flow.bindings)
        self._weights, self._seeds = weights, frozenset(map(gradient_name, self._gives))
        self._fragments: StageFragments | None = None
        if self.wanted:
            params = [name for name in flow.params if name not in self.wanted]
            module = part(flow, set(flow.bindings), [*params, *self.wanted], self._gives)
            stage = Stage(0, "", module, tuple(params), dict.fromkeys(self.wanted, 0), self._gives, self._gives)
            constant = {*weights, *source_names(relax_function(mod, function)).values()}
            options = replace(options, weights=weights)
            self._fragments = training_fragments(
                stage, mesh, {}, options, self.wanted, "B", constant=tuple(constant.intersection(flow.params))
            )

    @property
    def modules(self) -> list[Any]:
        """The modules that it runs."""
        return [] if self._fragments is None else [part.module for part in self._fragments.fragments.values()]

    def __call__(self, tensors: Tensors) -> Any:
        """What the function returns for these tensors of all its parameters that are no weights."""
        call = _Call(self, tuple(tensors), self.wanted, any(is_dtensor(tensor) for tensor in tensors.values()))
        made = dict(zip(self._gives, _Recorded.apply(call, *tensors.values()), strict=True))
        known = {name: tensors[name] for name in self._flow.results if name in tensors}
        return self._flow.tree(known | made)

    def forward(self, tensors: Tensors) -> dict[str, Any]:
        """What the forward gives, on the mesh, by name."""
        fragment = self._fragment("F")
        given = [tensors[name] for name in fragment.takes if name not in self._weights]
        if not any(is_dtensor(tensor) for tensor in given):  # so that what it makes stays on the mesh
            return self._ran(fragment, [self._on_mesh(given[0], fragment), *given[1:]], True)
        return self._ran(fragment, given)

    def backward(self, tensors: Tensors) -> dict[str, Any]:
        """The gradients, on the mesh, by the names of parameters."""
        fragment = self._fragment("B")
        given = [self._compared(tensors[name], name) for name in self.backward_takes()]
        if not any(isinstance(tensor, MeshTensor) or is_dtensor(tensor) for tensor in given):
            given[0] = self._on_mesh(given[0], fragment)
        made = self._ran(fragment, given, True)
        return {name: made[gradient_name(name)] for name in self.wanted}

    def backward_takes(self) -> tuple[str, ...]:
        """What the backward takes of what went into the forward, or came out of it; and gradients of results."""
        return tuple(name for name in self._fragment("B").takes if name not in self._weights)

    def results(self) -> tuple[str, ...]:
        """The results that the function computes, each once."""
        return self._gives

    def is_constant(self, name: str) -> bool:
        """Whether a result has no gradient."""
        return name not in self._differentiable

    def blank(self, name: str) -> torch.Tensor:
        """The gradient of a result that nothing depends on."""
        shape, dtype = self._fragment("F").types[name]
        return torch.zeros(shape, dtype=dtype)

    def _fragment(self, kind: str) -> Fragment:
        assert self._fragments is not None
        return self._fragments.fragments[kind]

    def _ran(self, fragment: Fragment, given: Sequence[Any], alike: bool = False) -> dict[str, Any]:
        """What a fragment makes, on the mesh. `alike`: DTensors are known to lie alike on all ranks."""
        run = fragment.module.call_alike if alike else fragment.module
        return dict(zip(fragment.gives, run(*given), strict=True))

    def _compared(self, tensor: Any, name: str) -> Any:
        """What the backward takes; a gradient that lies on ranks as it has to, which they agree on."""
        layout = self._fragment("B").layouts[name]
        if not is_dtensor(tensor) or name not in self._seeds or not lies_like_torch(layout, tensor.shape):
            return tensor
        return redistribute(tensor, layout)

    def _on_mesh(self, tensor: torch.Tensor, fragment: Fragment) -> Any:
        if self._device_mesh is not None:
            layout = Sharding.of(fragment.module.mesh, tensor.ndim, {})
            return as_dtensor(tensor.detach(), self._device_mesh, layout, tensor.shape)
        return distribute(tensor.detach(), fragment.module.mesh, {})


def _with_influence(flow: Flow, wanted: Sequence[str]) -> tuple[tuple[str, ...], set[str]]:
    """The parameters on which results of floats depend, through what has gradients; and these results."""
    _, graph = readable(flow.mod, flow.function)
    names = dict(zip(leaves(graph.result), flow.results, strict=True))
    computed = {value for value in names if value not in graph.params}
    found = {v.name: depending_on(graph, [v]) & computed for v in graph.params if v.name in wanted}
    return tuple(n for n in wanted if found[n]), {names[value] for values in found.values() for value in values}


@dataclass(frozen=True, eq=False)
class _Call:
    """One call: `inputs` are the names of its tensors, `wanted` those whose gradients are asked for."""

    recorded: RecordedModule
    inputs: tuple[str, ...]
    wanted: tuple[str, ...]
    on_mesh: bool  # whether results are DTensors

    def outside(self, tensor: Any, on_mesh: bool) -> torch.Tensor:
        """A tensor on the mesh as callers know it."""
        if isinstance(tensor, MeshTensor):
            return tensor.full()
        if is_dtensor(tensor) and not on_mesh:
            return local_part(redistribute(tensor, {}))  # ranks agree on it
        return tensor


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        recorded, given = call.recorded, dict(zip(call.inputs, tensors, strict=True))
        made = recorded.forward(given)
        results = {name: call.outside(made[name], call.on_mesh) for name in recorded.results()}
        taken = recorded.backward_takes()
        # what callers have is kept as torch keeps it, which sees when it is written into
        outer = {name: tensor for name, tensor in {**given, **results}.items() if name in taken}
        ctx.kept = tuple(outer)
        ctx.save_for_backward(*outer.values())
        ctx.inner = {name: made[name] for name in taken if name in made and name not in outer}
        ctx.call, ctx.placements = call, [tensor.placements if is_dtensor(tensor) else None for tensor in tensors]
        ctx.mark_non_differentiable(*(tensor for name, tensor in results.items() if recorded.is_constant(name)))
        ctx.set_materialize_grads(False)
        return tuple(results.values())

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        if torch.is_grad_enabled():
            refuse(
                "gradients of gradients (create_graph=True)",
                where=f"the backward of module function {call.recorded.function!r}",
                why="gradients are made by a module that is not differentiated again",
                fix="write the penalty on gradients without them, or leave out create_graph",
            )
        known = {**dict(zip(ctx.kept, ctx.saved_tensors, strict=True)), **ctx.inner}
        for name, grad in zip(call.recorded.results(), grads, strict=True):
            known[gradient_name(name)] = call.recorded.blank(name) if grad is None else grad
        made = call.recorded.backward(known)
        found = []
        for name, placements in zip(call.inputs, ctx.placements, strict=True):
            gradient = made.get(name)
            if gradient is not None and placements is None:
                gradient = call.outside(gradient, False)
            found.append(gradient_like(gradient, placements))
        return None, *found
