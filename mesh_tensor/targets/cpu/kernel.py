"""Compile a kernel for this machine's CPU and call it with as little as possible in between."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.targets.reports import raise_failure, report_from

from .build import ENTRY, libraries_for
from .legalize import size_variables

_SCALARS = {"bool": ctypes.c_bool, "float32": ctypes.c_float, "float64": ctypes.c_double} | {
    f"{sign}int{bits}": getattr(ctypes, f"c_{sign}int{bits}") for sign in ("", "u") for bits in (8, 16, 32, 64)
}


class CpuKernel:
    """A compiled kernel: call it with contiguous CPU tensors and numbers in the order of the kernel's parameters.

    Nothing is checked. The call releases the GIL, and several threads may call at the same time."""

    def __init__(self, arguments: _Arguments, library: ctypes.CDLL) -> None:
        self._library = library
        self._entry = library[ENTRY]
        self._entry.restype = ctypes.c_int
        self._entry.argtypes = arguments.types
        self._is_tensor, self._sizes = arguments.is_tensor, arguments.sizes

    def __call__(self, *args: object) -> None:
        values = [a.data_ptr() if tensor else a for a, tensor in zip(args, self._is_tensor)]  # type: ignore[attr-defined]  # noqa: B905
        if self._sizes:
            values += [size(args) for size in self._sizes]
        if self._entry(*values):
            raise MemoryError("no memory for the blocks of a kernel")


class _ReportingKernel(CpuKernel):
    """A kernel that prints or asserts."""

    def __call__(self, *args: object) -> None:
        super().__call__(*args)
        raise_failure()


def compile_for_cpu(func: tirx.PrimFunc) -> CpuKernel:
    """`func` compiled for this machine; compiled code is kept on disk, so the next process only loads it."""
    return compile_together([func])[0]


def compile_together(funcs: Sequence[tirx.PrimFunc]) -> list[CpuKernel]:
    """Several, by compilers that run at the same time, once it is known that all can be called."""
    arguments = [_Arguments.of(func) for func in funcs]
    return [
        (_ReportingKernel if report_from(library) else CpuKernel)(taken, library)
        for taken, library in zip(arguments, libraries_for(funcs), strict=True)
    ]


@dataclass(frozen=True)
class _Arguments:
    """What the C function takes: of which types, which of them are tensors, and the sizes that come after them."""

    types: list[type]
    is_tensor: tuple[bool, ...]
    sizes: tuple[Callable[[tuple], int], ...]

    @staticmethod
    def of(func: tirx.PrimFunc) -> _Arguments:
        """Those of a kernel; refused where it has others."""
        is_tensor = tuple([param in func.buffer_map for param in func.params])
        sizes = _size_sources(func)
        types = [_argument(param, tensor) for param, tensor in zip(func.params, is_tensor, strict=True)]
        types += [_SCALARS[var.dtype] for var, _ in sizes]
        return _Arguments(types, is_tensor, tuple([source for _, source in sizes]))


def _argument(param: tirx.Var, is_tensor: bool) -> type:
    if is_tensor:
        return ctypes.c_void_p
    if param.dtype not in _SCALARS:
        refuse(
            f"parameter '{param.name}' is a scalar of dtype {param.dtype}, which a CPU kernel can't take",
            fix="pass it as float32, or as a tensor of one element",
        )
    return _SCALARS[param.dtype]


def _size_sources(func: tirx.PrimFunc) -> list[tuple[tirx.Var, Callable[[tuple], int]]]:
    """The sizes that are no parameters of their own, each with how to find it in the arguments."""
    found: dict[tirx.Var, Callable[[tuple], int]] = {}
    for position, param in enumerate(func.params):
        buffer = func.buffer_map.get(param)
        if buffer is None:
            continue
        for dim, size in enumerate(buffer.shape):
            if isinstance(size, tirx.Var):
                found.setdefault(size, _shape_of(position, dim))
        for dim, stride in enumerate(buffer.strides):
            if isinstance(stride, tirx.Var):
                found.setdefault(stride, _stride_of(position, dim))
    sizes = size_variables(func)
    missing = sorted(var.name for var in sizes if var not in found)
    if missing:
        refuse(
            f"the size {listing(missing)} is no dim by itself",
            where=f"kernel '{func.attrs['global_symbol']}', target 'c'",
            why="it can't be read from the shape of an argument",
            fix="give some parameter a dim of exactly that size, or pass it as a parameter of its own",
        )
    return [(var, found[var]) for var in sizes]


def _shape_of(position: int, dim: int) -> Callable[[tuple], int]:
    return lambda args: args[position].shape[dim]


def _stride_of(position: int, dim: int) -> Callable[[tuple], int]:
    return lambda args: args[position].stride(dim)
