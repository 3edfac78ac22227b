"""What a kernel is once it is compiled: the ways to call it, what can run it, what `explain` says of it beside its
Program, and VirtualKernel, which is called with global tensors and MeshTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from tvm import tirx

from mesh_tensor.annotations.annotation import is_int
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.program.symbolic import Programs
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.runtime.ranks.rank_launch import Transfer
from mesh_tensor.runtime.virtual.launch import AnyTensor, Launch, entangled
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor
from mesh_tensor.targets.cpu.blas import who_multiplies
from mesh_tensor.targets.kernels import Target
from mesh_tensor.tir.tile_ops import Gemm

from .signature import Signature, check_layouts, is_quick


@dataclass(frozen=True, eq=False)
class Compiled:
    """A kernel for `target`, with its `programs` by size. `layouts`: those of the annotated parameters; `writes`: the
    parameters that it writes; `ran` is told what a call ran, and how to find out what more it had to do (lines for
    `explain`, the title first)."""

    signature: Signature
    mesh: Mesh
    target: Target
    strict: bool
    poison: bool
    overlap: str | int
    layouts: Mapping[str, Sharding]
    writes: frozenset[str]
    programs: Programs
    ran: Callable[[Program, Callable[[], list[Any]]], None]


def notes_on(program: Program, target: str, arrived: Sequence[Transfer]) -> Iterator[tuple[str, ...]]:
    """Lines, the title first: of the changes of layout that the DTensors of the last call needed (`arrived`), and of
    products on this target."""
    if arrived:
        yield "DTensors of the last call on ranks, redistributed", *columns(_arrived(arrived))
    if target == "c" and _multiplies(program):
        yield (f"products: {who_multiplies()}",)


def _arrived(transfers: Sequence[Transfer]) -> list[tuple[object, ...]]:
    """Per DTensor that lay otherwise than the kernel takes or makes it: how it was redistributed."""
    rows: list[tuple[object, ...]] = [("parameter", "goes", "from", "to", "steps", "bytes received")]
    for name, comes_in, by_torch, plan in transfers:
        moves = [f"{m.kind}({m.op})" if m.op else m.kind for m in plan.moves]
        steps = "; ".join(f"{kind} over {', '.join(m.axes)}" for kind, m in zip(moves, plan.moves, strict=True))
        steps = f"{steps}, by torch" if by_torch else steps
        rows.append((name, "in" if comes_in else "out", plan.src, plan.dst, steps, f"{plan.bytes:,}"))
    return rows


def _multiplies(program: Program) -> bool:
    """Whether kernels compute matrix products."""
    statements = [s for kernel in program.kernels for s in read_kernel(kernel.func).statements]
    return any(isinstance(statement.tile_op, Gemm) for statement in statements)


_MANY = 256  # devices: what so many need is made ready when they run, as a kernel may be compiled to be looked at alone


class VirtualKernel:
    """The kernel on all devices of its mesh, in this process. What has no symbolic dims, and not too many devices, is
    made ready here."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, self._signature, self._device = compiled, compiled.signature, compiled.target.device()
        self._launches: Recent[tuple[int, ...], Launch] = Recent(KERNEL_SIZES)
        self._peak_bytes = 0  # of calls whose launches are not kept any more
        at_once = not self._signature.symbols and compiled.mesh.num_devices <= _MANY
        self._only = self._launch(()) if at_once else None
        types = [] if self._only is None else self._only.tensor_types()
        self._quick = [(name, torch.Size(shape), dtype) for name, shape, dtype in types]
        self._can_be_quick = len(self._signature.params) == len(self._quick)

    def __call__(self, given: Mapping[str, Any], returned: Sequence[str]) -> list[AnyTensor]:
        """Run on whole tensors; if any is a MeshTensor, all results are, laid out as annotated."""
        quick = self._can_be_quick and is_quick(self._quick, given, self._device)
        launch = self._only if quick and self._only is not None else self._checked(given)
        as_mesh_tensors = any(isinstance(arg, MeshTensor) for arg in given.values())
        tensors: dict[str, AnyTensor | None] = {name: given.get(name) for name in self._signature.tensors}
        for parameter in launch.program.parameters:
            if parameter.input is not None and tensors[parameter.name] is None:
                tensors[parameter.name] = launch.zeros(parameter, as_mesh_tensors)
        results = launch(
            tensors,
            self._signature.scalars(given),
            as_mesh_tensors=as_mesh_tensors,
            entangled=entangled(tensors, self._compiled.writes, self._signature.name),
        )
        return [_result(given.get(name), results[name]) for name in returned]

    def refuse_call(self, error: Exception) -> NoReturn:
        """Raise `error`."""
        raise error

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device held at once, in tiles and workspaces, in any call so far."""
        return max(self._peak_bytes, *(launch.peak_bytes for launch in self._launches), 0)

    def _checked(self, given: Mapping[str, Any]) -> Launch:
        """Check the arguments; the launch for their sizes."""
        sizes = self._signature.check(given, self._compiled.mesh, self._device)
        launch = self._launch(tuple([sizes[var] for var in self._signature.symbols]))
        if self._signature.symbols:
            self._compiled.ran(launch.program, list)
        if self._compiled.strict:
            layouts = {name: value.sharding for name, value in given.items() if isinstance(value, MeshTensor)}
            where = f"call of kernel {self._signature.name!r} on {launch.program.mesh}"
            fix = "distribute or .redistribute it so, or compile without strict=True"
            check_layouts(layouts, launch.program, where, fix)
        return launch

    def _launch(self, key: tuple[int, ...]) -> Launch:
        launch = self._launches.get(key)
        if launch is None:
            self._peak_bytes = self.peak_bytes
            program = self._compiled.programs.of(dict(zip(self._signature.symbols, key, strict=True)))
            launch = self._launches.put(key, Launch(program, self._compiled.target, poison=self._compiled.poison))
        return launch


def _result(given: Any, result: AnyTensor) -> AnyTensor:
    """The very tensor that was passed, where the result is in it."""
    return given if isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor) else result


OutIdx = int | str | Sequence[int | str] | None


@dataclass(frozen=True)
class CallForm:
    """One way to call a kernel: the parameters that are passed, and those that are returned."""

    passed: tuple[str, ...]
    returned: tuple[str, ...]


def given_out_idx(func: tirx.PrimFunc, out_idx: OutIdx) -> list[Any] | None:
    """`out_idx` as the caller states it, or else the kernel's own `tilelang_out_idx`, as a list."""
    if out_idx is None:
        of_kernel = (func.attrs or {}).get("tilelang_out_idx")
        return None if of_kernel is None else [int(index) for index in of_kernel]
    return list(out_idx) if isinstance(out_idx, Iterable) and not isinstance(out_idx, str) else [out_idx]


