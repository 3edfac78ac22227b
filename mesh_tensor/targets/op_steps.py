"""What an OpStep is on one device: a function from tiles to tiles."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from tvm import tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.recent import Recent
from mesh_tensor.program.program import Program
from mesh_tensor.program.steps import OpStep
from mesh_tensor.rules.operator import OpCall
from mesh_tensor.rules.operator.call import operator_name

from .dtypes import torch_dtype
from .kernels import Target
from .torch_ops import Valid, torch_function

TileFunction = Callable[..., list[torch.Tensor]]


_KNOWN: Recent[tuple, Callable[..., Sequence[torch.Tensor]]] = Recent(4096)  # of alike calls, as in a model's layers


def tile_functions(step: OpStep, program: Program, ranks: Sequence[int], target: Target) -> list[TileFunction]:
    """Per rank the step as a function of the operands' tiles; it gives the results' tiles."""
    if step.checked or differs_by_rank(step):
        return [_tile_function(step, program, rank, target) for rank in ranks]
    return [_tile_function(step, program, ranks[0], target)] * len(ranks)


def _tile_function(step: OpStep, program: Program, rank: int, target: Target) -> TileFunction:
    call, mesh = step.call, program.mesh
    function: Callable[..., Sequence[torch.Tensor]]
    if step.kernel is not None:
        function = _kernel_function(step.kernel, call, target)
    else:
        place = rank if differs_by_rank(step) else 0, _valid(step, program, rank)
        function = _KNOWN.made((call, mesh, place), lambda: torch_function(call, mesh, *place))
    stored = [program.values[name].tile_shape for name in step.args]
    known = [tensor.shape for tensor in step.call.inputs]
    merge = [shape if shape != tile else None for tile, shape in zip(stored, known, strict=True)]
    tiles = [program.values[name].tile_shape for name in step.results]
    split = [tile if tile != tensor.shape else None for tile, tensor in zip(tiles, step.call.outputs, strict=True)]
    whole = [name in step.whole for name in step.results]

    def run(*operands: torch.Tensor) -> list[torch.Tensor]:
        try:
            made = function(*[_as(tile, shape) for tile, shape in zip(operands, merge, strict=True)])
        except (RuntimeError, IndexError) as error:
            refuse(f"R.{operator_name(step.call)} fails on tiles of {known}: {error}", where=step.where)
        results = [_as(tile, shape) for tile, shape in zip(made, split, strict=True)]
        return [tile.contiguous() if one else tile for tile, one in zip(results, whole, strict=True)]

    return run


def _valid(step: OpStep, program: Program, rank: int) -> tuple[Valid, ...] | None:
    """What is no padding of each operand's tile, where indices are to be checked."""
    if not step.checked:
        return None
    values = [program.values[name] for name in step.args]
    return tuple(Valid(v.tile_shape, tuple(v.sharding.valid_extent(v.shape, rank))) for v in values)


def _kernel_function(func: tirx.PrimFunc, call: OpCall, target: Target) -> Callable[..., list[torch.Tensor]]:
    """A kernel that takes operands, then results, as a function that gives the results."""
    kernel = target.compile(func)
    buffers = [func.buffer_map[param] for param in func.params]
    shapes = [tuple(map(int, buffer.shape)) for buffer in buffers]
    results = [(torch_dtype(out.dtype), out.shape) for out in call.outputs]

    def run(*tiles: torch.Tensor) -> list[torch.Tensor]:
        given = [tile.reshape(shape).contiguous() for tile, shape in zip(tiles, shapes, strict=False)]
        made = [torch.empty(shape, dtype=dtype, device=tiles[0].device) for dtype, shape in results]
        kernel(*given, *(tile.view(shape) for tile, shape in zip(made, shapes[len(given) :], strict=True)))
        return made

    return run


def differs_by_rank(step: OpStep) -> bool:
    """Whether the operator looks at where the device stands."""
    return operator_name(step.call).startswith("mesh.")


def _as(tile: torch.Tensor, shape: tuple[int, ...] | None) -> torch.Tensor:
    return tile if shape is None else tile.reshape(shape)
