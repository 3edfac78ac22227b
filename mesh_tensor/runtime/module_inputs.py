"""What a module's function takes: its parameters, and the checks of what a call brings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parameter import is_lazy
from tvm import ir, relax, tirx

from mesh_tensor.annotations.annotate import evaluate, fits
from mesh_tensor.annotations.names import SourceNames, known, relax_function, source_names, without_layout
from mesh_tensor.annotations.size_conditions import size_conditions, unfulfilled
from mesh_tensor.base.errors import did_you_mean, listing, refuse
from mesh_tensor.plan.orders import IndexCheck
from mesh_tensor.targets.dtypes import as_floats, dtype_name, is_plain, torch_dtype

from .ambient import fix_of, is_freed, why_not_plain
from .ranks.dtensor import is_dtensor, local_part


@dataclass(frozen=True)
class ModuleParam:
    """A tensor parameter; sizes are ints or symbols."""

    name: str
    shape: tuple[Any, ...]
    dtype: str


# What a function is called with is all of its parameters if nothing was said to stay.
_WEIGHTS = "; what stays is given once: distribute_module(..., weights={name: tensor})"


class ModuleSignature:
    """The parameters of a Relax function."""

    def __init__(self, mod: ir.IRModule, function: str) -> None:
        func = relax_function(mod, function)
        self.function = function
        self.params = tuple(_param(var, function) for var in func.params)
        self._own = {param.name for param in self.params}
        self._source_names = source_names(func)
        self._conditions = size_conditions(func)
        self.names = self._names()
        self._free: tuple[Mapping[str, Any], tuple[str, ...]] = ({}, tuple(param.name for param in self.params))
        self._places = {
            size.name: f"dim {dim} of {param.name!r}"
            for param in reversed(self.params)
            for dim, size in enumerate(param.shape)
            if isinstance(size, tirx.Var)
        }
        self.symbols = tuple(dict.fromkeys(size for p in self.params for size in p.shape if isinstance(size, tirx.Var)))

    def _names(self) -> dict[str, list[str]]:
        """Per parameter what it was called where the module comes from, or else its name."""
        found: dict[str, list[str]] = {}
        for theirs, ours in self._source_names.items():
            found.setdefault(ours, []).append(theirs)
        return {param.name: found.get(param.name, [param.name]) for param in self.params}

    def places(self) -> dict[str, str]:
        """From values that are no parameters to the innermost layers, where the module comes from, that give them."""
        names = sorted(self._source_names.items(), key=lambda item: len(item[0]))
        params = {param.name for param in self.params}
        return {ours: theirs for theirs, ours in names if ours not in params}

    def bind(self, weights: Mapping[str, Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """Every parameter's tensor: those that are no weights come from `args`, in order, or by name, their own or that
        which they had where the module comes from."""
        is_whole = not weights and not args and named.keys() == self._own
        given = named if is_whole else {**weights, **self.passed(weights, args, named)}
        return {p.name: given[p.name] for p in self.params}

    def passed(self, weights: Mapping[str, Any], args: Sequence[Any], named: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of those that are no weights."""
        if not named and len(args) == len(self.free(weights)):
            return dict(zip(self.free(weights), args, strict=True))
        names = SourceNames(self._source_names | {param.name: param.name for param in self.params})
        meant: dict[str, Any] = {}
        again = [name for name, t in named.items() if not _is_same(meant.setdefault(names.ours(name), t), t)]
        named = meant
        free = [p.name for p in self.params if p.name not in weights and p.name not in named]
        unknown = [name for name in named if name not in {p.name for p in self.params}]
        twice = [name for name in named if name in weights]
        if unknown or twice or again or len(args) != len(free):
            refuse(
                [
                    *(f"there is no parameter {name!r}{did_you_mean(name, free)}" for name in unknown),
                    *(f"parameter {name!r} is a weight, which was given already" for name in twice),
                    *(f"{name!r} is given under another name with another value" for name in again),
                    *([f"{len(args)} tensors for {len(free)} parameters"] if len(args) != len(free) else []),
                ],
                where=f"call of {self.function!r}, which takes {listing(free)}",
                fix="pass what is no weight in the order of the function's parameters, or by name"
                + ("" if weights or len(args) >= len(free) else _WEIGHTS),
            )
        return {**dict(zip(free, args, strict=True)), **named}

    def free(self, weights: Mapping[str, Any]) -> tuple[str, ...]:
        """The parameters that are no weights, in order; known for the weights that were asked for last."""
        last, free = self._free
        if last is not weights:
            free = tuple(param.name for param in self.params if param.name not in weights)
            self._free = weights, free
        return free

    def is_open(self, weights: Mapping[str, Any]) -> bool:
        """Whether sizes of some weights are symbols."""
        return any(not all(isinstance(size, int) for size in p.shape) for p in self.params if p.name in weights)

    def weights(self, weights: Any, device_type: str) -> dict[str, Any]:
        """Weights by parameter, checked; they may go by the names that they had where the module comes from. They
        are constants: parameters of torch's serve, without their gradients, and complex ones as pairs of floats."""
        if not isinstance(weights, Mapping):
            refuse(f"the weights are a {type(weights).__name__}", fix="give a dict from parameters to tensors")
        names = SourceNames(self._source_names | {param.name: param.name for param in self.params})
        named: dict[str, Any] = {}
        for name, tensor in weights.items():
            same = named.setdefault(names.ours(str(name)), tensor)
            if not _is_same(same, tensor):
                both = listing([n for n in weights if names.ours(str(n)) == names.ours(str(name))])
                refuse(
                    f"a weight is given under two names, {both}, with two values",
                    where=f"weights of {self.function!r}",
                    fix="give it once, or tie the model's weights",
                )
        named = {name: as_floats(t.detach() if _is_recorded(t) else t) for name, t in named.items()}
        self.check(named, device_type, what="weights")
        return named

    def check(
        self, tensors: Mapping[str, Any], device_type: str | None = None, *, what: str = "call"
    ) -> dict[tirx.Var, int]:
        """The sizes of the symbols; a MeshTensorError names every tensor that does not fit, that is on a device where
        nothing runs, or that no parameter is for. Parameters that are left out are not checked."""
        sizes: dict[tirx.Var, int] = {}
        given = [p for p in self.params if p.name in tensors]
        problems = self._unknown(tensors)
        problems += [
            f"parameter {(self.names[p.name][0] if what == 'weights' else p.name)!r}: {problem}"
            for p in given
            if (problem := _problem(p, tensors[p.name], sizes, device_type))
        ]
        if not problems and self.symbols:  # every symbol has its size now
            problems = [
                f"parameter {p.name!r}: {tuple(tensors[p.name].shape)}, but expected {p.shape}, where {_told(sizes)}"
                for p in given
                if not _follows(p, tensors[p.name], sizes)
            ]
        if not problems and self._conditions:
            known = {var.name: size for var, size in sizes.items()}
            problems = list(unfulfilled(self._conditions, known, self._places))
        if problems:
            fix = fix_of(problems, [tensors[p.name] for p in given], "pass tensors of the module's shapes and dtypes")
            others = [p for p in given if _has_other_sizes(p, tensors[p.name])]
            if what == "call" and self._source_names and len(others) == len(problems):
                fix += "; a module of other sizes, too: torch.export.export(..., dynamic_shapes=...)"
                if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
                    fix += "; what is a rank's own part: DTensor.from_local(tensor, device_mesh, [Shard(0)])"
            refuse(problems, where=f"{what} of {self.function!r}", fix=fix)
        return sizes

    def _unknown(self, tensors: Mapping[str, Any]) -> list[str]:
        """What is given for no parameter; parameters are called as where the module comes from."""
        if self._own.issuperset(tensors):
            return []
        own = [p.name for p in self.params]
        called = {ours: theirs for theirs, ours in reversed(self._source_names.items())}
        names = [called.get(name, name) for name in own]
        return [
            f"there is no parameter {name!r}, but {known(name, names)}{did_you_mean(name, [*names, *own])}"
            for name in tensors
            if name not in own
        ]


