"""Simulations beside what was published for GPUs: layers and iterations of GPT models with tensor and pipeline
parallelism, from "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), tables 4 and 5.

Everything is one set of constants, the preset `a100`. Of iterations only the layers are simulated, without
recomputation and sequence parallelism: what table 5 has beside that are embeddings, the loss, the optimizer, transfers
between stages, and what is recomputed of attention. Biases, dropouts and sums are operators of their own here, and
fused kernels there.

python -m benchmarks.bench_published
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from tilelang import tvm

import mesh_tensor as mt
from mesh_tensor.pipelining.clock import timeline

from ._timing import header, table

relax = tvm.relax
ops = relax.op


@dataclass(frozen=True)
class Model:
    """A GPT model of 2205.05198, with what was measured: milliseconds of table 4's baseline layer (22B alone), and
    seconds per iteration of table 5 with selective recomputation and sequence parallelism."""

    name: str
    width: int
    heads: int
    layers: int
    pipeline: int
    interleaved: int
    microbatches: int
    microbatch: int
    iteration: float


MODELS = (
    Model("22B", 6144, 64, 48, 1, 1, 1, 4, 1.10),
    Model("175B", 12288, 96, 96, 8, 3, 64, 1, 13.75),
    Model("530B", 20480, 128, 105, 35, 3, 280, 1, 37.83),
    Model("1T", 25600, 160, 128, 64, 1, 512, 1, 71.49),
)
FORWARD, BACKWARD = 7.7, 11.9  # ms, 2205.05198 table 4, the 22B layer, "Baseline no recompute"
TENSOR_PARALLEL, POSITIONS = 8, 2048
LAYOUTS = {
    "wqkv": {"t": 1},
    "bqkv": {"t": 0},
    "wo": {"t": 0},
    "w1": {"t": 1},
    "b1": {"t": 0},
    "w2": {"t": 0},
    "mask": {"t": 1},
}


def half_precision(preset: str = "a100") -> mt.Machine:
    """The preset, on which float32 stands for float16: as many operations, and twice the bytes."""
    machine = mt.Machine.preset(preset)
    memory = tuple(replace(level, rate=2 * level.rate, size=2 * level.size) for level in machine.memory)
    links = tuple(replace(link, rate=2 * link.rate) for link in machine.links)
    return replace(machine, flops={"float32": machine.peak("float16")}, memory=memory, links=links)


def layer(batch: int, width: int, heads: int) -> tvm.ir.IRModule:
    """A transformer layer with dropouts as masks; its result is a number, so that it has gradients."""
    full, size = (batch, POSITIONS, width), width // heads
    shapes = {"x": full, "g1": (width,), "c1": (width,), "wqkv": (width, 3 * width), "bqkv": (3 * width,)}
    shapes |= {"mask": (batch, heads, POSITIONS, POSITIONS), "wo": (width, width), "bo": (width,), "drop1": full}
    shapes |= {"g2": (width,), "c2": (width,), "w1": (width, 4 * width), "b1": (4 * width,)}
    shapes |= {"w2": (4 * width, width), "b2": (width,), "drop2": full, "seed": full}
    p = {name: relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(p.values())):
        with builder.dataflow():
            y = _layer(builder.emit, p, batch, width, heads, size)
            result = builder.emit_output(builder.emit(ops.sum(builder.emit(ops.multiply(y, p["seed"])))))
        builder.emit_func_output(result)
    return builder.get()


def _layer(
    emit: Callable[..., relax.Var], p: dict[str, relax.Var], batch: int, width: int, heads: int, size: int
) -> relax.Var:
    n = emit(ops.nn.layer_norm(p["x"], p["g1"], p["c1"], [2]))
    made = emit(ops.add(emit(ops.matmul(n, p["wqkv"])), p["bqkv"]))
    made = emit(ops.permute_dims(emit(ops.reshape(made, (batch, POSITIONS, heads, 3, size))), (3, 0, 2, 1, 4)))
    parts = emit(ops.split(made, 3, axis=0))
    q, k, v = (emit(ops.squeeze(emit(relax.TupleGetItem(parts, i)), [0])) for i in range(3))
    weights = emit(ops.nn.softmax(emit(ops.matmul(q, emit(ops.permute_dims(k, (0, 1, 3, 2))))), -1))
    o = emit(ops.matmul(emit(ops.multiply(weights, p["mask"])), v))
    o = emit(ops.reshape(emit(ops.permute_dims(o, (0, 2, 1, 3))), (batch, POSITIONS, width)))
    o = emit(ops.add(emit(ops.matmul(o, p["wo"])), p["bo"]))
    x = emit(ops.add(p["x"], emit(ops.multiply(o, p["drop1"]))))
    n = emit(ops.nn.layer_norm(x, p["g2"], p["c2"], [2]))
    hidden = emit(ops.nn.gelu_tanh(emit(ops.add(emit(ops.matmul(n, p["w1"])), p["b1"]))))
    y = emit(ops.add(emit(ops.matmul(hidden, p["w2"])), p["b2"]))
    return emit(ops.add(x, emit(ops.multiply(y, p["drop2"]))))


def layer_seconds(model: Model, machine: mt.Machine) -> tuple[float, float]:
    """Forward, and backward, of a layer on 8 GPUs; without what makes a number of it."""
    mod = layer(model.microbatch, model.width, model.heads)
    trained = ["x", "g1", "c1", "wqkv", "bqkv", "wo", "bo", "g2", "c2", "w1", "b1", "w2", "b2"]
    times = []
    for module in (mod, mt.gradient(mod, trained)):
        made = mt.simulate(mt.distribute_module(module, {"t": TENSOR_PARALLEL}, LAYOUTS), machine)
        loss = machine.work(0, 12 * model.microbatch * POSITIONS * model.width, "float32", "elementwise").seconds
        loss += machine.work(0, 4 * model.microbatch * POSITIONS * model.width, "float32", "reduce").seconds
        times.append(made.time - loss)
    return times[0], times[1] - times[0]


def iteration_seconds(model: Model, forward: float, backward: float) -> float:
    """The layers of an iteration, with one-forward-one-backward over the stages."""
    stages = model.pipeline * model.interleaved
    costs = {"F": forward * model.layers / stages, "B": backward * model.layers / stages}
    if model.pipeline == 1:
        return model.microbatches * stages * sum(costs.values())
    name, options = ("interleaved", {"chunks": model.interleaved}) if model.interleaved > 1 else ("1f1b", {})
    schedule = mt.Schedule.named(name, meshes=model.pipeline, microbatches=model.microbatches, **options)
    return timeline(schedule, costs).makespan


def rows() -> list[list[str]]:
    """Published and simulated, with the error."""
    machine, found = half_precision(), []
    for model in MODELS:
        forward, backward = layer_seconds(model, machine)
        if model.name == "22B":
            found.append(_row("table 4, 22B layer, forward, ms", FORWARD, forward * 1e3))
            found.append(_row("table 4, 22B layer, backward, ms", BACKWARD, backward * 1e3))
            found.append(_row("table 4, 22B layer, both, ms", FORWARD + BACKWARD, (forward + backward) * 1e3))
        taken = iteration_seconds(model, forward, backward)
        found.append(_row(f"table 5, {model.name}, seconds per iteration", model.iteration, taken))
    return found


def _row(what: str, published: float, simulated: float) -> list[str]:
    return [what, f"{published:.2f}", f"{simulated:.2f}", f"{simulated / published - 1:+.1%}"]


if __name__ == "__main__":
    print(header("Simulations beside published measurements"))
    print(table(["what", "published", "simulated", "error"], rows()))
