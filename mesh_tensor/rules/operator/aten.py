"""Rules of operators of torch's that Relax has none for.

Their calls are `R.call_pure_packed("aten.cummax.default", x, "[[0], {}]")`: the tensors, then all arguments as JSON,
in which {"tensor": n} stands for the n-th tensor and {"dtype": "float32"} for a dtype. Those without a rule of their
own are `R.call_pure_packed("aten", x, '["linalg_qr.default", 1, [...], {}]')`: the operator, what is known of it (see
`ANY`), and its arguments; then, if some are complex, which tensors and results are pairs of floats, in their last dim.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import relax

from mesh_tensor.base.errors import refuse

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import Dim, LocalCall, OpRule, rule
from .shifts import made_factor, moved

Dims = tuple[Dim, ...]
_ALL = (frozenset({0}),)

_POINTWISE = (
    "copysign.Tensor digamma.default erfc.default erfinv.default exp2.default heaviside.default hypot.default"
    " i0.default lgamma.default nextafter.default round.decimals sinc.default special_ndtr.default"
    " special_log_ndtr.default xlogy.Tensor"
)
# The position of the dim that an operator goes along, among its arguments.
_ALONG = {
    **dict.fromkeys(("_safe_softmax.default", "cummax.default", "cummin.default", "logcumsumexp.default"), 1),
    **{"kthvalue.default": 2, "mode.default": 1, "sort.stable": 2, "topk.default": 2},
}
# They look through windows at as many of the last dims as their names say.
_WINDOWS = (
    "_upsample_bicubic2d_aa.default _upsample_bicubic2d_aa.vec _upsample_bilinear2d_aa.default"
    " _upsample_bilinear2d_aa.vec _upsample_nearest_exact1d.vec _upsample_nearest_exact2d.vec"
    " _upsample_nearest_exact3d.vec adaptive_max_pool2d.default adaptive_max_pool3d.default"
    " max_pool2d_with_indices.default max_pool3d_with_indices.default upsample_bicubic2d.vec upsample_bilinear2d.vec"
    " upsample_linear1d.vec upsample_nearest1d.vec upsample_nearest2d.vec upsample_nearest3d.vec"
    " upsample_trilinear3d.vec"
)
# Groups' products only take matrices whose rows are multiples of 16 bytes, which tiles may not be.
_WHOLE = "_grouped_mm.default histc.default dist.default masked_scatter.default put.default scatter_reduce.two"


def arguments_text(args: Any, kwargs: Any) -> str:
    """All arguments of a call, as the literal that the call has; above is what stands for tensors and dtypes."""
    return json.dumps([args, kwargs])


def arguments_of(call: OpCall) -> tuple[list[Any], dict[str, Any]]:
    """A call's positional and named arguments, as `arguments_text` took them."""
    args, kwargs = json.loads(call.literals[-1])
    return args, kwargs


#: Any operator of torch's, of which one thing is known: how many leading dims all operands and results share, each
#: place of which is computed by itself; or, if that is None, that it works element by element.
ANY = "aten"


def any_text(name: str, leading: int | None, args: Any, kwargs: Any, pairs: Sequence[bool] = ()) -> str:
    """The literal of a call of an operator that has no rule of its own; `name` is like "linalg_qr.default"."""
    return json.dumps([name, leading, args, kwargs, *([list(pairs)] if any(pairs) else [])])


def any_of(call: OpCall) -> tuple[str, int | None, list[Any], dict[str, Any], list[bool]]:
    """The operator that such a call is of, its leading dims, its arguments, and of each operand and result whether it
    is complex: pairs of floats, as `any_text` took them. Refused where the literal has another form, or names more
    leading dims than a tensor has."""
    tensors = (*call.inputs, *call.outputs)
    pairs = [False] * len(tensors)
    try:
        name, leading, args, kwargs, *more = json.loads(call.literals[-1])
        (pairs,) = more or [pairs]
    except (TypeError, ValueError):
        name = None
    fits = isinstance(pairs, list) and len(pairs) == len(tensors) and all(isinstance(pair, bool) for pair in pairs)
    fits = fits and all(not pair or tensor.shape[-1:] == (2,) for tensor, pair in zip(tensors, pairs, strict=True))
    least = min((tensor.ndim - pair for tensor, pair in zip(tensors, pairs, strict=True)), default=0) if fits else -1
    if not (
        isinstance(name, str)
        and fits
        and (leading is None or (type(leading) is int and 0 <= leading <= least))
        and isinstance(args, list)
        and isinstance(kwargs, dict)
    ):
        refuse("no call of an operator of torch's", where=str(call.expr), fix="import the model again")
    return name, leading, args, kwargs, pairs


