"""Poles: where what is computed of finite numbers is infinite, as a quotient by 0 is.

Parts of a sum that are divided by 0, or multiplied by an infinite number, before they are added give NaN where the sum
itself gives an infinite number. So a sum waits behind a division only if the divisor is never 0, and behind a product
only if no other factor has a pole. Poles are followed from operator to operator: an infinite operand may make any
result infinite, but for what is bounded. What the caller gives, norms, gradients, states of loops, and kernels that do
more than store what they compute of operands count as finite. What is too large for its type is no pole.

    x.sum(0) / c                      completed before it is divided
    x.sum(0) * rsqrt(v * v + 1e-6)    pending
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.operator.aten import ANY, arguments_of
from mesh_tensor.rules.operator.vjp import VJP, vjp_of

from .ir import ANNOTATE, REDISTRIBUTE, Node, Value
from .orders import number_of
from .tir_linear import has_poles
from .tir_rule import analysed

Signs = frozenset[int]
_NEVER: Signs = frozenset()
_BOTH: Signs = frozenset({1, -1})
_TOPK = ("topk", "aten.topk.default")
# What has elements of its first operand, or of all of them.
_OF_FIRST = (
    "builtin.stop_lift_params broadcast_to expand_dims flatten flip full gather_elements grad.end_checkpoint"
    " grad.no_grad grad.start_checkpoint index_tensor max mean min permute_dims repeat reshape split squeeze"
    " strided_slice take tile wrap_param"
)
_FIRST_OF = frozenset({*_OF_FIRST.split(), ANNOTATE, REDISTRIBUTE, *_TOPK})
_ALL_OF = frozenset({"concat", "stack"})
# What leaves infinite elements their signs; others may give them any.
_OF_ALL = (
    "add astype aten.roll.default aten.sort.stable ceil floor full_like index_put nn.pad round scatter_elements"
    " scatter_nd sort sum tril triu trunc where"
)
_KEEP_SIGNS = frozenset(_OF_ALL.split())
# What is finite, whatever it is made of, or counts as that.
_BOUNDED = (
    "acos asin atan aten._safe_softmax.default aten.erfc.default aten.special_ndtr.default cos erf nn.softmax rsqrt"
    " sigmoid sign sin tanh"
)
_NORMS = f"{VJP} nn.batch_norm nn.group_norm nn.instance_norm nn.layer_norm nn.rms_norm"
_FINITE = frozenset([*_BOUNDED.split(), *_NORMS.split()])
# How many operands may make results infinite, where not all may: attention's bias is a mask.
_TAKEN = {**dict.fromkeys(_FIRST_OF, 1), "nn.attention": 3, "nn.attention_bias": 3}
_NOT_NEGATIVE = frozenset(
    {"abs", "exp", "nn.relu", "nn.softmax", "nn.softplus", "rsqrt", "sigmoid", "sqrt", "square", "std", "variance"}
)
_AT_ZERO = frozenset({"log", "rsqrt"})
_OWN_POLES = "acosh aten.digamma.default aten.erfinv.default aten.lgamma.default aten.xlogy.Tensor atanh"
_OWN = frozenset({*_OWN_POLES.split(), ANY})
_DIVIDE = ("divide", "floor_divide")
_STEEP = frozenset({"acos", "asin", "atan2", "divide", "power", "std"})  # whose derivatives have poles
_WIDE = ("int32", "int64")
_SMALLEST = {"float64": 2.0**-1022, "float16": 2.0**-14}  # less may have become 0
_SMALLEST_OF_OTHERS = 2.0**-126


@dataclass(frozen=True)
class _Known:
    """Of the elements of a value: none is less than `lowest`; `infinite`: the signs of infinite ones that there may be;
    `nonzero`: none is 0; `total`: a dim along which the sum is at least some number; `sum_of`: each is the sum of
    finite elements, none less than 0, of another value, and stands where they do."""

    lowest: float = -math.inf
    infinite: Signs = _NEVER
    nonzero: bool = False
    total: tuple[int, float] | None = None
    sum_of: Value | None = None


class Poles:
    """The poles of a graph, whose nodes come in order."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self._known: dict[Value, _Known] = {}
        for node in nodes:
            operands = [self._of(value) for value in node.inputs]
            for value in node.outputs:
                self._known[value] = _made(node, value, operands)

    def spoil(self, node: Node, waiting: Collection[int]) -> bool:
        """Whether finite parts of these operands, in which a node is linear, may become infinite there."""
        known = [self._of(value) for value in node.inputs]
        if node.call.operator == VJP:
            forward = vjp_of(node.call).forward
            if forward.operator in (*_AT_ZERO, "sqrt"):
                return known[0].lowest <= 0
            if forward.operator in _OWN | _STEEP or forward.attr("epsilon", 1.0) <= 0:
                return True
        infinite = any(one.infinite for i, one in enumerate(known) if i not in waiting)
        return infinite or (node.call.name == "divide" and not _divides_by_nonzero(node, known))

    def _of(self, value: Value) -> _Known:
        """What is known of an operand: of a constant, by looking at it."""
        if value not in self._known:
            self._known[value] = _given(value)
        return self._known[value]


