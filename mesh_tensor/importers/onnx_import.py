"""import_onnx: an ONNX model as a Relax module."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch
import tvm_ffi
from tvm import ir, relax

from mesh_tensor.annotations.annotate_module import SOURCE_NAMES_ATTR
from mesh_tensor.annotations.names import renamed_parameters
from mesh_tensor.base.errors import MeshTensorError, refuse

from .imported import ImportedModule, identifiers
from .onnx_recurrent import CELLS, check_sizes, recurrent_nodes, settle_names

_WHOLE = {6, 7}  # onnx.TensorProto's int32 and int64
_FEW = 64


def import_onnx(path: str | os.PathLike[str], shapes: Mapping[str, Sequence[int]] | None = None) -> ImportedModule:
    """The Relax module of an ONNX file: `mesh_tensor.from_onnx`, without its check of results."""
    onnx, frontend = _packages()
    model = _loaded(onnx, path)
    try:
        model = _with_known_operators(onnx, model)
        graph = model.graph
        settle_names(graph)
        _settle(onnx, graph)
    except (IndexError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        _refuse_import(error, path)  # a node without what its operator has, or without a type
    names = identifiers([t.name for t in graph.initializer], [])
    places = {name: f"p{index}_" for index, name in enumerate(names)}
    inputs = [value.name for value in graph.input if value.name not in places]
    names = identifiers([*inputs, *places], [])
    unknown = [name for name in shapes or {} if name not in inputs]
    if unknown:
        refuse([f"`shapes` has {name!r}, which is no input" for name in unknown], fix=f"the inputs are {inputs}")
    check_sizes(onnx, model, shapes or {}, os.fspath(path))
    _rename(graph, places)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            mod = frontend(model, shape_dict=dict(shapes or {}), keep_params_in_input=True, sanitize_input_names=False)
        except Exception as error:  # TVM's importer raises what it happens to meet
            _refuse_import(error, path)
    return _named(mod, names, {places[name]: name for name in places})


def _refuse_import(error: Exception, path: str | os.PathLike[str]) -> NoReturn:
    if isinstance(error, MeshTensorError):
        raise error
    refuse(f"the model can't be imported: {error}", where=str(path), fix="export it with other operators")


def _packages() -> tuple[Any, Any]:
    """The package onnx, and TVM's importer."""
    try:
        onnx = importlib.import_module("onnx")
        module = importlib.import_module("tvm.relax.frontend.onnx")
    except ImportError as error:
        refuse("from_onnx needs the package onnx", why=str(error), fix="pip install onnx")
    return onnx, module.from_onnx


def _loaded(onnx: Any, path: str | os.PathLike[str]) -> Any:
    if not isinstance(path, (str, os.PathLike)) or not os.path.isfile(path):
        refuse(f"there is no file {path!r}", fix="pass the path of an ONNX file")
    try:
        model = onnx.load(os.fspath(path))
        onnx.checker.check_model(model)
    except Exception as error:  # protobuf's and the checker's own classes
        refuse(f"{os.fspath(path)!r} is no valid ONNX model", why=str(error), fix="export it again")
    return model