def name_of(call: OpCall) -> str:
    """The operator's name for readers: of any operator of torch's, that one's."""
    name = call.operator
    return f"aten.{any_of(call)[0]}" if name == ANY else name


def _argument(call: OpCall, position: int, name: str, default: Any) -> Any:
    args, kwargs = arguments_of(call)
    return args[position] if len(args) > position else kwargs.get(name, default)


def _names(names: str) -> list[str]:
    return [f"aten.{name}" for name in names.split()]


def _rule(*names: str) -> Callable[[Callable[[OpCall], tuple[list[Dims], list[Dims]] | OpRule]], Any]:
    """Register a function from calls to the dims of operands and results, or to the rule, as the rule of these
    operators."""

    def register(make: Callable[[OpCall], tuple[list[Dims], list[Dims]] | OpRule]) -> Any:
        def made(call: OpCall) -> OpRule:
            found = make(call)
            if isinstance(found, OpRule):
                return found
            inputs, outputs = found
            return OpRule(tuple(inputs), tuple(outputs), localize=_on_tiles)

        rule(*names)(made)
        ATEN.extend(names)
        return make

    return register


#: The operators that have a rule here, with "aten.".
ATEN: list[str] = []


def _on_tiles(local: LocalCall) -> relax.Expr:
    """The same call; its results have their tiles' shapes."""
    call = local.call
    infos = [relax.TensorStructInfo(tile, o.dtype) for tile, o in zip(local.out_tiles, call.outputs, strict=True)]
    info = infos[0] if len(infos) == 1 else relax.TupleStructInfo(infos)
    name, *_, text = call.expr.args
    return relax.op.call_pure_packed(name.global_symbol, *local.args, text, sinfo_args=[info])


@_rule(*_names(_POINTWISE))
def pointwise(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Dims are aligned at the end."""
    out = call.outputs[0]
    inputs = [broadcast_dims(tensor.shape, out.shape) for tensor in call.inputs]
    return inputs, [dims_of(out.ndim)] * len(call.outputs)


@rule(ANY)
def any_operator(call: OpCall) -> OpRule:
    """Element by element, or by leading dims; all else is needed whole, as both parts of a complex number are."""
    _, leading, *_, pairs = any_of(call)
    tensors = (*call.inputs, *call.outputs)
    shapes = [tensor.shape[: tensor.ndim - pair] for tensor, pair in zip(tensors, pairs, strict=True)]
    if leading is None:
        dims = [broadcast_dims(shape, shapes[-1]) for shape in shapes]
    else:
        dims = [(*dims_of(leading), *(None,) * (len(shape) - leading)) for shape in shapes]
    dims = [(*found, *(None,) * pair) for found, pair in zip(dims, pairs, strict=True)]
    count = len(call.inputs)
    return OpRule(tuple(dims[:count]), tuple(dims[count:]), localize=_on_tiles)


@_rule(*_names(" ".join(_ALONG)))
def along(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """All dims but one are independent; results have that one, or not."""
    name = call.expr.args[0].global_symbol.removeprefix("aten.")
    dim, ndim = call.axis(_argument(call, _ALONG[name], "dim", -1)), call.inputs[0].ndim
    given: Dims = tuple(None if d == dim else f"d{d}" for d in range(ndim))
    left = tuple(factor for d, factor in enumerate(given) if d != dim)
    return [given], [given if out.ndim == ndim else left for out in call.outputs]


@_rule(*_names(_WINDOWS))
def windows(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Batch and channels are independent; places are looked at together."""
    places = next(n for n in (1, 2, 3) if f"{n}d" in call.expr.args[0].global_symbol)
    dims: Dims = (*dims_of(call.inputs[0].ndim - places), *(None,) * places)
    return [dims], [dims] * len(call.outputs)


@_rule(*_names("grid_sampler_2d.default grid_sampler_3d.default"))
def grid_sample(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Each place of the grid looks at all places of the image."""
    places = dims_of(call.inputs[0].ndim - 2, "p")
    image: Dims = ("b", "c", *(None,) * len(places))
    return [image, ("b", *places, None)], [("b", "c", *places)]


@_rule("aten.diagonal.default")
def diagonal(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Two dims become one, the last."""
    gone = {call.axis(_argument(call, 2, "dim1", 0)), call.axis(_argument(call, 3, "dim2", 1))}
    given: Dims = tuple(None if d in gone else f"d{d}" for d in range(call.inputs[0].ndim))
    return [given], [(*(factor for factor in given if factor is not None), None)]


@_rule("aten.unfold.default")
def unfold(call: OpCall) -> OpRule:
    """Windows along one dim become a dim, the last."""
    dim, ndim = call.axis(_argument(call, 1, "dimension", -1)), call.inputs[0].ndim
    length, step = _argument(call, 2, "size", 1), _argument(call, 3, "step", 1)
    given: Dims = tuple(None if d == dim else f"d{d}" for d in range(ndim))
    made: Dims = tuple(made_factor(d) if d == dim else f"d{d}" for d in range(ndim))
    if not ndim or not length:
        return OpRule((given,), ((*given, None),), localize=_on_tiles)
    reaches = moved(call, 0, dim, 0, step, last=length - 1)
    return OpRule((given,), ((*made, None),), linear=_ALL, windows={(0, dim): reaches}, localize=_on_tiles)


@_rule("aten.roll.default")
def roll(call: OpCall) -> OpRule:
    """What leaves a dim at one end comes in at the other. Rolled as a line of all elements, it is needed whole."""
    shifts, kept = _rolled(call), dims_of(call.inputs[0].ndim)
    given: Dims = (None,) * len(kept) if shifts is None else tuple(None if f in shifts else f for f in kept)
    if shifts is None:
        return OpRule((given,), (given,), linear=_ALL, moves=True, localize=_on_tiles)
    made: Dims = tuple(made_factor(d) if f in shifts else f for d, f in enumerate(kept))
    windows = {(0, d): moved(call, 0, d, -shifts[f], wraps=True) for d, f in enumerate(kept) if f in shifts}
    return OpRule((given,), (made,), linear=_ALL, moves=True, windows=windows, localize=_roll)


def _rolled(call: OpCall) -> dict[str, int] | None:
    """By how much each dim is rolled; None if the tensor is rolled as a line."""
    shifts, dims = _argument(call, 1, "shifts", []), _argument(call, 2, "dims", [])
    if not dims or 0 in call.inputs[0].shape:
        return None
    found: dict[str, int] = {}
    for shift, dim in zip(shifts, dims, strict=True):
        d = call.axis(dim)
        found[f"d{d}"] = (found.get(f"d{d}", 0) + shift) % call.inputs[0].shape[d]
    return found


def _roll(local: LocalCall) -> relax.Expr:
    """Windows are rolled already."""
    shifts = _rolled(local.call) or {}
    left = {int(f[1:]): shift for f, shift in shifts.items() if local.layouts[0].window(int(f[1:])) is None}
    if not left:
        return relax.op.reshape(local.args[0], local.out_tiles[0])
    return roll_call(local.args[0], left, relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0]))


