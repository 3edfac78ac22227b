"""Random models with their losses, as Relax functions and by torch; and cuts, meshes, layouts, schedules for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch.nn import functional as F
from tvm import relax

from mesh_tensor.pipelining import SCHEDULES, Schedule
from tests.api.pipeline.random_schedules import random_schedule

op = relax.op
MESHES = [{"d": 1}, {"d": 2}, {"m": 2}, {"d": 2, "m": 2}, {"d": 3}, {"m": 3, "d": 1}]
FOUR_DEVICES = [
    [{"d": 2}, {"m": 2}], [{"d": 2, "m": 2}], [{"d": 3}, {"m": 1}], [{"m": 1}, {"d": 3}],
    [{"d": 1}, {"d": 2}, {"d": 1}], [{"m": 2}, {"d": 1}, {"d": 1}], [{"d": 1}] * 4,
]  # fmt: skip
TRAINING = [name for name in SCHEDULES if name != "forward"]
POSITIONS, WORDS = 3, 5

Tensors = dict[str, Any]
Operator = tuple[str, int, int]  # its kind, the number of a weight, and of an earlier value


@dataclass(frozen=True)
class Model:
    """A stack of operators on rows of positions of `width`, and its loss. `loss` is one of LOSSES."""

    width: int
    rows: int
    tokens: bool
    operators: tuple[Operator, ...]
    loss: str
    extras: tuple[str, ...]  # other results: "rows", "mean"
    penalty: int | None  # the value whose mean is added to the loss
    unused: bool  # whether it takes an input that nothing depends on


def _flat(x: relax.Expr) -> tuple[int, int]:
    rows, positions, width = map(int, x.struct_info.shape)
    return rows, positions * width


# Per kind: which weights it takes (by their shape: "matrix", "vector"), by Relax, by torch; both take the value before,
# an earlier value, and the weights.
KINDS: dict[str, tuple[tuple[str, ...], Callable[..., Any], Callable[..., Any]]] = {
    "tanh": ((), lambda x, _: op.tanh(x), lambda x, _: torch.tanh(x)),
    "gelu": ((), lambda x, _: op.nn.gelu(x), lambda x, _: F.gelu(x)),
    "relu": ((), lambda x, _: op.nn.relu(x), lambda x, _: F.relu(x)),
    "add": ((), lambda x, y: op.add(x, y), lambda x, y: x + y),
    "multiply": ((), lambda x, y: op.multiply(op.tanh(x), y), lambda x, y: torch.tanh(x) * y),
    "softmax": ((), lambda x, _: op.nn.softmax(x, -1), lambda x, _: x.softmax(-1)),
    "mix": (
        (),
        lambda x, y: op.matmul(op.nn.softmax(op.matmul(x, op.permute_dims(y, [0, 2, 1])), -1), y),
        lambda x, y: (x @ y.transpose(1, 2)).softmax(-1) @ y,
    ),
    "pool": (
        (),
        lambda x, y: op.add(x, op.mean(y, 1, True)),
        lambda x, y: x + y.mean(1, keepdim=True),
    ),
    "view": (
        (),
        lambda x, _: op.reshape(op.reshape(x, _flat(x)), x.struct_info.shape),
        lambda x, _: x.flatten(1).view(x.shape),
    ),
    "wide": (
        (),
        lambda x, _: op.astype(op.tanh(op.astype(x, "float64")), "float32"),
        lambda x, _: torch.tanh(x.double()).float(),
    ),
    "lookup": (  # takes integers in place of an earlier value
        ("words",),
        lambda x, ids, w: op.add(x, op.take(w, ids, 0)),
        lambda x, ids, w: x + w[ids],
    ),
    "masked": (  # takes where an earlier value is positive, as integers, in place of that
        (),
        lambda x, bits: op.multiply(x, op.add(op.astype(bits, "float32"), relax.const(0.5))),
        lambda x, bits: x * (bits + 0.5),
    ),
    "bias": (("vector",), lambda x, _, b: op.add(x, b), lambda x, _, b: x + b),
    "matmul": (("matrix",), lambda x, _, w: op.matmul(x, w), lambda x, _, w: x @ w),
    "linear": (
        ("matrix", "vector"),
        lambda x, _, w, b: op.add(op.matmul(x, op.permute_dims(w)), b),
        lambda x, _, w, b: F.linear(x, w, b),
    ),
    "norm": (
        ("vector", "vector"),
        lambda x, _, g, b: op.nn.layer_norm(x, g, b, [-1]),
        lambda x, _, g, b: F.layer_norm(x, x.shape[-1:], g, b),
    ),
}


def _labelled(x: relax.Expr, labels: relax.Expr) -> relax.Expr:
    there = op.astype(op.greater_equal(labels, relax.const(0, "int64")), "float32")
    index = op.expand_dims(op.maximum(labels, relax.const(0, "int64")), 2)
    picked = op.squeeze(op.gather_elements(op.nn.log_softmax(x, -1), index, 2), [2])
    return op.divide(op.negative(op.sum(op.multiply(picked, there))), op.sum(there))


def _counted(x: relax.Expr, y: relax.Expr) -> relax.Expr:
    return op.divide(op.sum(op.multiply(op.multiply(x, x), y)), op.sum(y))


# Per loss: which input it takes beside, by Relax, by torch.
LOSSES: dict[str, tuple[str, Callable[..., Any], Callable[..., Any]]] = {
    "mean": ("", lambda x: op.mean(x), lambda x: x.mean()),
    "sum": ("", lambda x: op.sum(op.multiply(x, x)), lambda x: (x * x).sum()),
    "squares": ("y", lambda x, y: op.mean(op.square(op.subtract(x, y))), lambda x, y: ((x - y) ** 2).mean()),
    "counted": ("mask", lambda x, y: _counted(x, y), lambda x, y: (x * x * y).sum() / y.sum()),
    "labelled": (
        "labels",
        lambda x, y: _labelled(x, y),
        lambda x, y: F.cross_entropy(x.flatten(0, 1), y.flatten(), ignore_index=-1),
    ),
}


@dataclass(frozen=True)
class Built:
    """A model as a module, with its weights' shapes; `names` are those of the values after each operator."""

    module: Any
    weights: dict[str, tuple[int, ...]]
    names: tuple[str, ...]
    by_torch: Callable[[Tensors, Tensors], list[torch.Tensor]]


