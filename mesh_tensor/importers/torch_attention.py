"""torch's scaled_dot_product_attention as Relax's."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import plain

from .torch_args import arguments, emit

_DIMS = 4  # (batch, heads, positions, size)


def attention(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """scaled_dot_product_attention of (..., H, S, D) tensors as `relax.nn.attention`, which has (B, S, H, D)."""
    query, key, value, mask, dropout, causal = arguments(
        node, importer, 3, attn_mask=None, dropout_p=0.0, is_causal=False
    )
    grouped = bool(node.kwargs.get("enable_gqa", False))
    if dropout:
        refuse("dropout in attention is random", fix="export the model in eval mode")
    before = _batches([plain(tensor.struct_info.shape) for tensor in (query, key, value)], grouped)
    operands = [_expanded(importer, tensor, dims) for tensor, dims in zip((query, key, value), before, strict=True)]
    meant = list(operands[0].struct_info.shape)
    query, key, value = (_of_four(importer, tensor) for tensor in operands)
    heads, key_heads = (tensor.struct_info.shape[1] for tensor in (query, key))
    if grouped and int(heads) != int(key_heads):
        key, value = (_repeated(importer, tensor, int(heads) // int(key_heads)) for tensor in (key, value))
    bias = None if mask is None else _bias(importer, mask, query, meant[:-2], key.struct_info.shape[2])
    operands = [heads_last(importer, tensor) for tensor in (query, key, value)]
    scale = node.kwargs.get("scale")
    result = heads_last(importer, emit(importer, _attention(operands, bias, scale, causal)))
    if len(meant) == _DIMS:
        return result
    return emit(importer, relax.op.reshape(result, [*meant[:-1], result.struct_info.shape[3]]))


def flash_attention(node: torch.fx.Node, importer: Any) -> tuple[relax.Expr, None]:
    """What attention on a CPU is in a graph with its backward; the logarithms of sums are not computed."""
    if any(user.args[1] == 1 for user in node.users):
        refuse("the logarithms of attention's sums are taken", fix="take the result of attention alone")
    *operands, dropout, causal = arguments(node, importer, 3, dropout_p=0.0, is_causal=False)
    return heads_last(importer, emit(importer, flash_expression(node, importer, operands, causal, dropout))), None


def flash_expression(
    node: torch.fx.Node, importer: Any, operands: Sequence[relax.Expr], causal: bool, dropout: Any
) -> relax.Expr:
    """Attention of (B, H, S, D) tensors, as (B, S, H, D); mask and scale are the node's."""
    if dropout:
        refuse("dropout in attention is random", fix="export the model in eval mode")
    bias, turned = bias_of(node, importer, operands), [heads_last(importer, tensor) for tensor in operands]
    return _attention(turned, bias, node.kwargs.get("scale"), causal)


def bias_of(node: torch.fx.Node, importer: Any, operands: Sequence[relax.Expr]) -> relax.Expr | None:
    """What is added to the products of (B, H, S, D) tensors."""
    query, key, _ = operands
    if node.kwargs.get("attn_mask") is None:
        return None
    mask = importer.env[node.kwargs["attn_mask"]]
    return _bias(importer, mask, query, list(query.struct_info.shape)[:2], key.struct_info.shape[2])


def heads_last(importer: Any, tensor: relax.Expr) -> relax.Expr:
    """Positions before heads, or the other way around."""
    return emit(importer, relax.op.permute_dims(tensor, [0, 2, 1, 3]))


def _attention(operands: Sequence[relax.Expr], bias: Any, scale: Any, causal: bool) -> relax.Expr:
    mode = "TopLeft" if causal else None
    return relax.op.nn.attention(*operands, bias=bias, scale=scale, causal_mask=mode)


def _bias(importer: Any, mask: relax.Expr, query: relax.Expr, batch: list[Any], columns: Any) -> relax.Expr:
    """A mask as what is added to products."""
    if mask.struct_info.dtype == "bool":
        # No scalars: TVMScript can't parse the infinite one that it prints.
        zero, lowest = (relax.const(np.array([value]), query.struct_info.dtype) for value in (0.0, -math.inf))
        mask = emit(importer, relax.op.where(mask, zero, lowest))
    return _mask_of_four(importer, mask, batch, columns)


def _batches(shapes: list[tuple[Any, ...]], grouped: bool) -> list[list[Any]]:
    """Per tensor, its dims before positions, where those of size 1 are as the other tensors'; heads that are `grouped`
    stay. Refuses sizes that differ otherwise."""
    ndims = [len(shape) for shape in shapes]
    batches = [list(shape[:-2]) for shape in shapes]
    meant = [[size for size in sizes if not _is_one(size)] for sizes in zip(*batches, strict=False)]
    meant = meant[:-1] if grouped else meant
    if len(set(ndims)) > 1 or any(len({size for size in sizes if isinstance(size, int)}) > 1 for sizes in meant):
        refuse(
            f"attention of tensors of {ndims} dims, with batches and heads {batches}",
            fix="expand them to (batch, heads, positions, size) tensors, with equal batches and heads",
        )
    common = [sizes[0] if sizes else 1 for sizes in meant]
    return [common + batch[len(common) :] for batch in batches]


def _expanded(importer: Any, tensor: relax.Expr, batch: list[Any]) -> relax.Expr:
    """The tensor with these dims before positions."""
    *mine, positions, size = tensor.struct_info.shape
    if [_is_one(here) for here in mine] == [_is_one(wanted) for wanted in batch]:
        return tensor
    return emit(importer, relax.op.broadcast_to(tensor, [*batch, positions, size]))


def _is_one(size: int | tirx.PrimExpr) -> bool:
    return isinstance(size, (int, tirx.IntImm)) and int(size) == 1


def _of_four(importer: Any, tensor: relax.Expr) -> relax.Expr:
    """The tensor with one dim for the batch and one for heads."""
    *batch, positions, size = tensor.struct_info.shape
    if len(batch) == 2:
        return tensor
    return emit(importer, relax.op.reshape(tensor, [*_batch_and_heads(batch), positions, size]))


def _batch_and_heads(dims: list[Any]) -> tuple[Any, Any]:
    """Dims before positions, as two."""
    *batch, heads = dims or [1]
    return math.prod(batch), heads


def _mask_of_four(importer: Any, mask: relax.Expr, batch: list[Any], columns: Any) -> relax.Expr:
    """The mask of tensors with the dims `batch` before their positions, as one of tensors that are `_of_four`, with a
    column for each key."""
    *known, rows, last = mask.struct_info.shape
    known = [1] * (len(batch) - len(known)) + known
    if not all(map(_is_one, known[:-1])):
        known = [*batch[:-1], *known[-1:]]
    if _is_one(last) or len(known) > 2:
        mask = emit(importer, relax.op.broadcast_to(mask, [*known, rows, columns]))
    shape = [*_batch_and_heads(known), rows, columns]
    return mask if len(mask.struct_info.shape) == _DIMS else emit(importer, relax.op.reshape(mask, shape))


def _repeated(importer: Any, tensor: relax.Expr, times: int) -> relax.Expr:
    """Each head `times` times, one after the other."""
    batch, heads, length, size = tensor.struct_info.shape
    apart = emit(importer, relax.op.expand_dims(tensor, 2))
    wide = emit(importer, relax.op.broadcast_to(apart, (batch, heads, times, length, size)))
    return emit(importer, relax.op.reshape(wide, (batch, heads * times, length, size)))
