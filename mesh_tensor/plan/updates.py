"""The optimizer's step on every parameter, as what a function computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TypeAlias

from tvm import ir, relax

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.optimizer import Optimizer
from mesh_tensor.rules.operator.update import update_call

from .gradient import Writer

op = relax.op


@dataclass(frozen=True, eq=False)
class WrittenOptimizer:
    """An optimizer that somebody wrote: `function(shape, dtype)` takes (parameter, gradient, learning rate, number of
    the step, *slots) and returns (new parameter, *new slots)."""

    name: str
    slots: tuple[str, ...]
    function: Callable[[tuple[int, ...], str], relax.Function]
    options: Mapping[str, float] = field(default_factory=dict)

    def numbers(self, step: int, lr: float) -> tuple[float, ...]:
        """As `Optimizer.numbers`."""
        return lr, 1.0, 1.0, float(step)


AnyOptimizer: TypeAlias = "Optimizer | WrittenOptimizer"


class Updates:
    """Writes the steps; `functions` are those that they call."""

    def __init__(self, optimizer: AnyOptimizer, writer: Writer, numbers: relax.Var, scale: relax.Expr | None) -> None:
        self._optimizer, self._writer, self._numbers, self._scale = optimizer, writer, numbers, scale
        self._by_type: dict[tuple[tuple[int, ...], str], ir.GlobalVar] = {}
        self._scalars: tuple[relax.Expr, relax.Expr] | None = None
        self.functions: dict[ir.GlobalVar, relax.Function] = {}

    def __call__(
        self, name: str, parameter: relax.Expr, gradient: relax.Expr, slots: list[relax.Expr]
    ) -> list[relax.Expr]:
        """The new parameter and its new slots."""
        emit = self._writer.emit
        if isinstance(self._optimizer, WrittenOptimizer):
            return self._called(self._optimizer, name, parameter, gradient, slots)
        call = update_call(self._optimizer, parameter, gradient, slots, self._numbers, self._scale)
        made = emit(call, f"new_{name}")
        names = [name, *(slot.name_hint for slot in slots)]
        return [emit(relax.TupleGetItem(made, n), f"new_{each}") for n, each in enumerate(names)]

    def _called(
        self,
        optimizer: WrittenOptimizer,
        name: str,
        parameter: relax.Expr,
        gradient: relax.Expr,
        slots: list[relax.Expr],
    ) -> list[relax.Expr]:
        """By a call of its function. Where the gradient is not finite the parameter is not, whatever is made of it."""
        emit, narrow = self._writer.emit, parameter.struct_info.dtype
        wide = slots[-1] if narrow in NARROW else parameter
        shape, dtype = tuple(map(int, wide.struct_info.shape)), wide.struct_info.dtype
        if gradient.struct_info.dtype != dtype:
            gradient = emit(op.astype(gradient, dtype))
        if self._scale is not None:
            factor = self._scale if dtype == "float32" else emit(op.astype(self._scale, dtype))
            gradient = emit(op.multiply(gradient, factor))
        own = slots[: len(optimizer.slots)]
        callee = self._function(optimizer, shape, dtype)
        made = emit(relax.Call(callee, [wide, gradient, *self._lr_and_step(), *own]), f"new_{name}")
        new, *kept = [emit(relax.TupleGetItem(made, n), f"new_{name}") for n in range(1 + len(own))]
        nothing = relax.const(float("nan"), dtype)
        new = emit(op.where(emit(op.isfinite(gradient)), new, nothing), f"new_{name}")
        if wide is parameter:
            return [new, *kept]
        return [emit(op.astype(new, narrow), f"new_{name}"), *kept, new]

    def _function(self, optimizer: WrittenOptimizer, shape: tuple[int, ...], dtype: str) -> ir.GlobalVar:
        if (shape, dtype) not in self._by_type:
            function = optimizer.function(shape, dtype)
            var = ir.GlobalVar(f"optimizer_{len(self._by_type)}")
            relax.expr._update_struct_info(var, function.struct_info)
            self._by_type[shape, dtype], self.functions[var] = var, function
        return self._by_type[shape, dtype]

    def _lr_and_step(self) -> tuple[relax.Expr, relax.Expr]:
        """As numbers in float32."""
        if self._scalars is None:
            self._scalars = self._number(0, "lr"), self._number(3, "step")
        return self._scalars

    def _number(self, index: int, name: str) -> relax.Expr:
        emit = self._writer.emit
        part = emit(op.squeeze(emit(op.strided_slice(self._numbers, [0], [index], [index + 1])), [0]))
        return emit(op.astype(part, "float32"), name)
