"""The table of gradients: operator name -> the function that makes the gradients of its operands."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from tvm import relax

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import OpCall, tensor_infos
from mesh_tensor.rules.operator.rule import rule_of
from mesh_tensor.rules.operator.shape import reshaped
from mesh_tensor.rules.operator.vjp import vjp_call

Gradient: TypeAlias = Any  # an expression, or None
Emit = Callable[[relax.Expr], relax.Var]


@dataclass(frozen=True, eq=False)
class Backward:
    """A call whose results have gradients.

    operands   its tensor operands, flattened as in `call.inputs`
    results    what it gave
    seeds      per result its gradient; None: nothing depends on the result
    wanted     per operand whether its gradient is wanted
    emit       binds an expression to a variable
    """

    call: OpCall
    operands: tuple[relax.Expr, ...]
    results: tuple[relax.Expr, ...]
    seeds: tuple[Gradient, ...]
    wanted: tuple[bool, ...]
    emit: Emit

    @property
    def d(self) -> relax.Expr:
        """The gradient of the only result."""
        (seed,) = self.seeds
        assert seed is not None
        return seed

    def arguments(self) -> list[relax.Expr]:
        """All arguments: operands, and numbers."""
        operands = iter(self.operands)
        return [next(operands) if tensor_infos(arg.struct_info) else arg for arg in self.call.expr.args]

    def summed(self, gradient: relax.Expr, operand: int) -> relax.Expr:
        """The gradient of an operand that was broadcast, of that of what it was broadcast to."""
        shape = self.call.inputs[operand].shape
        if shape_of(gradient) == shape:
            return gradient
        return self.emit(relax.op.collapse_sum_to(gradient, relax.ShapeExpr(shape)))

    def reshaped(self, x: relax.Expr, shape: Sequence[int]) -> relax.Expr:
        """The elements of `x` in that shape."""
        return self.emit(reshaped(x, shape, str(x.struct_info.dtype)))

    def number(self, value: float, operand: int = 0) -> relax.Expr:
        """A number in the dtype of an operand. (TVM makes no constants in bfloat16 of its own.)"""
        dtype = self.call.inputs[operand].dtype
        if dtype == "bfloat16":
            return self.emit(relax.op.astype(relax.const(value, "float32"), dtype))
        return relax.const(value, dtype)

    def typed(self, gradient: relax.Expr, operand: int) -> relax.Expr:
        """The gradient in the dtype of an operand."""
        dtype = self.call.inputs[operand].dtype
        return gradient if str(gradient.struct_info.dtype) == dtype else self.emit(relax.op.astype(gradient, dtype))


# Per tensor operand its gradient; None where it is not wanted, or the result does not depend on it.
GradientMaker = Callable[[Backward], Sequence[Gradient]]
_GRADIENTS: dict[str, GradientMaker] = {}
_STOPS: set[str] = set()


def gradient(*names: str) -> Callable[[GradientMaker], GradientMaker]:
    """Register a function as the gradient of the operators of these names (without "relax.")."""

    def register(make: GradientMaker) -> GradientMaker:
        _GRADIENTS.update(dict.fromkeys(names, make))
        return make

    return register


def stops(*names: str) -> None:
    """Register operators whose results count as constants."""
    _STOPS.update(names)


def stops_gradients(name: str) -> bool:
    """Whether the operator's results count as constants."""
    return name in _STOPS


def has_gradient(name: str) -> bool:
    """Whether the operator has a gradient."""
    return name in _GRADIENTS


def gradients_of(backward: Backward, where: str) -> list[Gradient]:
    """The gradients of a call's operands. Refused where the operator has none."""
    name = backward.call.operator
    if name not in _GRADIENTS:
        refuse(
            f"operator R.{name} has no gradient",
            where=f"{where} = {backward.call.expr}",
            why="the result that is differentiated depends on it",
            fix="write it with other operators, put R.grad.no_grad around it if it counts as a constant, or add its "
            "gradient (docs/adding_an_op.md)",
        )
    made = list(_GRADIENTS[name](backward))
    for operand, found, wanted in zip(backward.call.inputs, made, backward.wanted, strict=True):
        if found is not None and wanted:
            type_ = TensorType(shape_of(found), str(found.struct_info.dtype))
            assert type_ == operand, f"the gradient of {operand} of {name} is {type_}"
    return [found if wanted else None for found, wanted in zip(made, backward.wanted, strict=True)]


def differentiated(backward: Backward) -> list[Gradient]:
    """The gradients by `mesh.vjp`: an operand that the operator is linear in by itself gets a node of its own, which
    does not depend on it; all others share one."""
    call = backward.call
    found: list[Gradient] = [None] * len(backward.operands)
    wanted = [i for i, is_wanted in enumerate(backward.wanted) if is_wanted]
    seeds = {i: seed for i, seed in enumerate(backward.seeds) if seed is not None}
    linear = rule_of(call).linear
    groups = [[i] for i in wanted] if all(frozenset({i}) in linear for i in wanted) else [wanted]
    for group in groups:
        made = backward.emit(vjp_call(call, backward.operands, seeds, group))
        for position, i in enumerate(group):
            found[i] = made if len(group) == 1 else backward.emit(relax.TupleGetItem(made, position))
    return found


def shape_of(expr: relax.Expr) -> tuple[int, ...]:
    """The shape of a tensor."""
    return tuple(int(size) for size in expr.struct_info.shape.values)


def zeros(tensor: TensorType) -> relax.Expr:
    """Zeros of that type."""
    return relax.op.zeros(tensor.shape, tensor.dtype)
