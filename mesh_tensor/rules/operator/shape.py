"""Rules of operators that move elements of dims together; those along a dim are in `shifts`."""

from __future__ import annotations

import math
from collections.abc import Sequence

from tvm import ir, relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

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
    return OpRule((source,), (target,), sizes=sizes, linear=_ALL, moves=True, localize=to_tile)


def to_tile(local: LocalCall) -> relax.Expr:
    """The operand's tile in the shape of the result's."""
    return reshaped(local.args[0], local.out_tiles[0], local.call.outputs[0].dtype)


def reshaped(x: relax.Expr, shape: Sequence[int], dtype: str) -> relax.Expr:
    """The elements of `x` in that shape; of none, new ones: to TVM a size of 0 is the one that was there."""
    return relax.op.zeros(relax.ShapeExpr(shape), dtype) if 0 in shape else relax.op.reshape(x, shape)


def reshape_call(x: relax.Expr, shape: Sequence[int]) -> relax.Call:
    """R.reshape of any sizes, in a graph: it has no text that is read again where one is 0."""
    return relax.Call(ir.Op.get("relax.reshape"), [x, relax.ShapeExpr(shape)])


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


MERGE = "mesh.merge_dims"


def merge_call(x: relax.Var, dims: Sequence[int]) -> relax.Call:
    """`x` with dims that are one atom each, whatever they are made of elsewhere."""
    return relax.op.call_pure_packed(MERGE, x, relax.ShapeExpr(list(dims)), sinfo_args=[x.struct_info])


@rule(MERGE)
def merge_dims(call: OpCall) -> OpRule:
    """Tiles of a dim's first atom are tiles of the dim, where they are equal ones."""
    (merged,) = call.literals[1:]
    dims = dims_of(call.inputs[0].ndim)
    alike = {f"merged{d}": dims[d] for d in merged}
    made: tuple[Dim, ...] = tuple(f"merged{d}" if d in merged else factor for d, factor in enumerate(dims))
    return OpRule((dims,), (made,), alike=alike, linear=_ALL, moves=True, localize=to_tile)


@rule("broadcast_to")
def broadcast_to(call: OpCall) -> OpRule:
    out = call.outputs[0]
    dims = broadcast_dims(call.inputs[0].shape, out.shape)
    return OpRule(
        (dims,), (dims_of(out.ndim),), linear=_ALL, localize=lambda c: relax.op.broadcast_to(c.args[0], c.out_tiles[0])
    )


@rule("meshgrid")
def meshgrid(call: OpCall) -> OpRule:
    """Every operand's dim is one of all results."""
    order = dims_of(len(call.inputs))
    return OpRule(tuple((dim,) for dim in order), (order,) * len(order))


@rule("stack")
def stack(call: OpCall) -> OpRule:
    axis = call.attr("axis", 0) % call.outputs[0].ndim
    dims = dims_of(call.inputs[0].ndim)
    everything = frozenset(range(len(call.inputs)))
    return OpRule((dims,) * len(call.inputs), ((*dims[:axis], None, *dims[axis:]),), linear=(everything,), moves=True)


@rule("split")
def split(call: OpCall) -> OpRule:
    """Into n equal parts: the dim is (n, part), and nothing splits n."""
    axis = call.axis(call.attr("axis", 0))
    parts = [out.shape[axis] for out in call.outputs]
    dims = tuple(None if d == axis else f"d{d}" for d in range(call.inputs[0].ndim))
    if len(set(parts)) != 1 or parts[0] * len(parts) != call.inputs[0].shape[axis]:
        return OpRule((dims,), (dims,) * len(parts), linear=_ALL, moves=True)
    taken: tuple[Dim, ...] = (*dims[:axis], ("n", "part"), *dims[axis + 1 :])
    made: tuple[Dim, ...] = (*dims[:axis], "part", *dims[axis + 1 :])
    return OpRule(
        (taken,),
        (made,) * len(parts),
        sizes={"n": len(parts), "part": parts[0]},
        unsplit=frozenset({"n"}),
        linear=_ALL,
        moves=True,
        localize=lambda c: relax.op.split(c.args[0], len(parts), axis),
    )


@rule("repeat")
def repeat(call: OpCall) -> OpRule:
    """Every element several times in a row: the result's dim is (elements, times)."""
    axis, times = call.attr("axis"), call.attr("repeats")
    if axis is None:
        return whole_rule(call)
    axis, dims = call.axis(axis), dims_of(call.inputs[0].ndim)
    made: tuple[Dim, ...] = (*dims[:axis], (dims[axis], "times"), *dims[axis + 1 :])
    sizes = {dims[axis]: call.inputs[0].shape[axis], "times": times}
    return OpRule((dims,), (made,), sizes=sizes, unsplit=frozenset({"times"}), linear=_ALL)


@rule("tile")
def tile(call: OpCall) -> OpRule:
    """A dim several times, one after the other: the result's is (times, elements). What is there once is parallel."""
    source, out = call.inputs[0], call.outputs[0]
    if 0 in out.shape:
        return whole_rule(call)
    skipped = out.ndim - source.ndim
    shape = (*(1 for _ in range(skipped)), *source.shape)
    taken: list[Dim] = [f"d{dim}" for dim in range(out.ndim)]
    made, sizes = list(taken), dict[str, int]()
    for dim, (size, whole) in enumerate(zip(shape, out.shape, strict=True)):
        if whole == size:
            continue
        taken[dim], made[dim] = None, f"t{dim}"
        if size > 1:
            taken[dim], made[dim] = f"d{dim}", (f"t{dim}", f"d{dim}")
            sizes |= {f"t{dim}": whole // size, f"d{dim}": size}
    return OpRule((tuple(taken[skipped:]),), (tuple(made),), sizes=sizes, linear=_ALL, localize=_tiles)


def _tiles(local: LocalCall) -> relax.Expr:
    """The operand's tile as often as the result's has it."""
    (tile,), (made,) = local.in_tiles, local.out_tiles
    shape = (*(1 for _ in range(len(made) - len(tile))), *tile)
    return relax.op.tile(local.args[0], [whole // size for whole, size in zip(made, shape, strict=True)])


@rule("nn.pixel_shuffle")
def pixel_shuffle(call: OpCall) -> OpRule:
    """Of every channel's (row, column) of a square, (height, row) and (width, column)."""
    factor = call.attr("upscale_factor")
    batch = dims_of(call.inputs[0].ndim - 3)
    channels, height, width = call.outputs[0].shape[-3], *call.inputs[0].shape[-2:]
    return OpRule(
        ((*batch, ("c", "row", "column"), "h", "w"),),
        ((*batch, "c", ("h", "row"), ("w", "column")),),
        sizes={"c": channels, "row": factor, "column": factor, "h": height, "w": width},
        unsplit=frozenset({"row", "column"}),
        linear=_ALL,
        moves=True,
    )
