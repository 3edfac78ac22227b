"""Parameters that are tuples become one parameter per field: layouts, weights and inputs are of tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from tvm import ir, relax

from .names import Fresh, relax_function, variables


def with_flat_parameters(mod: ir.IRModule, function: str) -> ir.IRModule:
    """The module, in which the parameters of `function` that are tuples are taken apart: `t` is `t_0`, `t_1`, ...

    Raises:
        MeshTensorError: there is no such function.
    """
    func = relax_function(mod, function)
    if not any(isinstance(param.struct_info, relax.TupleStructInfo) for param in func.params):
        return mod
    fresh = Fresh([var.name_hint for var in variables(func)])
    params: list[relax.Var] = []
    bound: list[relax.VarBinding] = []
    for param in func.params:
        fields, value = _taken_apart(param, fresh)
        params += fields
        if value is not param:
            bound.append(relax.VarBinding(param, value))
    body = relax.SeqExpr([relax.BindingBlock(bound), *func.body.blocks], func.body.body)
    body = relax.BlockBuilder().normalize(body)
    flat = relax.Function(params, body, func.ret_struct_info, func.is_pure, func.attrs)
    mod = mod.clone()
    mod.update_func(mod.get_global_var(function), flat)
    return mod


def flat_arguments(args: Sequence[Any]) -> Iterator[Any]:
    """The arguments of a call, with those that are tuples or lists taken apart likewise."""
    for arg in args:
        if isinstance(arg, (tuple, list)):
            yield from flat_arguments(arg)
        else:
            yield arg


def _taken_apart(param: relax.Var, fresh: Fresh) -> tuple[list[relax.Var], relax.Expr]:
    """A parameter for every tensor in the type of `param`, and what `param` is of them."""
    if not isinstance(param.struct_info, relax.TupleStructInfo):
        return [param], param
    made: list[relax.Var] = []
    values: list[relax.Expr] = []
    for index, info in enumerate(param.struct_info.fields):
        fields, value = _taken_apart(relax.Var(fresh.name(f"{param.name_hint}_{index}"), info), fresh)
        made += fields
        values.append(value)
    return made, relax.Tuple(values)
