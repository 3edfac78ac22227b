"""Complex numbers of torch as pairs of floats. See torch_ops for what functions take; a complex result is a `Pair`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.linear_algebra import fft_call
from mesh_tensor.targets.torch_ops.linear_algebra import is_function

from .torch_args import arguments, emit, op_name
from .torch_general import any_call

Convert = Callable[[Any, Any], Any]
op = relax.op


@dataclass(frozen=True)
class Pair:
    """The real and the imaginary parts of a tensor."""

    real: relax.Expr
    imag: relax.Expr


def is_complex(node: torch.fx.Node) -> bool:
    """Whether the node takes or gives complex numbers."""
    return any(_holds_complex(each) for each in (node, *node.all_input_nodes))


def of_complex(node: torch.fx.Node, importer: Any, convert: Callable[[Any], Any]) -> Any:
    """What the node gives; `convert` is what its operator is to floats."""
    name = op_name(node)
    if name in COMPLEX:
        return COMPLEX[name](node, importer)
    if name in _BY_PARTS and all(map(_holds_complex, (node, *_floats_of(node)))):
        parts = []
        for part in range(2):  # an operator that only moves elements
            with _floats(node, importer, part):
                parts.append(convert(node))
        return Pair(*parts)
    if not stays_complex(node):
        refuse(f"{node.target} of complex numbers", fix="compute with real and imaginary parts there")
    return any_operator(node, importer)


def stays_complex(node: torch.fx.Node) -> bool:
    """Whether the node can be a call of torch's operator on complex numbers."""
    meant = node.meta.get("val")
    values = [
        *(meant if isinstance(meant, (tuple, list)) else [meant]),
        *(n.meta.get("val") for n in node.all_input_nodes),
    ]
    tensors = all(isinstance(value, torch.Tensor) and value.layout == torch.strided for value in values)
    return tensors and is_complex(node) and is_function(node.target)


def _floats_of(node: torch.fx.Node) -> list[torch.fx.Node]:
    """Those of the node's operands that are no indices."""
    values = [(operand, operand.meta.get("val")) for operand in node.all_input_nodes]
    return [
        operand
        for operand, value in values
        if isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())
    ]


def pair_of(importer: Any, value: Any) -> Pair:
    """Complex numbers as they are held, or as a tensor whose last dim has both parts; floats have no imaginary part."""
    if isinstance(value, torch.fx.Node):
        stacked = _holds_complex(value) and not isinstance(importer.env[value], Pair)
        value = importer.env[value]
        return _apart(importer, value) if stacked else pair_of(importer, value)
    return value if isinstance(value, Pair) else Pair(value, emit(importer, op.zeros_like(value)))


def _apart(importer: Any, stacked: relax.Expr) -> Pair:
    """Both parts, of a tensor whose last dim has them."""
    last = len(stacked.struct_info.shape) - 1
    parts = (op.strided_slice(stacked, axes=[last], begin=[part], end=[part + 1]) for part in range(2))
    return Pair(*(emit(importer, op.squeeze(emit(importer, part), [last])) for part in parts))


