"""Parallelism strategies as layouts: each function gives a dict {name: {axis: dim}} for `distribute_module`.

`combine` merges them. A strategy changes nothing by itself, and could be written by hand; values that it doesn't name
get their layouts by propagation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TypeAlias

from tvm import ir

from mesh_tensor.annotations.named_values import NamedValues
from mesh_tensor.annotations.names import check_module, relax_function, source_names
from mesh_tensor.base.errors import MeshTensorError, refuse, shown
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.ir import Graph
from mesh_tensor.plan.reader import read_graph
from mesh_tensor.plan.tensor_parallel import find_pairs

from .training import TrainingStep

Layouts: TypeAlias = dict[str, dict[str, int]]
Module: TypeAlias = "ImportedModule | TrainingStep | ir.IRModule"

__all__ = [
    "combine",
    "context_parallel",
    "data_parallel",
    "expert_parallel",
    "sequence_parallel",
    "tensor_parallel",
    "zero",
]


def data_parallel(module: Module, axis: str = "data", *, dim: int = 0) -> Layouts:
    """Data parallelism: split the batch over `axis`. That is dim `dim` of the first input that has it, and of all
    inputs of the same size there. Refused where no input has such a dim."""
    sizes = _inputs(module)
    first = next((shape[dim] for shape in sizes.values() if len(shape) > dim), None)
    found = {name: {axis: dim} for name, shape in sizes.items() if len(shape) > dim and shape[dim] == first}
    if not found:
        refuse(f"no input has a dim {dim}", where="a data-parallel layout", fix="say which dim the batch is")
    return found


def context_parallel(module: Module, axis: str = "context", *, dim: int = 1) -> Layouts:
    """Context parallelism: split the positions of the sequence, dim `dim` of the inputs, over `axis`. Attention gathers
    keys and values."""
    return data_parallel(module, axis, dim=dim)


def tensor_parallel(module: Module, axis: str = "model", *, vocabulary: bool = False) -> Layouts:
    """Megatron's tensor parallelism over `axis`, found in the graph: groups of linear layers whose outputs reach
    another linear layer through operators that don't need all features at once. The former are split by output features
    (column parallel), the latter by input features (row parallel): one all-reduce forward and one backward per group.
    Refused where there is no such group.

    vocabulary   also split embedding tables by rows (tokens), and the layer that gives the logits by classes
    """
    pairs = find_pairs(_graph(module))
    names = _source_names(module)
    layouts: Layouts = {}
    for weight in pairs.columns:
        layouts |= {names(weight.name): {axis: weight.out_dim}, **{names(b): {axis: 0} for b in weight.biases}}
    for weight in pairs.rows:
        layouts |= {names(weight.name): {axis: weight.in_dim}, **{names(b): {} for b in weight.biases}}
    if vocabulary:
        layouts |= {names(table): {axis: 0} for table in pairs.tables}
        for weight in pairs.last:
            layouts |= {names(weight.name): {axis: weight.out_dim}, **{names(b): {axis: 0} for b in weight.biases}}
    if not layouts:
        refuse(
            "no linear layers meet again in a linear layer",
            where="a tensor-parallel layout",
            fix="state the layouts of the weights by hand",
        )
    return layouts


def sequence_parallel(
    module: Module, axis: str = "model", *, dim: int = 1, also: Mapping[str, int] | None = None
) -> Layouts:
    """Megatron's sequence parallelism: activations between the groups of `tensor_parallel` over the same axis are split
    along dim `dim`, the positions, so that all-reduces become reduce-scatters and all-gathers. Combine it with
    `tensor_parallel`.

    also   the dims that other axes split in these activations, e.g. {"data": 0} with data parallelism; axes that are
           not named replicate them
    """
    return {name: {**(also or {}), axis: dim} for name in find_pairs(_graph(module)).sums}


def expert_parallel(module: Module, parameters: Iterable[str], axis: str = "expert", *, dim: int = 0) -> Layouts:
    """Expert parallelism: split dim `dim` (the experts) of these parameters over `axis`. They are given by name, or by
    patterns such as "*.experts.*"; names that the module doesn't have are refused."""
    found = list(parameters)
    _, problems = NamedValues(_mod(module), "main").meant_by(found)
    if problems:
        fix = "name the parameters that have a dim of experts, or patterns of them"
        refuse(problems, where="an expert-parallel layout", fix=fix)
    return {name: {axis: dim} for name in found}


