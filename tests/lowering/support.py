"""What the tests of the lowering share: lowering by hand, facts about TIR, numeric twins of structural tests."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.lowering.local_view import Collective, LocalKernel
from mesh_tensor.lowering.pipeline import Lowered, lower_kernel

Shardings = Mapping[str, Mapping[str, int | None]]


def lowered(func: tirx.PrimFunc, mesh: Mapping[str, int], shardings: Shardings, **options) -> Lowered:
    """`func` annotated and lowered."""
    return lower_kernel(mt.annotate(func, mt.Mesh(mesh), dict(shardings)), **options)


def local_kernels(result: Lowered) -> list[tirx.PrimFunc]:
    """The local kernels, in order."""
    return [step.func for step in result.steps if isinstance(step, LocalKernel)]


def only_kernel(result: Lowered) -> tirx.PrimFunc:
    """The local kernel of a lowering that needs nothing else."""
    (kernel,) = result.steps
    assert isinstance(kernel, LocalKernel)
    return kernel.func


def outline(result: Lowered) -> list[str]:
    """The steps in words: `kernel(A, C)`, `all_reduce(C, sum, y)`, `all_gather(A, dim 0, x)`."""
    return [_outline(step) for step in result.steps]


def _outline(step: LocalKernel | Collective) -> str:
    if isinstance(step, LocalKernel):
        return f"kernel({', '.join(step.args)})"
    move = step.move
    dims = " -> ".join(f"dim {dim}" for dim in (move.src_dim, move.dst_dim) if dim is not None)
    return f"{move.kind}({', '.join(part for part in (step.src, dims, move.op, *move.axes) if part)})"


def nodes(func: tirx.PrimFunc, kind: type) -> list:
    """The nodes of a kind in a function."""
    found: list = []
    tirx.stmt_functor.post_order_visit(func.body, lambda n: found.append(n) if isinstance(n, kind) else None)
    return found


def extents(func: tirx.PrimFunc) -> dict[str, int]:
    """The loops of a function with constant bounds: variable name -> extent."""
    return {loop.loop_var.name: int(loop.extent) for loop in nodes(func, tirx.For)}


def text(func: tirx.PrimFunc) -> str:
    """The function as TVMScript."""
    return func.script(show_meta=False)


def coordinates(func: tirx.PrimFunc) -> list[str]:
    """The device coordinates (and other scalars) that a local kernel takes."""
    return [param.name for param in func.params if param not in func.buffer_map]


def run(func: tirx.PrimFunc, mesh: Mapping[str, int], shardings: Shardings, *inputs: torch.Tensor, **options):
    """The annotated kernel's results on a poisoned virtual mesh."""
    annotated = mt.annotate(func, mt.Mesh(mesh), dict(shardings))
    return mt.compile(annotated, target="interpret", poison=True, **options)(*inputs)


def assert_right(
    func: tirx.PrimFunc,
    mesh: Mapping[str, int],
    shardings: Shardings,
    inputs: list[torch.Tensor],
    reference: Callable[..., torch.Tensor],
    *,
    rtol: float = 1e-5,
    atol: float = 1e-5,
) -> None:
    """Run the kernel on the mesh; compare with the reference, rounded to the dtype of the result."""
    result = run(func, mesh, shardings, *(tensor.clone() for tensor in inputs))
    expected = reference(*inputs)
    torch.testing.assert_close(result, expected.to(result.dtype), rtol=rtol, atol=atol)