def _is_recorded(tensor: Any) -> bool:
    """Whether it is a tensor of which autograd records what is done, and which has a shape by now."""
    return isinstance(tensor, torch.Tensor) and tensor.requires_grad and not is_lazy(tensor)


def _is_same(one: Any, other: Any) -> bool:
    """Whether both are one tensor, perhaps as two objects, or hold the same, as tied weights do that were stored under
    all their names. Of DTensors, all ranks tell by memory alone."""
    if one is other:
        return True
    if is_dtensor(one) and is_dtensor(other):
        alike = (one.shape, one.placements, one.device_mesh) == (other.shape, other.placements, other.device_mesh)
        parts = [local_part(tensor) for tensor in (one, other)]
        return alike and parts[0].data_ptr() == parts[1].data_ptr() and parts[0].stride() == parts[1].stride()
    one, other = (tensor.read() if hasattr(tensor, "read") else tensor for tensor in (one, other))  # from files
    if not is_plain(one) or not is_plain(other):
        return False
    if (one.shape, one.dtype, one.device) != (other.shape, other.dtype, other.device):
        return False
    if any(tensor.layout is not torch.strided for tensor in (one, other)):
        return False
    if one.stride() == other.stride() and one.data_ptr() == other.data_ptr():
        return True
    return not is_freed(one) and not is_freed(other) and torch.equal(one, other)