def roll_call(x: relax.Expr, shifts: Mapping[int, int], info: relax.TensorStructInfo) -> relax.Call:
    """A tensor of that type, rolled by so much along each of some dims."""
    text = arguments_text([{"tensor": 0}, list(shifts.values()), list(shifts)], {})
    return relax.op.call_pure_packed("aten.roll.default", x, relax.StringImm(text), sinfo_args=[info])


@_rule("aten._cdist_forward.default")
def distances(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Each row of one with each row of the other."""
    batch = call.outputs[0].shape[:-2]
    first, second = (broadcast_dims(tensor.shape[:-2], batch, "b") for tensor in call.inputs)
    return [(*first, "m", None), (*second, "n", None)], [(*dims_of(len(batch), "b"), "m", "n")]


@_rule("aten.searchsorted.Tensor")
def searchsorted(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """A sorted sequence for all, or one per row."""
    ndim = call.outputs[0].ndim
    values = dims_of(ndim)
    given = call.inputs[0]
    sequence: Dims = (None,) if given.ndim == 1 else (*values[:-1], None)
    rest: list[Dims] = [sequence] * (len(call.inputs) - 2)  # the order in which to look at it
    return [sequence, values, *rest], [values]


@_rule("aten._embedding_bag_forward_only.default")
def embedding_bag(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Rows of a table are combined; columns are independent, and of a maximum so are the rows that it comes from."""
    rest: list[Dims] = [(None,) * tensor.ndim for tensor in call.inputs[1:]]
    made: list[Dims] = [(None, "d") if tensor.ndim == 2 else (None,) for tensor in call.outputs]
    return [(None, "d"), *rest], made


@_rule(*_names(_WHOLE))
def whole(call: OpCall) -> tuple[list[Dims], list[Dims]]:
    """Everything is needed whole."""
    given: list[Dims] = [(None,) * tensor.ndim for tensor in call.inputs]
    return given, [(None,) * tensor.ndim for tensor in call.outputs]
