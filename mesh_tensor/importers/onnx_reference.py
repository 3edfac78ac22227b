"""What onnx's reference evaluator makes of a model, with functions in place of those of its own that can't run, or
differ from what onnx's documents say."""

from __future__ import annotations

import importlib
import os
import warnings
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

    old = any(not opset.domain and opset.version < 14 for opset in model.opset_import)
    one = all(len(node.output) == 1 for node in model.graph.node if node.op_type == "BatchNormalization")
    return [GatherElements, RNN, *([BatchNormalization] if old and one else [])]