def refuse_outside(
    checks: Iterable[IndexCheck],
    tensors: Mapping[str, Any],
    function: str,
    layers: Callable[[], Mapping[str, str]] = dict,
) -> None:
    """Refuse whole tensors on a CPU with elements that are looked up in vain; all of them are named. `layers`: from the
    function's values to what they are the results of, where the module comes from."""
    problems = []
    for check in checks:
        tensor = tensors.get(check.parameter)
        if type(tensor) is torch.Tensor and tensor.device.type == "cpu" and tensor.numel():
            if check.ignored is not None:  # 0 is looked up in its place
                tensor = tensor.masked_fill(tensor == check.ignored, 0)
            low, high = (int(bound) for bound in torch.aminmax(tensor))
            if low < check.lowest or high >= check.size:
                own, _, value = check.where.partition(".")
                layer = layers().get(value) if own == function else None
                problems.append(
                    f"parameter {check.parameter!r} has elements from {low} to {high}, but "
                    f"{check.where if layer is None else repr(layer)} looks them up "
                    f"in a dim that takes {check.lowest} to {check.size - 1}"
                )
    if problems:
        refuse(
            problems,
            where=f"call of {function!r}",
            fix="keep them inside; check_indices=False leaves this out, and gives NaN for them",
        )


def bound(mod: ir.IRModule, function: str, sizes: Mapping[tirx.Var, int]) -> ir.IRModule:
    """The module with these sizes in place of the function's symbols."""
    if not sizes:
        return mod
    values = {var.name: size for var, size in sizes.items()}
    return relax.transform.BindSymbolicVars(values, function)(mod)


def _param(var: relax.Var, function: str) -> ModuleParam:
    info = without_layout(var.struct_info)
    if not isinstance(info, relax.TensorStructInfo) or not isinstance(info.shape, relax.ShapeExpr):
        refuse(
            f"parameter {var.name_hint!r} of {function!r} is {var.struct_info}",
            fix="take tensors of known rank as parameters",
        )
    sizes = (int(s) if isinstance(s, tirx.IntImm) else s for s in info.shape.values)
    return ModuleParam(var.name_hint, tuple(sizes), str(info.dtype))


def _problem(param: ModuleParam, tensor: Any, sizes: dict[tirx.Var, int], device_type: str | None) -> str:
    if isinstance(tensor, torch.Tensor) and (found := why_not_plain(tensor)):
        return found[0]
    shape, dtype = getattr(tensor, "shape", None), getattr(tensor, "dtype", None)
    if shape is None or not isinstance(dtype, torch.dtype):
        return f"a {type(tensor).__name__}, but expected a tensor"
    shape = tuple(shape)
    if len(shape) != len(param.shape) or dtype != torch_dtype(param.dtype):
        return f"{shape} {dtype_name(dtype)}, but expected {param.shape} {param.dtype}"
    if device_type is not None and isinstance(tensor, torch.Tensor) and tensor.device.type not in ("cpu", device_type):
        return f"on device {tensor.device}, but the module runs on {device_type}"
    if shape == param.shape or fits(param.shape, shape, sizes):
        return ""
    of_others = "" if all(isinstance(size, int) for size in param.shape) else " with the sizes of the other tensors"
    return f"{shape}, but expected {param.shape} {param.dtype}{of_others}"


def _has_other_sizes(param: ModuleParam, tensor: Any) -> bool:
    """Whether it is a tensor of the parameter's rank and dtype that has other sizes than it is known to have."""
    if not isinstance(tensor, torch.Tensor) or why_not_plain(tensor) or dtype_name(tensor.dtype) != param.dtype:
        return False  # of a nested tensor, or a parameter that is not initialised yet, there are no sizes
    pairs = zip(param.shape, tensor.shape, strict=False)
    return len(param.shape) == tensor.dim() and any(isinstance(known, int) and known != size for known, size in pairs)


def _follows(param: ModuleParam, tensor: Any, sizes: Mapping[tirx.Var, int]) -> bool:
    """Whether sizes that are computed from symbols are what they should be, where the symbols are known."""
    known = [evaluate(wanted, sizes) for wanted in param.shape]
    return all(size in (None, actual) for size, actual in zip(known, tensor.shape, strict=True))


def _told(sizes: Mapping[tirx.Var, int]) -> str:
    return ", ".join(f"{var} = {size}" for var, size in sizes.items())
