"""gradient: a Relax module that gives the gradients of its parameters, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from tvm import ir

from mesh_tensor.annotations.names import check_module, known, relax_function, source_names, with_flat_parameters
from mesh_tensor.base.errors import did_you_mean, listing, refuse
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.gradient import gradient_function

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
    check_module(mod, "gradient")
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
        )
    return [name if name in params else sources[name] for name in wanted]
