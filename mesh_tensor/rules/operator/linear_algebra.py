"""Rules of matrix products."""

from __future__ import annotations

from collections import Counter

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import LocalCall, OpRule
from .table import rule, whole_rule

_EACH = (frozenset({0}), frozenset({1}))


@rule("matmul")
def matmul(call: OpCall) -> OpRule:
    """Batch dims broadcast; rows and columns are parallel; what is contracted is summed."""
    a, b = call.inputs
    batch = call.outputs[0].shape[: call.outputs[0].ndim - (a.ndim > 1) - (b.ndim > 1)]
    left = (*broadcast_dims(a.shape[:-2], batch), *(("m",) if a.ndim > 1 else ()), "k")
    right = (*broadcast_dims(b.shape[:-2], batch), "k", *(("n",) if b.ndim > 1 else ()))
    out = (*dims_of(len(batch)), *(("m",) if a.ndim > 1 else ()), *(("n",) if b.ndim > 1 else ()))
    return OpRule((left, right), (out,), {"k": "sum"}, linear=_EACH, localize=_product)


def _product(local: LocalCall) -> relax.Expr:
    dtype = "float32" if local.wide else local.call.outputs[0].dtype
    return relax.op.matmul(*local.args, out_dtype=dtype)


@rule("outer")
def outer(call: OpCall) -> OpRule:
    return OpRule((("m",), ("n",)), (("m", "n"),), linear=_EACH)


@rule("einsum")
def einsum(call: OpCall) -> OpRule:
    """A factor per label; labels that the result lacks are summed. Diagonals are whole."""
    subscripts = call.attr("subscripts").replace(" ", "")
    if "." in subscripts:
        return whole_rule(call)
    left, _, right = subscripts.partition("->")
    terms = left.split(",")
    counts = Counter("".join(terms))
    if "->" not in subscripts:
        right = "".join(sorted(label for label, count in counts.items() if count == 1))
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, call.inputs, strict=True):
        for label, size in zip(term, tensor.shape, strict=True):
            sizes[label] = max(sizes.get(label, size), size)
    inputs = tuple(
        tuple(label if size == sizes[label] else None for label, size in zip(term, tensor.shape, strict=True))
        for term, tensor in zip(terms, call.inputs, strict=True)
    )
    reduced = dict.fromkeys((label for label in counts if label not in right), "sum")
    diagonal = frozenset(label for term in terms for label, count in Counter(term).items() if count > 1)
    each = tuple(frozenset({n}) for n in range(len(terms)))
    return OpRule(inputs, (tuple(right),), reduced, linear=each, unsplit=diagonal, localize=_contraction)


def _contraction(local: LocalCall) -> relax.Expr:
    args = [relax.op.astype(arg, "float32") for arg in local.args] if local.wide else list(local.args)
    return relax.op.einsum(args, local.call.attr("subscripts"))
