"""Backward kernels: those that compute the gradients of another kernel, and what runs them for torch.autograd.

Their parameters are named after the forward kernel's. `x` is what went into its parameter x, or came out of it; `d_y`
is the gradient with respect to what it wrote into y, and is read; `d_x` is the gradient with respect to its input x,
and is written, or added to by atomics. Several kernels may share the work, each for some of the inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from tvm import tirx

from mesh_tensor.annotations.annotate import INFO_ATTR, annotate, read_annotations
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.runtime.ranks import gradient_like, is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .signature import Param, Signature

if TYPE_CHECKING:
    from .compile import MeshKernel

_PREFIX = "d_"
_NAMES = "x, y: the forward kernel's parameters; d_y: the gradient with respect to what it wrote, which is read; "
_NAMES += "d_x: the gradient with respect to its input, which is written"
Run = Callable[..., Sequence[Any]]


def laid_out_alike(func: tirx.PrimFunc, backward: Any) -> tirx.PrimFunc:
    """A backward kernel of the annotated `func`, with annotations of its own, or else those of `func`: each gradient
    lies as what it is the gradient of. Partial values are whole there."""
    backward = check_kernel(backward)
    if INFO_ATTR in (backward.attrs or {}):
        return backward
    mesh, stated = read_annotations(func)
    names = [str(backward.buffer_map[var].name) for var in backward.params if var in backward.buffer_map]
    known = {str(buffer.name) for buffer in func.buffer_map.values()}
    bases = {name: name if name in known else name.removeprefix(_PREFIX) for name in names}
    layouts = {name: stated[base].sharding for name, base in bases.items() if base in stated}
    return annotate(backward, mesh, {name: Sharding(mesh, one.ndim, one.dims) for name, one in layouts.items()})


class Gradients:
    """The gradients of a kernel by its backward `kernels`, as torch.autograd asks for them. Refused where they don't
    fit the kernel, with every parameter that is wrong."""

    def __init__(self, forward: Signature, kernels: Sequence[MeshKernel]) -> None:
        self._name, self.kernels = forward.name, tuple(kernels)
        problems = [*_in_place(forward)]
        for kernel in self.kernels:
            problems += _misfits(forward, kernel)
        given = [name for kernel in self.kernels for name in kernel.signature.written]
        twice = [name for name in dict.fromkeys(given) if given.count(name) > 1]
        problems += [f"{name!r} is written by {given.count(name)} of them" for name in twice]
        if problems:
            names = listing([kernel.signature.name for kernel in self.kernels])
            refuse(problems, where=f"backward kernels ({names}) of kernel {self._name!r}", fix=_NAMES)
        self._gives = {name.removeprefix(_PREFIX) for name in given}
        self._taken = {name for kernel in self.kernels for name in kernel.signature.names}.difference(given)
        self._taken |= {name.removeprefix(_PREFIX) for kernel in self.kernels for name in _added(kernel)}
        self._outputs = forward.written

    def around(self, run: Run, given: Mapping[str, Any]) -> Run:
        """`run`, which computes the kernel for the arguments `given`, recorded by autograd where one of them requires a
        gradient. Refused where no backward kernel writes a gradient that is required, or results are written into what
        is given."""
        wanted = [name for name, value in given.items() if isinstance(value, torch.Tensor) and value.requires_grad]
        if not wanted or not torch.is_grad_enabled() or any(isinstance(v, MeshTensor) for v in given.values()):
            return run
        filled = [name for name in given if name in self._outputs]
        self._refuse_lost(
            wanted, [f"parameter {name!r} is written into: autograd records results that are made" for name in filled]
        )
        return lambda tensors, returned, *more: self._recorded(run, tensors, returned, *more)

    def _recorded(self, run: Run, given: Mapping[str, Any], returned: Sequence[str], *more: Any) -> Sequence[Any]:
        tensors = {name: value for name, value in given.items() if isinstance(value, torch.Tensor)}
        others = {name: value for name, value in given.items() if name not in tensors}

        def forward(values: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
            return run({**dict(zip(tensors, values, strict=True)), **others}, returned, *more)

        call = _Call(self, forward, tuple(tensors), tuple(returned), others)
        return _Recorded.apply(call, *tensors.values())

    def _refuse_lost(self, wanted: Sequence[str], problems: Sequence[str] = ()) -> None:
        """Refuse `wanted` gradients that no backward kernel writes, and a call with other problems."""
        missing = [name for name in wanted if name not in self._gives]
        lost = [f"parameter {n!r} requires a gradient, and none of them writes {_PREFIX}{n}" for n in missing]
        if lost or problems:
            names = listing([kernel.signature.name for kernel in self.kernels])
            fix = "pass what the kernel reads only; .detach() what needs no gradient, or add a backward kernel for it"
            refuse([*lost, *problems], where=f"call of kernel {self._name!r}, backward kernels ({names})", fix=fix)

    def _refuse_unread(self, grads: Mapping[str, torch.Tensor | None]) -> None:
        """Refuse gradients that no backward kernel takes into account; those of results that nothing uses are 0."""
        unread = [name for name in grads if _PREFIX + name not in self._taken]
        if lost := [name for name in unread if grads[name] is not None and not _is_zero(grads[name])]:
            refuse(
                [f"the loss depends on {name!r}, and none of them reads {_PREFIX}{name}" for name in lost],
                where=f"gradients of kernel {self._name!r}",
                why="what goes through it would be missing in the gradients",
                fix="use .detach() of it, or a backward kernel that reads its gradient",
            )

    def reads(self, name: str) -> bool:
        """Whether a backward kernel reads the gradient with respect to a result."""
        return _PREFIX + name in self._taken

    def keep(self, ctx: Any, values: Mapping[str, torch.Tensor]) -> None:
        """Of what went in and came out of a call, keep what the backward kernels read in torch's context for it."""
        ctx.kept = [name for name in values if name in self._taken]
        ctx.save_for_backward(*[values[name] for name in ctx.kept])

    def compute(
        self,
        ctx: Any,
        grads: Mapping[str, torch.Tensor | None],
        wanted: Sequence[str],
        run: Sequence[Callable[..., Any]],
        others: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The gradients with respect to the `wanted` inputs of the call whose context it is; `grads`: those with
        respect to its results; `run`: what computes each of the kernels; `others`: its arguments that are no tensors.
        """
        self._refuse_lost(wanted)
        self._refuse_unread(grads)
        known = {**others, **dict(zip(ctx.kept, ctx.saved_tensors, strict=True))}
        known |= {_PREFIX + name: grad.contiguous() for name, grad in grads.items() if grad is not None}
        made: dict[str, Any] = {}
        for kernel, function in zip(self.kernels, run, strict=True):
            written = [name for name in kernel.signature.names if name in kernel.signature.written]
            if {name.removeprefix(_PREFIX) for name in written}.isdisjoint(wanted):
                continue
            added = {name: torch.zeros_like(known[name.removeprefix(_PREFIX)]) for name in _added(kernel)}
            taken = [name for name in kernel.signature.names if name not in written or name in added]
            results = function(*[added[name] if name in added else known[name] for name in taken])
            made |= zip(written, [results] if len(written) == 1 else results, strict=True)
        return {name: made[_PREFIX + name] for name in wanted}


@dataclass(frozen=True, eq=False)
class _Call:
    """One call of the kernel: `inputs` are its tensors' names, `outputs` its results', `others` what is no tensor."""

    gradients: Gradients
    forward: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    others: dict[str, Any]


class _Recorded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        results = tuple(call.forward(tensors))
        values = zip((*call.inputs, *call.outputs), (*tensors, *results), strict=True)
        call.gradients.keep(ctx, dict(values))
        ctx.call, ctx.placements = call, [tensor.placements if is_dtensor(tensor) else None for tensor in tensors]
        return results

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        call: _Call = ctx.call
        wanted = [name for name, need in zip(call.inputs, ctx.needs_input_grad[1:], strict=True) if need]
        by_output = dict(zip(call.outputs, grads, strict=True))
        made = call.gradients.compute(ctx, by_output, wanted, call.gradients.kernels, call.others)
        placed = zip(call.inputs, ctx.placements, strict=True)
        return None, *[gradient_like(made.get(name), placements) for name, placements in placed]


def _is_zero(grad: Any) -> bool:
    """Whether a gradient is 0, as that of a result is that nothing uses; what torch traces is none."""
    if type(grad).__name__ == "FakeTensor":
        return False
    return not bool(((grad.full_tensor() if is_dtensor(grad) else grad) != 0).any())


def _added(kernel: MeshKernel) -> frozenset[str]:
    """The gradients that a kernel adds to what is there, which has to be 0."""
    return kernel.signature.read & kernel.signature.written


def _in_place(forward: Signature) -> Iterator[str]:
    for name in forward.names:
        if name in forward.read & forward.written:
            yield f"{name!r} is updated in place by the forward kernel, which autograd can't record"


def _misfits(forward: Signature, kernel: MeshKernel) -> Iterator[str]:
    """Why a backward kernel is none of this forward kernel."""
    known = {param.name: param for param in forward.params}
    for param in kernel.signature.params:
        name, written = param.name, param.name in kernel.signature.written
        what = f"{kernel.signature.name}: {name!r}"
        base = known.get(name.removeprefix(_PREFIX)) if name not in known else known[name]
        if base is None:
            yield f"{what} is named after no parameter of the forward kernel ({', '.join(known)})"
        elif name in known:
            if written:
                yield f"{what} is written, but is no gradient"
            else:
                yield from _unlike(what, param, base)
        elif written and base.name not in forward.read:
            yield f"{what} is written, but the forward kernel doesn't read {base.name!r}"
        elif not written and base.name not in forward.written:
            yield f"{what} is read, but the forward kernel doesn't write {base.name!r}"
        elif not is_float(base.dtype):
            yield f"{what} is the gradient of {base.dtype} numbers"
        else:
            yield from _unlike(what, param, base)


def _unlike(what: str, param: Param, base: Param) -> Iterator[str]:
    """Why a parameter can't be of the type of the forward kernel's."""
    if (param.shape is None) != (base.shape is None) or param.dtype != base.dtype:
        yield f"{what} is {_type(param)}, but the forward kernel's {base.name!r} is {_type(base)}"
    elif param.shape is not None and base.shape is not None and _sizes(param.shape) != _sizes(base.shape):
        yield f"{what} has shape {_sizes(param.shape)}, but the forward kernel's {base.name!r} has {_sizes(base.shape)}"


def _type(param: Param) -> str:
    return f"a number, {param.dtype}" if param.shape is None else f"a tensor of {param.dtype}"


def _sizes(shape: Sequence[Any]) -> str:
    """Sizes as text; symbols by name, for each kernel has its own."""
    return "(" + ", ".join(str(size) for size in shape) + ")"
