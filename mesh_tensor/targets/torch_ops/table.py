"""The table from Relax operators to torch: operator name -> the function that makes the torch function of a call.

A maker decides everything that depends on the call alone (attributes, shapes, dtypes), so that what it gives back only
computes. Most operators know nothing of the mesh; those that may meet a tile's padding as data, and the local operators
of the namespace `mesh.`, are told where they run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.call import OpCall
from mesh_tensor.rules.operator.conv import CONV_ADD
from mesh_tensor.rules.operator.linear_algebra import LINEAR, MATMUL_ADD
from mesh_tensor.rules.operator.nn import LOG_SOFTMAX_BACKWARD, SOFTMAX_GRADIENT
from mesh_tensor.targets.dtypes import torch_dtype

Function = Callable[..., Any]
Maker = Callable[[OpCall], Function]


@dataclass(frozen=True)
class Valid:
    """The part of an operand's tile that is no padding: the first `extent` of the `stored` dims, into which the
    operand's own may be taken apart."""

    stored: tuple[int, ...]
    extent: tuple[int, ...]

    def of(self, tile: torch.Tensor) -> torch.Tensor:
        """That part of a tile, with its stored dims."""
        return tile.reshape(self.stored)[tuple(slice(size) for size in self.extent)]

    def repeated(self, tile: torch.Tensor) -> torch.Tensor:
        """The tile with its last rows in place of what is padding."""
        made = tile.reshape(self.stored)
        for dim, (size, extent) in enumerate(zip(self.stored, self.extent, strict=True)):
            if extent < size:
                made = made.index_select(dim, torch.arange(size, device=tile.device).clamp(max=extent - 1))
        return made.reshape(tile.shape)


@dataclass(frozen=True)
class Place:
    """Where a call runs: on the whole tensors (`mesh` is None), or on the tiles of device `rank` of a mesh. `valid`:
    what of the tiles is no padding, per operand, if indices in it are to be checked."""

    mesh: Mesh | None = None
    rank: int = 0
    valid: tuple[Valid, ...] | None = None

    @property
    def padded(self) -> bool:
        """Whether operands may have padding, whose values mean nothing and must do no harm."""
        return self.mesh is not None


# Operators whose results are never views of operands, whatever the call.
ALWAYS_NEW = {
    *("matmul", "divide", "floor_divide", "mod", "floor_mod", "nn.softmax", "nn.log_softmax", "nn.layer_norm"),
    *(LINEAR, MATMUL_ADD, SOFTMAX_GRADIENT, LOG_SOFTMAX_BACKWARD),
    *("nn.rms_norm", *CONV_ADD, *CONV_ADD.values(), "sum", "mean", "max", "min"),
}
NEW_IF: dict[str, Callable[[OpCall], bool]] = {}  # ... of those for which the call tells


def makes_new(call: OpCall) -> bool:
    """Whether the call's results are in memory that no operand has."""
    return call.name in ALWAYS_NEW or (call.name in NEW_IF and NEW_IF[call.name](call))


PlacedMaker = Callable[[OpCall, Place], Function]
_MAKERS: dict[str, PlacedMaker] = {}


def torch_op(*names: str) -> Callable[[Maker], Maker]:
    """Register what makes the torch function of the operators of these names (without "relax.")."""

    def register(make: Maker) -> Maker:
        placed_torch_op(*names)(lambda call, _: make(call))
        return make

    return register


def placed_torch_op(*names: str) -> Callable[[PlacedMaker], PlacedMaker]:
    """As :func:`torch_op`, for operators that need to know where they run."""

    def register(make: PlacedMaker) -> PlacedMaker:
        _MAKERS.update(dict.fromkeys(names, make))
        return make

    return register


def same_for_all(functions: dict[str, Function]) -> None:
    """Register operators that are one torch function of their operands, whatever the call, in memory of its own."""
    ALWAYS_NEW.update(functions)
    for name, function in functions.items():
        torch_op(name)(lambda call, function=function: with_numbers(call, function))  # type: ignore[misc]


def of_attributes(functions: Mapping[str, tuple[Function, tuple[str, ...]]]) -> None:
    """Register operators that are a torch function of their one operand and these attributes, in order."""
    for name, (function, attributes) in functions.items():

        def make(call: OpCall, function: Function = function, attributes: tuple[str, ...] = attributes) -> Function:
            values = [call.attr(attribute) for attribute in attributes]
            return lambda x: function(x, *values)

        torch_op(name)(make)


def has_torch_function(name: str) -> bool:
    """Whether the operator (without "relax."; local ones with "mesh.") has a torch function."""
    return name in _MAKERS


def local_operators() -> tuple[str, ...]:
    """The operators of the namespace `mesh.`: what only one device of a mesh runs."""
    return tuple(name for name in _MAKERS if name.startswith("mesh."))


def torch_function(call: OpCall, mesh: Mesh | None = None, rank: int = 0) -> Callable[..., tuple[torch.Tensor, ...]]:
    """The torch function of a call: it takes the call's tensor operands, flattened, and gives its results, whose dtypes
    are those of `call.outputs`. Results may be views of operands.

    With a mesh the operands are the tiles of device `rank`: data-dependent indices out of range then give poison (NaN
    or an extreme integer), since they may be padding; without a mesh they are refused.

    Raises:
        MeshTensorError: the operator, or what its attributes ask for, has no torch function here.

    >>> torch_function(op_call(relax.op.matmul(x, w)))(torch.ones(4, 8), torch.ones(8, 2))[0].shape
    torch.Size([4, 2])
    """
    return typed(untyped_function(call, mesh, rank), [torch_dtype(out.dtype) for out in call.outputs])


def untyped_function(
    call: OpCall, mesh: Mesh | None = None, rank: int = 0, valid: tuple[Valid, ...] | None = None
) -> Function:
    """As :func:`torch_function`, but a single result may come bare, and the dtypes are those that torch gives. Indices
    out of range are refused in what is `valid` of the tiles, too."""
    name = call.operator
    if name not in _MAKERS:
        refuse(
            f"operator R.{name} has no torch function",
            where=str(call.expr),
            fix="write it with other operators, or as a TIR function that R.call_tir calls",
        )
    return _MAKERS[name](call, Place(mesh, rank, valid))


def with_numbers(call: OpCall, function: Function) -> Function:
    """`function` of the call's tensor operands, where it takes all operands: those that are numbers (R.prim_value) are
    filled in as tensors without dims, in the tensors' dtype."""
    numbers = {
        position: torch.tensor(arg, dtype=torch_dtype(call.inputs[0].dtype), device="cpu")
        for position, arg in enumerate(call.operands)
        if arg is not None
    }
    if not numbers:
        return function

    def filled(*tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        return function(*(numbers[i] if i in numbers else next(rest) for i in range(count)))

    count = len(numbers) + len(call.inputs)
    return filled


def typed(function: Function, dtypes: list[torch.dtype]) -> Callable[..., tuple[torch.Tensor, ...]]:
    """`function` with its results in a tuple, in these dtypes."""
    if len(dtypes) == 1:
        (only,) = dtypes

        def single(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            result = function(*tensors)
            if isinstance(result, (tuple, list)):
                (result,) = result
            return (result if result.dtype is only else result.to(only),)

        return single

    def several(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(r if r.dtype is t else r.to(t) for r, t in zip(function(*tensors), dtypes, strict=True))

    return several
