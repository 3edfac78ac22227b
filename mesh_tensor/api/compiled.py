"""What a kernel is once it is compiled, whatever runs it; what can run it, and what `explain` says of it beside its
Program."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mesh_tensor.base.decisions import columns
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.program.symbolic import Programs
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.runtime.ranks.dtensor_ports import Transfer
from mesh_tensor.targets.cpu.blas import who_multiplies
from mesh_tensor.targets.kernels import Target
from mesh_tensor.tir.tile_ops import Gemm

from .signature import Signature


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
