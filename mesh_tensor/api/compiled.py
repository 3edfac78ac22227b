"""What a kernel is once it is compiled, whatever runs it; and what can run it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Program
from mesh_tensor.program.symbolic import Programs
from mesh_tensor.targets.kernels import Target

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
