"""from_onnx: an ONNX model as a Relax module that computes the same."""

from __future__ import annotations

import importlib
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch

from mesh_tensor.base.errors import refuse
from mesh_tensor.runtime.module_inputs import ModuleParam, ModuleSignature
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import torch_dtype

from .imported import ImportedModule, refuse_differences
from .onnx_import import import_onnx

_FIRST = (3, 4, 8, 16, 1)  # sizes to try for symbols; the n-th symbol has n more, then all have the same


def from_onnx(
    path: str | os.PathLike[str], *, shapes: Mapping[str, Sequence[int]] | None = None, check: bool = True
) -> ImportedModule:
    """The Relax module of an ONNX file. Needs the package `onnx` (the extra `mesh-tensor[onnx]`).

    Its function `main` takes the inputs in the file's order, then the weights (initializers), under their names as
    identifiers: "fc.weight" is called `fc_weight`. `annotate_module` knows them by both names. Short vectors of whole
    numbers (sizes, axes) are constants.

    Args:
        path: the file; tensors in files of their own lie beside it.
        shapes: sizes of inputs, by name, in place of the file's (which may leave some open).
        check: run both the module and onnx's reference evaluator on random inputs, and refuse a module whose results
            are not the reference's: TVM's importer leaves out some options of some operators.

    Raises:
        MeshTensorError: the package or the file is missing, the model is not valid, it has operators that TVM can't
            import, or that differ, or that the reference can't run.
    """
    module = import_onnx(path, shapes)
    if check:
        _check(module, path)
    return module


def _check(module: ImportedModule, path: str | os.PathLike[str]) -> None:
    signature = ModuleSignature(module.mod, "main")
    inputs = [param for param in signature.params if param.name not in module.params]
    names = {new: old for old, new in module.names.items()}
    error: Exception | None = None
    for sizes in _sizes([str(symbol) for symbol in signature.symbols]):
        tensors = {param.name: _random(param, sizes) for param in inputs}
        try:
            expected = _reference(path, {names[name]: tensor.numpy() for name, tensor in tensors.items()})
        except Exception as found:  # what the reference's functions happen to raise
            error = found
            continue
        results = run_sequential(module.mod, tensors | module.params)
        fix = "export it with other operators, or a newer opset"
        refuse_differences(results, expected, "onnx's reference", f"{path}, on random inputs", fix)
        return
    refuse(
        "onnx's reference evaluator, by which the imported module is checked, can't run the model",
        where=str(path),
        why=f"{type(error).__name__}: {error}",
        fix="settle open sizes by `shapes`; `check=False` leaves this check out",
    )


def _reference(path: str | os.PathLike[str], feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    onnx = importlib.import_module("onnx.reference")
    ops = importlib.import_module("onnx.reference.ops.op_batch_normalization")

    class BatchNormalization(importlib.import_module("onnx.reference.op_run").OpRun):  # type: ignore[misc]
        """As for inference, with one result. The reference takes opsets before 14 for training."""

        def _run(self, x, scale, bias, mean, var, epsilon=None, **options):  # type: ignore[no-untyped-def]
            return (ops._batchnorm_test_mode(x, scale, bias, mean, var, epsilon or 1e-5),)

    model = importlib.import_module("onnx").load(os.fspath(path))
    old = any(not opset.domain and opset.version < 14 for opset in model.opset_import)
    one = all(len(node.output) == 1 for node in model.graph.node if node.op_type == "BatchNormalization")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of divisions by zero
        evaluator = onnx.ReferenceEvaluator(os.fspath(path), new_ops=[BatchNormalization] if old and one else None)
        return [torch.from_numpy(np.array(result)) for result in evaluator.run(None, feeds)]


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
    if dtype.is_floating_point:
        return torch.randn(shape).to(dtype)
    return torch.randint(2, shape).to(dtype)