def _with_known_operators(onnx: Any, model: Any) -> Any:
    """The model, in which functions (its own, and operators that onnx defines by others) are written out, unless TVM's
    importer has them."""
    table = importlib.import_module("tvm.relax.frontend.onnx.onnx_frontend")._get_convert_map()
    if not model.functions and all(node.op_type in table for node in model.graph.node):
        return model
    typed = importlib.import_module("onnx.shape_inference").infer_shapes(model)
    make = onnx.helper.make_tensor_value_info  # the inliner asks for the types of all that operators take
    typed.graph.value_info.extend(make(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    inliner = importlib.import_module("onnx.inliner")
    return inliner.inline_selected_functions(typed, [("", name) for name in {*table, *_REWRITTEN}], True, True)


def _settle(onnx: Any, graph: Any) -> None:
    """Make constants of what is no weight but says how operators work (sizes, axes, counts), which TVM's importer has
    to know; and write some operators as it reads them."""
    results = {value.name for value in graph.output}
    small = [
        tensor
        for tensor in graph.initializer
        if tensor.data_type in _WHOLE and len(tensor.dims) < 2 and math.prod(tensor.dims) <= _FEW
    ]
    settled = {tensor.name: tensor for tensor in small if tensor.name not in results}
    for values in (graph.initializer, graph.input):
        kept = [value for value in values if value.name not in settled]
        del values[:]
        values.extend(kept)
    nodes = [_constant(onnx, name, tensor) for name, tensor in settled.items()]
    for node in graph.node:
        rewrite = _REWRITTEN.get(node.op_type)
        nodes += rewrite(onnx, graph, settled, node) if rewrite else [node]
    del graph.node[:]
    graph.node.extend(nodes)


def _layer_norm(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """With a bias: without one, TVM's importer takes the wrong size."""
    scale = next((tensor for tensor in graph.initializer if tensor.name == node.input[1]), None)
    if scale is None or "".join(node.input[2:]):
        return [node]
    name = f"{node.output[0]}_bias"
    node.input[2:] = [name]
    zeros = onnx.helper.make_tensor(name, scale.data_type, scale.dims, [0.0] * math.prod(scale.dims))
    return [_constant(onnx, name, zeros), node]


def _topk(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """With a count that is no vector, which TVM's importer can't take the number out of; it makes int32 of indices."""
    count = settled.get(node.input[1]) or _made(graph, node.input[1])
    if count is None:
        return [node]
    name, indices = (f"{node.output[1]}_{what}" for what in ("count", "int32"))
    cast = onnx.helper.make_node("Cast", [indices], [node.output[1]], to=onnx.TensorProto.INT64)
    node.input[1], node.output[1] = name, indices
    count = onnx.helper.make_tensor(name, count.data_type, [], onnx.numpy_helper.to_array(count).flatten())
    return [_constant(onnx, name, count), node, cast]


def _one_hot(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """With the indices that count from the end as those from the start, which TVM's importer does not know, and a depth
    that is no vector."""
    count = settled.get(node.input[1]) or _made(graph, node.input[1])
    if count is None:
        return [node]
    make, where = onnx.helper.make_node, node.output[0]
    whole, zero, depth, negative, from_start, places = (
        f"{where}_{n}" for n in ("i", "zero", "depth", "neg", "up", "at")
    )
    number = onnx.numpy_helper.to_array(count).astype(np.int64).flatten()
    constants = {zero: [0], depth: number}
    made = [
        _constant(onnx, name, onnx.helper.make_tensor(name, onnx.TensorProto.INT64, [], value))
        for name, value in constants.items()
    ]
    steps = [
        make("Cast", [node.input[0]], [whole], to=onnx.TensorProto.INT64),
        make("Less", [whole, zero], [negative]),
        make("Add", [whole, depth], [from_start]),
        make("Where", [negative, from_start, whole], [places]),
    ]
    node.input[0], node.input[1] = places, depth
    return [*made, *steps, node]


def _is_inf(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """Of both signs: TVM's importer leaves out which ones."""
    if any(attribute.i == 0 for attribute in node.attribute):
        refuse("IsInf of one sign is not supported", where=f"node {node.name or node.output[0]!r}", fix="compare")
    return [node]


def _rms_norm(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """In smaller operators: x / sqrt(mean(x * x) + epsilon) * scale over the last dims."""
    scale = next((tensor for tensor in graph.initializer if tensor.name == node.input[1]), None)
    given = {attribute.name: attribute for attribute in node.attribute}
    axis = given["axis"].i if "axis" in given else -1
    if scale is None or axis >= 0:
        return [node]
    x, made = node.input[0], node.output[0]
    epsilon = given["epsilon"].f if "epsilon" in given else 1e-5
    names = [f"{made}_{what}" for what in ("square", "mean", "sum", "root", "unit", "epsilon", "axes")]
    square, mean, total, root, unit, small, axes = names
    make = onnx.helper.make_node
    return [
        _constant(onnx, small, onnx.helper.make_tensor(small, scale.data_type, [], [epsilon])),
        _constant(onnx, axes, onnx.helper.make_tensor(axes, onnx.TensorProto.INT64, [-axis], range(axis, 0))),
        make("Mul", [x, x], [square]),
        make("ReduceMean", [square, axes], [mean]),
        make("Add", [mean, small], [total]),
        make("Sqrt", [total], [root]),
        make("Div", [x, root], [unit]),
        make("Mul", [unit, node.input[1]], [made]),
    ]


def _dropout(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """As for inference, where nothing is dropped."""
    if len(node.input) > 2 and node.input[2] or len(node.output) > 1 and node.output[1]:
        return [node]
    return [onnx.helper.make_node("Identity", node.input[:1], node.output[:1])]


def _group_norm(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """As instances of a channel per group, whose results are scaled per channel."""
    shape = _shape(graph, node.input[0])
    options = {attribute.name: attribute for attribute in node.attribute}
    groups = options["num_groups"].i
    epsilon = options["epsilon"].f if "epsilon" in options else 1e-5
    if shape is None or not isinstance(shape[1], int) or sum(not isinstance(size, int) for size in shape[2:]) > 1:
        refuse(
            f"a group norm of a tensor of shape {shape}",
            where=f"node {node.name or node.output[0]!r}",
            fix="settle its sizes by `shapes`",
        )
    made, helper = node.output[0], onnx.helper
    kind = next((t.data_type for t in graph.initializer if t.name == node.input[1]), onnx.TensorProto.FLOAT)
    names = [
        f"{made}_{what}" for what in ("flat", "ones", "zeros", "grouped", "unit", "back", "column", "scale", "bias")
    ]
    flat, ones, zeros, grouped, unit, back, column, scale, bias = names
    whole = [0, shape[1], *(size if isinstance(size, int) else -1 for size in shape[2:])]
    numbers = {flat: [0, groups, -1], back: whole, column: [-1, *[1] * (len(shape) - 2)]}
    return [
        *(
            _constant(onnx, name, helper.make_tensor(name, onnx.TensorProto.INT64, [len(value)], value))
            for name, value in numbers.items()
        ),
        *(
            _constant(onnx, name, helper.make_tensor(name, kind, [groups], [value] * groups))
            for name, value in ((ones, 1.0), (zeros, 0.0))
        ),
        helper.make_node("Reshape", [node.input[0], flat], [grouped]),
        helper.make_node("InstanceNormalization", [grouped, ones, zeros], [f"{unit}_grouped"], epsilon=epsilon),
        helper.make_node("Reshape", [f"{unit}_grouped", back], [unit]),
        helper.make_node("Reshape", [node.input[1], column], [scale]),
        helper.make_node("Reshape", [node.input[2], column], [bias]),
        helper.make_node("Mul", [unit, scale], [f"{unit}_scaled"]),
        helper.make_node("Add", [f"{unit}_scaled", bias], [made]),
    ]


def _recurrent(onnx: Any, graph: Any, settled: Mapping[str, Any], node: Any) -> list[Any]:
    """Step by step."""
    return recurrent_nodes(onnx, node, _shape(graph, node.input[0]))


def _shape(graph: Any, name: str) -> list[int | str] | None:
    """The sizes of a value, open ones by name; None if nothing tells."""
    for value in (*graph.input, *graph.value_info):
        if value.name == name and value.type.tensor_type.HasField("shape"):
            dims = value.type.tensor_type.shape.dim
            return [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in dims]
    return None


_REWRITTEN = {
    "GroupNormalization": _group_norm,
    **dict.fromkeys(CELLS, _recurrent),
    "Dropout": _dropout,
    "RMSNormalization": _rms_norm,
    "LayerNormalization": _layer_norm,
    "TopK": _topk,
    "OneHot": _one_hot,
    "IsInf": _is_inf,
}


def _constant(onnx: Any, name: str, tensor: Any) -> Any:
    return onnx.helper.make_node("Constant", [], [name], value=tensor)


def _made(graph: Any, name: str) -> Any:
    """The tensor of the Constant of that name."""
    nodes = [node for node in graph.node if node.op_type == "Constant" and node.output[0] == name]
    return next((attribute.t for node in nodes for attribute in node.attribute if attribute.name == "value"), None)


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


def _check_tensors(func: relax.Function) -> None:
    """Refuse inputs and results that are no tensors, or of elements smaller than a byte."""
    fields = func.ret_struct_info
    made = list(fields.fields) if isinstance(fields, relax.TupleStructInfo) else [fields]
    infos = {var.name_hint: var.struct_info for var in func.params}
    infos |= {f"result {number}": info for number, info in enumerate(made)}
    no_tensors = [n for n, info in infos.items() if not isinstance(info, relax.TensorStructInfo)]
    problems = [f"{name} is no tensor" for name in no_tensors]
    problems += [
        f"{name} is of {infos[name].dtype}, which has parts of bytes"
        for name in infos.keys() - no_tensors
        if infos[name].dtype and 1 < tvm_ffi.dtype(infos[name].dtype).bits < 8
    ]
    if problems:
        refuse(
            sorted(problems), where="the ONNX model", fix="leave it out of what the model takes and gives, or cast it"
        )


def _named(mod: ir.IRModule, names: Mapping[str, str], origin: Mapping[str, str]) -> ImportedModule:
    """The weights that the function takes, and the module with their names. `origin`: TVM's name -> the file's."""
    func = mod["main"]
    _check_tensors(func)
    values = list(func.attrs["params"]) if "params" in func.attrs else []
    weights = [var.name_hint for var in func.params[len(func.params) - len(values) :]]
    new = {var.name_hint: names[origin.get(var.name_hint, var.name_hint)] for var in func.params}
    kept = {origin.get(old, old): name for old, name in new.items()}
    func = renamed_parameters(mod, func.without_attr("params"), new).with_attr(SOURCE_NAMES_ATTR, kept)
    mod.update_func(mod.get_global_var("main"), func)
    params = {new[old]: torch.from_numpy(np.array(value.numpy())) for old, value in zip(weights, values, strict=True)}
    return ImportedModule(mod, params, kept)
