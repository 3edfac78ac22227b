"""Indices of dims that have one element: 0, where the bounds of loops prove it."""

from __future__ import annotations

from collections import Counter

from tvm import arith, ir, tirx

from .nodes import nodes


def with_plain_single_dims(func: tirx.PrimFunc) -> tirx.PrimFunc:
    """`KV[b, head // 16]` of one head is `KV[b, 0]` where there are 16: the loop over heads walks no dim of it."""
    analyzer, loops = arith.Analyzer(), list(nodes(func.body, tirx.For))
    times = Counter(loop.loop_var for loop in loops)
    for loop in loops:
        if times[loop.loop_var] == 1:
            analyzer.bind(loop.loop_var, ir.Range.from_min_extent(loop.min, loop.extent))

    def plain(node: tirx.BufferLoad | tirx.BufferStore) -> tirx.BufferLoad | tirx.BufferStore | None:
        if node.predicate is not None:
            return None
        indices = [_plain(index, size, analyzer) for index, size in zip(node.indices, node.buffer.shape, strict=True)]
        if all(new.same_as(old) for new, old in zip(indices, node.indices, strict=True)):
            return None
        if isinstance(node, tirx.BufferLoad):
            return tirx.BufferLoad(node.buffer, indices)
        return tirx.BufferStore(node.buffer, node.value, indices)

    body = tirx.stmt_functor.ir_transform(func.body, None, plain, ["tirx.BufferLoad", "tirx.BufferStore"])
    return func if body.same_as(func.body) else func.with_body(body)


def _plain(index: tirx.PrimExpr, size: tirx.PrimExpr, analyzer: arith.Analyzer) -> tirx.PrimExpr:
    is_single = isinstance(size, tirx.IntImm) and int(size) == 1 and not isinstance(index, (tirx.IntImm, tirx.Ramp))
    return tirx.IntImm(index.dtype, 0) if is_single and analyzer.can_prove_equal(index, 0) else index
