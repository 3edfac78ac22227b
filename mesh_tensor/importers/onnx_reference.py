"""What onnx's reference evaluator makes of a model, with functions in place of those of its own that can't run, or
differ from what onnx's documents say."""

from __future__ import annotations

import importlib
import math
import os
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def reference_results(path: str | os.PathLike[str], feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """The model's results for these inputs, by name. Raises what the reference's functions happen to raise."""
    onnx = importlib.import_module("onnx")
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    model = onnx.load(os.fspath(path))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of divisions by zero
        results = evaluator(os.fspath(path), new_ops=_operators(model)).run(None, feeds)
    return [torch.from_numpy(np.array(result)) for result in results]


def _operators(model: Any) -> list[Any]:
    """Classes of operators, each in place of the reference's of its name."""
    run = importlib.import_module("onnx.reference.op_run").OpRun
    batch_norm = importlib.import_module("onnx.reference.ops.op_batch_normalization")
    rnn = importlib.import_module("onnx.reference.ops.op_rnn")

    class BatchNormalization(run):  # type: ignore[misc,valid-type]
        """As for inference, with one result. The reference takes opsets before 14 for training."""

        def _run(self, x, scale, bias, mean, var, epsilon=None, **options):  # type: ignore[no-untyped-def]
            return (batch_norm._batchnorm_test_mode(x, scale, bias, mean, var, epsilon or 1e-5),)

    class GatherElements(run):  # type: ignore[misc,valid-type]
        """Of any sizes. The reference's chooses among at most 32 elements, and along the last of two dims beyond."""

        def _run(self, data, indices, axis=None):  # type: ignore[no-untyped-def]
            axis = (axis or 0) % data.ndim
            parts = [slice(None) if dim == axis else slice(size) for dim, size in enumerate(indices.shape)]
            return (np.take_along_axis(data[tuple(parts)], indices.astype(np.int64), axis),)

    class RNN(rnn.RNN_14):  # type: ignore[misc,name-defined]
        """With the activation that exporters write besides Tanh, too."""

        def choose_act(self, name, alpha, beta):  # type: ignore[no-untyped-def]
            if name.lower() == "relu":
                return lambda x: np.maximum(x, 0)
            return super().choose_act(name, alpha, beta)

    version = next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)
    one = all(len(node.output) == 1 for node in model.graph.node if node.op_type == "BatchNormalization")
    batch_norms = [BatchNormalization] if version < 14 and one else []
    return [GatherElements, RNN, *batch_norms, *(_of_all_behind(run) if version < 13 else [])]


def _of_all_behind(run: Any) -> list[Any]:
    """Softmax and its like as they are before opset 13: over `axis` and all dims behind it, as one. The reference takes
    them for the newer ones, over `axis` alone."""

    def operator(name: str, function: Callable[[np.ndarray], np.ndarray]) -> Any:
        def _run(self: Any, x: np.ndarray, **_options: Any) -> tuple[np.ndarray]:  # of which -1 is the newer default
            dim = next((one.i for one in self.onnx_node.attribute if one.name == "axis"), 1) % x.ndim
            rows = x.reshape(math.prod(x.shape[:dim]), -1)
            return (function(rows).reshape(x.shape).astype(x.dtype),)

        return type(name, (run,), {"_run": _run})

    def largest(rows: np.ndarray) -> np.ndarray:
        return np.arange(rows.shape[1]) == rows.argmax(1)[:, None]

    def logarithms(rows: np.ndarray) -> np.ndarray:
        less = rows - rows.max(1, keepdims=True)
        return less - np.log(np.exp(less).sum(1, keepdims=True))

    functions = {"Softmax": lambda rows: np.exp(logarithms(rows)), "LogSoftmax": logarithms, "Hardmax": largest}
    return [operator(*one) for one in functions.items()]
