"""Rules of matrix products, and the names of those that are several of Relax's operators at once."""

from __future__ import annotations

from collections import Counter

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import LocalCall, OpRule
from .table import rule, whole_rule

_EACH = (frozenset({0}), frozenset({1}))
LINEAR, MATMUL_ADD = "fused.linear", "fused.matmul_add"


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


GROUPED = "mesh.grouped_matmul"


@rule(GROUPED)
def grouped_matmul(call: OpCall) -> OpRule:
    """Rows of x, groups of which meet a matrix each: group g are the rows from ends[g - 1] to ends[g]. A device with
    some of the matrices makes rows of 0 for the others' groups."""
    return OpRule(
        (("s", "k"), ("g", "k", "n"), (None,)),
        (("s", "n"),),
        {"k": "sum", "g": "sum"},
        linear=_EACH,
        positional=frozenset({"s", "g"}),
        localize=_local_groups,
    )


def grouped_call(x: relax.Expr, weight: relax.Expr, ends: relax.Expr, dtype: str) -> relax.Call:
    """(S, K) rows in groups by (G, K, N) matrices, as (S, N); rows after the last of the (G,) ends are 0."""
    info = relax.TensorStructInfo([x.struct_info.shape[0], weight.struct_info.shape[2]], dtype)
    return relax.op.call_pure_packed(GROUPED, x, weight, ends, sinfo_args=[info])


def _local_groups(local: LocalCall) -> relax.Expr:
    """The tiles' call, with what tells which rows and groups they are."""
    dtype = "float32" if local.wide else local.call.outputs[0].dtype
    info = relax.TensorStructInfo(local.out_tiles[0], dtype)
    where: list[relax.Expr] = []
    for tensor, layout in zip(local.call.inputs[:2], local.layouts[:2], strict=True):
        where += [relax.ShapeExpr(tensor.shape), relax.StringImm(layout.text())]
    return relax.op.call_pure_packed(GROUPED, *local.args, *where, sinfo_args=[info])


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
