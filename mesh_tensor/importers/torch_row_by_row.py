"""Which of torch's operators give each row of theirs from one row: along a dim of unknown size, of which nothing else
may be known."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

from .torch_args import op_name
from .torch_rows_graph import Along, args_of

_aten = torch.ops.aten

Keeps = Callable[[torch.fx.Node, Along, int], bool]


def keeps_rows(node: torch.fx.Node, along: Along, result: int) -> bool:
    """Whether rows of the operands `along` give the same rows of the node's result along its dim `result`."""
    known = _KNOWN.get(node.target)
    if known is not None:
        return known(node, along, result)
    tags = getattr(node.target, "tags", ())
    random = torch.Tag.nondeterministic_seeded in tags
    elementwise = torch.Tag.pointwise in tags and not random and node.target not in _DIVISIONS
    return elementwise or node.target is operator.getitem


# Operators that have finite gradients wherever their operands are finite.
_SMOOTH = frozenset(
    (
        *("add", "sub", "mul", "neg", "abs", "exp", "sin", "cos", "tanh", "sigmoid", "erf", "relu", "gelu", "silu"),
        *("elu", "celu", "selu", "leaky_relu", "hardtanh", "hardswish", "hardsigmoid", "softplus", "mish"),
        *("log_sigmoid_forward", "clamp", "clamp_min", "clamp_max", "maximum", "minimum", "where", "square", "sign"),
        *("eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_not", "logical_xor"),
        *("bitwise_and", "bitwise_or", "bitwise_not", "view", "reshape", "_unsafe_view", "unsqueeze", "squeeze"),
        *("permute", "transpose", "t", "expand", "select", "slice", "clone", "alias", "detach", "_to_copy", "cat"),
        *("full_like", "zeros_like", "ones_like", "empty_like", "full", "zeros", "ones", "empty", "new_zeros"),
        *("new_ones", "new_full", "getitem", "linear", "mm", "bmm", "addmm", "matmul", "conv2d", "convolution"),
        *("group_norm", "layer_norm", "rms_norm", "scaled_dot_product_attention", "_softmax", "_log_softmax"),
        *("_safe_softmax", "sum", "mean", "amax", "amin", "max", "min", "any", "all", "argmax", "argmin", "topk"),
        *("sort", "argsort", "cumsum", "index", "index_put", "gather", "embedding", "index_select", "one_hot"),
        *("nonzero", "masked_select", "logsumexp", "floor", "ceil", "round", "trunc", "sym_size"),
    )
)


def is_smooth(node: torch.fx.Node) -> bool:
    """Whether a node's gradients are finite wherever its operands are: those of a logarithm are not at 0. Numbers that
    are infinite make softmax NaN where nothing else is chosen, and so do masks of attention."""
    if any(_is_infinite(one) for one in (node, *node.all_input_nodes)):
        return False
    if node.target is _aten.scaled_dot_product_attention.default and len(node.all_input_nodes) > 3:
        return False
    name = op_name(node).partition(".")[0]
    if name == "div":  # by a number
        return not isinstance(args_of(node)[1], torch.fx.Node) and args_of(node)[1] != 0
    if name == "pow":
        return type(args_of(node)[1]) is int and args_of(node)[1] > 0
    return name in _SMOOTH


def _is_infinite(node: torch.fx.Node) -> bool:
    """Whether a number that a node is called with is not finite."""
    numbers = pytree.tree_leaves((node.args, node.kwargs))
    return any(isinstance(number, float) and not math.isfinite(number) for number in numbers)


# Whole numbers may be 0 in rows that nobody asked for.
_DIVISIONS = {
    *(_aten.div.Tensor_mode, _aten.floor_divide.default, _aten.remainder.Tensor, _aten.fmod.Tensor),
    *(_aten.remainder.Scalar_Tensor,),
}


def ndim(node: torch.fx.Node) -> int:
    """Of how many dims the node's tensor is."""
    return node.meta["val"].dim()


def _always(node: torch.fx.Node, along: Along, result: int) -> bool:
    return True


def _leading(last: int) -> Keeps:
    """Rows of the first operand alone, before its last dims."""

    def keeps(node: torch.fx.Node, along: Along, result: int) -> bool:
        first = args_of(node)[0]
        return set(along) == {first} and along[first] < ndim(first) - last

    return keeps


