"""Kernels whose parts have nothing to do with each other: the parts are lowered alone where less moves then."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from tvm import tirx

from mesh_tensor.annotations.annotate import read_annotations
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.plan.prices import Prices, bytes_moved
from mesh_tensor.plan.tir_rule import typical_size
from mesh_tensor.rules.kernel.independent_parts import independent_parts
from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.tir.grids import Grids

from .grids import LoweredGrids, lower_grids
from .local_view import Collective, LocalView, Lowered

_WHY = ": its parts can go one after the other, and less moves where each is split by itself"


def lower_apart(
    func: tirx.PrimFunc, lower: Callable[[tirx.PrimFunc], Lowered], prices: Prices, least: float
) -> LoweredGrids | None:
    """An annotated kernel in parts, one after the other, where it takes less than `least` to change layouts, and in no
    other way less; None if it is one, or a part is refused."""
    _, annotations = read_annotations(func)
    asked = {name: annotation.sharding for name, annotation in annotations.items()}
    best = None
    for parts in independent_parts(normalize(func), asked):
        try:
            made = lower_grids(func, Grids(parts), lower)
        except MeshTensorError:
            continue
        if (takes := moving(made, prices)) < least:
            best, least = replace(made, why=_WHY), takes
        if not least:
            break
    return best


def moving(local: LocalView, prices: Prices) -> int:
    """What it takes to change layouts; next to nothing where devices have all that they need."""
    total = 0
    for step in local.steps:
        if isinstance(step, Collective):
            tensor, after = local.tensors[step.src], local.tensors[step.dst].sharding
            change = tuple(typical_size(size, {}) for size in tensor.shape), tensor.dtype, tensor.sharding, after
            total += prices.change(*change) if bytes_moved(*change) else 0
    return total
