"""Rules of operators that take or put elements by index."""

from __future__ import annotations

from collections.abc import Sequence

from tvm import relax

from .call import OpCall
from .elementwise import broadcast_dims, dims_of
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

_FIRST = (frozenset({0}),)
# Operators whose second operand, or all after the first, are looked up in dims of the first one.
LOOK_UPS = frozenset(
    {
        "gather_elements",
        "gather_nd",
        "index_tensor",
        "mesh.local_gather",
        "mesh.local_scatter",
        "mesh.local_take",
        "scatter_elements",
        "take",
    }
)


def looked_up(call: OpCall) -> tuple[int, ...]:
    """The operands whose elements are looked up in dims of the first one; of torch's own operators, all that may be."""
    if call.operator.startswith("aten."):
        return tuple([n for n, operand in enumerate(call.inputs) if operand.dtype.startswith("int")])
    if call.operator not in LOOK_UPS and call.name != "scatter_nd":
        return ()
    return tuple(range(1, len(call.inputs) if call.name == "index_tensor" else min(2, len(call.inputs))))


rule("mesh.dynamic_strided_slice", "mesh.nonzero", "mesh.unique")(whole_rule)  # of sizes that are stated


@rule("take")
def take(call: OpCall) -> OpRule:
    """Where the table's rows are split, each device takes what it has, and 0 for the rest."""
    table, indices = call.inputs[0], call.inputs[1:]
    axis = _axis(call)
    if call.attr("axis") is None and table.ndim != 1:
        return whole_rule(call)
    rows = dims_of(indices[0].ndim, "i") if indices else ()
    split = bool(indices) and table.dtype != "bool"
    dims = tuple(("row" if split else None) if d == axis else f"d{d}" for d in range(table.ndim))
    # An index that is a number stands for one index, in a dim of its own, or for none.
    gone = (None,) * (call.outputs[0].ndim - table.ndim + 1) if not indices else rows
    return OpRule(
        (dims, *((rows,) if indices else ())),
        ((*dims[:axis], *gone, *dims[axis + 1 :]),),
        {"row": "sum"} if split else {},
        linear=_FIRST,
        positional=frozenset({"row"}),
        masks=split,
        localize=_local_take if split else None,
    )


def _axis(call: OpCall) -> int:
    return 0 if call.attr("axis") is None else call.axis(call.attr("axis"))


def _local_take(local: LocalCall) -> relax.Expr:
    mode = relax.StringImm(local.call.attr("mode", "fast"))
    return _of_what_is_held("mesh.local_take", local, _axis(local.call), mode)


def _of_what_is_held(name: str, local: LocalCall, axis: int, *more: relax.Expr) -> relax.Expr:
    """The operator that takes what a device holds along a dim, where it is split."""
    call, layout = local.call, local.layouts[0]
    if not layout.axes_of(axis):
        return local.again()
    args = [relax.ShapeExpr(call.inputs[0].shape), relax.StringImm(layout.text()), relax.PrimValue(axis), *more]
    info = relax.TensorStructInfo(local.out_tiles[0], "float32" if local.wide else call.outputs[0].dtype)
    return relax.op.call_pure_packed(name, *local.args, *args, sinfo_args=[info])


@rule("gather_elements")
def gather_elements(call: OpCall) -> OpRule:
    """Where an element stands in the dims that are not indexed is where its index stands. Where the dim that is indexed
    is split, each device takes what it has, and 0 for the rest."""
    data, index = call.inputs
    axis = call.axis(call.attr("axis"))
    same = tuple(
        f"d{d}" if d != axis and a == b else None for d, (a, b) in enumerate(zip(data.shape, index.shape, strict=True))
    )
    split = data.dtype != "bool"
    taken = (*same[:axis], "i", *same[axis + 1 :])
    return OpRule(
        ((*same[:axis], "row" if split else None, *same[axis + 1 :]), taken),
        (taken,),
        {"row": "sum"} if split else {},
        linear=_FIRST,
        positional=frozenset({"row"}),
        masks=split,
        localize=_local_gather if split else None,
    )


def _local_gather(local: LocalCall) -> relax.Expr:
    return _of_what_is_held("mesh.local_gather", local, local.call.axis(local.call.attr("axis")))


