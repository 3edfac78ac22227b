"""gradient: a Relax module that gives the gradients of its parameters, too; and calls of a module that
torch.autograd records: its forward, which gives what its backward takes, and that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from tvm import ir

from mesh_tensor.annotations.names import (
    check_module,
    known,
    meant_function,
    relax_function,
    source_names,
    with_flat_parameters,
)
from mesh_tensor.base.errors import did_you_mean, listing, refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.importers import ImportedModule
from mesh_tensor.pipelining.flow import Flow
from mesh_tensor.pipelining.fragments import gradient_name
from mesh_tensor.pipelining.stages import Stage, part
from mesh_tensor.plan.gradient import depending_on, gradient_function, readable
from mesh_tensor.plan.ir import leaves, map_tree
from mesh_tensor.runtime.ambient import refuse_traced
from mesh_tensor.runtime.ranks import gradient_like, is_dtensor, lies_like_torch, redistribute
from mesh_tensor.runtime.ranks.dtensor import as_dtensor, local_part
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute

from .fragments import Fragment, Options, StageFragments, training_fragments
from .module_ports import HeldWeights

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
        """What the function returns for these tensors of all its parameters that are no weights, in own memory."""
        call = _Call(self, tuple(tensors), self.wanted, any(is_dtensor(tensor) for tensor in tensors.values()))
        made = dict(zip(self._gives, _Recorded.apply(call, *tensors.values()), strict=True))
        known = {name: tensors[name] for name in self._flow.results if name in tensors}
        others = set(map(id, known.values()))

        def leave(tensor: Any) -> Any:
            own = tensor.clone() if id(tensor) in others else tensor
            others.add(id(tensor))
            return own

        return map_tree(self._flow.tree(known | made), leave)

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

    def backward_as_call(self, grads: Sequence[Any]) -> AbstractContextManager[None]:
        """Within, what is refused counts as a backward, which the other ranks make."""
        return self._fragment("B").module.as_call(grads)

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
        with call.recorded.backward_as_call(grads):
            if torch.is_grad_enabled():
                refuse(
                    "gradients of gradients (create_graph=True)",
                    where=f"the backward of module function {call.recorded.function!r}",
                    why="gradients are made by a module that is not differentiated again",
                    fix="write the penalty on gradients without them, or leave out create_graph",
                )
            refuse_traced(f"the backward of module function {call.recorded.function!r}", grads)
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


Module = TypeVar("Module", ir.IRModule, ImportedModule)


def gradient(module: Module, wrt: Sequence[str] | None = None, function: str = "main", *, loss: int = 0) -> Module:
    """The module whose `function` returns a pair: what it returned, and a tuple of the gradients of its loss.

    Calls of the module's functions are entered: the result is one function without calls. A gradient lies on a mesh as
    the value lies that it belongs to, where that is annotated.

    Args:
        module: a module of known sizes, or what `from_torch` gives (then the result is such a module, too).
        wrt: the parameters whose gradients are wanted, in the order in which they are returned; names as in
            `annotate_module`. None: those that a frontend made of weights, or else all that hold floats.
        function: the function that is differentiated.
        loss: which of its results is the loss, a tensor of one element of floats.

    Raises:
        MeshTensorError: there is no such parameter, or the loss does not depend on it; the loss is no number; an
            operator on the way has no gradient (it is named: no gradient is silently zero).

    >>> grads = mt.gradient(mt.from_torch(torch.export.export(model_with_loss, (x, y))))
    >>> run = mt.distribute_module(grads.mod, {"data": 2}, {"x": {"data": 0}}, weights=grads.params)
    >>> loss, (d_weight, d_bias) = run(x, y)
    """
    mod = module.mod if isinstance(module, ImportedModule) else module
    check_module(mod, "gradient", takes_imported=True)
    function = meant_function(mod, function)
    if isinstance(module, ImportedModule) and module.state:
        refuse(
            f"the gradient of a module that writes {listing(list(module.state))}",
            why="its results are new values of these, too",
            fix="export it in eval mode, or use training_step",
        )
    mod = with_flat_parameters(mod, function)
    names = _parameters(mod, function, wrt)
    made = gradient_function(mod, function, names, loss=loss)
    return replace(module, mod=made, form=None) if isinstance(module, ImportedModule) else made


def _parameters(mod: ir.IRModule, function: str, wrt: Sequence[str] | None) -> list[str]:
    """The parameters that are meant, by their names in the module."""
    func = relax_function(mod, function)
    params = {param.name_hint: param.struct_info for param in func.params}
    sources = {theirs: ours for theirs, ours in source_names(func).items() if ours in params}
    if wrt is None:
        floats = [name for name, info in params.items() if "float" in str(getattr(info, "tensor_sinfo", info).dtype)]
        return [name for name in floats if name in sources.values()] or floats
    wanted = [wrt] if isinstance(wrt, str) else list(wrt)
    unknown = [name for name in wanted if name not in params and name not in sources]
    if unknown:
        names = list(dict.fromkeys([*sources, *(name for name in params if name not in sources.values())]))
        refuse(
            [f"there is no parameter {n!r}, but {known(n, names)}{did_you_mean(n, names)}" for n in unknown],
            where=f"gradient of {function!r}",
            fix="name parameters of the function, in `wrt`; all that hold floats are meant without it",
        )
    return [name if name in params else sources[name] for name in wanted]
