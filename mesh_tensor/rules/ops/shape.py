"""Rules of operators that move elements."""

from __future__ import annotations

import math

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import Dim, LocalCall, OpRule
from .table import rule

_ALL = (frozenset({0}),)


@rule("permute_dims")
def permute_dims(call: OpCall) -> OpRule:
    ndim = call.inputs[0].ndim
    order = call.axes(call.attr("axes") or tuple(range(ndim))[::-1])
    dims = dims_of(ndim)
    return OpRule((dims,), (tuple(dims[d] for d in order),), linear=_ALL, moves=True)


@rule("reshape", "flatten", "nn.batch_flatten", "expand_dims", "squeeze")
def reshape(call: OpCall) -> OpRule:
    """Groups of dims with equal products are taken apart into common factors."""
    source, target, sizes = regroup(call.inputs[0].shape, call.outputs[0].shape)
    return OpRule((source,), (target,), sizes=sizes, linear=_ALL, moves=True, localize=_to_tile)


def _to_tile(local: LocalCall) -> relax.Expr:
    return relax.op.reshape(local.args[0], local.out_tiles[0])


def regroup(
    source: tuple[int, ...], target: tuple[int, ...]
) -> tuple[tuple[Dim, ...], tuple[Dim, ...], dict[str, int]]:
    """The dims of both shapes as products of common factors, where there are such."""
    sizes: dict[str, int] = {}
    ins: list[Dim] = [None] * len(source)
    outs: list[Dim] = [None] * len(target)
    for group, (left, right) in enumerate(_groups(source, target)):
        cuts = sorted({*_suffixes(source, left), *_suffixes(target, right)})
        if any(high % low for low, high in zip(cuts, cuts[1:], strict=False)):
            continue
        names = {low: f"g{group}_{i}" for i, low in enumerate(cuts[:-1])}
        sizes.update({names[low]: high // low for low, high in zip(cuts, cuts[1:], strict=False)})
        for shape, dims, result in ((source, left, ins), (target, right, outs)):
            low = 1
            for dim in reversed(dims):
                high = low * shape[dim]
                inside = tuple(names[c] for c in reversed(cuts[:-1]) if low <= c < high)
                result[dim] = inside or None
                low = high
    return tuple(ins), tuple(outs), sizes


def _groups(source: tuple[int, ...], target: tuple[int, ...]):
    """Runs of dims of both with equal products, as short as possible."""
    if 0 in source:
        return
    i = j = 0
    while i < len(source) and j < len(target):
        left, right = [i], [j]
        a, b = source[i], target[j]
        while a != b:
            if a < b:
                left.append(left[-1] + 1)
                a *= source[left[-1]]
            else:
                right.append(right[-1] + 1)
                b *= target[right[-1]]
        yield left, right
        i, j = left[-1] + 1, right[-1] + 1


def _suffixes(shape: tuple[int, ...], dims: list[int]) -> list[int]:
    return [math.prod(shape[d] for d in dims[i:]) for i in range(len(dims) + 1)]


@rule("broadcast_to")
def broadcast_to(call: OpCall) -> OpRule:
    out = call.outputs[0]
    dims = broadcast_dims(call.inputs[0].shape, out.shape)
    return OpRule(
        (dims,), (dims_of(out.ndim),), linear=_ALL, localize=lambda c: relax.op.broadcast_to(c.args[0], c.out_tiles[0])
    )


@rule("concat")
def concat(call: OpCall) -> OpRule:
    axis = call.axis(call.attr("axis", 0))
    dims = tuple(None if d == axis else f"d{d}" for d in range(call.inputs[0].ndim))
    everything = frozenset(range(len(call.inputs)))
    return OpRule((dims,) * len(call.inputs), (dims,), linear=(everything,), moves=True)


@rule("split")
def split(call: OpCall) -> OpRule:
    """Into n equal parts: the dim is (n, part), and nothing splits n."""
    axis = call.axis(call.attr("axis", 0))
    parts = [out.shape[axis] for out in call.outputs]
    dims = tuple(None if d == axis else f"d{d}" for d in range(call.inputs[0].ndim))
    whole = call.inputs[0].shape[axis]
    if len(set(parts)) != 1 or parts[0] * len(parts) != whole:
        return OpRule((dims,), (dims,) * len(parts), linear=_ALL, moves=True)
    taken: tuple[Dim, ...] = tuple(("n", "part") if d == axis else f"d{d}" for d in range(len(dims)))
    made = tuple("part" if d == axis else f"d{d}" for d in range(len(dims)))
    sizes = {"n": len(parts), "part": parts[0]}
    return OpRule(
        (taken,),
        (made,) * len(parts),
        sizes=sizes,
        unsplit=frozenset({"n"}),
        linear=_ALL,
        moves=True,
        localize=lambda c: relax.op.split(c.args[0], len(parts), axis),
    )


@rule("strided_slice")
def strided_slice(call: OpCall) -> OpRule:
    dims = tuple(
        f"d{d}" if a == b and d not in _sliced(call) else None
        for d, (a, b) in enumerate(zip(call.inputs[0].shape, call.outputs[0].shape, strict=True))
    )
    return OpRule((dims,), (dims,), linear=_ALL, moves=True)


def _sliced(call: OpCall) -> set[int]:
    axes = call.literals[0]
    return {axis % call.inputs[0].ndim for axis in axes}