def _given(value: Value) -> _Known:
    lowest = _least(value.type.dtype)
    if value.data is None or not value.type.elements:
        return _Known(lowest)
    data = value.data.data.numpy()
    least, most = float(data.min()), float(data.max())
    infinite = frozenset(sign for sign, end in ((1, most), (-1, least)) if end == sign * math.inf or math.isnan(end))
    return _Known(least if not math.isnan(least) else -math.inf, infinite, bool(data.all()))


def _least(dtype: str) -> float:
    return 0.0 if dtype == "bool" or dtype.startswith("uint") else -math.inf


def _made(node: Node, value: Value, operands: Sequence[_Known]) -> _Known:
    dtype = value.type.dtype
    if node.call.operator in _TOPK and not _is_of_values(node, value):  # places
        return _Known(_least(dtype))
    lowest = max(_lowest(node, operands), _least(dtype))
    if is_float(dtype) and 0 < lowest < _SMALLEST.get(dtype, _SMALLEST_OF_OTHERS):
        lowest = 0.0
    elif not is_float(dtype) and math.isfinite(lowest):  # rounded down, and small ones start again
        lowest = math.floor(lowest) if dtype in _WIDE else _least(dtype)
    same = node.call.operator in _FIRST_OF - {"max", "mean", "min"} or node.call.name == "negative"
    nonzero = same and operands[0].nonzero
    infinite = _infinite(node, operands) if is_float(dtype) else _NEVER
    return _Known(lowest, infinite, nonzero, _total(node, value, operands), _sum_of(node, operands))


def _divides_by_nonzero(node: Node, operands: Sequence[_Known]) -> bool:
    divisor = node.call.operands[1]
    return bool(divisor) if divisor is not None else operands[-1].nonzero or operands[-1].lowest > 0


def _infinite(node: Node, operands: Sequence[_Known]) -> Signs:
    """The signs of infinite elements that the results may have."""
    name = node.call.operator
    if node.kernel is not None:
        return _BOTH if any(one.infinite for one in operands) or has_poles(analysed(node.kernel)) else _NEVER
    if name in _DIVIDE and not _divides_by_nonzero(node, operands):  # of a part by its whole, 0 / 0 is NaN
        return _NEVER if operands[-1].sum_of is node.inputs[0] else _BOTH
    if (
        name in _OWN
        or (name in _AT_ZERO and operands[0].lowest <= 0)
        or (name == "power" and _may_divide(node, operands))
        or math.isinf(node.call.attr("pad_value", 0.0))
    ):
        return _BOTH
    if name in _FINITE:
        return _NEVER
    taken = operands[1:] if name == "where" else operands[: _TAKEN.get(name)]
    signs = _NEVER.union(*(one.infinite for one in taken))
    if name in ("maximum", "minimum"):
        kept = 1 if name == "maximum" else -1
        return signs & {kept} | _BOTH.intersection(*(one.infinite for one in taken))
    if name == "clip":
        return frozenset(sign for sign in signs if not _clips(node, sign))
    if name == "exp":
        return signs - {-1}
    kept_so = name in _FIRST_OF | _ALL_OF | _KEEP_SIGNS
    return signs if kept_so or not signs else _BOTH


def _clips(node: Node, sign: int) -> bool:
    """Whether what is infinite becomes a finite number."""
    end = node.call.operands[1 if sign < 0 else 2]
    return end is not None and math.isfinite(end)


def _may_divide(node: Node, operands: Sequence[_Known]) -> bool:
    """Whether something that may be 0 is raised to a power that may be less than 0."""
    base, exponent = _numbers(node, operands)
    return exponent < 0 and base <= 0