def inputs_of(model: Model, batch: int) -> Tensors:
    """A batch for it. Some labels are left out, some rows have no label at all, some masks are zero."""
    shape = (batch, POSITIONS)
    made: Tensors = {"x": torch.randint(WORDS, shape)} if model.tokens else {"x": torch.randn(*shape, model.width)}
    if any(kind == "lookup" for kind, _, _ in model.operators):
        made["ids"] = torch.randint(WORDS, shape)
    if model.unused:
        made["unused"] = torch.randn(batch, 2)
    wanted = LOSSES[model.loss][0]
    if wanted == "y":
        made["y"] = torch.randn(*shape, model.width)
    if wanted == "mask":
        made["mask"] = (torch.rand(*shape, 1) < 0.6).float()
        made["mask"][0, 0] = 1.0
    if wanted == "labels":
        made["labels"] = torch.randint(-1, model.width, shape)
        made["labels"][0, 0] = 0
    return made


def _weights_of(model: Model) -> dict[str, tuple[int, ...]]:
    shapes = {"table": (WORDS, model.width)} if model.tokens else {}
    sizes = {"matrix": (model.width, model.width), "vector": (model.width,), "words": (WORDS, model.width)}
    for kind, number, _ in model.operators:
        shapes |= {f"{shape}{number + i}": sizes[shape] for i, shape in enumerate(KINDS[kind][0])}
    return shapes


