"""Indices of dims that have one element: 0, where the bounds of loops prove it."""

from __future__ import annotations

from collections import Counter

from tvm import arith, ir, tirx

from .effects import op_name
from .nodes import nodes
from .rewrite import with_indices


def with_plain_single_dims(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`KV[b, head // 16]` of one head is `KV[b, 0]` where there are 16: the loop over heads walks no dim of it. Where
    blocks start is left: a block of 16 rows walks the only one, too."""
    analyzer, loops = arith.Analyzer(), list(nodes(func.body, tirx.For))
    times = Counter(loop.loop_var for loop in loops)
    for loop in loops:
        if times[loop.loop_var] == 1:
            analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    blocks = {c.args[0]: list(c.args[2:]) for c in nodes(func.body, tirx.Call) if op_name(c) == "tl.region"}

    def plain(node: tirx.BufferLoad | tirx.BufferStore) -> tirx.BufferLoad | tirx.BufferStore | None:
        if node.predicate is not None:
            return None
        extents = blocks.get(node, [tirx.IntImm("int32", 1)] * len(node.indices))
        places = zip(node.indices, node.buffer.shape, extents, strict=True)
        indices = [_plain(i, size, analyzer) if _is_one(extent) else i for i, size, extent in places]
        if all(new.same_as(old) for new, old in zip(indices, node.indices, strict=True)):
            return None
        return with_indices(node, indices)

    body = tirx.stmt_functor.ir_transform(func.body, None, plain, ["tirx.BufferLoad", "tirx.BufferStore"])
    return func if body.same_as(func.body) else func.with_body(body)


def _plain(index: tirx.PrimExpr, size: tirx.PrimExpr, analyzer: arith.Analyzer) -> tirx.PrimExpr:
    is_single = _is_one(size) and not isinstance(index, (tirx.IntImm, tirx.Ramp))
    return tirx.IntImm(index.dtype, 0) if is_single and analyzer.can_prove_equal(index, 0) else index


def _is_one(size: tirx.PrimExpr) -> bool:
    return isinstance(size, tirx.IntImm) and int(size) == 1
