"""Operators that torch.autograd leaves in a joint graph of forward and backward (`make_fx` of a function that takes
gradients, `_export_forward_backward`), as gradients of Relax operators: `mesh.vjp`. All others are taken apart by
torch's decompositions. See torch_ops for what each function takes."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.fx.operator_schemas import normalize_function
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.vjp import vjp_call
from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import arguments, emit, filled, in_dtype
from .torch_attention import bias_of, flash_attention, flash_expression, heads_last
from .torch_general import general

_aten = torch.ops.aten
_FLASH = _aten._scaled_dot_product_flash_attention_for_cpu.default
_FLASH_BACKWARD = _aten._scaled_dot_product_flash_attention_for_cpu_backward.default
_POOL, _POOL_BACKWARD = _aten.max_pool2d_with_indices.default, _aten.max_pool2d_with_indices_backward.default
_SAME = (_aten.detach.default, _aten.alias.default, _aten.clone.default)

#: What is not taken apart.
KEPT_BACKWARD = (_FLASH, _FLASH_BACKWARD, _aten.embedding_dense_backward.default)
# Per operator: the one whose gradient it is, and which arguments are results of that one.
_SAVED = {_FLASH_BACKWARD: (_FLASH, {"out": 0, "logsumexp": 1}), _POOL_BACKWARD: (_POOL, {"indices": 1})}


def forget_saved(program: Any) -> None:
    """Take from operators of the backward pass what is seen to be their forward operator's results: their operands say
    it."""
    graph: torch.fx.Graph = program.graph
    found = [node for node in graph.nodes if node.target in _SAVED and _is_known(node)]
    for node in found:
        names, (_, saved) = [argument.name for argument in node.target._schema.arguments], _SAVED[node.target]
        for name in saved:
            node.update_arg(names.index(name), None)
    if found:
        graph.eliminate_dead_code()


def _is_known(node: torch.fx.Node) -> bool:
    """Whether what is taken as results of the forward operator is what that gives for the same arguments."""
    of, saved = _SAVED[node.target]  # type: ignore[index]
    mine = _arguments(node)
    taken = [(_source(mine[name]), number) for name, number in saved.items()]
    if not all(made.target is operator.getitem and made.args[1] == number for made, number in taken):
        return False
    forward = {made.args[0] for made, _ in taken}
    if len(forward) > 1 or (node := forward.pop()).target is not of:
        return False
    theirs = _arguments(node)
    return all(_stated(theirs, name) == _stated(mine, name) for name in theirs)


def _arguments(node: torch.fx.Node) -> dict[str, Any]:
    found = normalize_function(node.target, node.args, dict(node.kwargs), normalize_to_only_use_kwargs=True)  # type: ignore[arg-type]
    assert found is not None
    return found.kwargs


def _stated(given: Mapping[str, Any], name: str) -> Any:
    """An argument; numbers for both dims as a list, and no stride is the kernel's size."""
    value = given[name]
    if name == "stride" and not value:
        value = given["kernel_size"]
    if isinstance(value, int) and name in ("kernel_size", "stride", "padding", "dilation"):
        value = [value] * 2
    return list(value) if isinstance(value, (list, tuple)) else _source(value)


def _source(value: Any) -> Any:
    while isinstance(value, torch.fx.Node) and value.target in _SAME:
        value = value.args[0]
    return value


def gradients(importer: Any, expr: relax.Expr, seed: relax.Expr, wrt: Sequence[int]) -> list[relax.Expr]:
    """The gradients of an operator's operands, of that of its result."""
    call = op_call(importer.block_builder.normalize(expr))
    operands = [arg for arg in call.expr.args if isinstance(arg.struct_info, relax.TensorStructInfo)]
    made = emit(importer, vjp_call(call, operands, {0: seed}, wrt))
    return [made] if len(wrt) == 1 else [emit(importer, relax.TupleGetItem(made, n)) for n in range(len(wrt))]