def built(model: Model) -> Built:
    """The model as a Relax module, and as a function of torch's."""
    weights = _weights_of(model)
    builder = relax.BlockBuilder()
    example = inputs_of(model, model.rows)
    params = {
        name: relax.Var(name, relax.TensorStructInfo(tuple(t.shape), str(t.dtype).removeprefix("torch.")))
        for name, t in example.items()
    }
    params |= {name: relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in weights.items()}
    beside = LOSSES[model.loss][0]
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            x = params["x"]
            if model.tokens:
                x = builder.emit(op.take(params["table"], x, 0), "embedded")
            values = [x]
            masks = {earlier for kind, _, earlier in model.operators if kind == "masked"}
            bits: dict[int, relax.Var] = {}  # made where their value is, and sent as integers
            for i, (kind, number, earlier) in enumerate(model.operators):
                if i in masks:
                    bits[i] = builder.emit(op.astype(op.greater(values[i], relax.const(0.0)), "int64"), f"bits{i}")
                taken, by_relax, _ = KINDS[kind]
                given = [params[f"{shape}{number + n}"] for n, shape in enumerate(taken)]
                beside_it = (
                    params["ids"] if kind == "lookup" else bits[earlier] if kind == "masked" else values[earlier]
                )
                expr = builder.normalize(by_relax(values[-1], beside_it, *given))
                values.append(builder.emit(expr, f"v{i}"))
            loss = LOSSES[model.loss][1](values[-1], *([params[beside]] if beside else []))
            if model.penalty is not None:
                loss = op.add(loss, op.multiply(op.mean(values[model.penalty]), relax.const(0.5)))
            out = [builder.emit_output(builder.normalize(loss), "loss")]
            if "rows" in model.extras:
                out.append(builder.emit_output(op.tanh(values[len(values) // 2]), "rows_out"))
            if "mean" in model.extras:
                out.append(builder.emit_output(op.mean(values[-1]), "mean_out"))
        builder.emit_func_output(out[0] if len(out) == 1 else relax.Tuple(out))

    def by_torch(inputs: Tensors, leaves: Tensors) -> list[torch.Tensor]:
        x = leaves["table"][inputs["x"]] if model.tokens else inputs["x"]
        values = [x]
        for kind, number, earlier in model.operators:
            given = [leaves[f"{shape}{number + n}"] for n, shape in enumerate(KINDS[kind][0])]
            beside_it = inputs["ids"] if kind == "lookup" else values[earlier]
            beside_it = (beside_it > 0).long() if kind == "masked" else beside_it
            values.append(KINDS[kind][2](values[-1], beside_it, *given))
        results = [LOSSES[model.loss][2](values[-1], *([inputs[beside]] if beside else []))]
        if model.penalty is not None:
            results[0] = results[0] + values[model.penalty].mean() * 0.5
        if "rows" in model.extras:
            results.append(torch.tanh(values[len(values) // 2]))
        if "mean" in model.extras:
            results.append(values[-1].mean())
        return results

    return Built(builder.get(), weights, tuple(f"v{i}" for i in range(len(model.operators))), by_torch)


def _model(random: Random, count: int) -> Model:
    """A model that can be cut into so many stages."""
    width, rows = random.choice([2, 3, 4, 5]), random.randint(1, 3)
    kinds = [*KINDS, "linear", "matmul", "linear", "norm"]
    size = random.randint(count + 1, count + 5)
    operators = [(random.choice(kinds), random.randint(0, 2), random.randint(0, i)) for i in range(size)]
    operators[random.randint(0, size - 1)] = ("matmul", 0, 0)
    loss = random.choice(list(LOSSES))
    known = ["rows"] if loss == "sum" else ["rows", "mean"]
    extras = random.sample(known, random.randint(0, len(known)))
    penalty = None if loss == "sum" else random.choice([None, None, *range(size + 1)])
    return Model(
        width, rows, random.random() < 0.5, tuple(operators), loss, tuple(extras), penalty, random.random() < 0.5
    )


@dataclass(frozen=True)
class Case:
    """A model, and how it is run. `frozen`: which of its weights are not trained; `memory`: kinds of memory by name."""

    model: Model
    meshes: tuple[Any, ...]
    cuts: tuple[int, ...]
    layouts: Any
    schedule: str | Schedule
    microbatches: int
    recompute: bool
    frozen: tuple[str, ...]
    max_norm: float | None
    memory: dict[str, str]
    poison: bool
    ranks: bool = False


def _layouts(random: Random, model: Model, meshes: list[dict[str, int]]) -> dict[str, dict[str, Any]]:
    """Layouts of inputs, weights (split as in tensor parallelism, or as in ZeRO over the rows' axis) and values."""
    found: dict[str, dict[str, Any]] = {}
    for i, mesh in enumerate(meshes):
        stated: dict[str, Any] = {}
        for name, shape in _weights_of(model).items():
            axis = random.choice([None, None, *mesh])
            if axis is not None:
                stated[name] = {axis: random.randint(0, len(shape) - 1)}
        for name in ("x", "y", "labels", "mask"):
            axis = random.choice([None, *mesh])
            if axis is not None and (name == "x" or name == LOSSES[model.loss][0]):
                stated[name] = {axis: 0}
        value, axis = random.randint(0, len(model.operators) - 1), random.choice([None, *mesh])
        if axis is not None:
            stated[f"v{value}"] = {axis: random.randint(0, 2)}
        found[f"m{i}"] = {f"{name}*": layout for name, layout in stated.items()}  # for those that the mesh has
    return found


def make_case(number: int, ranks: bool = False) -> Case:
    """The case with this number: a model, a topology, cuts, layouts per mesh, a schedule (every fourth one of no name),
    what is trained, and what is in which memory. `ranks`: it is run on four ranks."""
    random = Random(f"pipeline {number}")
    meshes, chunks = random.choices(MESHES, k=random.randint(1, 3)), random.randint(1, 2)
    meshes = random.choice(FOUR_DEVICES) if ranks else meshes
    count = len(meshes) * chunks
    model = _model(random, count)
    weights = sorted(_weights_of(model))
    cuts = sorted(random.sample(range(len(model.operators) - 1), count - 1))
    fitting = [name for name in TRAINING if SCHEDULES[name].any_chunks or SCHEDULES[name].chunks == chunks]
    held = [*(f"v{i}" for i in range(len(model.operators))), *weights]
    layouts = _layouts(random, model, meshes)
    schedule, microbatches = random.choice(fitting), random.choice([1, 2, 3, 4, len(meshes), 2 * len(meshes)])
    own = random_schedule(Random(f"schedule {number}"), len(meshes), count, microbatches)
    return Case(
        model,
        tuple(meshes),
        tuple(cuts),
        layouts,
        own if number % 4 == 3 else schedule,
        microbatches,
        random.random() < 0.5,
        tuple(random.sample(weights, random.randint(0, 1))),
        random.choice([None, 0.1]),
        dict.fromkeys(random.sample(held, random.choice([0, 0, 1, 3])), "pinned_host"),
        random.random() < 0.3,
        ranks,
    )


def make_fuzz_case(number: int) -> Case:
    """Every eighth case is one on ranks."""
    return make_case(number, ranks=number % 8 == 0)
