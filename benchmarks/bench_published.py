"""Simulations beside what was published for GPUs: a layer of GPT models with tensor and sequence parallelism, from
"Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198): the times of its table 4, and the
bytes of activations of its table 2, which its figures 1 and 7 are made of.

Everything is one set of constants, the preset `a100`, and the layer's own plan. What is recomputed of attention
("selective") is what is between queries, keys and values and their result. Of what is otherwise there, nothing is made
up for: biases, dropouts and sums are operators of their own here, and fused kernels there (which would take 0.6 ms off
a forward).

python -m benchmarks.bench_published
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tilelang import tvm

import mesh_tensor as mt
from mesh_tensor.api.fragments import StageFragments
from mesh_tensor.api.model_pieces import ModelPieces
from mesh_tensor.base.topology import Topology
from mesh_tensor.searching.choices import MODEL
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.stages import held_for_backward, tile_bytes

from ._timing import header, table

relax = tvm.relax
ops = relax.op

SIZES = {  # 2205.05198, table 3: width, heads, rows of a microbatch
    "22B": (6144, 64, 4),
    "175B": (12288, 96, 1),
    "530B": (20480, 128, 1),
    "1T": (25600, 160, 1),
}
TABLE_4 = {  # ms of a 22B layer: forward, backward; whether sequence parallel, and what is recomputed
    "baseline": (7.7, 11.9, False, ""),
    "sequence parallel": (7.2, 11.8, True, ""),
    "full recompute": (7.7, 19.5, False, "full"),
    "selective recompute": (7.7, 13.2, False, "selective"),
    "both": (7.2, 13.1, True, "selective"),
}
TENSOR_PARALLEL, POSITIONS, VOCABULARY = 8, 2048, 51200
INPUTS = ("tokens", "mask", "drop1", "drop2", "wanted")
_FLOAT16 = 4  # bytes: float32 stands for it
LAYOUTS = {"wqkv": 1, "bqkv": 0, "wo": 0, "w1": 1, "b1": 0, "w2": 0}  # of a layer: the dim that is split


def half_precision(preset: str = "a100") -> mt.Machine:
    """The preset, on which float32 stands for float16: as many operations, and twice the bytes."""
    machine = mt.Machine.preset(preset)
    memory = tuple(replace(level, rate=2 * level.rate, size=2 * level.size) for level in machine.memory)
    links = tuple(replace(link, rate=2 * link.rate) for link in machine.links)
    return replace(machine, flops={"float32": machine.peak("float16")}, memory=memory, links=links)


def _layer(
    emit: Callable[..., relax.Var], p: dict[str, relax.Var], batch: int, width: int, heads: int, number: int
) -> relax.Var:
    size = width // heads
    n = emit(ops.nn.layer_norm(p["x"], p["g1"], p["c1"], [2]))
    made = emit(ops.add(emit(ops.matmul(n, p["wqkv"])), p["bqkv"]))
    made = emit(ops.permute_dims(emit(ops.reshape(made, (batch, POSITIONS, heads, 3, size))), (3, 0, 2, 1, 4)))
    parts = emit(ops.split(made, 3, axis=0))
    q, k, v = (emit(ops.squeeze(emit(relax.TupleGetItem(parts, i)), [0])) for i in range(3))
    weights = emit(ops.nn.softmax(emit(ops.matmul(q, emit(ops.permute_dims(k, (0, 1, 3, 2))))), -1))
    o = emit(ops.matmul(emit(ops.multiply(weights, p["mask"])), v))
    o = emit(ops.reshape(emit(ops.permute_dims(o, (0, 2, 1, 3))), (batch, POSITIONS, width)))
    o = emit(ops.add(emit(ops.matmul(o, p["wo"]), f"projected_{number}"), p["bo"]))
    x = emit(ops.add(p["x"], emit(ops.multiply(o, p["drop1"]))))
    n = emit(ops.nn.layer_norm(x, p["g2"], p["c2"], [2]))
    hidden = emit(ops.nn.gelu_tanh(emit(ops.add(emit(ops.matmul(n, p["w1"])), p["b1"]))))
    y = emit(ops.add(emit(ops.matmul(hidden, p["w2"])), p["b2"]))
    return emit(ops.add(x, emit(ops.multiply(y, p["drop2"]))))


@lru_cache(maxsize=64)
def gpt(rows: int, width: int, heads: int) -> tvm.ir.IRModule:
    """A GPT model of two layers with its loss; dropouts are masks."""
    full = (rows, POSITIONS, width)
    shapes = {"mask": (rows, heads, POSITIONS, POSITIONS), "drop1": full, "drop2": full}
    shapes |= {"wanted": (rows, POSITIONS, VOCABULARY), "table": (VOCABULARY, width), "places": (POSITIONS, width)}
    shapes |= {"g": (width,), "c": (width,)}
    for number in range(2):
        one = {"g1": (width,), "c1": (width,), "wqkv": (width, 3 * width), "bqkv": (3 * width,), "wo": (width, width)}
        one |= {"bo": (width,), "g2": (width,), "c2": (width,), "w1": (width, 4 * width), "b1": (4 * width,)}
        one |= {"w2": (4 * width, width), "b2": (width,)}
        shapes |= {f"{name}_{number}": shape for name, shape in one.items()}
    p = {name: relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in shapes.items()}
    tokens = relax.Var("tokens", relax.TensorStructInfo((rows, POSITIONS), "int64"))
    builder = relax.BlockBuilder()
    with builder.function("main", [tokens, *p.values()]):
        with builder.dataflow():
            found = builder.emit(ops.take(p["table"], builder.emit(ops.reshape(tokens, (rows * POSITIONS,))), 0))
            x = builder.emit(ops.add(builder.emit(ops.reshape(found, full)), p["places"]))
            for number in range(2):
                own = {name.removesuffix(f"_{number}"): var for name, var in p.items() if name.endswith(f"_{number}")}
                own |= {"x": x, "mask": p["mask"], "drop1": p["drop1"], "drop2": p["drop2"]}
                x = _layer(builder.emit, own, rows, width, heads, number)
            n = builder.emit(ops.nn.layer_norm(x, p["g"], p["c"], [2]))
            logits = builder.emit(ops.matmul(n, builder.emit(ops.permute_dims(p["table"]))))
            chosen = builder.emit(ops.multiply(builder.emit(ops.nn.log_softmax(logits)), p["wanted"]))
            result = builder.emit_output(builder.emit(ops.sum(chosen)))
        builder.emit_func_output(result)
    return builder.get()


def layouts() -> dict[str, Any]:
    """Megatron's, of both layers, and the vocabulary split. What leaves attention is summed, as there: to gather its
    weights is less to send where rows are many, but then the backward has more."""
    found = {f"{name}_{number}": {MODEL: dim} for name, dim in LAYOUTS.items() for number in range(2)}
    summed = {f"projected_{number}": {"sharding": {}, "partial": {MODEL: "sum"}} for number in range(2)}
    return {**found, **summed, "mask": {MODEL: 1}, "table": {MODEL: 0}, "wanted": {MODEL: 2}}


def pieces_of_gpt(
    rows: int, width: int, heads: int, machine: mt.Machine, model: int, overlap: str = "auto"
) -> ModelPieces:
    """The pieces of a GPT model, split over `model` devices as Megatron splits it."""
    stated = layouts() if model > 1 else {}
    return ModelPieces(gpt(rows, width, heads), "main", INPUTS, machine, stated, overlap=overlap)


@lru_cache(maxsize=64)
def layer_of(
    rows: int, width: int, heads: int, machine: mt.Machine, model: int, sequence: bool, recompute: bool = False
) -> StageFragments:
    """One of its layers: forward and backward, `sequence`: with sequence parallelism."""
    pieces = pieces_of_gpt(rows, width, heads, machine, model)
    flow = pieces.flow_of(rows)
    stage = pieces.stages_of(flow, (0, 1, 1, 0), (1,))[0]
    topology = Topology({stage.mesh: {MODEL: model}})
    return pieces.fragments(flow, stage, topology, pieces.shardings(sequence), recompute=recompute)


def layer_seconds(here: StageFragments, machine: mt.Machine) -> tuple[float, float, float]:
    """Forward and backward of a layer, and what of its forward is the core of attention."""
    forward, backward = (Simulation(here.fragments[kind].module.program, machine) for kind in "FB")
    steps = [step for step in forward.steps if step.stream == "device"]
    softmax = next(number for number, step in enumerate(steps) if step.kind == "nn.softmax")
    core = sum(step.end - step.start for step in steps[softmax - 1 : softmax + 3])  # ... a dropout, two products
    return forward.time, backward.time, core


def table_4(machine: mt.Machine) -> Iterator[tuple[str, float, float]]:
    """What is published of a layer of the 22B model, in ms, and as it is simulated."""
    width, heads, rows = SIZES["22B"]
    for name, (*published, sequence, again) in TABLE_4.items():
        here = layer_of(rows, width, heads, machine, TENSOR_PARALLEL, sequence)
        forward, backward, core = (seconds * 1e3 for seconds in layer_seconds(here, machine))
        backward += {"full": forward, "selective": core, "": 0.0}[again]
        for what, theirs, ours in zip(("forward", "backward"), published, (forward, backward), strict=True):
            yield f"{name}, {what}", theirs, ours
        yield f"{name}, both", sum(published), forward + backward


def activation_bytes(here: StageFragments, without_core: bool = False) -> int:
    """What a layer keeps for its backward: numbers of two bytes, and masks of one; `without_core`: but what is as large
    as attention's scores."""
    later = {name for name in here.fragments["B"].takes if name not in here.stage.params or name in here.inputs}
    found = 0
    for name in later & {*here.fragments["F"].takes, *here.fragments["F"].gives}:
        if not (without_core and here.types[name][0][-2:] == (POSITIONS, POSITIONS)):
            found += tile_bytes(here, [name]) // _FLOAT16 * (1 if _is_mask(name) else 2)
    return found