@rule("gather_nd")
def gather_nd(call: OpCall) -> OpRule:
    """Batch dims, then dims that are indexed, then whole pieces of the data."""
    data, index = call.inputs
    batch, count = call.attr("batch_dims", 0), index.shape[-1]
    batches, places = dims_of(batch, "b"), dims_of(index.ndim - 1 - batch, "i")
    rest = dims_of(data.ndim - batch - count)
    return OpRule(
        ((*batches, *(None,) * count, *rest), (*batches, *places, None)), ((*batches, *places, *rest),), linear=_FIRST
    )


@rule("index_tensor")
def index_tensor(call: OpCall) -> OpRule:
    """Index tensors that broadcast together name places in the first dims."""
    data, *indices = call.inputs
    rest = dims_of(data.ndim - len(indices))
    places = call.outputs[0].shape[: call.outputs[0].ndim - len(rest)]
    return OpRule(
        ((*(None,) * len(indices), *rest), *(broadcast_dims(index.shape, places, "i") for index in indices)),
        ((*dims_of(len(places), "i"), *rest),),
        linear=_FIRST,
    )


@rule("scatter_nd")
def scatter_nd(call: OpCall) -> OpRule:
    """Pieces of the data are updated, at places that every device knows: it updates those that it has."""
    data, index, updates = call.inputs
    count = index.shape[-1]
    rest = dims_of(data.ndim - count)
    made = (*_rows(count), *rest)
    changed = (*(None,) * (updates.ndim - len(rest)), *rest)
    return _scattered((made, (None,) * index.ndim, changed), range(count))


@rule("scatter_elements")
def scatter_elements(call: OpCall) -> OpRule:
    """Rows that all three operands have, beside the dim that is indexed, are by themselves. Along that one a device
    takes what belongs into its tile."""
    axis = call.axis(call.attr("axis"))
    shapes = [operand.shape for operand in call.inputs]
    dims = tuple(
        f"d{d}" if d != axis and len({shape[d] for shape in shapes}) == 1 else None for d in range(len(shapes[0]))
    )
    return _scattered(((*dims[:axis], f"row{axis}", *dims[axis + 1 :]), dims, dims), [axis])


@rule("index_put")
def index_put(call: OpCall) -> OpRule:
    """Values go to places in the first dims that every device knows: it puts those that it has."""
    data, *indices, values = call.inputs
    count = len(indices)
    rest = dims_of(data.ndim - count)
    trailing = values.shape[max(0, values.ndim - len(rest)) :]
    put = broadcast_dims(trailing, data.shape[count:]) if trailing else ()
    changed = (*(None,) * (values.ndim - len(trailing)), *put)
    return _scattered(((*_rows(count), *rest), *((None,) * index.ndim for index in indices), changed), range(count))


def _rows(count: int) -> tuple[str, ...]:
    return tuple([f"row{d}" for d in range(count)])


def _scattered(inputs: tuple[tuple[Dim, ...], ...], indexed: Sequence[int]) -> OpRule:
    """The rule where the result's dims are the data's, of which some are indexed."""
    rows = frozenset([f"row{d}" for d in indexed])
    return OpRule(inputs, (inputs[0],), positional=rows, localize=lambda local: _local_scatter(local, indexed))


def _local_scatter(local: LocalCall, indexed: Sequence[int]) -> relax.Expr:
    call, layout = local.call, local.layouts[0]
    split = [d for d in indexed if layout.axes_of(d)]
    if not split:
        return local.again()
    args = [relax.ShapeExpr(call.inputs[0].shape), relax.StringImm(layout.text()), relax.ShapeExpr(list(indexed))]
    how = "accumulate" if call.attr("accumulate") else call.attr("reduction", "update")
    info = relax.TensorStructInfo(local.out_tiles[0], call.outputs[0].dtype)
    names = relax.StringImm(call.name), relax.StringImm(how)
    return relax.op.call_pure_packed("mesh.local_scatter", *local.args, *args, *names, sinfo_args=[info])


@rule("one_hot")
def one_hot(call: OpCall) -> OpRule:
    axis = call.attr("axis") % call.outputs[0].ndim
    dims = dims_of(call.inputs[0].ndim)
    return OpRule((dims,), ((*dims[:axis], None, *dims[axis:]),))
