"""run_sequential: a Relax module on one device, operator by operator, with torch. The reference for everything else."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import nullcontext, suppress
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch.utils._pytree import tree_map_only
from tvm import ir, relax

from mesh_tensor.annotations.names import check_module, flat_arguments, meant_function, with_flat_parameters
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.recent import Recent
from mesh_tensor.targets.tile_memory import memory_of

from .ambient import Computing, undisturbed, why_not_plain
from .module_inputs import ModuleSignature
from .sequential_lines import Recorded, Recorder
from .sequential_runner import NOT_TORCH, RelaxValue, Runner, as_tensor

_FAILS = (MeshTensorError, *NOT_TORCH)
_CPU = torch.device("cpu")
_CALLS = 16  # of a module, for operands of other shapes, that are known


@undisturbed
def run_sequential(
    mod: ir.IRModule,
    inputs: Sequence[torch.Tensor | np.ndarray] | Mapping[str, torch.Tensor | np.ndarray],
    function: str = "main",
) -> Any:
    """Run a function of a Relax module on one device, as the reference for distributed runs: sharding annotations are
    ignored, `R.print` does nothing, and TIR functions, TileLang kernels among them, are interpreted.

    Args:
        mod: the module. Symbolic sizes take the values that the inputs bring.
        inputs: the function's arguments in order, or by parameter name. Parameters that the module brings along (the
            attribute "params" that frontends attach) can be left out.
        function: the function to run.

    Returns:
        The function's result: a tensor, or a tuple of results. None of them shares memory with an input.

    Raises:
        MeshTensorError: inputs that don't fit, all named; or an operator that has no torch function, whose attributes
            or operands are refused, or whose binding is a closure or packed call, named with its binding.

    >>> run_sequential(mod, {"x": torch.ones(2, 4), "w": torch.ones(4, 3)})
    """
    check_module(mod, "run_sequential")
    known = _KNOWN.get(mod)
    if known is None or not known.is_of(mod):
        known = _KNOWN[mod] = _Known(mod)
    return known.result(inputs, function)


class _Known:
    """What is known of a module: its functions' parameters, and what was recorded of calls of them."""

    def __init__(self, mod: ir.IRModule) -> None:
        self._mod, self._functions = mod.clone(), mod.functions
        self._taken: dict[str, tuple[str, ir.IRModule, ModuleSignature]] = {}
        self._recorded: Recent[tuple, Recorded] = Recent(_CALLS)

    def is_of(self, mod: ir.IRModule) -> bool:
        """Whether the module has the functions that it had: a map that somebody else has, too, is not written."""
        return self._functions.same_as(mod.functions)

    def result(self, inputs: Any, function: str) -> Any:
        """The result of a function of the module."""
        function, mod, signature = self._function(function)
        given = _arguments(mod[function], signature, inputs)
        tensors = list(given.values())
        key = function, *[_kind(tensor) for tensor in tensors]
        recorded = self._recorded.get(key)
        if recorded is None or any(map(why_not_plain, tensors)):
            signature.check(given)
        device = (
            next((t.device for t in tensors if t.device.type != "cpu"), _CPU) if recorded is None else recorded.device
        )
        on_device = nullcontext() if device.type == "cpu" else device
        with Computing(), on_device:
            if recorded is not None:
                with suppress(*_FAILS):  # interpreting it says where
                    result = recorded(tensors)
                    if recorded.is_new:
                        return result
                    return _apart(result, {*map(memory_of, tensors), *recorded.made_once})
            tensors = [tensor.detach() for tensor in tensors]
            runner = Runner(mod, device, Recorder(tensors))
            result = runner.call(function, tensors)
            recorded = runner.recorder.recorded(result, device)
            if recorded is None:
                return _apart(result, {*map(memory_of, tensors), *map(memory_of, runner.constants.values())})
            self._recorded.put(key, recorded)
            return _apart(result, recorded.made_once)

    def _function(self, function: str) -> tuple[str, ir.IRModule, ModuleSignature]:
        """The function that is meant, the module with its parameters flat, and what it takes."""
        if function not in self._taken:
            name = meant_function(self._mod, function)
            mod = with_flat_parameters(self._mod, name)
            self._taken[function] = name, mod, ModuleSignature(mod, name)
        return self._taken[function]


def _kind(tensor: Any) -> tuple:
    """What has to be the same for what was recorded to be right, beside the values."""
    return type(tensor), getattr(tensor, "shape", None), getattr(tensor, "dtype", None), getattr(tensor, "device", None)


_KNOWN: WeakKeyDictionary[ir.IRModule, _Known] = WeakKeyDictionary()


def _apart(result: RelaxValue, known: Collection[int]) -> RelaxValue:
    """The result in memory that is none of what is known."""
    return tree_map_only(torch.Tensor, lambda tensor: tensor.clone() if memory_of(tensor) in known else tensor, result)


def _arguments(func: relax.Function, signature: ModuleSignature, inputs: Any) -> dict[str, torch.Tensor]:
    """The function's arguments by parameter, in order."""
    args, named = ((), inputs) if isinstance(inputs, Mapping) else (tuple(flat_arguments(inputs)), {})
    weights = {} if len(args or named) == len(signature.params) else attached_weights(func)
    kept = {name: value for name, value in weights.items() if name not in named}
    return {name: as_tensor(value) for name, value in signature.bind(kept, args, named).items()}


def attached_weights(func: relax.Function) -> dict[str, Any]:
    """The last parameters' values, where a frontend has attached them."""
    values = func.attrs["params"] if func.attrs is not None and "params" in func.attrs else ()
    return {
        var.name_hint: value for var, value in zip(func.params[len(func.params) - len(values) :], values, strict=True)
    }
