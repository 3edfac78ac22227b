"""What a module's function takes: its parameters, and the checks of what a call brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx

from .errors import listing, refuse
from .runtime.dtypes import torch_dtype


@dataclass(frozen=True)
class ModuleParam:
    """A tensor parameter; sizes are ints or symbols."""

    name: str
    shape: tuple[Any, ...]
    dtype: str


class ModuleSignature:
    """The parameters of a Relax function."""

    def __init__(self, mod: ir.IRModule, function: str) -> None:
        func = mod[function]
        self.function = function
        self.params = tuple(_param(var, function) for var in func.params)
        self.symbols = tuple(dict.fromkeys(size for p in self.params for size in p.shape if isinstance(size, tirx.Var)))

    def bind(self, weights: Mapping[str, Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter's tensor: those that are no weights come from `args`, in order, or by name."""
        free = [p.name for p in self.params if p.name not in weights and p.name not in named]
        unknown = [name for name in named if name not in {p.name for p in self.params}]
        if unknown or len(args) != len(free):
            refuse(
                [
                    *(f"there is no parameter {name!r}" for name in unknown),
                    *([f"{len(args)} tensors for {len(free)} parameters"] if len(args) != len(free) else []),
                ],
                where=f"call of {self.function!r}, which takes {listing(free)}",
                fix="pass what is no weight in the order of the function's parameters, or by name",
            )
        given = {**weights, **dict(zip(free, args, strict=True)), **named}
        return {p.name: given[p.name] for p in self.params}

    def check(self, tensors: Mapping[str, Any]) -> dict[tirx.Var, int]:
        """The sizes of the symbols; a MeshTensorError names every tensor that does not fit, or that no parameter is
        for. Parameters that are left out are not checked."""
        sizes: dict[tirx.Var, int] = {}
        names = [p.name for p in self.params]
        problems = [f"there is no parameter {name!r}, but {listing(names)}" for name in tensors if name not in names]
        problems += [
            f"parameter {p.name!r}: {problem}"
            for p in self.params
            if p.name in tensors and (problem := _problem(p, tensors[p.name], sizes))
        ]
        if problems:
            refuse(problems, where=f"call of {self.function!r}", fix="pass tensors of the module's shapes and dtypes")
        return sizes


def bound(mod: ir.IRModule, function: str, sizes: Mapping[tirx.Var, int]) -> ir.IRModule:
    """The module with these sizes in place of the function's symbols."""
    if not sizes:
        return mod
    values = {var.name: size for var, size in sizes.items()}
    return relax.transform.BindSymbolicVars(values, function)(mod)


def _param(var: relax.Var, function: str) -> ModuleParam:
    info = var.struct_info
    if isinstance(info, relax.distributed.DTensorStructInfo):
        info = info.tensor_sinfo
    if not isinstance(info, relax.TensorStructInfo) or info.shape is None:
        refuse(
            f"parameter {var.name_hint!r} of {function!r} is {var.struct_info}",
            fix="take tensors of known rank as parameters",
        )
    sizes = (int(s) if isinstance(s, tirx.IntImm) else s for s in info.shape.values)
    return ModuleParam(var.name_hint, tuple(sizes), str(info.dtype))


def _problem(param: ModuleParam, tensor: Any, sizes: dict[tirx.Var, int]) -> str:
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None:
        return f"a {type(tensor).__name__}, but expected a tensor"
    shape = tuple(shape)
    expected = f"{param.shape} {param.dtype}"
    if len(shape) != len(param.shape) or dtype != torch_dtype(param.dtype):
        return f"{shape} {str(dtype).removeprefix('torch.')}, but expected {expected}"
    for size, wanted in zip(shape, param.shape, strict=True):
        if isinstance(wanted, tirx.Var):
            wanted = sizes.setdefault(wanted, size)
        if isinstance(wanted, int) and size != wanted:
            return f"{shape}, but expected {expected} with the sizes of the other tensors"
    return ""