def _is_mask(name: str) -> bool:
    return name.removeprefix("saved.").startswith(("mask", "drop"))


def table_2(machine: mt.Machine, names: Iterable[str] = tuple(SIZES)) -> Iterator[tuple[str, int, int]]:
    """The bytes of activations per layer of models, by the formulas of table 2 and by our plans."""
    for name in names:
        width, heads, rows = SIZES[name]
        t, scores, per = TENSOR_PARALLEL, 5 * heads * POSITIONS, POSITIONS * rows
        whole, split, sequence = (
            layer_of(rows, width, heads, machine, *way) for way in ((1, False), (t, False), (t, True))
        )
        again = layer_of(rows, width, heads, machine, t, False, recompute=True)
        yield f"{name}, no parallelism", per * (34 * width + scores), activation_bytes(whole)
        yield f"{name}, tensor", per * (10 * width + (24 * width + scores) // t), activation_bytes(split)
        yield f"{name}, tensor, sequence", per * (34 * width + scores) // t, activation_bytes(sequence)
        yield f"{name}, tensor, selective", per * (10 * width + 24 * width // t), activation_bytes(split, True)
        yield f"{name}, tensor, sequence, selective", per * 34 * width // t, activation_bytes(sequence, True)
        yield f"{name}, full recompute", per * 2 * width, int(entering_bytes(again))


def entering_bytes(here: StageFragments) -> int:
    """What enters a layer, which is all that is kept of it where it is recomputed; masks are made again."""
    kept = held_for_backward(here).forward - tile_bytes(here, here.inputs)
    return int(kept) // _FLOAT16 * 2


if __name__ == "__main__":
    print(header("Simulations beside published measurements"))
    on, errors = half_precision(), []
    rows = []
    for what, theirs, ours in table_4(on):
        errors.append(abs(ours / theirs - 1))
        rows.append([what, f"{theirs:.1f}", f"{ours:.2f}", f"{ours / theirs - 1:+.1%}"])
    print("2205.05198, table 4, a layer of the 22B model on 8 GPUs, ms\n")
    print(table(["what", "published", "simulated", "error"], rows))
    print(f"{len(rows)} numbers: mean {statistics.mean(errors):.1%}, worst {max(errors):.1%}\n")
    print("2205.05198, table 2, bytes of activations per layer\n")
    made = [
        [what, f"{theirs:,}", f"{ours:,}", "equal" if ours == theirs else "other"] for what, theirs, ours in table_2(on)
    ]
    print(table(["what", "published", "planned", ""], made))
