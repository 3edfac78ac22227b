"""What the functions that convert torch's operators share: arguments of fx nodes, and Relax values made of them."""

from __future__ import annotations

from typing import Any

import torch
from tvm import relax, tirx

from mesh_tensor.targets.dtypes import dtype_name


def arguments(node: torch.fx.Node, importer: Any, required: int, **defaults: Any) -> list[Any]:
    """The node's positional arguments, then those with defaults, however they were passed; nodes as Relax values."""
    values = list(node.args[:required])
    for index, (name, default) in enumerate(defaults.items(), required):
        values.append(node.args[index] if index < len(node.args) else node.kwargs.get(name, default))
    return [importer.env[value] if isinstance(value, torch.fx.Node) else value for value in values]


def emit(importer: Any, expr: relax.Expr) -> relax.Var:
    """A variable that is bound to the expression."""
    return importer.block_builder.emit(expr)


def result_dtype(node: torch.fx.Node) -> str:
    """The dtype that torch says the node's result has."""
    return dtype_name(node.meta["val"].dtype)


def with_sizes_as_tensors(node: torch.fx.Node, importer: Any, convert: Any) -> Any:
    """What `convert` makes of a node, with operands that are symbolic sizes (x * x.shape[0]) as tensors."""
    nodes = [operand for operand in node.args if isinstance(operand, torch.fx.Node)]
    sizes = {operand: importer.env[operand] for operand in nodes if isinstance(importer.env[operand], tirx.PrimExpr)}
    if not sizes:
        return convert(node)
    dtype = result_dtype(node)
    if dtype == "bool":  # a comparison, in the dtype of what is compared
        dtype = next(importer.env[operand].struct_info.dtype for operand in nodes if operand not in sizes)
    importer.env.update({operand: tensor_of(importer, size, dtype) for operand, size in sizes.items()})
    try:
        return convert(node)
    finally:
        importer.env.update(sizes)


def tensor_of(importer: Any, size: tirx.PrimExpr, dtype: str) -> relax.Expr:
    """The number that a size is, as a tensor. (The only operator that takes sizes for numbers is arange.)"""
    ends = relax.PrimValue(size), relax.PrimValue(size + 1), relax.PrimValue(tirx.IntImm("int64", 1))
    number = emit(importer, relax.op.reshape(emit(importer, relax.op.arange(*ends, "int64")), ()))
    return number if dtype == "int64" else emit(importer, relax.op.astype(number, dtype))


def in_result_dtype(node: torch.fx.Node, importer: Any, operand: Any) -> relax.Expr:
    """A tensor or a number in the dtype of the node's result."""
    return in_dtype(importer, operand, result_dtype(node))


def in_dtype(importer: Any, operand: Any, dtype: str) -> relax.Expr:
    """A tensor or a number in that dtype."""
    if not isinstance(operand, relax.Expr):
        return relax.const(operand, dtype)
    return operand if operand.struct_info.dtype == dtype else emit(importer, relax.op.astype(operand, dtype))
