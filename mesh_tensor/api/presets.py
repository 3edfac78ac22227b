"""What people write: data parallel, Megatron's, both on two axes, and weights split over the data as well. A search
looks at these first, so that it is never worse than them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tvm import ir

from mesh_tensor.annotations.names import relax_function, source_names
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.importers import ImportedModule

from . import strategies

Layouts = Mapping[str, Mapping[str, int]]


def preset_layouts(module: ImportedModule | ir.IRModule, function: str, mesh: Mesh) -> Iterator[Layouts]:
    """Layouts of parameters, by the function's names: every axis for the data but one, or none, for the model."""
    if function != "main":
        return
    mod = module if isinstance(module, ir.IRModule) else module.mod
    func = relax_function(mod, function)
    ours, sizes = source_names(func), {p.name_hint: p.struct_info.shape.values for p in func.params}
    weights = set() if isinstance(module, ir.IRModule) else set(module.params)
    for model in (None, *mesh):
        data = {axis: 0 for axis in mesh if axis != model}
        inputs = dict.fromkeys(_inputs(module), data)
        for split in _models(module, model):
            made = {ours.get(name, name): layout for name, layout in split.items()}
            yield {**inputs, **made}
            yield {**inputs, **made, **_over_data(sizes, weights, made, data)}


def _inputs(module: ImportedModule | ir.IRModule) -> list[str]:
    try:
        return list(strategies.data_parallel(module))
    except MeshTensorError:
        return []


def _models(module: ImportedModule | ir.IRModule, axis: str | None) -> list[Layouts]:
    """Megatron's layouts over an axis, without and with the vocabulary; without an axis, none."""
    if axis is None:
        return [{}]
    try:
        return [strategies.tensor_parallel(module, axis, vocabulary=words) for words in (False, True)]
    except MeshTensorError:
        return []


def _over_data(
    sizes: Mapping[str, object], weights: set[str], made: Layouts, data: Mapping[str, int]
) -> dict[str, dict[str, int]]:
    """The weights, their first whole dim split over the data's axes as well."""
    found = {}
    for name in weights:
        taken = made.get(name, {})
        free = [dim for dim in range(len(sizes[name])) if dim not in taken.values()]  # type: ignore[arg-type]
        if free:
            found[name] = {**taken, **dict.fromkeys(data, free[0])}
    return found