def _lowest(node: Node, operands: Sequence[_Known]) -> float:
    """What no element of the results is less than."""
    name, least = node.call.operator, [one.lowest for one in operands]
    if not all(value.type.elements for value in node.inputs):  # the sum of none is 0
        return -math.inf
    if name in _FIRST_OF or name == "astype":
        return least[0]
    if name in _ALL_OF or name == "where":
        return min(least[1:] if name == "where" else least)
    lowest = 0.0 if name in _NOT_NEGATIVE else -math.inf
    if name in _LOWEST:
        lowest = max(lowest, _LOWEST[name](_numbers(node, operands)))
    squares = name == "multiply" and len(operands) == 2 and node.inputs[0] is node.inputs[1]
    if squares or (name == "power" and _is_even(node)):
        lowest = max(lowest, 0.0)
    if name == "sum" and operands[0].total is not None:
        dim, total = operands[0].total
        lowest = max(lowest, total if node.call.axes(node.call.attr("axis")) == (dim,) else lowest)
    return lowest


def _is_even(node: Node) -> bool:
    """Whether something is raised to an even power."""
    stated = node.call.operands[1]
    exponent = number_of(node.inputs[-1]) if stated is None else stated
    return exponent is not None and exponent % 2 == 0


def _numbers(node: Node, operands: Sequence[_Known]) -> list[float]:
    """Per tensor or number among the arguments what no element of it is less than."""
    least, stated = iter([one.lowest for one in operands]), node.call.operands
    return [next(least) if one is None else float(one) for one in stated if one is None or not isinstance(one, tuple)]


def _sum(numbers: Sequence[float]) -> float:
    """That what cancels leaves something may be due to rounding."""
    total = sum(numbers) if -math.inf not in numbers else -math.inf
    return total if min(numbers) >= 0 or total > max(map(abs, numbers)) / 64 else min(total, 0.0)


def _product(numbers: Sequence[float]) -> float:
    return math.prod(numbers) if min(numbers) >= 0 and math.inf not in numbers else -math.inf


_LOWEST: dict[str, Callable[[list[float]], float]] = {
    "add": _sum,
    "multiply": _product,
    "divide": lambda numbers: 0.0 if min(numbers) >= 0 else -math.inf,
    "power": lambda numbers: 0.0 if numbers[0] >= 0 else -math.inf,
    "maximum": max,
    "minimum": min,
    "clip": lambda numbers: min(max(numbers[:2]), numbers[2]),
    "exp": lambda numbers: math.exp(min(numbers[0], 80.0)),
    "sqrt": lambda numbers: math.sqrt(max(numbers[0], 0.0)),
    "abs": lambda numbers: max(numbers[0], 0.0),
    "ones": lambda numbers: 1.0,
    "sum": lambda numbers: numbers[0] if numbers[0] >= 0 else -math.inf,
}


def _total(node: Node, value: Value, operands: Sequence[_Known]) -> tuple[int, float] | None:
    """The dim along which a softmax adds up to 1, at least about so much of it for the largest elements."""
    if node.call.operator == "nn.softmax":
        dim = node.call.axis(node.call.attr("axis"))
        return dim, 0.5 / max(1, value.type.shape[dim])
    known = operands[0].total if operands else None
    if node.call.operator in _TOPK:
        return known if known is not None and _largest_along(node) == known[0] else None
    kept = node.call.operator == "astype" or node.is_annotation
    return known if kept and value is node.outputs[0] else None


def _sum_of(node: Node, operands: Sequence[_Known]) -> Value | None:
    """What a result has the sums of, where their terms are. No sum is less than a term, however it is rounded."""
    if node.call.name != "sum" or operands[0].lowest < 0 or operands[0].infinite:
        return None
    stays = node.call.attr("keepdims") or node.call.attr("axis") is None
    return node.inputs[0] if stays and is_float(node.inputs[0].type.dtype) else None


def _is_of_values(node: Node, value: Value) -> bool:
    """Whether a result of topk has elements of its operand; the others are their places."""
    return value is node.outputs[0] and node.call.attr("ret_type", "both") != "indices"


def _largest_along(node: Node) -> int | None:
    """The dim of which topk gives the largest elements; None: it gives the smallest."""
    if node.call.operator == "topk":
        dim, largest = node.call.attr("axis"), node.call.attr("largest")
    else:
        args, options = arguments_of(node.call)
        given = {**dict(zip(("x", "k", "dim", "largest", "sorted"), args, strict=False)), **options}
        dim, largest = given.get("dim", -1), given.get("largest", True)
    return node.call.axis(dim) if largest else None