def _holds_complex(node: torch.fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_complex()


@contextmanager
def _floats(node: torch.fx.Node, importer: Any, part: int) -> Iterator[None]:
    """The node, and what it takes, as if they were of floats: those of one part."""
    held = [each for each in (node, *node.all_input_nodes) if _holds_complex(each)]
    values = {each: each.meta["val"] for each in held}
    kept = {each: importer.env[each] for each in held if each is not node}
    pairs = {each: pair_of(importer, each) for each in kept}
    try:
        for each in held:
            each.meta["val"] = values[each].real
        importer.env.update({each: (pair.real, pair.imag)[part] for each, pair in pairs.items()})
        yield
    finally:
        importer.env.update(kept)
        for each in held:
            each.meta["val"] = values[each]


def _of_floats(node: torch.fx.Node, importer: Any) -> Pair:
    """Another dtype: of floats or of complex numbers."""
    source = node.args[0]
    dtype = _dtype_of_parts(node)
    _refuse_floats(node)
    made = pair_of(importer, source)
    return Pair(*(emit(importer, op.astype(part, dtype)) for part in (made.real, made.imag)))


def _refuse_floats(made: torch.fx.Node) -> None:
    if not _holds_complex(made):
        refuse("complex numbers as floats", why="the imaginary parts would be lost", fix="say which part is meant")


def _view_as_complex(node: torch.fx.Node, importer: Any) -> Pair:
    (x,) = arguments(node, importer, 1)
    return _apart(importer, x)


def _view_as_real(node: torch.fx.Node, importer: Any) -> relax.Expr:
    return _stacked(importer, pair_of(importer, node.args[0]))


def _stacked(importer: Any, pair: Pair) -> relax.Expr:
    return emit(importer, op.stack([pair.real, pair.imag], axis=-1))


def _complex(node: torch.fx.Node, importer: Any) -> Pair:
    return Pair(*arguments(node, importer, 2))


def _polar(node: torch.fx.Node, importer: Any) -> Pair:
    size, angle = arguments(node, importer, 2)
    return Pair(*(emit(importer, op.multiply(size, emit(importer, f(angle)))) for f in (op.cos, op.sin)))


def _conjugate(node: torch.fx.Node, importer: Any) -> Pair:
    pair = pair_of(importer, node.args[0])
    return Pair(pair.real, emit(importer, op.negative(pair.imag)))


def _same(node: torch.fx.Node, importer: Any) -> Pair:
    return pair_of(importer, node.args[0])


def _product(node: torch.fx.Node, importer: Any) -> Pair:
    return _multiplied(node, importer, op.multiply)


def _matrix_product(node: torch.fx.Node, importer: Any) -> Pair:
    return _multiplied(node, importer, op.matmul)


def _multiplied(node: torch.fx.Node, importer: Any, apply: Callable[..., relax.Expr]) -> Pair:
    """A product, of elements or of matrices, of the products of parts."""

    def times(a: relax.Expr, b: relax.Expr) -> relax.Expr:
        return emit(importer, apply(a, b))

    a, b = (_operand(node, importer, place) for place in range(2))
    if not isinstance(a, Pair):
        return Pair(times(a, b.real), times(a, b.imag))
    if not isinstance(b, Pair):
        return Pair(times(a.real, b), times(a.imag, b))
    real = emit(importer, op.subtract(times(a.real, b.real), times(a.imag, b.imag)))
    return Pair(real, emit(importer, op.add(times(a.real, b.imag), times(a.imag, b.real))))


def _of_both(apply: Callable[..., relax.Expr], node: torch.fx.Node, importer: Any) -> Pair:
    if node.kwargs.get("alpha", 1) != 1:
        refuse("a sum of complex numbers with alpha", fix="multiply first")
    a, b = (_operand(node, importer, place) for place in range(2))
    first, second = (_whole(importer, one, other) for one, other in ((a, b), (b, a)))
    return Pair(emit(importer, apply(first.real, second.real)), emit(importer, apply(first.imag, second.imag)))


def _whole(importer: Any, value: Any, other: Any) -> Pair:
    """A pair; of floats (a tensor or a number), without an imaginary part."""
    if isinstance(value, (Pair, relax.Expr)):
        return pair_of(importer, value)
    dtype = other.real.struct_info.dtype
    return Pair(relax.const(value, dtype), relax.const(0.0, dtype))


def _quotient(node: torch.fx.Node, importer: Any) -> Any:
    a, b = (_operand(node, importer, place) for place in range(2))
    if isinstance(b, Pair):
        return any_operator(node, importer)
    return Pair(*(emit(importer, op.divide(part, b)) for part in (a.real, a.imag)))


def any_operator(node: torch.fx.Node, importer: Any) -> Any:
    """A call of torch's operator, which takes and gives complex numbers as pairs of floats."""
    if not stays_complex(node):
        refuse(f"{node.target} of complex numbers and others", fix="compute with real and imaginary parts there")

    def operand(one: torch.fx.Node) -> relax.Expr:
        return _stacked(importer, pair_of(importer, one)) if _holds_complex(one) else importer.env[one]

    made = any_call(node, importer, operand)
    meant = node.meta["val"]
    if isinstance(meant, torch.Tensor):
        return _pair_if(importer, made, meant)
    fields = [emit(importer, relax.TupleGetItem(made, number)) for number in range(len(meant))]
    return [_pair_if(importer, field, each) for field, each in zip(fields, meant, strict=True)]


def _split(node: torch.fx.Node, importer: Any) -> list[Pair]:
    _, sizes, dim = arguments(node, importer, 2, dim=0)
    pair, ends = pair_of(importer, node.args[0]), [*accumulate(sizes)][:-1]
    if not ends:
        return [pair]
    halves = [emit(importer, op.split(part, ends, dim)) for part in (pair.real, pair.imag)]
    return [Pair(*(emit(importer, relax.TupleGetItem(half, n)) for half in halves)) for n in range(len(sizes))]


def _field(node: torch.fx.Node, importer: Any) -> Any:
    several, number = node.args
    return importer.env[several][number]


def _pair_if(importer: Any, made: relax.Expr, meant: torch.Tensor) -> Any:
    return _apart(importer, made) if meant.is_complex() else made


def _filled(node: torch.fx.Node, importer: Any) -> Pair:
    """Of one number everywhere."""
    meant, values = node.meta["val"], {"empty": 0, "zeros": 0, "zeros_like": 0, "ones": 1, "ones_like": 1}
    name = str(node.target.__name__).partition(".")[0]  # type: ignore[union-attr]
    value: Any = values[name] if name in values else node.args[-1]
    shape = [importer.size(size) for size in meant.shape]
    if isinstance(value, torch.fx.Node) or None in shape:
        refuse("complex numbers that an open size says, or as many", fix="make them of floats, by torch.complex")
    dtype, number = _dtype_of_parts(node), complex(value)
    return Pair(*(emit(importer, op.full(shape, relax.const(n, dtype), dtype)) for n in (number.real, number.imag)))


def _copied(node: torch.fx.Node, importer: Any) -> Pair:
    """What another tensor's places hold once this one is copied to them."""
    _refuse_floats(node)
    target, source = (pair_of(importer, value) for value in node.args[:2])
    shape, dtype = target.real.struct_info.shape, _dtype_of_parts(node)
    parts = (emit(importer, op.astype(part, dtype)) for part in (source.real, source.imag))
    return Pair(*(emit(importer, op.broadcast_to(part, shape)) for part in parts))


def _operand(node: torch.fx.Node, importer: Any, place: int) -> Any:
    """A pair, or floats in the dtype of the parts."""
    value = node.args[place]
    if isinstance(value, torch.fx.Node) and _holds_complex(value):
        return pair_of(importer, value)
    dtype = _dtype_of_parts(node)
    if isinstance(value, complex):
        return Pair(relax.const(value.real, dtype), relax.const(value.imag, dtype))
    if not isinstance(value, torch.fx.Node):
        return relax.const(value, dtype)
    found = importer.env[value]
    return found if found.struct_info.dtype == dtype else emit(importer, op.astype(found, dtype))


def _dtype_of_parts(node: torch.fx.Node) -> str:
    return "float64" if node.meta["val"].dtype == torch.complex128 else "float32"


def _fft(kind: str, node: torch.fx.Node, importer: Any) -> Any:
    """The result's sizes are the operand's, which may be open, but for the last dim that is transformed."""
    args: Any = node.args
    source, given, normalization, option = args
    x = importer.env[source] if kind == "r2c" else _stacked(importer, pair_of(importer, source))
    sizes = list(x.struct_info.shape)[: node.meta["val"].dim()]
    dims = [dim % len(sizes) for dim in given]
    if kind == "r2c" and option:
        sizes[dims[-1]] = sizes[dims[-1]] // 2 + 1
    elif kind == "c2r":
        if not isinstance(option, int):
            refuse("an inverse transform to an open size", fix="record the model with a size, or pass n= of one")
        sizes[dims[-1]] = option
    shape = sizes if kind == "c2r" else [*sizes, 2]
    made = emit(importer, fft_call(x, kind, dims, normalization, int(option), shape))
    return made if kind == "c2r" else _apart(importer, made)


COMPLEX: dict[str, Convert] = {
    **dict.fromkeys(("_conj.default", "conj_physical.default"), _conjugate),
    **{f"_fft_{kind}.default": partial(_fft, kind) for kind in ("c2c", "c2r", "r2c")},
    **dict.fromkeys(("alias.default", "clone.default", "detach.default", "resolve_conj.default"), _same),
    **dict.fromkeys(("bmm.default", "matmul.default", "mm.default"), _matrix_product),
    **dict.fromkeys(("empty.memory_format", "zeros.default", "zeros_like.default"), _filled),
    **dict.fromkeys(("ones.default", "ones_like.default", "full.default", "full_like.default"), _filled),
    "_to_copy.default": _of_floats,
    "add.Tensor": partial(_of_both, op.add),
    "complex.default": _complex,
    "copy.default": _copied,
    "div.Tensor": _quotient,
    "getitem": _field,
    "mul.Tensor": _product,
    "polar.default": _polar,
    "scalar_tensor.default": _filled,
    "split_with_sizes.default": _split,
    "sub.Tensor": partial(_of_both, op.subtract),
    "view_as_complex.default": _view_as_complex,
    "view_as_real.default": _view_as_real,
}
# Operators that move elements, or sum them: on complex numbers alone, part by part.
_BY_PARTS = {
    *("_unsafe_view.default", "cat.default", "expand.default", "flip.default", "index.Tensor", "index_select.default"),
    *("mean.default", "mean.dim", "neg.default", "permute.default", "repeat.default", "reshape.default"),
    *("roll.default", "select.int", "select_scatter.default", "slice.Tensor", "slice_scatter.default", "squeeze.dim"),
    *("squeeze.dims", "stack.default", "sum.default", "sum.dim_IntList", "transpose.int", "unsqueeze.default"),
    *("view.default",),
}