def _before_last(node: torch.fx.Node, along: Along, result: int) -> bool:
    return all(dim < ndim(operand) - 2 for operand, dim in along.items())


def _matmul(node: torch.fx.Node, along: Along, result: int) -> bool:
    """Whatever is not summed over."""
    a, b = args_of(node)[-2:]
    summed = {a: ndim(a) - 1, b: max(ndim(b) - 2, 0)}
    return all(operand in summed and dim != summed[operand] for operand, dim in along.items())


def _over(position: int, default: Any = None) -> Keeps:
    """Other dims than that of rows: those that an argument says; None: all."""

    def keeps(node: torch.fx.Node, along: Along, result: int) -> bool:
        dims = args_of(node)[position] if len(args_of(node)) > position else default
        if dims is None or dims == []:
            return False
        listed = dims if isinstance(dims, Sequence) else [dims]
        return all(dim % ndim(operand) != along[operand] for operand in along for dim in listed)

    return keeps


def _normed(node: torch.fx.Node, along: Along, result: int) -> bool:
    """A norm over last dims, of one operand."""
    return _leading(len(args_of(node)[1]))(node, along, result)


def _regrouped(node: torch.fx.Node, along: Along, result: int) -> bool:
    """A reshape that leaves rows whole."""
    ((operand, dim),) = along.items()
    made, before = node.meta["val"].shape, operand.meta["val"].shape
    return math.prod(made[:result]) == math.prod(before[:dim])


def _joined(node: torch.fx.Node, along: Along, result: int) -> bool:
    """Several values with rows side by side, along another dim."""
    dim = args_of(node)[1] if len(args_of(node)) > 1 else 0
    return len(along) == len(set(args_of(node)[0])) and dim % len(node.meta["val"].shape) != result


def _batched(node: torch.fx.Node, along: Along, result: int) -> bool:
    """Rows are the first dim of the first operand alone."""
    return dict(along) == {args_of(node)[0]: 0}


_SHAPES = (
    *(_aten.unsqueeze.default, _aten.squeeze.dims, _aten.squeeze.dim, _aten.permute.default, _aten.transpose.int),
    *(_aten.expand.default, _aten.select.int, _aten.clone.default, _aten.alias.default, _aten.detach.default),
    *(_aten._to_copy.default, _aten.t.default),
    *(_aten.full_like.default, _aten.zeros_like.default, _aten.ones_like.default, _aten.empty_like.default),
)
_KNOWN: dict[Any, Keeps] = {
    **dict.fromkeys(_SHAPES, _always),
    _aten.slice.Tensor: _always,  # of the dim of rows, all of them: or there would be fewer
    **dict.fromkeys((_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default), _regrouped),
    _aten.linear.default: _leading(1),
    **dict.fromkeys((_aten.mm.default, _aten.bmm.default, _aten.matmul.default), _matmul),
    _aten.addmm.default: _matmul,
    **dict.fromkeys((_aten._softmax.default, _aten._log_softmax.default, _aten._safe_softmax.default), _over(1)),
    **dict.fromkeys((_aten.layer_norm.default, _aten.rms_norm.default), _normed),
    **dict.fromkeys((_aten.sum.dim_IntList, _aten.mean.dim, _aten.amax.default, _aten.amin.default), _over(1)),
    **dict.fromkeys((_aten.argmax.default, _aten.argmin.default), _over(1)),
    **dict.fromkeys((_aten.any.dim, _aten.all.dim, _aten.prod.dim_int, _aten.max.dim, _aten.min.dim), _over(1)),
    **dict.fromkeys((_aten.topk.default,), _over(2, -1)),
    **dict.fromkeys((_aten.sort.default, _aten.argsort.default), _over(1, -1)),
    **dict.fromkeys((_aten.cumsum.default, _aten.logsumexp.default), _over(1)),
    _aten.cat.default: _joined,
    **dict.fromkeys((_aten.conv2d.default, _aten.convolution.default, _aten.group_norm.default), _batched),
    _aten.scaled_dot_product_attention.default: _before_last,
}
