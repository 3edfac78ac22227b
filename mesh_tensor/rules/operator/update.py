"""`mesh.update`: an optimizer's step on one parameter, as one operator.

`R.call_pure_packed("mesh.update", parameter, gradient, *slots, numbers[, scale], R.str(text))`: `numbers` are those of
the step (`Optimizer.numbers`), `scale` is what the gradient is multiplied with; the text has the optimizer. Results:
the parameter and its slots. Of a parameter in 16 bits the last slot is its value in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from tvm import relax

from mesh_tensor.base.dtypes import NARROW, TensorType
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.optimizer import MASTER, Optimizer

from .call import OpCall, tensor_type
from .call_text import dumps, info_of, loads
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule

UPDATE = "mesh.update"
UPDATE_IN_PLACE = "fused.update_in_place"  # the same, whose results have the memory of the parameter and its slots
NUMBERS = TensorType((4,), "float64")


class HasSlots(Protocol):
    """An optimizer, by what it keeps."""

    @property
    def slots(self) -> tuple[str, ...]: ...


def slots_of(optimizer: HasSlots, dtype: str) -> dict[str, str]:
    """What is kept for a parameter of that dtype, and in which dtype: in float32 at least."""
    if dtype in NARROW:
        return dict.fromkeys([*optimizer.slots, MASTER], "float32")
    return dict.fromkeys(optimizer.slots, dtype)


def update_call(
    optimizer: Optimizer,
    parameter: relax.Expr,
    gradient: relax.Expr,
    slots: Sequence[relax.Expr],
    numbers: relax.Expr,
    scale: relax.Expr | None,
) -> relax.Call:
    """The new parameter and its new slots, as a tuple."""
    operands = [parameter, gradient, *slots, numbers, *([] if scale is None else [scale])]
    said = {"optimizer": optimizer.name, "slots": len(slots), **optimizer.options}
    infos = [info_of(tensor_type(x.struct_info, "an operand")) for x in (parameter, *slots)]
    info = relax.TupleStructInfo(infos)
    return relax.op.call_pure_packed(UPDATE, *operands, relax.StringImm(dumps(said)), sinfo_args=[info])


def optimizer_of(call: OpCall) -> tuple[Optimizer, int]:
    """The optimizer, and how many slots the parameter has. Refused where the text is none that `update_call` wrote, or
    does not fit the operands."""
    said: Any = loads(call.literals[-1]) if call.literals and isinstance(call.literals[-1], str) else None
    try:
        options = {
            n: tuple(v) if isinstance(v, list) else v for n, v in said.items() if n not in ("optimizer", "slots")
        }
        optimizer, count = Optimizer.make(said["optimizer"], **options), int(said["slots"])
        fits = count == len(slots_of(optimizer, call.inputs[0].dtype)) and count + 3 <= len(call.inputs) <= count + 4
    except (AttributeError, KeyError, TypeError, IndexError) as error:
        refuse(f"{str(said)[:200]} is no text of mesh.update", why=str(error))
    shapes = {tensor.shape for tensor in (*call.inputs[: count + 2], *call.outputs)}
    if not fits or len(shapes) != 1 or call.inputs[count + 2] != NUMBERS or len(call.outputs) != count + 1:
        refuse(f"mesh.update by {said} on operands of {call.inputs}", why="they don't fit each other")
    return optimizer, count


@rule(UPDATE)
def update(call: OpCall) -> OpRule:
    """Element by element."""
    _, count = optimizer_of(call)
    dims = dims_of(call.inputs[0].ndim)
    numbers = tuple((None,) * tensor.ndim for tensor in call.inputs[count + 2 :])
    return OpRule(((dims,) * (count + 2)) + numbers, (dims,) * (count + 1), localize=_local)


def _local(local: LocalCall) -> relax.Expr:
    infos = [info_of(TensorType(t, d)) for t, d in zip(local.out_tiles, local.dtypes, strict=True)]
    info = relax.TupleStructInfo(infos)
    return relax.op.call_pure_packed(UPDATE, *local.args, local.call.expr.args[-1], sinfo_args=[info])
