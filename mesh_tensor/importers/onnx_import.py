"""import_onnx: an ONNX model as a Relax module; from_onnx: as one that computes the same."""

from __future__ import annotations

import contextlib
import importlib
import io
import math
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, BinaryIO, NoReturn

import numpy as np
import torch
import tvm_ffi
from tvm import ir, relax

from mesh_tensor.annotations.annotate_module import SOURCE_NAMES_ATTR
from mesh_tensor.annotations.names import renamed_parameters
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.runtime.module_inputs import ModuleParam, ModuleSignature
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import torch_dtype

from .imported import ImportedModule, identifiers, refuse_differences
from .onnx_converters import convert, opset_of
from .onnx_nodes import Facts
from .onnx_recurrent import CELLS
from .onnx_reference import reference_results
from .onnx_rewrites import REWRITES, rewritten
from .onnx_sizes import check_sizes, fold, inferred, settle_names, sizes_of
from .onnx_source import loaded, package

if TYPE_CHECKING:
    from onnx import ModelProto

_WHOLE = {6, 7}  # onnx.TensorProto's int32 and int64
_FEW = 64
_SCALED = ("Resize", "Upsample")
_OTHERS = ("com.microsoft",)  # domains with operators that TVM's importer knows, by their names alone


def import_onnx(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]], where: str) -> ImportedModule:
    """The Relax module of an ONNX model, which is changed: `mesh_tensor.from_onnx`, without its check of results.
    `where`: what the model is called."""
    try:
        model = _with_known_operators(onnx, model)
        _check_domains(model.graph)
        settle_names(model.graph)
        _check_shapes(onnx, model, shapes, where)
        _settle(onnx, model, shapes)
    except (IndexError, KeyError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        _refuse_import(error, where)  # a node without what its operator has, or without a type
    graph = model.graph
    names = identifiers([t.name for t in graph.initializer], [])
    places = {name: f"p{index}_" for index, name in enumerate(names)}
    inputs = [value.name for value in graph.input if value.name not in places]
    names = identifiers([*inputs, *places], [])
    _rename(graph, places)
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        try:
            mod = convert(onnx, model, shapes)
        except Exception as error:  # TVM's importer raises what it happens to meet
            _refuse_import(error, where)
    return _named(mod, names, {places[name]: name for name in places})


def _check_shapes(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]], where: str) -> None:
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value.name for value in model.graph.input if value.name not in weights]
    if unknown := [name for name in shapes if name not in inputs]:
        refuse([f"`shapes` has {name!r}, which is no input" for name in unknown], fix=f"the inputs are {inputs}")
    check_sizes(onnx, model, shapes, where)


def _refuse_import(error: Exception, where: str) -> NoReturn:
    if isinstance(error, MeshTensorError):
        raise error
    refuse(f"the model can't be imported: {error}", where=where, fix="export it with other operators")


def _with_known_operators(onnx: Any, model: Any) -> Any:
    """The model, in which functions (its own, and operators that onnx defines by others) are written out, unless they
    are known here or to TVM's importer, whose `Attention` is not ONNX's."""
    table = importlib.import_module("tvm.relax.frontend.onnx.onnx_frontend")._get_convert_map()
    known = {*table, *REWRITES, *CELLS} - {"Attention"}
    if not model.functions and all(node.op_type in known or node.domain in _OTHERS for node in model.graph.node):
        return model
    typed = importlib.import_module("onnx.shape_inference").infer_shapes(model)
    make = onnx.helper.make_tensor_value_info  # the inliner asks for the types of all that operators take
    typed.graph.value_info.extend(make(t.name, t.data_type, t.dims) for t in model.graph.initializer)
    inliner = importlib.import_module("onnx.inliner")
    return inliner.inline_selected_functions(typed, [("", name) for name in known], True, True)


def _check_domains(graph: Any) -> None:
    """Refuse operators of others: TVM's importer goes by their names alone."""
    foreign = [
        f"operator {node.op_type!r} is of the domain {node.domain!r}"
        for node in graph.node
        if node.domain not in ("", "ai.onnx", *_OTHERS)
    ]
    if foreign:
        fix = "export it with ONNX's own operators, or with a function that says what it is made of"
        refuse(sorted(set(foreign)), where="the ONNX model", fix=fix)
    for node in graph.node:
        for attribute in node.attribute:
            for inner in [attribute.g, *attribute.graphs]:
                _check_domains(inner)


