"""Manual computations: a function of a module that is one device's work on its own tiles, collectives among it.

`R.call_pure_packed("mesh.manual_computation", *tensors, R.str(text), sinfo_args=...)` calls a function of the module on
the tiles that the tensors have over the manual axes, and makes tensors of the tiles that it gives. The text is JSON:
`{"body": "name", "axes": {"x": 2}, "in": ["S[0]"], "out": ["R"]}`, layouts over the manual axes alone (the function is
there by name: TVM finds no module well-formed whose function is an argument and has symbolic sizes). What the function
does with other axes is left to propagation. Its collectives are `mt.comm`'s and `R.ccl`'s.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tvm import ir, relax, tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.errors import MeshTensorError, listing, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding

from .annotation import check, complete

MANUAL = "mesh.manual_computation"
_FIX = 'state {"body": "name", "axes": {"x": 2}, "in": ["S[0]"], "out": ["R"]}, or let mt.manual_computation write it'


@dataclass(frozen=True)
class Experts:
    """A manual computation that `mt.experts` wrote, of the function `body`: rows go to experts, which are split over
    these axes, in rounds of `room` rows."""

    body: str
    axes: tuple[str, ...]
    room: int

    @staticmethod
    def parse(said: Any) -> Experts | None:
        """What a text says of it."""
        return None if said is None else Experts(str(said["body"]), tuple(map(str, said["axes"])), int(said["room"]))


@dataclass(frozen=True)
class Manual:
    """What is stated of a manual computation: its function's name, its axes, with their sizes, and how operands and
    results lie over these."""

    body: str
    axes: Mesh
    inputs: tuple[Sharding, ...]
    outputs: tuple[Sharding, ...]
    experts: Experts | None = None

    @property
    def text(self) -> str:
        """As JSON."""
        said: dict[str, Any] = {"body": self.body, "axes": self.axes.shape}
        said |= {"in": list(map(str, self.inputs)), "out": list(map(str, self.outputs))}
        return json.dumps(said | ({"experts": vars(self.experts)} if self.experts is not None else {}))

    @staticmethod
    def parse(text: str, inputs: Sequence[int], outputs: Sequence[int], where: str) -> Manual:
        """What a text states for operands and results with so many dims. Refused where it states no such thing, or
        other numbers of tensors."""
        try:
            said = json.loads(text)
            axes, layouts = Mesh(said["axes"]), (list(said["in"]), list(said["out"]))
            body, experts = str(said["body"]), Experts.parse(said.get("experts"))
        except (ValueError, KeyError, TypeError) as error:
            refuse(f"{shown(text)} states no manual computation: {error}", where=where, fix=_FIX)
        counts = [
            f"{len(stated)} layouts are stated for {len(ndims)} {what}"
            for what, stated, ndims in zip(("operands", "results"), layouts, (inputs, outputs), strict=True)
            if len(stated) != len(ndims)
        ]
        if counts:
            refuse(counts, where=where, fix="state one layout per tensor")
        made = [
            tuple(Sharding.parse(axes, ndim, str(one), name=where) for one, ndim in zip(stated, ndims, strict=True))
            for stated, ndims in zip(layouts, (inputs, outputs), strict=True)
        ]
        return Manual(body, axes, made[0], made[1], experts)


def manual_computation(
    body: ir.GlobalVar,
    args: Sequence[relax.Expr],
    mesh: Mesh | Mapping[str, int],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    *,
    axes: Iterable[str] | None = None,
) -> relax.Call:
    """A call of a Relax function in local view, as JAX's `shard_map`: the function works on one device's tiles, with
    explicit collectives. The call is bound in TVMScript or by a BlockBuilder:
    `y = mt.manual_computation(cls.body, (x, w), {"x": 2}, [{"x": 0}, {}], {"x": 0})`.

    Args:
        body: the function. It takes the tiles of `args` over the manual axes, and returns the tiles of the results: a
            tensor, or a tuple of tensors. Devices communicate only by the collectives in it (`mt.comm`, `R.ccl`).
        args: the global tensors.
        mesh: the mesh; the module has to be distributed over one in which these axes have these sizes.
        in_shardings: for each tensor its layout over the manual axes, in any form of `annotate_module`. Axes have to
            divide the dims that they split.
        out_shardings: likewise for the results: one layout for a tensor, a list for a tuple. Along an axis that is left
            out, all devices have to hold the same values, which is proved; {"sharding": ..., "partial": {axis: op}}
            reduces the devices' values by `op`.
        axes: the manual axes; None: all of the mesh's. Along all other axes layouts are propagated as usual.

    Raises:
        MeshTensorError: a layout does not fit its tensor or the axes, or the function takes or returns something else
            than tensors.
    """
    return manual_call(body, args, mesh, in_shardings, out_shardings, axes, None)


def manual_call(
    body: ir.GlobalVar,
    args: Sequence[relax.Expr],
    mesh: Mesh | Mapping[str, int],
    in_shardings: Sequence[Any],
    out_shardings: Any,
    axes: Iterable[str] | None,
    experts: Experts | None,
) -> relax.Call:
    """A call as `manual_computation` makes it, which says what experts are in it."""
    mesh = Mesh(mesh)
    manual = Mesh({axis: mesh.size(axis) for axis in mesh.in_order(mesh.axis_names if axes is None else axes)})
    where = f"the manual computation of {body.name_hint!r}"
    info = body.struct_info
    if not isinstance(info, relax.FuncStructInfo) or info.params is None:
        refuse(
            f"{body.name_hint!r} is {info}, no function of known types",
            where=where,
            fix="pass the global variable of a function in the module, whose parameters have struct infos",
        )
    args = [relax.BlockBuilder().normalize(arg) if arg.struct_info_ is None else arg for arg in args]
    given = [_tensor(arg.struct_info, f"operand {n}", where) for n, arg in enumerate(args)]
    results = info.ret.fields if isinstance(info.ret, relax.TupleStructInfo) else [info.ret]
    tiles = [_tensor(result, f"result {n} of {body.name_hint!r}", where) for n, result in enumerate(results)]
    stated = [out_shardings] if isinstance(info.ret, relax.TensorStructInfo) else list(out_shardings)
    layouts = _layouts(manual, in_shardings, given, where), _layouts(manual, stated, tiles, where)
    made = Manual(body.name_hint, manual, *layouts, experts)
    sizes = _sizes(info, given, made.inputs)
    infos = [_whole(tile, layout, sizes) for tile, layout in zip(tiles, made.outputs, strict=True)]
    out = infos[0] if isinstance(info.ret, relax.TensorStructInfo) else relax.TupleStructInfo(infos)
    return relax.op.call_pure_packed(MANUAL, *args, relax.StringImm(made.text), sinfo_args=[out])


def experts_of(call: relax.Call) -> Experts | None:
    """What a call that is a manual computation says of experts."""
    return Experts.parse(json.loads(manual_text(call)).get("experts"))


def _tensor(info: relax.StructInfo, what: str, where: str) -> relax.TensorStructInfo:
    if not isinstance(info, relax.TensorStructInfo) or not isinstance(info.shape, relax.ShapeExpr):
        refuse(f"{what} is {info}, no tensor of known rank", where=where, fix="annotate its shape")
    return info


def _layouts(
    mesh: Mesh, stated: Sequence[Any], infos: Sequence[relax.TensorStructInfo], where: str
) -> tuple[Sharding, ...]:
    if isinstance(stated, (str, Mapping, Sharding)) or len(stated) != len(infos):
        refuse(f"{shown(stated)} is stated for {len(infos)} tensors", where=where, fix="give a list: one per tensor")
    made, problems = [], []
    for number, (layout, info) in enumerate(zip(stated, infos, strict=True)):
        annotation, wrong = check(mesh, info.ndim, complete(mesh, layout))
        problems += [f"tensor {number}: {problem}" for problem in wrong]
        if annotation is not None:
            made.append(annotation.sharding)
    if problems:
        refuse(problems, where=where, fix=f"state layouts over the manual axes {listing(mesh.axis_names)}")
    return tuple(made)


def _sizes(
    info: relax.FuncStructInfo, given: Sequence[relax.TensorStructInfo], layouts: Sequence[Sharding]
) -> dict[tirx.Var, Any]:
    """What the function's symbols are, in the caller's."""
    found: dict[tirx.Var, Any] = {}
    for param, arg, layout in zip(info.params, given, layouts, strict=False):
        if isinstance(param, relax.TensorStructInfo) and isinstance(param.shape, relax.ShapeExpr):
            pairs = zip(param.shape.values, arg.shape.values, strict=False)
            for dim, (mine, theirs) in enumerate(pairs):
                if isinstance(mine, tirx.Var):
                    found.setdefault(mine, theirs // layout.num_shards(dim))
    return found


def _whole(tile: relax.TensorStructInfo, layout: Sharding, sizes: Mapping[tirx.Var, Any]) -> relax.TensorStructInfo:
    """What tiles of that type make up."""
    shape = [
        (substitute(size, sizes) if isinstance(size, tirx.PrimExpr) else size) * layout.num_shards(dim)
        for dim, size in enumerate(tile.shape.values)
    ]
    return relax.TensorStructInfo(shape, tile.dtype)


def is_manual(expr: relax.Expr) -> bool:
    """Whether a call is of a manual computation."""
    if not isinstance(expr, relax.Call) or not expr.args or not isinstance(expr.args[0], relax.ExternFunc):
        return False
    return str(expr.args[0].global_symbol) == MANUAL


def manual_text(call: relax.Call) -> str:
    """What a manual computation states. Refused where it states nothing."""
    if not isinstance(call.args[-1], relax.StringImm):
        refuse(f"{MANUAL} takes tensors and a text, not {call}", fix=_FIX)
    return str(call.args[-1].value)


def axes_of_manual(call: relax.Call) -> dict[str, int]:
    """The axes of a manual computation, with their sizes. Refused where it states none."""
    try:
        return dict(Mesh(json.loads(manual_text(call))["axes"]).shape)
    except (ValueError, KeyError, TypeError) as error:
        return refuse(f"{shown(manual_text(call))} states no manual computation: {error}", fix=_FIX)


def body_of(call: relax.Call) -> str:
    """The name of the function that a manual computation runs; "" if it states none."""
    try:
        return str(json.loads(manual_text(call))["body"])
    except (ValueError, KeyError, TypeError, MeshTensorError):
        return ""
