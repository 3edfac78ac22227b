"""`mesh.dropout`: zeros in place of elements that numbers of their own choose, whatever device has them.

`R.call_pure_packed("mesh.dropout", x, seed, R.str(text))`: `seed` is one whole number, which differs from step to step;
the text says with which probability an element is 0, and which of the function's dropouts it is (`stream`). Whether an
element stays follows from the seed, the stream and where it stands in the whole tensor. What stays is divided by the
probability to stay. On tiles the text also has the shape of the whole tensor, and its layout.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from tvm import ir, relax

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse

from .call import OpCall
from .call_text import dumps, info_of, loads
from .elementwise import dims_of
from .rule import LocalCall, OpRule, rule

DROPOUT = "mesh.dropout"
SEED = TensorType((), "int64")
SEED_NAME = "dropout_seed"  # the parameter of a function with dropouts


@dataclass(frozen=True)
class Dropout:
    """What the text says; `shape` and `layout` are those of the whole tensor, of a call on tiles."""

    probability: float
    stream: int
    shape: tuple[int, ...] = ()
    layout: str = ""


def dropout_call(x: relax.Expr, seed: relax.Expr, said: Dropout) -> relax.Call:
    """A call of the operator on a whole tensor, some of whose sizes may be open."""
    info = relax.TensorStructInfo(x.struct_info.shape, x.struct_info.dtype)
    return relax.op.call_pure_packed(DROPOUT, x, seed, relax.StringImm(dumps(asdict(said))), sinfo_args=[info])


def dropout_of(call: OpCall) -> Dropout:
    """What a call says. Refused where the text is none that was written for these operands."""
    said: Any = loads(call.literals[-1]) if call.literals and isinstance(call.literals[-1], str) else None
    try:
        made = Dropout(
            float(said["probability"]), int(said["stream"]), tuple(map(int, said["shape"])), str(said["layout"])
        )
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        refuse(f"{str(said)[:200]} is no text of mesh.dropout", why=str(error))
    fits = [tensor.shape for tensor in call.inputs[1:]] == [SEED.shape] and call.inputs[1].dtype == SEED.dtype
    if not fits or call.inputs[0].shape != call.outputs[0].shape or not 0 <= made.probability <= 1:
        refuse(f"mesh.dropout of {made} on operands of {call.inputs}", why="they don't fit each other")
    return made


def without_dropout(mod: ir.IRModule, function: str) -> ir.IRModule:
    """The module, in whose function nothing is dropped."""
    mod = mod.clone()
    mod.update_func(mod.get_global_var(function), _Without().visit_expr(mod[function]))
    return mod


@relax.expr_functor.mutator
class _Without(relax.PyExprMutator):
    def visit_call_(self, call: relax.Call) -> relax.Expr:
        name = call.args[0].global_symbol if call.args and isinstance(call.args[0], relax.ExternFunc) else ""
        return self.visit_expr(call.args[1]) if name == DROPOUT else super().visit_call_(call)


@rule(DROPOUT)
def dropout(call: OpCall) -> OpRule:
    dropout_of(call)
    dims = dims_of(call.inputs[0].ndim)
    linear = (frozenset({0}),)
    return OpRule((dims, ()), (dims,), linear=linear, positional=frozenset(dims), localize=_local)


def _local(local: LocalCall) -> relax.Expr:
    said, layout = dropout_of(local.call), local.layouts[0]
    text = asdict(Dropout(said.probability, said.stream, local.call.inputs[0].shape, layout.text()))
    info = info_of(TensorType(local.out_tiles[0], local.dtypes[0]))
    return relax.op.call_pure_packed(DROPOUT, *local.args, relax.StringImm(dumps(text)), sinfo_args=[info])
