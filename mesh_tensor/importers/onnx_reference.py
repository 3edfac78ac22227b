"""What onnx's reference evaluator makes of a model, with functions in place of those of its own that can't run, or
differ from what onnx's documents say."""

from __future__ import annotations

import importlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch


def reference_results(model: Any, feeds: dict[str, np.ndarray]) -> list[torch.Tensor]:
    """The model's results for these inputs, by name. Raises what the reference's functions happen to raise."""
    evaluator = importlib.import_module("onnx.reference").ReferenceEvaluator
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy's, of divisions by zero
        results = evaluator(model, new_ops=_operators(model)).run(None, feeds)
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
    return [GatherElements, RNN, *batch_norms, *_pools(run, model), *(_of_all_behind(run) if version < 13 else [])]


def _pools(run: Any, model: Any) -> list[Any]:
    """Pooling where paddings follow from sizes: the reference pads the other side where strides leave elements over,
    can't have windows that end behind the last element, and takes norms of fewer elements for averages."""

    def operator(name: str, combined: Callable[..., np.ndarray], fill: float = 0) -> Any:
        def _run(self: Any, x: np.ndarray, p: int | None = None, **_options: Any) -> tuple[np.ndarray]:
            elements, counted = _windows(x, fill, **_pooling(self.onnx_node))
            return (combined(elements, counted, p or 2).astype(x.dtype),)

        return type(name, (run,), {"_run": _run})

    found = [
        operator("MaxPool", lambda elements, *_: elements.max(-1), -np.inf),
        operator("AveragePool", lambda elements, counted, _: elements.sum(-1) / counted.sum(-1)),
        operator("LpPool", lambda elements, _, p: (abs(elements) ** p).sum(-1) ** (1 / p)),
    ]
    nodes = [node for node in model.graph.node if node.op_type in {one.__name__ for one in found}]
    other = {node.op_type for node in nodes if len(node.output) > 1 or _pooling(node)["auto_pad"] == "NOTSET"}
    return [one for one in found if one.__name__ not in other]


def _pooling(node: Any) -> dict[str, Any]:
    options = {one.name: one for one in node.attribute}
    window = list(options["kernel_shape"].ints)
    numbers = {
        name: list(options[name].ints) if name in options else [1] * len(window) for name in ("strides", "dilations")
    }
    pad = options["auto_pad"].s.decode() if "auto_pad" in options else "NOTSET"
    padding_counts = "count_include_pad" in options and bool(options["count_include_pad"].i)
    return {"window": window, **numbers, "auto_pad": pad, "padding_counts": padding_counts}


def _windows(
    x: np.ndarray,
    fill: float,
    window: list[int],
    strides: list[int],
    dilations: list[int],
    auto_pad: str,
    padding_counts: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """The elements of all windows, in a last dim, and which of them count in an average."""
    spans = [(size - 1) * apart + 1 for size, apart in zip(window, dilations, strict=True)]
    pads = [(0, 0), (0, 0)]
    for size, span, step in zip(x.shape[2:], spans, strides, strict=True):
        missing = max(0, (-(-size // step) - 1) * step + span - size) if auto_pad != "VALID" else 0
        halves = missing // 2, missing - missing // 2
        pads.append(halves if auto_pad == "SAME_UPPER" else halves[::-1])
    dims, every = tuple(range(2, x.ndim)), (slice(None),) * 2
    where = (*every, *(slice(None, None, step) for step in strides), *(slice(None, None, n) for n in dilations))

    def seen(values: np.ndarray, fill: float) -> np.ndarray:
        padded = np.pad(values, pads, constant_values=fill)
        found = np.lib.stride_tricks.sliding_window_view(padded, spans, dims)[where]
        return found.reshape(*found.shape[: x.ndim], -1)

    return seen(x, fill), seen(np.ones(x.shape, bool), padding_counts)


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
