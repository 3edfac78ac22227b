"""What the functions that convert torch's operators share: arguments of fx nodes, and Relax values made of them."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
from tvm import relax, tirx

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.base.errors import refuse
from mesh_tensor.targets.dtypes import dtype_name


def arguments(node: torch.fx.Node, importer: Any, required: int, **defaults: Any) -> list[Any]:
    """The node's positional arguments, then those with defaults, however they were passed; nodes as Relax values."""
    values = list(node.args[:required])
    for index, (name, default) in enumerate(defaults.items(), required):
        values.append(node.args[index] if index < len(node.args) else node.kwargs.get(name, default))
    return [importer.env[value] if isinstance(value, torch.fx.Node) else value for value in values]


def op_name(node: torch.fx.Node) -> str:
    """What TVM's importer, and the tables here, call the node's operator: "add.Tensor"."""
    return getattr(node.target, "__name__", str(node.target))


def emit(importer: Any, expr: relax.Expr) -> relax.Var:
    """A variable that is bound to the expression."""
    return importer.block_builder.emit(expr)


def result_dtype(node: torch.fx.Node) -> str:
    """The dtype that torch says the node's result has."""
    return dtype_name(node.meta["val"].dtype)


def filled(tensor: Any, value: int, sizes: Any, like: relax.Expr) -> relax.Expr:
    """The tensor, or where there is none a constant of that value."""
    if tensor is not None:
        return tensor
    return relax.const(np.full([int(size) for size in sizes], value), like.struct_info.dtype)


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


COMPARISONS: dict[Any, Callable[..., relax.Expr]] = {
    operator.eq: relax.op.equal,
    operator.ge: relax.op.greater_equal,
    operator.gt: relax.op.greater,
    operator.le: relax.op.less_equal,
    operator.lt: relax.op.less,
    operator.ne: relax.op.not_equal,
}


def compared_sizes(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """Whether open sizes are as a node says, as a tensor. (TVM's importer takes what holds of the example.)"""
    compare = COMPARISONS.get(node.target)
    if compare is None:
        refuse(f"{node.target} of comparisons of sizes", fix="compare two sizes at a time")
    sides = [importer.env[side] if isinstance(side, torch.fx.Node) else side for side in node.args]
    numbers = [
        relax.const(side, "int64") if isinstance(side, int) else tensor_of(importer, side, "int64") for side in sides
    ]
    return emit(importer, compare(*numbers))


def in_result_dtype(node: torch.fx.Node, importer: Any, operand: Any) -> relax.Expr:
    """A tensor or a number in the dtype of the node's result."""
    return in_dtype(importer, operand, result_dtype(node))


def in_dtype(importer: Any, operand: Any, dtype: str) -> relax.Expr:
    """A tensor or a number in that dtype."""
    if not isinstance(operand, relax.Expr):
        return relax.const(operand, dtype)
    return operand if operand.struct_info.dtype == dtype else emit(importer, relax.op.astype(operand, dtype))


def widened(importer: Any, x: relax.Expr) -> relax.Expr:
    """The tensor, in float32 if it has 16 bits: torch rounds what an operator makes once, in the end."""
    return in_dtype(importer, x, "float32") if x.struct_info.dtype in NARROW else x


def with_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, in which results of parts under `torch.no_grad()` are detached; it stays as it is."""
    if not any(_forgets(node) for node in program.graph.nodes):
        return program
    module = copied_graph(program)
    for node in list(module.graph.nodes):
        if _forgets(node):
            for result in list(node.users):  # its fields
                _detach(module.graph, result)
    module.recompile()
    return changed_program(program, module)


def copied_graph(program: torch.export.ExportedProgram) -> torch.fx.GraphModule:
    """A copy of the program's graph, whose nodes have the names that the signature knows: copies of some get others."""
    module = copy.deepcopy(program.graph_module)
    for node, original in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name
    return module


def changed_program(
    program: torch.export.ExportedProgram, module: torch.fx.GraphModule, **parts: Any
) -> torch.export.ExportedProgram:
    """The program with another graph, and with these `parts` of what torch's constructor takes, such as
    `example_inputs`, in place of its own."""
    names = ("graph_signature", "state_dict", "range_constraints", "module_call_graph", "example_inputs", "constants")
    kept = {name: getattr(program, name) for name in (*names, "verifiers")}
    return torch.export.ExportedProgram(root=module, graph=module.graph, **{**kept, **parts})


def _forgets(node: torch.fx.Node) -> bool:
    return node.target is wrap_with_set_grad_enabled and not node.args[0]


def _detach(graph: torch.fx.Graph, result: torch.fx.Node) -> None:
    if not isinstance(value := result.meta.get("val"), torch.Tensor) or not value.is_floating_point():
        return
    with graph.inserting_after(result):
        detached = graph.call_function(torch.ops.aten.detach.default, (result,))
    detached.meta = dict(result.meta)
    result.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
    result.name, detached.name = detached.name, result.name  # the signature knows results by their names
