"""Rules of operators that put the elements of a dim at other places of one: slices, joins, padding, rolls. A device
takes the windows that its tile of the result is made of, from whoever has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

from tvm import relax, tirx

from mesh_tensor.base.window import Reach, Reaches

from .call import OpCall
from .elementwise import dims_of
from .rule import Dim, LocalCall, Localizer, OpRule, rule, whole_rule

#: Puts tiles side by side that are as long as the result's, each with its elements where they stand there.
JOIN = "mesh.local_join"
#: Puts parts of tensors side by side along a dim: what `joined_parts` makes.
JOINED_PARTS = "mesh.joined_parts"
_ALL = (frozenset({0}),)
_MOST_JOINED = 8  # operands, of each of which a device makes room for a tile of the result


def made_factor(dim: int) -> str:
    """The factor of a result's dim whose elements stood elsewhere."""
    return f"o{dim}"


def moved(
    call: OpCall, operand: int, dim: int, start: int, stride: int = 1, *, last: int = 0, wraps: bool = False
) -> Reaches:
    """The result's element i of a dim is the operand's element start + stride * i, or made of those from there to so
    many after it."""
    reach = Reach(start, start + last)
    return Reaches(made_factor(dim), call.inputs[operand].shape[dim], stride, 1, (reach,), wraps, always=True)


@rule("strided_slice")
def strided_slice(call: OpCall) -> OpRule:
    """Dims of which everything is taken are parallel; the tiles' slice leaves them out. A single element comes from the
    device that has it: what the others make of it is 0."""
    cuts, kept, shape = cuts_of(call), dims_of(call.inputs[0].ndim), call.outputs[0].shape
    single = {d: f"row{d}" for d in _single(call, cuts)}
    some = {d: cut for d, cut in cuts.items() if len(cut) == shape[d] > 0 and d not in single}
    given = tuple([single.get(d) if d in cuts else factor for d, factor in enumerate(kept)])
    made = tuple([None if d in cuts else factor for d, factor in enumerate(kept)])
    return OpRule(
        (given,),
        (tuple([made_factor(d) if d in some else factor for d, factor in enumerate(made)]),),
        dict.fromkeys(single.values(), "sum"),
        linear=_ALL,
        moves=True,
        positional=frozenset(single.values()),
        windows={(0, d): moved(call, 0, d, cut.start, cut.step) for d, cut in some.items()},
        masks=bool(single),
        localize=_slice,
    )


def _single(call: OpCall, cuts: Mapping[int, range]) -> list[int]:
    """The dims of which one element is taken that devices can add up."""
    alone = [d for d, cut in cuts.items() if len(cut) == call.outputs[0].shape[d] == 1]
    return alone if call.inputs[0].dtype != "bool" else []


def cuts_of(call: OpCall) -> dict[int, range]:
    """The dims of which not everything is taken in order -> what is taken."""
    axes, begins, ends, *strides = call.literals
    steps = strides[0] if strides else (1,) * len(axes)
    cuts = {}
    for axis, begin, end, step in zip(axes, begins, ends, steps, strict=True):
        dim = call.axis(axis)
        size = call.inputs[0].shape[dim]
        taken = range(*slice(begin, end, step).indices(size))
        if taken != range(size) or call.outputs[0].shape[dim] != size:
            cuts[dim] = taken
    return cuts


def _slice(local: LocalCall) -> relax.Expr:
    """The slice of tiles: all of a window, by its step; of an element that one device has, what this one has."""
    call, layout = local.call, local.layouts[0]
    found: dict[int, tuple[int, int, int]] = {}
    axes, begins, ends, *strides = call.literals
    cuts, tile, shape = cuts_of(call), local.args[0], list(local.in_tiles[0])
    for position, axis in enumerate(axes):
        dim = call.axis(axis)
        if dim not in cuts:
            continue
        step, length = cuts[dim].step, local.in_tiles[0][dim]
        if layout.window(dim) is not None:
            found[dim] = (0, length, step) if step > 0 else (length - 1, -length - 1, step)
        elif layout.axes_of(dim):
            shape[dim] = 1
            tile = _local_take(local, tile, shape, dim, cuts[dim].start)
        else:
            found[dim] = begins[position], ends[position], strides[0][position] if strides else 1
    if all(step == 1 and begin == 0 and end == local.in_tiles[0][dim] for dim, (begin, end, step) in found.items()):
        return relax.op.reshape(tile, local.out_tiles[0]) if tile is local.args[0] else tile
    columns = zip(*((dim, *cut) for dim, cut in found.items()), strict=True)
    return relax.op.strided_slice(tile, *(relax.Tuple([relax.PrimValue(n) for n in column]) for column in columns))


