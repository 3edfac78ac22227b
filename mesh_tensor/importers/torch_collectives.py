"""Torch's functional collectives as those of manual computations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from tvm import relax

from mesh_tensor.annotations import comm
from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.base.mesh import Mesh

from .torch_args import arguments, emit

_OPS = {"sum": "sum", "avg": "avg", "max": "max", "min": "min", "product": "prod"}


def _group(importer: Any, name: str, size: int | None = None) -> Mesh:
    """The axes of a group, which has so many ranks."""
    groups: dict[str, Mesh] = importer.groups
    if str(name) not in groups:
        refuse(
            f"group {name!r} has no axes (known: {listing(list(groups)) or 'none'})",
            fix=f"state them: groups={{{str(name)!r}: (axis,)}}",
        )
    axes = groups[str(name)]
    if size is not None and size != axes.num_devices:
        refuse(
            f"group {name!r} has {size} ranks, but {axes} has {axes.num_devices} devices",
            fix="state the axes along which the group's ranks lie, in a mesh of the sizes that the program ran on",
        )
    return axes


def _op(name: str) -> str:
    if name.lower() not in _OPS:
        refuse(f"reduction {name!r} is none of {listing(list(_OPS))}", fix="reduce by one of them")
    return _OPS[name.lower()]


def _all_reduce(node: torch.fx.Node, importer: Any) -> relax.Expr:
    x, op, group = arguments(node, importer, 3)
    return emit(importer, comm.all_reduce(x, _group(importer, group), _op(op)))


def _all_gather(node: torch.fx.Node, importer: Any) -> relax.Expr:
    x, size, group = arguments(node, importer, 3)
    return emit(importer, comm.all_gather(x, _group(importer, group, size), 0))


def _reduce_scatter(node: torch.fx.Node, importer: Any) -> relax.Expr:
    x, op, size, group = arguments(node, importer, 4)
    return emit(importer, comm.reduce_scatter(x, _group(importer, group, size), 0, _op(op)))


def _all_to_all(node: torch.fx.Node, importer: Any) -> relax.Expr:
    x, gets, sends, group = arguments(node, importer, 4)
    axes = _group(importer, group)
    rows = node.args[0].meta["val"].shape[0]  # type: ignore[union-attr]
    even = [rows // axes.num_devices] * axes.num_devices
    if rows % axes.num_devices or (gets and list(gets) != even) or (sends and list(sends) != even):
        refuse(f"rows {gets} of {sends} are no even parts of {rows}", fix="send each rank as many rows")
    return emit(importer, comm.all_to_all(x, axes, 0, 0))


def _wait(node: torch.fx.Node, importer: Any) -> relax.Expr:
    (x,) = arguments(node, importer, 1)
    return x


COLLECTIVES: dict[str, Callable[[torch.fx.Node, Any], relax.Expr]] = {
    "all_reduce.default": _all_reduce,
    "all_gather_into_tensor.default": _all_gather,
    "reduce_scatter_tensor.default": _reduce_scatter,
    "all_to_all_single.default": _all_to_all,
    "wait_tensor.default": _wait,
}
NAMESPACE = "_c10d_functional"
