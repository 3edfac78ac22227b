"""from_onnx: an ONNX model as a Relax module."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from tvm import ir

from ..errors import refuse
from .annotations import SOURCE_NAMES_ATTR
from .imported import ImportedModule, identifiers
from .names import renamed_parameters


def from_onnx(path: str | os.PathLike[str], *, shapes: Mapping[str, Sequence[int]] | None = None) -> ImportedModule:
    """The Relax module of an ONNX file. Needs the package `onnx` (the extra `mesh-tensor[onnx]`).

    Its function `main` takes the inputs in the file's order, then the weights (initializers), under their names as
    identifiers: "fc.weight" is called `fc_weight`. `annotate_module` knows them by both names.

    Args:
        path: the file; tensors in files of their own lie beside it.
        shapes: sizes of inputs, by name, in place of the file's (which may leave some open).

    Raises:
        MeshTensorError: the package or the file is missing, the model is not valid, or operators that TVM can't import.
    """
    onnx, frontend = _packages()
    model = _loaded(onnx, path)
    graph = model.graph
    names = identifiers([t.name for t in graph.initializer], [])
    places = {name: f"p{index}_" for index, name in enumerate(names)}
    inputs = [value.name for value in graph.input if value.name not in places]
    names = identifiers([*inputs, *places], [])
    unknown = [name for name in shapes or {} if name not in inputs]
    if unknown:
        refuse([f"`shapes` has {name!r}, which is no input" for name in unknown], fix=f"the inputs are {inputs}")
    _rename(graph, places)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            mod = frontend(model, shape_dict=dict(shapes or {}), keep_params_in_input=True, sanitize_input_names=False)
        except Exception as error:  # TVM's importer raises what it happens to meet
            refuse(f"the model can't be imported: {error}", where=str(path), fix="export it with other operators")
    return _named(mod, names, {places[name]: name for name in places})


def _packages() -> tuple[Any, Any]:
    """The package onnx, and TVM's importer."""
    try:
        onnx = importlib.import_module("onnx")
        module = importlib.import_module("tvm.relax.frontend.onnx")
    except ImportError as error:
        refuse("from_onnx needs the package onnx", why=str(error), fix="pip install onnx")
    return onnx, module.from_onnx


def _loaded(onnx: Any, path: str | os.PathLike[str]) -> Any:
    if not os.path.isfile(path):
        refuse(f"there is no file {os.fspath(path)!r}", fix="pass the path of an ONNX file")
    try:
        model = onnx.load(os.fspath(path))
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf's and the checker's own classes
        refuse(f"{os.fspath(path)!r} is no valid ONNX model", why=str(error), fix="export it again")
    return model


def _rename(graph: Any, names: Mapping[str, str]) -> None:
    """Give initializers other names: TVM strips letters off theirs, and takes those that become equal for one."""
    for tensor in graph.initializer:
        tensor.name = names[tensor.name]
    for value in graph.input:
        value.name = names.get(value.name, value.name)
    for value in graph.output:
        value.name = names.get(value.name, value.name)
    _rename_uses(graph, names)


def _rename_uses(graph: Any, names: Mapping[str, str]) -> None:
    for node in graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                hidden = {tensor.name for tensor in inner.initializer} | {value.name for value in inner.input}
                _rename_uses(inner, {old: new for old, new in names.items() if old not in hidden})


def _named(mod: ir.IRModule, names: Mapping[str, str], origin: Mapping[str, str]) -> ImportedModule:
    """The weights that the function takes, and the module with their names. `origin`: TVM's name -> the file's."""
    func = mod["main"]
    values = list(func.attrs["params"]) if "params" in func.attrs else []
    weights = [var.name_hint for var in func.params[len(func.params) - len(values) :]]
    new = {var.name_hint: names[origin.get(var.name_hint, var.name_hint)] for var in func.params}
    kept = {origin.get(old, old): name for old, name in new.items()}
    func = renamed_parameters(mod, func.without_attr("params"), new).with_attr(SOURCE_NAMES_ATTR, kept)
    mod.update_func(mod.get_global_var("main"), func)
    params = {new[old]: torch.from_numpy(np.array(value.numpy())) for old, value in zip(weights, values, strict=True)}
    return ImportedModule(mod, params, kept)
