"""Rules of matrix products, and the names of those that are several of Relax's operators at once; and of `mesh.fft`:
Fourier transforms of complex numbers as pairs of floats, the last dim.

`R.call_pure_packed("mesh.fft", x, "[kind, dims, normalization, option]")`, the arguments of torch's `aten._fft_<kind>`:
`c2c` (option: forwards), `r2c` (of floats; option: half of the spectrum), `c2r` (to floats; option: the last dim's
size).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

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


GROUPED, LOOKED_UP = "mesh.grouped_matmul", "mesh.looked_up_matmul"


@rule(GROUPED)
def grouped_matmul(call: OpCall) -> OpRule:
    """Rows of x, groups of which meet a matrix each: group g are the rows from ends[g - 1] to ends[g]. A device with
    some of the matrices makes rows of 0 for the others' groups."""
    return _by_matrices((None,), {"s", "g"}, _local_groups)


@rule(LOOKED_UP)
def looked_up_matmul(call: OpCall) -> OpRule:
    """Rows of x, each of which meets the matrix that its id says. A device with some of the matrices makes rows of 0
    for the ids of others."""
    return _by_matrices(("s",), {"g"}, _local_look_up)


def _by_matrices(which: tuple[Dim, ...], positional: set[str], localize: Callable[[LocalCall], relax.Expr]) -> OpRule:
    """Rows by matrices that the third operand, of dims `which`, says."""
    operands, sums = (("s", "k"), ("g", "k", "n"), which), {"k": "sum", "g": "sum"}
    return OpRule(operands, (("s", "n"),), sums, linear=_EACH, positional=frozenset(positional), localize=localize)


def grouped_call(x: relax.Expr, weight: relax.Expr, ends: relax.Expr, dtype: str) -> relax.Call:
    """(S, K) rows in groups by (G, K, N) matrices, as (S, N); rows after the last of the (G,) ends are 0."""
    info = relax.TensorStructInfo([x.struct_info.shape[0], weight.struct_info.shape[2]], dtype)
    return relax.op.call_pure_packed(GROUPED, x, weight, ends, sinfo_args=[info])


def looked_up_call(x: relax.Expr, weight: relax.Expr, ids: relax.Expr, dtype: str) -> relax.Call:
    """(S, K) rows by those of (G, K, N) matrices that (S,) ids say, as (S, N); rows with other ids are 0."""
    info = relax.TensorStructInfo([x.struct_info.shape[0], weight.struct_info.shape[2]], dtype)
    return relax.op.call_pure_packed(LOOKED_UP, x, weight, ids, sinfo_args=[info])


def _local_rows(local: LocalCall, name: str, first: int) -> relax.Expr:
    """The tiles' call, with what tells which of the rows (operand 0) and matrices (1) they are, from operand `first`
    on."""
    dtype = "float32" if local.wide else local.call.outputs[0].dtype
    info = relax.TensorStructInfo(local.out_tiles[0], dtype)
    where: list[relax.Expr] = []
    for tensor, layout in list(zip(local.call.inputs[:2], local.layouts[:2], strict=True))[first:]:
        where += [relax.ShapeExpr(tensor.shape), relax.StringImm(layout.text())]
    return relax.op.call_pure_packed(name, *local.args, *where, sinfo_args=[info])


_local_groups = partial(_local_rows, name=GROUPED, first=0)
_local_look_up = partial(_local_rows, name=LOOKED_UP, first=1)


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


FFT = "mesh.fft"


def fft_call(
    x: relax.Expr, kind: str, dims: Sequence[int], normalization: int, option: int, shape: Sequence[Any]
) -> relax.Call:
    """A transform along `dims`, counted from the front; the result has this shape."""
    text = relax.StringImm(json.dumps([kind, list(dims), normalization, option]))
    return relax.op.call_pure_packed(FFT, x, text, sinfo_args=[relax.TensorStructInfo(shape, x.struct_info.dtype)])


def fft_arguments(call: OpCall) -> tuple[str, list[int], int, int]:
    """The kind, the dims, the normalization and the option."""
    kind, dims, normalization, option = json.loads(call.literals[-1])
    return kind, dims, normalization, option


@rule(FFT)
def fft(call: OpCall) -> OpRule:
    """All dims but those that are transformed are independent."""
    kind, dims, _, _ = fft_arguments(call)
    count = call.inputs[0].ndim - (kind != "r2c")
    kept: tuple[Dim, ...] = tuple(None if d in dims else f"d{d}" for d in range(count))
    pair: tuple[Dim, ...] = (None,)
    given, made = (kept + pair * (kind != "r2c"), kept + pair * (kind != "c2r"))
    return OpRule((given,), (made,), linear=(frozenset({0}),), localize=_local)


def _local(local: LocalCall) -> relax.Expr:
    info = relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0])
    return relax.op.call_pure_packed(FFT, *local.args, local.call.expr.args[-1], sinfo_args=[info])