def _local_take(local: LocalCall, tile: relax.Expr, shape: Sequence[int], dim: int, element: int) -> relax.Expr:
    """One element of a split dim, so that the tile has this shape, or 0 if another device has it."""
    whole = [relax.ShapeExpr(local.call.inputs[0].shape), relax.StringImm(local.layouts[0].text())]
    dtype = "float32" if local.wide else local.call.outputs[0].dtype
    index = relax.const([element], "int64")
    info = relax.TensorStructInfo(shape, dtype)
    return relax.op.call_pure_packed("mesh.local_take", tile, index, *whole, relax.PrimValue(dim), sinfo_args=[info])


@rule("flip")
def flip(call: OpCall) -> OpRule:
    axis = call.axis(call.attr("axis"))
    given, made = _but(call, axis)
    size = call.inputs[0].shape[axis]
    if not size:
        return OpRule((given,), (given,), linear=_ALL, moves=True)
    windows = {(0, axis): moved(call, 0, axis, size - 1, -1)}
    return OpRule((given,), (made,), linear=_ALL, moves=True, windows=windows)


@rule("concat")
def concat(call: OpCall) -> OpRule:
    """Without a dim, the operands are flattened first."""
    if call.attr("axis") is None and any(t.ndim != 1 for t in call.inputs):
        return whole_rule(call)
    axis = call.axis(call.attr("axis", 0))
    return _joined_rule(call, axis, [(0, tensor.shape[axis]) for tensor in call.inputs], LocalCall.again)


def joined_parts(tensors: Sequence[relax.Expr], axis: int, parts: Sequence[tuple[int, int]]) -> relax.Call:
    """Of each tensor the elements of a dim from where its part begins to where that ends, side by side."""
    first = tensors[0].struct_info
    shape = [int(size) for size in first.shape]
    shape[axis] = sum(end - begin for begin, end in parts)
    ends = relax.ShapeExpr([end for part in parts for end in part])
    info = relax.TensorStructInfo(shape, first.dtype)
    return relax.op.call_pure_packed(JOINED_PARTS, *tensors, relax.PrimValue(axis), ends, sinfo_args=[info])


@rule(JOINED_PARTS)
def _of_joined_parts(call: OpCall) -> OpRule:
    _, axis, ends = call.literals
    parts = list(zip(ends[::2], ends[1::2], strict=True))
    return _joined_rule(call, axis, parts, lambda local: _whole_parts(local, axis, parts))


def _whole_parts(local: LocalCall, axis: int, parts: Sequence[tuple[int, int]]) -> relax.Expr:
    """Slices side by side, of tiles whose dim is whole."""
    sliced = []
    for tile, shape, part in zip(local.args, local.in_tiles, parts, strict=True):
        cut = [relax.Tuple([relax.PrimValue(n)]) for n in (axis, *part, 1)]
        sliced.append(tile if part == (0, shape[axis]) else relax.op.strided_slice(tile, *cut))
    return relax.op.concat(sliced, axis)


def _joined_rule(call: OpCall, axis: int, parts: Sequence[tuple[int, int]], whole: Localizer) -> OpRule:
    """Of each operand a part of a dim, side by side; `whole`: how that looks where the dim is."""
    given, made = _but(call, axis)
    count, spans = len(parts), _side_by_side(parts)
    windows = {
        (n, axis): moved(call, n, axis, begin - start)
        for n, ((begin, _), (start, end)) in enumerate(zip(parts, spans, strict=True))
        if start < end
    }
    if not windows or count > _MOST_JOINED:
        return OpRule((given,) * count, (given,), linear=(frozenset(range(count)),), moves=True, localize=whole)
    return OpRule(
        (given,) * count,
        (made,),
        linear=(frozenset(range(count)),),
        moves=True,
        positional=frozenset({made_factor(axis)}),
        windows=windows,
        localize=lambda local: _joined(local, axis, spans, whole),
    )


