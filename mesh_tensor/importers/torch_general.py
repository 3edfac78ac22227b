"""Operators of torch that Relax has none for, as calls of torch's own (see rules.operator.aten), or of one that is made
for them: products of rows in groups, each with a matrix of its own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from tvm import relax, tirx

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.rules.operator.aten import ATEN, arguments_text
from mesh_tensor.rules.operator.linear_algebra import grouped_call
from mesh_tensor.targets.dtypes import dtype_name

from .torch_args import arguments, emit, result_dtype

_NUMBERS = (bool, int, float, str, type(None))


def general(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A call of torch's operator with the node's arguments."""
    tensors: list[torch.fx.Node] = []
    text = arguments_text(_stated(node.args, tensors), _stated(node.kwargs, tensors))
    known = _known_sizes(tensors, importer)
    meant = node.meta["val"]
    infos = [_info(tensor, known) for tensor in (meant if isinstance(meant, (tuple, list)) else [meant])]
    info = relax.TupleStructInfo(infos) if isinstance(meant, (tuple, list)) else infos[0]
    operands = [importer.env[tensor] for tensor in tensors]
    name = f"aten.{getattr(node.target, '__name__', '')}"
    return emit(importer, relax.op.call_pure_packed(name, *operands, relax.StringImm(text), sinfo_args=[info]))


def _stated(value: Any, tensors: list[torch.fx.Node]) -> Any:
    """Arguments in the form of JSON; tensors are collected."""
    if isinstance(value, torch.fx.Node):
        if not isinstance(value.meta.get("val"), torch.Tensor):
            refuse(f"the argument {value.name!r} is a symbolic size", fix="export the model with constant sizes there")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, (tuple, list)):
        return [_stated(item, tensors) for item in value]
    if isinstance(value, Mapping):
        return {key: _stated(item, tensors) for key, item in value.items()}
    if isinstance(value, torch.dtype):
        return {"dtype": dtype_name(value)}
    if not isinstance(value, _NUMBERS):
        refuse(f"the argument {shown(value)} has no form that can be saved")
    return value


def _known_sizes(tensors: list[torch.fx.Node], importer: Any) -> dict[str, tirx.PrimExpr]:
    """The symbolic sizes of operands, by what torch calls them."""
    known: dict[str, tirx.PrimExpr] = {}
    for tensor in tensors:
        shape = importer.env[tensor].struct_info.shape
        known |= {str(size): made for size, made in zip(tensor.meta["val"].shape, shape, strict=True)}
    return known


def _info(tensor: torch.Tensor, known: Mapping[str, tirx.PrimExpr]) -> relax.TensorStructInfo:
    shape = [size if isinstance(size, int) else known.get(str(size)) for size in tensor.shape]
    if None in shape:
        refuse(f"the result's shape {tuple(tensor.shape)} has sizes that no operand has", fix="export constant sizes")
    return relax.TensorStructInfo(shape, dtype_name(tensor.dtype))


GENERAL = {name.removeprefix("aten."): general for name in ATEN}


def grouped(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """(S, K) rows, sorted by group, by (G, K, N) matrices; other forms are torch's."""
    x, weight, ends, bias, _ = arguments(node, importer, 2, offs=None, bias=None, out_dtype=None)
    if ends is None or bias is not None or [len(t.struct_info.shape) for t in (x, weight)] != [2, 3]:
        return general(node, importer)
    return emit(importer, grouped_call(x, weight, ends, result_dtype(node)))


GROUPS = {"_grouped_mm.default": grouped, "grouped_mm_fallback.default": grouped}
