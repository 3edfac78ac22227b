"""What a kernel is once it is compiled: what can run it, what `explain` says of it beside its Program, and
VirtualKernel, which is called with global tensors and MeshTensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import torch

from mesh_tensor.base.decisions import columns
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.program.symbolic import Programs
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.runtime.ranks.dtensor_ports import Transfer
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


class KernelRunner(Protocol):
    """Runs a kernel somewhere: on a virtual mesh, or as a rank of a process group."""

    def __call__(self, given: Mapping[str, Any], returned: Sequence[str]) -> Sequence[Any]:
        """Run on arguments by parameter; the written parameters `returned`."""

    def refuse_call(self, error: Exception) -> NoReturn:
        """Raise `error` instead of a call."""


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
