"""as_custom_op: a compiled kernel as one opaque operation of torch's, so that torch.compile takes models with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._library.autograd import make_autograd_impl

from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.program.program import Parameter, Program, ProgramValue
from mesh_tensor.runtime.ambient import is_dual, why_transformed
from mesh_tensor.runtime.ranks import (
    axes_out_of_order,
    check_order,
    dtensor_maker,
    is_dtensor,
    lies_like_torch,
    named,
    ranks_of,
    to_placements,
)
from mesh_tensor.targets.dtypes import torch_dtype

from .backward import Gradients
from .compile import MeshKernel

_LIBRARY = "mesh_tensor"


def as_custom_op(kernel: MeshKernel, name: str, *, device_mesh: Any = None) -> Callable[..., Any]:
    """The kernel as the operation `mesh_tensor::<name>`, which torch.compile, export and fake tensors know.

    Args:
        kernel: a kernel with constant sizes and without scalar parameters.
        name: a Python identifier, not yet taken.
        device_mesh: None for a kernel that is called with whole tensors, on a virtual mesh; else it is called with
            DTensors on this DeviceMesh, or with what this rank holds of them.

    Returns:
        A function of the tensors that the kernel reads. It returns what the kernel writes; what the kernel updates is
        updated in place. Torch knows its gradients if the kernel has backward kernels, which become the operations
        `mesh_tensor::<name>_backward_<number>`."""
    program = _checked(kernel)
    _check_name(name)
    rank = None if device_mesh is None else ranks_of(kernel.mesh, device_mesh, kernel.device.type).rank
    passed = [p for p in program.parameters if p.input is not None and not p.kept]
    made = [p for p in program.parameters if p.output is not None and p not in passed]
    changed = [p for p in passed if p.output is not None]

    def run(*tensors: torch.Tensor) -> Any:
        given = dict(zip([p.name for p in passed], tensors, strict=True))
        results = kernel(*tensors) if rank is None else kernel.local(*tensors, device_mesh=device_mesh)
        results = results if isinstance(results, tuple) else (results,)
        new = [result for result in results if not any(result is tensor for tensor in given.values())]
        return _packed([result.contiguous() for result in new])  # as the fake ones are

    def fake(*tensors: torch.Tensor) -> Any:
        shapes = [_shape(program, parameter, rank) for parameter in made]
        dtypes = [torch_dtype(program.values[str(p.output)].dtype) for p in made]
        return _packed([tensors[0].new_empty(s, dtype=d) for s, d in zip(shapes, dtypes, strict=True)])

    op = torch.library.custom_op(
        f"{_LIBRARY}::{name}", run, mutates_args=[p.name for p in changed], schema=_schema(passed, made)
    )
    op.register_fake(fake)
    if kernel.gradients is not None:
        numbered = enumerate(kernel.gradients.kernels)
        parts = [as_custom_op(part, f"{name}_backward_{number}", device_mesh=device_mesh) for number, part in numbered]
        _register_gradients(op, kernel.gradients, [p.name for p in passed], [p.name for p in made], parts)
    _refuse_before(op, kernel.device.type, [p.name for p in passed], [p.name for p in changed], program.name)
    call = _Call(kernel, op, tuple(passed), tuple(made), program)
    return call.plain if device_mesh is None else _OverDTensors(call, device_mesh)


def _register_gradients(
    op: Any, gradients: Gradients, passed: Sequence[str], made: Sequence[str], run: Sequence[Callable[..., Any]]
) -> None:
    """Tell torch that `run`, operations of the backward kernels, compute the gradients of `op`."""

    def keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
        results = output if isinstance(output, (tuple, list)) else (output,)
        gradients.keep(ctx, dict(zip((*passed, *made), (*inputs, *results), strict=True)))
        ctx.set_materialize_grads(False)  # so that those of results which nothing uses are known without their data
        ctx.blank = [(result.shape, result.dtype, result.device) for result in results]

    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        wanted = [name for name, need in zip(passed, ctx.needs_input_grad, strict=True) if need]
        read = {
            name: torch.zeros(shape, dtype=dtype, device=device) if grad is None and gradients.reads(name) else grad
            for name, grad, (shape, dtype, device) in zip(made, grads, ctx.blank, strict=True)
        }
        found = gradients.compute(ctx, read, wanted, run, {})
        return tuple(found.get(name) for name in passed)

    op.register_autograd(backward, setup_context=keep)


def _refuse_before(op: Any, device_type: str, passed: Sequence[str], changed: Sequence[str], kernel: str) -> None:
    """Refuse what torch would get wrong without a word, whoever calls `op`: gradients through what it updates in place,
    and transforms of torch.func, of which jvp takes the tangents of an operation for zeros."""
    below = make_autograd_impl(op._opoverload, op)

    def run(keys: Any, *tensors: torch.Tensor) -> Any:
        where = f"operation of kernel {kernel!r}"
        followed = [tensor for tensor in tensors if tensor.requires_grad or is_dual(tensor)]
        if found := next(filter(None, map(why_transformed, followed)), None):
            refuse(found[0], where=where, fix=found[1])
        if changed and torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors):
            names = ", ".join(name for name, tensor in zip(passed, tensors, strict=True) if tensor.requires_grad)
            refuse(
                f"{', '.join(changed)} is updated in place, and {names} requires a gradient",
                where=where,
                why="torch would take what is updated for what it was before",
                fix="pass its .detach(), or call under torch.no_grad(): there is no gradient",
            )
        return below(keys, *tensors)

    # torch registers `below` for the autograd of all devices, which that of one goes before
    op._lib.impl(op._name, run, f"Autograd{device_type.upper()}", with_keyset=True)


@dataclass(frozen=True)
class _Call:
    """The operation, and what goes in and comes out."""

    kernel: MeshKernel
    op: Callable[..., Any]
    passed: tuple[Parameter, ...]
    made: tuple[Parameter, ...]
    program: Program

    def plain(self, *tensors: torch.Tensor) -> Any:
        """Run the operation on plain tensors; results in the order of the kernel's parameters."""
        return self.results(tensors, self.new(*tensors))

    def new(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        """What is new of what the operation on plain tensors gives."""
        new = self.op(*tensors)
        return list(new) if isinstance(new, (tuple, list)) else [] if new is None else [new]

    def results(self, tensors: Sequence[Any], new: list[Any]) -> Any:
        """What the kernel writes: what was passed and updated, and what is new."""
        given = dict(zip([p.name for p in self.passed], tensors, strict=True))
        given |= dict(zip([p.name for p in self.made], new, strict=True))
        return _packed([given[p.name] for p in self.program.parameters if p.output is not None])


class _OverDTensors:
    """The operation on DTensors: on their local tensors, with the results wrapped again."""

    def __init__(self, call: _Call, device_mesh: Any) -> None:
        self._call, self._device_mesh = call, device_mesh
        self._inputs = [call.program.values[str(p.input)] for p in call.passed]
        outputs = [call.program.values[str(p.output)] for p in call.made]
        for value in (*self._inputs, *outputs):
            if not lies_like_torch(value.sharding, value.shape):
                refuse(
                    f"no DTensor lies like {value.name!r}: {value.shape} as '{value.sharding}'",
                    why="several axes split a dim that they don't divide, or not in the mesh's order: torch does that "
                    "differently",
                    fix="annotate it otherwise, or call the kernel itself",
                )
        self._wanted = [to_placements(value.sharding) for value in self._inputs]
        self._out_of_order = axes_out_of_order(device_mesh)
        self._makers = [dtensor_maker(device_mesh, value.sharding, value.shape) for value in outputs]

    def __call__(self, *tensors: Any) -> Any:
        if not any(is_dtensor(tensor) for tensor in tensors):
            return self._call.plain(*tensors)
        if torch.compiler.is_compiling():
            self._check(tensors)
            return self._on_dtensors(tensors)
        on_ranks = self._call.kernel.on_ranks(self._device_mesh)
        with on_ranks.lane:
            try:
                self._check(tensors)
            except MeshTensorError as error:
                on_ranks.refuse_call(error)
            if any(tuple(t.placements) != p for t, p in zip(tensors, self._wanted, strict=True)):
                on_ranks.ranks.meet_here()
            return self._on_dtensors(tensors)

    def _check(self, tensors: Sequence[Any]) -> None:
        given = zip(tensors, self._call.passed, self._inputs, strict=True)
        problems = [words for each in given if (words := _misfit(*each, self._device_mesh))]
        where = f"operation of kernel {self._call.program.name!r}"
        if problems:
            fix = "pass DTensors of these shapes on the DeviceMesh that the operation was made for"
            refuse(problems, where=where, fix=fix)
        for tensor, parameter, placements in zip(tensors, self._call.passed, self._wanted, strict=True):
            if parameter.output is not None and tuple(tensor.placements) != placements:
                what = f"parameter {parameter.name!r}: lies as {tensor.placements}, but is updated as {placements}"
                refuse(what, where=where, fix="redistribute it so before")
        for tensor, placements in zip(tensors, self._wanted, strict=True):
            check_order(tensor, placements, self._out_of_order)

    def _on_dtensors(self, tensors: Sequence[Any]) -> Any:
        laid = [t.redistribute(placements=p) for t, p in zip(tensors, self._wanted, strict=True)]
        new = self._call.new(*[tensor.to_local() for tensor in laid])
        return self._call.results(tensors, [make(tensor) for make, tensor in zip(self._makers, new, strict=True)])


def _misfit(tensor: Any, parameter: Parameter, value: ProgramValue, device_mesh: Any) -> str:
    """What is wrong with an argument of an operation on DTensors, if there is something."""
    if not is_dtensor(tensor):
        return f"parameter {parameter.name!r}: a {type(tensor).__name__}, but other parameters are DTensors"
    if tensor.device_mesh != device_mesh:
        return f"parameter {parameter.name!r}: on {named(tensor.device_mesh)}, but expected {named(device_mesh)}"
    if tuple(tensor.shape) != value.shape:
        return f"parameter {parameter.name!r}: shape {tuple(tensor.shape)}, but expected {value.shape}"
    return ""


def _check_name(name: str) -> None:
    what = f"the operation can't be named {name!r}"
    if not (isinstance(name, str) and name.isidentifier()):
        refuse(what, fix="use a Python identifier")
    if hasattr(getattr(torch.ops, _LIBRARY), name):
        refuse(
            what, why="there is an operation of that name, whose callers would run this kernel", fix="use another name"
        )


def _checked(kernel: MeshKernel) -> Program:
    if not isinstance(kernel, MeshKernel):
        refuse(f"as_custom_op takes a MeshKernel, not {type(kernel).__name__}", fix="mt.compile makes one")
    if kernel.symbols:
        refuse(
            f"{kernel} has symbolic dims ({', '.join(kernel.symbols)})",
            why="an operation of torch's has constant sizes here",
            fix="compile it with the sizes built in, one operation for each",
        )
    program = kernel.program
    scalars = [name for step in program.kernels for name in step.scalars]
    if scalars:
        refuse(
            f"kernel {program.name!r} has scalar parameters ({', '.join(dict.fromkeys(scalars))})",
            why="an operation of torch's has tensors only here",
            fix="compile it with these numbers built in",
        )
    return program


def _shape(program: Program, parameter: Parameter, rank: int | None) -> tuple[int, ...]:
    value = program.values[str(parameter.output)]
    return value.shape if rank is None else value.sharding.valid_extent(value.shape, rank)


def _schema(passed: Sequence[Parameter], made: Sequence[Parameter]) -> str:
    types = [f"Tensor(a{i}!)" if p.output is not None else "Tensor" for i, p in enumerate(passed)]
    arguments = ", ".join(f"{kind} {p.name}" for kind, p in zip(types, passed, strict=True))
    results = ", ".join(["Tensor"] * len(made))
    return f"({arguments}) -> {results if len(made) == 1 else f'({results})'}"


def _packed(results: list[Any]) -> Any:
    return results[0] if len(results) == 1 else tuple(results) if results else None