def _side_by_side(parts: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where parts begin and end in the result."""
    ends = list(accumulate(end - begin for begin, end in parts))
    return list(zip([0, *ends], ends, strict=False))


@rule("slice_scatter")
def slice_scatter(call: OpCall) -> OpRule:
    """What is put into the first operand comes to the device that has its place there."""
    axis = call.axis(call.attr("axis"))
    given, made = _but(call, axis)
    start, end, step = _scattered(call, axis)
    both = (frozenset({0, 1}),)
    if step != 1 or end - start != call.inputs[1].shape[axis] or start == end:
        return OpRule((given, given), (given,), linear=both, moves=True)
    return OpRule(
        (made, given),
        (made,),
        linear=both,
        moves=True,
        positional=frozenset({made_factor(axis)}),
        windows={(1, axis): moved(call, 1, axis, -start)},
        localize=lambda local: _joined(local, axis, [(0, call.outputs[0].shape[axis]), (start, end)], LocalCall.again),
    )


def _scattered(call: OpCall, axis: int) -> tuple[int, int, int]:
    """Where what is put into a dim begins and ends, and its step."""
    begin, end, *step = call.literals
    return slice(begin, end, *step).indices(call.inputs[0].shape[axis])


@rule("nn.pad")
def pad(call: OpCall) -> OpRule:
    """Dims that get nothing added are parallel. Of dims that do, constants are put around what a device has of them,
    and circular ones go on at their other end; in other modes they are whole."""
    widths, mode = call.attr("pad_width"), call.attr("pad_mode", "constant")
    padded = {d: widths[2 * d] for d in range(call.inputs[0].ndim) if any(widths[2 * d : 2 * d + 2])}
    kept = dims_of(call.inputs[0].ndim)
    constant, circular = mode == "constant", mode == "circular"
    movable = (constant or (circular and min((0, *widths)) == 0)) and 0 not in call.inputs[0].shape
    given: tuple[Dim, ...] = tuple(None if d in padded else factor for d, factor in enumerate(kept))
    made = tuple([made_factor(d) if d in padded and movable else factor for d, factor in enumerate(given)])
    return OpRule(
        (given,),
        (made,),
        linear=_ALL if not constant or not call.attr("pad_value", 0.0) else (),
        moves=not constant,
        positional=frozenset(map(made_factor, padded)) if movable else frozenset(),
        windows={(0, d): moved(call, 0, d, -low, wraps=circular) for d, low in padded.items()} if movable else {},
        localize=(lambda local: _padded(local, padded)) if padded else None,
    )


def _padded(local: LocalCall, padded: Mapping[int, int]) -> relax.Expr:
    """Windows are as long as the result's tile: what lies outside of the tensor is filled in, dim by dim."""
    call = local.call
    windows = [dim for dim in padded if local.layouts[0].window(dim) is not None]
    if not windows:
        return local.again()
    widths = list(call.attr("pad_width"))
    for dim in windows:
        widths[2 * dim : 2 * dim + 2] = 0, 0
    tile, value = local.args[0], call.attr("pad_value", 0.0)
    if any(widths):
        tile = relax.op.nn.pad(tile, widths, call.attr("pad_mode", "constant"), value)
    if call.attr("pad_mode", "constant") != "constant" or not value:
        return tile if any(widths) else relax.op.reshape(tile, local.out_tiles[0])
    for dim in windows:
        start = padded[dim]
        tile = _join(local, [tile], dim, [(start, start + call.inputs[0].shape[dim])], float(value))
    return tile


def _joined(local: LocalCall, axis: int, spans: Sequence[tuple[int, int]], whole: Localizer) -> relax.Expr:
    """`whole` where the result's dim is whole; else windows as long as its tile, one over the other."""
    if all(layout.window(axis) is None for layout in local.layouts):
        return whole(local)
    return _join(local, local.args, axis, spans)


def _join(
    local: LocalCall, tiles: Sequence[relax.Expr], axis: int, spans: Sequence[tuple[int, int]], fill: float = 0.0
) -> relax.Expr:
    """Of each tile what stands within its span of the result's dim; `fill` where there is no span."""
    out = local.call.outputs[0]
    ends = relax.ShapeExpr([end for span in spans for end in span])
    args = [relax.ShapeExpr(out.shape), relax.StringImm(local.out_layouts[0].text()), relax.PrimValue(axis), ends]
    args.append(relax.PrimValue(tirx.FloatImm("float64", fill)))
    info = relax.TensorStructInfo(local.out_tiles[0], local.dtypes[0])
    return relax.op.call_pure_packed(JOIN, *tiles, *args, sinfo_args=[info])


def _but(call: OpCall, axis: int) -> tuple[tuple[Dim, ...], tuple[Dim, ...]]:
    """The first operand's dims, of which all but one are parallel, without that one and with the result's."""
    kept = dims_of(call.inputs[0].ndim)
    return tuple([None if d == axis else f for d, f in enumerate(kept)]), tuple(
        [made_factor(d) if d == axis else f for d, f in enumerate(kept)]
    )
