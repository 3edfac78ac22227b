"""Files as they should be, which are then made wrong; each group by a number."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import tilelang  # noqa: F401  (it brings the tvm that the next lines import)
from onnx import TensorProto, helper, numpy_helper
from tvm import ir

import mesh_tensor as mt
from tests.plan.modules import Heads
from tests.plan.seed_modules import Mlp
from tests.plan.test_call_tir_kernels import kernels_in_a_row
from tests.random_modules.build import build
from tests.random_modules.strategy import make_case

from .mutations import mutated_bytes, mutated_text

DATA = Path(__file__).parents[1] / "importers" / "data"
RANDOM_MODULES = 12


def make_file(kind: str, number: int, folder: Path) -> tuple[str, Path]:
    """Write the file of a kind and number; what was done to it, and where it is."""
    rng = random.Random(f"{kind} {number}")
    return _KINDS[kind](rng, folder / f"{number}")


def _json(rng: random.Random, path: Path) -> tuple[str, Path]:
    name = rng.choice(sorted(_modules()))
    what, data = mutated_text(_modules()[name], rng)
    return f"{name}: {what}", _written(path.with_suffix(".json"), data)


def _saved(rng: random.Random, path: Path) -> tuple[str, Path]:
    """A file of save_module, with its checksum."""
    path = path.with_suffix(".json")
    mt.save_module(rng.choice((Heads, Mlp)), path)
    return "saved with a checksum", _written(path, mutated_bytes(path.read_bytes(), rng))


def _text(rng: random.Random, path: Path) -> tuple[str, Path]:
    text = rng.choice((Heads.script(show_meta=True), (DATA / "apache_tvm_0_25.txt").read_text()))
    if rng.random() < 0.5:
        return "text: bytes", _written(path.with_suffix(".txt"), mutated_bytes(text.encode(), rng))
    words = list(re.finditer(r"[A-Za-z_][\w.]*|\d+", text))
    one, other = rng.choice(words), rng.choice(words)
    changed = text[: one.start()] + other.group() + text[one.end() :]
    return f"text: {one.group()} is {other.group()}", _written(path.with_suffix(".txt"), changed.encode())


def _onnx(rng: random.Random, path: Path) -> tuple[str, Path]:
    number = rng.randrange(len(_models()))
    return f"model {number}", _written(path.with_suffix(".onnx"), mutated_bytes(_models()[number], rng))


_KINDS: dict[str, Callable[[random.Random, Path], tuple[str, Path]]] = {
    "json": _json,
    "saved": _saved,
    "text": _text,
    "onnx": _onnx,
}
KINDS = tuple(_KINDS)


def _written(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@cache
def _modules() -> dict[str, str]:
    made = {"heads": Heads, "mlp": Mlp, "kernels": kernels_in_a_row()}
    made |= {f"random {number}": build(make_case(number).source) for number in range(RANDOM_MODULES)}
    texts = {name: ir.save_json(mod) for name, mod in made.items()}
    return texts | {"apache": (DATA / "apache_tvm_0_25.json").read_text()}


@cache
def _models() -> tuple[bytes, ...]:
    rng = np.random.default_rng(0)

    def weight(name: str, *shape: int) -> TensorProto:
        return numpy_helper.from_array(rng.standard_normal(shape).astype("float32"), name)

    def info(name: str, shape: list, kind: int = TensorProto.FLOAT) -> object:
        return helper.make_tensor_value_info(name, kind, shape)

    def whole(name: str, *values: int) -> TensorProto:
        return helper.make_tensor(name, TensorProto.INT64, [len(values)], values)

    node = helper.make_node
    graphs = [
        helper.make_graph(
            [node("MatMul", ["x", "w"], ["a"]), node("Add", ["a", "b"], ["c"]), node("Relu", ["c"], ["y"])],
            "product", [info("x", ["n", 4])], [info("y", ["n", 3])], [weight("w", 4, 3), weight("b", 3)],
        ),
        helper.make_graph(
            [
                node("Reshape", ["x", "s"], ["a"]),
                node("TopK", ["a", "k"], ["y", "i"], axis=1),
                node("Softmax", ["a"], ["z"]),
            ],
            "rows", [info("x", [3, 4])], [info("y", [2, 2]), info("z", [2, 6])], [whole("s", 2, 6), whole("k", 2)],
        ),
        helper.make_graph(
            [
                node("Conv", ["x", "w"], ["a"], pads=[1, 1, 1, 1]),
                node("MaxPool", ["a"], ["c"], kernel_shape=[2, 2], strides=[2, 2]),
                node("Transpose", ["c"], ["y"], perm=[0, 2, 3, 1]),
            ],
            "images", [info("x", [1, 1, 6, 6])], [info("y", [1, 3, 3, 2])], [weight("w", 2, 1, 3, 3)],
        ),
        helper.make_graph(
            [
                node("LayerNormalization", ["x", "scale"], ["a"]),
                node("Gather", ["a", "i"], ["c"]),
                node("ReduceSum", ["c"], ["y"], keepdims=0),
            ],
            "norm", [info("x", [5, 4]), info("i", [2], TensorProto.INT64)], [info("y", [])], [weight("scale", 4)],
        ),
    ]  # fmt: skip
    models = [helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]) for graph in graphs]
    for model in models:
        model.ir_version = 9
    return tuple(model.SerializeToString() for model in models)