def zero(step: TrainingStep, level: int) -> TrainingStep:
    """ZeRO: a copy of the step whose optimizer state (levels 1 and 2), or optimizer state and parameters (level 3), are
    split over the axes that split the batch; 0 splits nothing."""
    if level not in (0, 1, 2, 3):
        refuse(f"there is no level {level!r} of ZeRO", fix="use 0, 1, 2 or 3")
    return replace(step, zero=level)


def combine(*layouts: Mapping[str, Mapping[str, int]]) -> Layouts:
    """Merge layouts: the axes that they state for one value become one layout. Refused where they state different dims
    for one axis of a value.

    >>> combine({"x": {"data": 0}}, {"x": {"context": 1}})
    {'x': {'data': 0, 'context': 1}}
    """
    made: Layouts = {}
    problems = []
    if wrong := [layout for layout in layouts if not isinstance(layout, Mapping)]:
        is_step = any(isinstance(each, TrainingStep) for each in wrong)
        fix = "distribute the step that zero gives, with these layouts" if is_step else "pass what strategies give"
        refuse([f"{shown(each)} is no layouts, which are a dict" for each in wrong], where="combine", fix=fix)
    for layout in layouts:
        for name, sharding in layout.items():
            mine = made.setdefault(name, {})
            problems += [
                f"{name!r}: axis {axis!r} splits dims {mine[axis]} and {dim}"
                for axis, dim in sharding.items()
                if mine.get(axis, dim) != dim
            ]
            mine |= sharding
    if problems:
        refuse(problems, where="layouts that are combined", fix="use another axis, or leave one of them out")
    return made


def _mod(module: Module) -> ir.IRModule:
    mod = module if isinstance(module, ir.IRModule) else getattr(module, "mod", None)
    check_module(mod if mod is not None else module, "a strategy", takes_imported=True)
    return mod


def _graph(module: Module) -> Graph:
    return read_graph(_mod(module), "main", Mesh({"none": 1}), {})


def _inputs(module: Module) -> dict[str, tuple[int, ...]]:
    """The inputs that are no weights, and their shapes."""
    graph = _graph(module)
    if isinstance(module, TrainingStep):
        return {value.name: value.type.shape for value in graph.params if value.name in module.inputs}
    weights = set(module.params) if isinstance(module, ImportedModule) else set()
    return {value.name: value.type.shape for value in graph.params if value.name not in weights}


def _source_names(module: Module) -> Callable[[str], str]:
    names = {ours: theirs for theirs, ours in reversed(source_names(relax_function(_mod(module), "main")).items())}
    return lambda name: names.get(name, name)


def preset_layouts(module: Module, function: str, mesh: Mesh) -> Iterator[Layouts]:
    """Layouts that a search starts from, by the names of the function's parameters: one axis, or none, for tensor
    parallelism, and the others for the data."""
    if function != "main":
        return
    mod = module if isinstance(module, ir.IRModule) else module.mod
    func = relax_function(mod, function)
    ours, sizes = source_names(func), {p.name_hint: p.struct_info.shape.values for p in func.params}
    weights = set[str]()
    if not isinstance(module, ir.IRModule):
        weights = set(module.state if isinstance(module, TrainingStep) else module.params)
    for model in (None, *mesh):
        data = {axis: 0 for axis in mesh if axis != model}
        inputs = dict.fromkeys(_batch_inputs(module), data)
        for split in _models(module, model):
            made = {ours.get(name, name): layout for name, layout in split.items()}
            yield {**inputs, **made}
            yield {**inputs, **made, **_over_data(sizes, weights, made, data)}


def _batch_inputs(module: Module) -> list[str]:
    try:
        return list(data_parallel(module))
    except MeshTensorError:
        return []


def _models(module: Module, axis: str | None) -> list[Layouts]:
    """Megatron's layouts over an axis, without and with the vocabulary; without an axis, none."""
    if axis is None:
        return [{}]
    try:
        return [tensor_parallel(module, axis, vocabulary=words) for words in (False, True)]
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