def _settle(onnx: Any, model: Any, shapes: Mapping[str, Sequence[int]]) -> None:
    """Make constants of what is no weight but says how operators work (sizes, axes, counts), which TVM's importer has
    to know; and write some operators as it reads them."""
    graph, opset = model.graph, opset_of(model)
    results = {value.name for value in graph.output}
    scales = {name for node in graph.node if node.op_type in _SCALED for name in node.input[1:]}
    small = [
        tensor
        for tensor in graph.initializer
        if (tensor.data_type in _WHOLE or tensor.name in scales)
        and len(tensor.dims) < 2
        and math.prod(tensor.dims) <= _FEW
    ]
    settled = {tensor.name: tensor for tensor in small if tensor.name not in results}
    for values in (graph.initializer, graph.input):
        kept = [value for value in values if value.name not in settled]
        del values[:]
        values.extend(kept)
    made = [onnx.helper.make_node("Constant", [], [name], value=tensor) for name, tensor in settled.items()]
    plain = Facts(opset, {}, {})
    _replace(graph, [*made, *(new for node in graph.node for new in _of_numbers(onnx, node, plain))])
    constants = fold(onnx, model, shapes)
    types = {tensor.name: (tensor.data_type, list(tensor.dims)) for tensor in graph.initializer}
    types |= {name: (kind, sizes) for name, kind, sizes in sizes_of(inferred(onnx, model, shapes))}
    used = {name for node in graph.node for name in node.input} | results
    facts = Facts(opset, constants, types, frozenset(used))
    _replace(graph, [new for node in graph.node for new in rewritten(onnx, node, facts)])


def _of_numbers(onnx: Any, node: Any, facts: Facts) -> list[Any]:
    return rewritten(onnx, node, facts) if node.op_type == "Constant" else [node]


def _replace(graph: Any, nodes: list[Any]) -> None:
    del graph.node[:]
    graph.node.extend(nodes)


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


_FIRST = (3, 4, 8, 16, 1)  # sizes to try for symbols; the n-th symbol has n more, then all have the same


def from_onnx(
    model: str | os.PathLike[str] | bytes | BinaryIO | ModelProto,
    *,
    shapes: Mapping[str, Sequence[int]] | None = None,
    check: bool = True,
) -> ImportedModule:
    """The Relax module of an ONNX model. Needs the package `onnx` (the extra `mesh-tensor[onnx]`).

    Its function `main` takes the inputs in the model's order, then the weights (initializers), under their names as
    identifiers: "fc.weight" is called `fc_weight`. `annotate_module` knows them by both names. Short vectors of whole
    numbers (sizes, axes) are constants.

    Args:
        model: the path of a file, beside which tensors in files of their own lie; a file that is open for reading
            bytes; its bytes; or an `onnx.ModelProto`, which stays as it is.
        shapes: sizes of inputs, by name, in place of the model's (which may leave some open).
        check: run both the module and onnx's reference evaluator on random inputs, and refuse a module whose results
            are not the reference's: TVM's importer leaves out some options of some operators.

    Raises:
        MeshTensorError: the package or the file is missing, the model is not valid, it has operators that TVM can't
            import, or that differ, or that the reference can't run.
    """
    onnx = package()
    own, where = loaded(onnx, model)
    changed = onnx.ModelProto()
    changed.CopyFrom(own)
    module = import_onnx(onnx, changed, shapes or {}, where)
    if check:
        _check(module, own, where)
    return module


def _check(module: ImportedModule, model: Any, where: str) -> None:
    signature = ModuleSignature(module.mod, "main")
    inputs = [param for param in signature.params if param.name not in module.params]
    names = {new: old for old, new in module.names.items()}
    error: Exception | None = None
    for sizes in _sizes([str(symbol) for symbol in signature.symbols]):
        tensors = {param.name: _random(param, sizes) for param in inputs}
        try:
            expected = reference_results(model, {names[name]: tensor.numpy() for name, tensor in tensors.items()})
        except Exception as found:  # what the reference's functions happen to raise
            error = found
            continue
        results = run_sequential(module.mod, tensors | module.params)
        fix = "export it with other operators, or a newer opset"
        refuse_differences(results, expected, "onnx's reference", f"{where}, on random inputs", fix)
        return
    refuse(
        "onnx's reference evaluator, by which the imported module is checked, can't run the model",
        where=where,
        why=f"{type(error).__name__}: {error}",
        fix="settle open sizes by `shapes`; `check=False` leaves this check out",
    )


def _sizes(symbols: Sequence[str]) -> Iterator[dict[str, int]]:
    """What the symbols may be: different sizes, then equal ones."""
    if symbols:
        yield {symbol: _FIRST[0] + index for index, symbol in enumerate(symbols)}
    for size in _FIRST if symbols else _FIRST[:1]:
        yield dict.fromkeys(symbols, size)


def _random(param: ModuleParam, sizes: Mapping[str, int]) -> torch.Tensor:
    """Normal numbers; whole ones are 0 or 1, which are positions of most things."""
    shape = [size if isinstance(size, int) else sizes.get(str(size), 1) for size in param.shape]
    dtype = torch_dtype(param.dtype)
    return (torch.randn(shape) if dtype.is_floating_point else torch.randint(2, shape)).to(dtype)