def checked_out_idx(out_idx: list[Any], signature: Signature, writes: frozenset[str]) -> tuple[str, ...]:
    """The names of the parameters that are made and returned, or a MeshTensorError with all that is wrong."""
    names = [param.name for param in signature.params]
    problems: list[str] = []
    made: list[str] = []
    for index in out_idx:
        if isinstance(index, str) and index not in names:
            problems.append(f"out_idx has {index!r}, which is no parameter{did_you_mean(index, names)}")
        elif not isinstance(index, str) and (not is_int(index) or not -len(names) <= index < len(names)):
            problems.append(f"out_idx has {shown(index)}, but there are {len(names)} parameters")
        elif (name := index if isinstance(index, str) else names[index]) not in writes:
            problems.append(f"out_idx has {index!r}, but the kernel does not write parameter {name!r}")
        elif name in made:
            problems.append(f"out_idx has parameter {name!r} twice")
        else:
            made.append(name)
    if problems:
        written = ", ".join(f"{index}: {name}" for index, name in enumerate(names) if name in writes)
        fix = f"use the positions, or the names, of what it writes ({written})"
        refuse(problems, where=f"kernel {signature.name!r}", fix=fix)
    return tuple(made)


def call_forms(
    signature: Signature, out_idx: list[Any] | None, reads: frozenset[str], writes: frozenset[str]
) -> dict[int, CallForm]:
    """The ways to call a kernel that reads and writes these parameters, by the number of arguments."""
    names = tuple(param.name for param in signature.params)
    written = tuple(name for name in names if name in writes)
    if out_idx is not None:
        made = checked_out_idx(out_idx, signature, writes)
        passed = tuple(name for name in names if name not in made)
        return {len(passed): CallForm(passed, made)}
    needed = tuple(name for name in names if name in reads or name not in writes)
    return {len(names): CallForm(names, written), len(needed): CallForm(needed, written)}


def refuse_count(kernel: str, count: int, forms: Mapping[int, CallForm]) -> NoReturn:
    """Raise a MeshTensorError: `kernel` can't be called with that many arguments."""
    expected = sorted(f"{len(form.passed)} ({', '.join(form.passed)})" for form in forms.values())
    shortest = min(forms.values(), key=lambda form: len(form.passed))
    returned = {name for form in forms.values() for name in form.returned}
    updated = [name for name in shortest.passed if name in returned and count < len(shortest.passed)]
    refuse(
        f"{count} arguments, but expected {' or '.join(expected)}",
        where=f"call of kernel {kernel!r}",
        why=f"it goes on from what {listing(updated)} held before (an atomic_add, say)" if updated else "",
        fix="pass the tensors in the order of the kernel's parameters",
    )


def in_order(
    kernel: str, params: Sequence[str], args: Sequence[Any], named: Mapping[str, Any], forms: Mapping[int, CallForm]
) -> tuple[Any, ...]:
    """The arguments of a call in the order of a form's parameters, those given by name in their places. The refusal
    names all the arguments that are missing, unknown, or given twice."""
    wrong = {count: _misfits(form, params, args, named) for count, form in forms.items()}
    best = min(wrong, key=lambda count: (len(wrong[count]), -count))
    if wrong[best]:
        calls = " or ".join(f"{kernel}({', '.join(form.passed)})" for _, form in sorted(forms.items()))
        refuse(wrong[best], where=f"call of kernel {kernel!r}", fix=f"call it as {calls}, by position or by name")
    return (*args, *(named[name] for name in forms[best].passed[len(args) :]))


def _misfits(form: CallForm, params: Sequence[str], args: Sequence[Any], named: Mapping[str, Any]) -> list[str]:
    """Why these arguments are not those of the form."""
    by_position, expected = form.passed[: len(args)], form.passed[len(args) :]
    found = (
        [f"{len(args)} arguments by position, but it takes {len(form.passed)}"] if len(args) > len(form.passed) else []
    )
    found += [f"no argument is given for {name!r}" for name in expected if name not in named]
    for name in named:
        if name in by_position:
            found.append(f"{name!r} is given twice, by position and by name")
        elif name not in form.passed and name in params:
            found.append(f"{name!r} is made by the kernel and returned")
        elif name not in form.passed:
            found.append(f"there is no parameter {name!r} (parameters: {listing(params)}){did_you_mean(name, params)}")
    return found
