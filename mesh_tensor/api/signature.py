"""What a kernel takes: its parameters as its caller sees them, and the checks of what a call brings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from tvm import tirx

from mesh_tensor.annotations.annotate import evaluate, fits, symbols
from mesh_tensor.base.dtypes import extreme, is_float
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.runtime.ambient import is_freed, may_be_dual, why_not_plain
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype
from mesh_tensor.tir.nodes import function_name

Sizes = dict[tirx.Var, int]
_WRITTEN = "allocate what the kernel writes into contiguous, as torch.empty does: a copy's result would be lost"


@dataclass(frozen=True)
class Param:
    """A parameter: a tensor of `shape` (which may hold symbols), or a scalar, whose `shape` is None."""

    name: str
    dtype: str
    shape: tuple[Any, ...] | None
    var: tirx.Var

    @property
    def is_tensor(self) -> bool:
        """Whether it is a tensor, not a scalar."""
        return self.shape is not None

    def number(self, value: Any) -> int | float:
        """A scalar argument as a Python number."""
        return float(value) if is_float(self.dtype) else int(value)


class Signature:
    """The parameters of `func`, and how arguments are checked against them. `read` and `written`: those that it
    reads, and those that it writes into."""

    def __init__(self, func: tirx.PrimFunc) -> None:
        self.name = function_name(func)
        self.symbols = symbols(func)
        self.params = tuple(_param(func, var, self.symbols) for var in func.params)
        self.tensors = {param.name: param for param in self.params if param.is_tensor}
        self.read: frozenset[str] = frozenset()
        self.written: frozenset[str] = frozenset()
        self._scalars = [param for param in self.params if not param.is_tensor]

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all parameters, in order."""
        return tuple(param.name for param in self.params)

    def scalars(self, args: Mapping[str, Any]) -> dict[str, int | float]:
        """The numbers among checked `args`, as Python's own."""
        return {p.name: p.number(args[p.name]) for p in self._scalars if p.name in args}

    def wrong_scalars(self, args: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is wrong with numbers among `args`, whatever sizes there are, and the ways out."""
        problems = [(p.name, _no_number(p, args[p.name])) for p in self._scalars if p.name in args]
        return [(_of(name, problem[0]), problem[1]) for name, problem in problems if problem is not None]

    def check(self, args: Mapping[str, Any], mesh: Mesh, device: torch.device) -> Sizes:
        """The sizes of the symbols, or a MeshTensorError that names everything that is wrong with `args`: parameter
        names to tensors and numbers; parameters that are left out are not checked."""
        sizes: Sizes = {}
        problems: list[tuple[str, str]] = []
        for param in self.params:
            if param.name in args:
                problem = _check(param, args[param.name], sizes, mesh, device, param.name in self.written)
                problems += [] if problem is None else [(_of(param.name, problem[0]), problem[1])]
        if not problems:
            problems += self._check_expressions(args, sizes)
        if problems:
            fixes = "; ".join(dict.fromkeys(fix for _, fix in problems))
            refuse([fact for fact, _ in problems], where=f"call of kernel {self.name!r}", fix=fixes)
        return sizes

    def _check_expressions(self, args: Mapping[str, Any], sizes: Sizes) -> list[tuple[str, str]]:
        """Dims such as `2 * n`, once the symbols are known; and that they are."""
        if not self.symbols:
            return []
        unknown = [var.name for var in self.symbols if var not in sizes]
        if unknown:
            fix = "pass the tensors that have these sizes, outputs too"
            return [(f"no argument says how large {', '.join(unknown)} is", fix)]
        problems = []
        for name, param in self.tensors.items():
            expected = tuple(evaluate(size, sizes) for size in param.shape or ())
            if name in args and (actual := tuple(args[name].shape)) != expected:
                fact = f"parameter {name!r}: shape {actual}, but expected {expected} = {words(param.shape)}"
                problems.append((fact, "pass tensors of the expected shapes"))
        return problems


def _param(func: tirx.PrimFunc, var: tirx.Var, found: tuple[tirx.Var, ...]) -> Param:
    # One Python object per symbol: two for the same variable are compared as expressions, which takes long.
    one = {symbol: symbol for symbol in found}
    buffer = func.buffer_map.get(var)
    if buffer is None:
        return Param(var.name, str(var.dtype), None, one.get(var, var))
    shape = tuple(int(size) if isinstance(size, (int, tirx.IntImm)) else one.get(size, size) for size in buffer.shape)
    return Param(buffer.name, str(buffer.dtype), shape, var)


def _check(
    param: Param, value: Any, sizes: Sizes, mesh: Mesh, device: torch.device, is_written: bool
) -> tuple[str, str] | None:
    """What is wrong with one argument, and the way out."""
    if param.shape is None:
        return _check_scalar(param, value, sizes)
    if not isinstance(value, (torch.Tensor, MeshTensor)):
        return (
            f"a {type(value).__name__}, but expected a torch tensor or a MeshTensor",
            "pass tensors, e.g. torch.as_tensor",
        )
    if isinstance(value, torch.Tensor) and (problem := why_not_plain(value)):
        what, fix = problem
        takes = "; mt.compile(func, backward=...) takes the kernels that compute gradients"
        return what, fix + takes * (value.requires_grad and torch.is_grad_enabled())
    dtype = torch_dtype(param.dtype)
    if value.dtype != dtype:
        return f"dtype {dtype_name(value.dtype)}, but expected {dtype_name(dtype)}", f"convert it with .to({dtype})"
    if not fits(param.shape, value.shape, sizes):
        expected = words(param.shape, sizes)
        return f"shape {tuple(value.shape)}, but expected {expected}", "pass tensors of the expected shapes"
    if value.device != device:
        return f"on device {value.device}, but expected {device}", f"move it with .to({str(device)!r})"
    if isinstance(value, MeshTensor):
        fix = "distribute it on the kernel's mesh, or pass its .full()"
        return None if value.mesh == mesh else (f"a MeshTensor on {value.mesh}, but expected {mesh}", fix)
    if value._is_zerotensor():
        return "zeros that have no memory", _WRITTEN if is_written else "pass a copy: .clone()"
    if value.is_neg():
        return "a view that torch negates when it reads it", _WRITTEN if is_written else "pass a copy: .resolve_neg()"
    if not value.is_contiguous():
        fact = f"layout is not contiguous (strides {value.stride()})"
        return fact, _WRITTEN if is_written else "pass a copy: .contiguous()"
    return None


def _of(name: str, problem: str) -> str:
    return f"parameter {name!r}: {problem}"


def _check_scalar(param: Param, value: Any, sizes: Sizes) -> tuple[str, str] | None:
    if problem := _no_number(param, value):
        return problem
    if isinstance(value, Integral) and sizes.setdefault(param.var, int(value)) != int(value):
        return f"{value}, but the tensors have {sizes[param.var]} there", "pass the size that the tensors have"
    return None


def _no_number(param: Param, value: Any) -> tuple[str, str] | None:
    wanted = Real if is_float(param.dtype) else Integral
    if not isinstance(value, wanted):
        return (
            f"{shown(value)}, but expected a number ({param.dtype})",
            f"pass a Python {wanted.__name__.lower()} number",
        )
    if not _is_number_of(param.dtype, value):
        limits = f", which holds {extreme(param.dtype, -1)} to {extreme(param.dtype, 1)}"
        fact = f"{shown(value)} is no {param.dtype}" + ("" if is_float(param.dtype) else limits)
        return fact, "pass a number that it can hold, or declare the parameter wider"
    return None


def _is_number_of(dtype: str, value: Any) -> bool:
    """Whether a scalar of a dtype can hold a number: of floats the nearest, which may be infinite."""
    if not is_float(dtype):
        return dtype == "bool" or bool(extreme(dtype, -1) <= int(value) <= extreme(dtype, 1))
    try:
        float(value)
    except OverflowError:  # an integer beyond all floats
        return False
    return True


def words(shape: Sequence[Any] | None, sizes: Mapping[tirx.Var, int] | None = None) -> str:
    """A shape, with what is known of its symbols."""
    parts = [f"{size}={sizes[size]}" if sizes and size in sizes else str(size) for size in shape or ()]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def is_quick(
    expected: Sequence[tuple[str, torch.Size, torch.dtype]], given: Mapping[str, Any], device: torch.device
) -> bool:
    """The usual case, checked fast: plain tensors that fit. Whatever else is left to the thorough check."""
    for name, shape, dtype in expected:
        tensor = given.get(name)
        if tensor is None:
            if name in given:
                return False
        elif not (
            type(tensor) is torch.Tensor
            and tensor.dtype is dtype
            and not tensor.is_nested
            and tensor.shape == shape
            and tensor.layout is torch.strided
            and tensor.is_contiguous()
            and not tensor.is_neg()
            and not tensor.requires_grad
            and tensor.device == device
            and not tensor._is_zerotensor()
            and not is_freed(tensor)
        ):
            return False
    return not may_be_dual()


def check_layouts(layouts: Mapping[str, Sharding], program: Program, where: str, fix: str) -> None:
    """Refuse arguments that don't lie as the program takes or makes them: what `strict` asks for."""
    problems = []
    for parameter in program.parameters:
        expected = program.values[str(parameter.input or parameter.output)].sharding
        if (layout := layouts.get(parameter.name, expected)) != expected:
            problems.append(f"parameter {parameter.name!r}: lies as '{layout}', but expected '{expected}'")
    if problems:
        refuse(problems, where=where, fix=fix)