def embedding(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The gradient of a table, of that of the rows that were taken; a row for padding has none."""
    seed, ids, count, padding, by_frequency = arguments(node, importer, 5)
    if by_frequency:
        refuse("an embedding whose gradients are scaled by frequency", fix="leave scale_grad_by_freq out")
    if padding >= 0:
        is_padding = emit(importer, relax.op.equal(ids, relax.const(padding, ids.struct_info.dtype)))
        is_padding = emit(importer, relax.op.expand_dims(is_padding, -1))
        seed = emit(importer, relax.op.where(is_padding, relax.const(0, seed.struct_info.dtype), seed))
    table = relax.Var("table", relax.TensorStructInfo((count, seed.struct_info.shape[-1]), seed.struct_info.dtype))
    return gradients(importer, relax.op.take(table, ids, axis=0, mode="nan"), seed, [0])[0]


def convolution(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr | None, ...]:
    """The gradients of data, weight and bias, as far as they are wanted."""
    seed, x, weight, _, strides, padding, dilation, transposed, more, groups, wanted = arguments(node, importer, 11)
    ndim = len(x.struct_info.shape)
    how = list(strides), list(padding), *([list(more)] if transposed else []), list(dilation), groups
    op = getattr(relax.op.nn, f"conv{ndim - 2}d{'_transpose' if transposed else ''}")
    wrt = [n for n in range(2) if wanted[n]]
    made = {n: gradients(importer, op(x, weight, *how), seed, [n])[0] for n in wrt}
    bias = emit(importer, relax.op.sum(seed, [0, *range(2, ndim)])) if wanted[2] else None
    return made.get(0), made.get(1), bias


def max_pool(node: torch.fx.Node, importer: Any) -> Any:
    """The largest of each window, as Relax has it; where it is, only if that is asked for."""
    if any(user.args[1] == 1 for user in node.users):
        return general(node, importer)
    how = arguments(node, importer, 2, stride=(), padding=0, dilation=1, ceil_mode=False)
    return emit(importer, _pooled(*how)), None


def max_pool_backward(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """The gradient goes to the largest of each window, which `indices` say among all places of a channel; None: to the
    first of several."""
    seed, *how, indices = arguments(node, importer, 8)
    if indices is None:
        return gradients(importer, _pooled(*how), seed, [0])[0]
    shape = [int(size) for size in how[0].struct_info.shape]
    flat = [*shape[:-2], -1]
    zeros = relax.op.zeros([*shape[:-2], shape[-2] * shape[-1]], seed.struct_info.dtype)
    indices, seed = (emit(importer, relax.op.reshape(tensor, flat)) for tensor in (indices, seed))
    made = relax.op.scatter_elements(emit(importer, zeros), indices, seed, len(shape) - 2, "add")
    return emit(importer, relax.op.reshape(emit(importer, made), shape))


def _pooled(x: relax.Expr, size: Any, stride: Any, padding: Any, dilation: Any, ceil_mode: bool) -> relax.Expr:
    if len(x.struct_info.shape) != 4:
        refuse("a maximum over windows of data without a batch", fix="give it a dim for the batch")
    return relax.op.nn.max_pool2d(x, size, stride or size, padding, dilation, ceil_mode)


def flash_attention_backward(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr, ...]:
    """The gradients of queries, keys and values. `out` and `sums` are attention's results, the second the logarithms of
    sums of exponentials; None: those of these operands."""
    seed, *operands, out, sums, dropout, causal = arguments(node, importer, 8)
    if out is not None:
        return _of_results(node, importer, seed, operands, out, sums)
    expr = flash_expression(node, importer, operands, causal, dropout)
    return tuple(heads_last(importer, d) for d in gradients(importer, expr, heads_last(importer, seed), [0, 1, 2]))


def _of_results(
    node: torch.fx.Node, importer: Any, seed: relax.Expr, operands: Sequence[relax.Expr], out: relax.Expr, sums: Any
) -> tuple[relax.Expr, ...]:
    """The same from attention's results, in float32 at least."""
    op, meant = relax.op, operands[0].struct_info.dtype
    if len(sums.struct_info.shape) != 3:
        refuse(
            "it takes weights for the logarithms of their sums, as torch puts them there when it takes attention's "
            "forward apart; torch's own gradients are wrong then",
            fix="export forward and backward under torch.nn.attention.sdpa_kernel(SDPBackend.MATH)",
        )
    wide = sums.struct_info.dtype

    def bound(expr: relax.Expr) -> relax.Var:
        return emit(importer, expr)

    def turned(tensor: relax.Expr) -> relax.Expr:
        return bound(op.permute_dims(tensor, [0, 1, 3, 2]))

    seed, query, key, value, out = (in_dtype(importer, tensor, wide) for tensor in (seed, *operands, out))
    size = int(query.struct_info.shape[3])
    stated = node.kwargs.get("scale")
    scale = relax.const(size**-0.5 if stated is None else stated, wide)
    scores = bound(op.multiply(bound(op.matmul(query, turned(key))), scale))
    if (mask := bias_of(node, importer, operands)) is not None:
        scores = bound(op.add(scores, in_dtype(importer, mask, wide)))
    weights = bound(op.exp(bound(op.subtract(scores, bound(op.expand_dims(sums, 3))))))
    weights = bound(op.tril(weights)) if node.args[7] else weights
    share = bound(op.sum(bound(op.multiply(seed, out)), 3, True))
    slope = bound(op.subtract(bound(op.matmul(seed, turned(value))), share))
    slope = bound(op.multiply(bound(op.multiply(weights, slope)), scale))
    made = (op.matmul(slope, key), op.matmul(turned(slope), query), op.matmul(turned(weights), seed))
    return tuple(in_dtype(importer, bound(d), meant) for d in made)


def layer_norm(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr | None, ...]:
    """The norm, and of what it divides by the mean and the inverse of the root, where they are asked for: constants, as
    torch has it."""
    x, sizes, weight, bias, epsilon = arguments(node, importer, 5)
    rows = list(range(-len(sizes), 0))
    result = emit(
        importer,
        relax.op.nn.layer_norm(x, filled(weight, 1, sizes, x), filled(bias, 0, sizes, x), axes=rows, epsilon=epsilon),
    )
    made = _statistics(node, importer, x, rows, epsilon)
    return result, *(value and emit(importer, relax.op.grad.no_grad(value)) for value in made)


def group_norm(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr | None, ...]:
    """The norm, and mean and the inverse of the root per group."""
    x, weight, bias, count, channels, _, groups, epsilon = arguments(node, importer, 8)
    axes, affine = (
        list(range(2, len(x.struct_info.shape))),
        (filled(weight, 1, [channels], x), filled(bias, 0, [channels], x)),
    )
    result = emit(importer, relax.op.nn.group_norm(x, *affine, groups, channel_axis=1, axes=axes, epsilon=epsilon))
    if not _asked(node):
        return result, None, None
    together = emit(importer, relax.op.reshape(x, (count, groups, -1)))
    made = _statistics(node, importer, together, [2], epsilon)
    return result, *(value and emit(importer, relax.op.squeeze(value, [2])) for value in made)


def _statistics(
    node: torch.fx.Node, importer: Any, x: relax.Expr, axes: list[int], epsilon: float
) -> tuple[relax.Expr | None, relax.Expr | None]:
    """The mean along axes, and one over the root of the variance and `epsilon`; in float32 at least."""
    meant = [value.dtype for value in node.meta["val"][1:]]
    if not _asked(node):
        return None, None
    wide = dtype_name(meant[0])
    x = x if x.struct_info.dtype == wide else emit(importer, relax.op.astype(x, wide))
    spread = emit(importer, relax.op.variance(x, axes, True))
    spread = emit(importer, relax.op.add(spread, relax.const(epsilon, wide)))
    return emit(importer, relax.op.mean(x, axes, True)), emit(importer, relax.op.rsqrt(spread))


def _asked(node: torch.fx.Node) -> bool:
    """Whether anything takes another result than the first."""
    return any(user.args[1] for user in node.users)


BACKWARD = {
    "_scaled_dot_product_flash_attention_for_cpu.default": flash_attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": flash_attention_backward,
    "convolution_backward.default": convolution,
    "embedding_dense_backward.default": embedding,
    "max_pool2d_with_indices.default": max_pool,
    "max_pool2d_with_indices_backward.default": max_pool_backward,
    "native_group_norm.default": group_norm,
    "native_layer_norm.default": layer_norm,
}
