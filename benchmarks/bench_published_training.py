"""Steps of training GPT models beside what was published: every model's pieces (embedding, a layer, logits and loss)
put together as its configuration says, with one set of constants per kind of GPU, the presets.

- "Efficient Large-Scale Language Model Training on GPU Clusters" (arXiv 2104.04473), table 1, A100. Microbatches and
  stages per mesh are those of Megatron-LM's examples/sc21/run_table_1.sh. Its table 2: the same beside ZeRO-3.
  A step of ZeRO-3 takes as long on 768 GPUs as on 1,536 there, 66.7 s: it waits for what is sent. That is 11 and 17 s
  by the links' rates and a ring's messages, beside 26 and 13 s of computing. DeepSpeed 0.3.14 (April 2021) did less
  (`as_deepspeed`): it gathered weight by weight where they were needed (deepspeed/runtime/zero/stage3.py prefetches one
  weight of this size at most; forwards none, its issue 1069), at about a card's rate even over NVLink (21 GB/s per GPU
  in its issue 1174). Gradients were scattered beside the backward (overlap_comm), and of a layer that was recomputed
  the last product's weights were still there (stage3_max_reuse_distance).
- The choices of table 1 beside all others that there are on as many GPUs: whether a search finds them.
- "Reducing Activation Recomputation in Large Transformer Models" (arXiv 2205.05198), table 5, A100: full recomputation;
  and sequence parallelism, where what is between queries, keys and values and their result is recomputed ("selective").
- DLPerf's GPT report (Oneflow-Inc/DLPerf, reports/GPT/dlperf_gpt_test_report_210512.md), V100: 18 configurations,
  Megatron-LM's sequences per second; microbatches and heads from its Megatron-LM/README.md.

All others recompute their layers. float32 stands for float16: as many operations, and twice the bytes. Adam keeps three
numbers of four bytes per weight (the weight itself is one), which count as two each. Before it, Megatron-LM's optimizer
(megatron/optimizer/optimizer.py at aed2f75e, April 2021) copies gradients to float32, divides them by the loss's scale,
and takes their norm: 6, 8 and 4 bytes per weight.

Megatron-LM hides the all-reduce of a layer's input gradient behind its weights' gradient since August 2021 (its commit
cf7efd4f), so 2205.05198 is planned so; what is older starts its collectives where it waits for them.

python -m benchmarks.bench_published_training
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import mesh_tensor as mt
from mesh_tensor.api.model_pieces import Shape, between
from mesh_tensor.pipelining.check import Held, peaks
from mesh_tensor.searching.choices import Choice
from mesh_tensor.searching.pieces import Composer, Model, named_schedule

from ._timing import header, table
from .bench_published import POSITIONS, VOCABULARY, half_precision, layer_of, layer_seconds, pieces_of_gpt
from .bench_simulator import spearman

STATES = 6  # of Adam: three numbers, each of the bytes of two
_FLOAT16 = 4  # bytes: float32 stands for it
_PREPARED = 18 * 2  # bytes per weight in which gradients are copied, unscaled and measured; float16 counts twice


@dataclass(frozen=True)
class Step:
    """A published step of training, and its seconds. `microbatch`: rows of a device's; `selective`: sequence parallel,
    and the core of attention is all that is recomputed; `overlap`: whether products hide collectives."""

    name: str
    width: int
    heads: int
    layers: int
    data: int
    model: int
    meshes: int
    chunks: int
    microbatch: int
    batch: int
    seconds: float
    zero: int = 0
    selective: bool = False
    overlap: str = "off"

    @property
    def choice(self) -> Choice:
        """As a search would have it."""
        count = self.batch // self.data // self.microbatch
        schedule = "interleaved" if self.chunks > 1 else "1f1b"
        kept = {"recompute": not self.selective, "sequence": self.selective}
        return Choice(self.data, self.model, self.meshes, count, schedule, self.chunks, self.zero, **kept)


def ptdp() -> list[Step]:
    """2104.04473, table 1. Seconds are the operations of its equation 3 by the Tflop/s that it has per GPU."""
    rows = (
        ("1.7B", 24, 2304, 24, 1, 1, 32, 512, 137, 16, 1),
        ("3.6B", 32, 3072, 30, 2, 1, 64, 512, 138, 16, 1),
        ("7.5B", 32, 4096, 36, 4, 1, 128, 512, 142, 16, 1),
        ("18.4B", 48, 6144, 40, 8, 1, 256, 1024, 135, 8, 1),
        ("39.1B", 64, 8192, 48, 8, 2, 512, 1536, 138, 4, 1),
        ("76.1B", 80, 10240, 60, 8, 4, 1024, 1792, 140, 2, 3),
        ("145.6B", 96, 12288, 80, 8, 8, 1536, 2304, 148, 2, 2),
        ("310.1B", 128, 16384, 96, 8, 16, 1920, 2160, 155, 1, 2),
        ("529.6B", 128, 20480, 105, 8, 35, 2520, 2520, 163, 1, 3),
        ("1008B", 160, 25600, 128, 8, 64, 3072, 3072, 163, 1, 1),
    )
    return [_at_rate(*row) for row in rows]


def beside_zero() -> list[Step]:
    """2104.04473, table 2: GPUs, batch, rows of a microbatch, Tflop/s per GPU. Stages are taken to be one per mesh."""
    small, large = (96, 12288, 96), (128, 20480, 105)
    rows = (
        ("ZeRO-3", small, 1, 1, 384, 1536, 144, 4), ("ZeRO-3", small, 1, 1, 768, 1536, 88, 2),
        ("ZeRO-3", small, 1, 1, 1536, 1536, 44, 1), ("ZeRO-3", large, 1, 1, 640, 2560, 138, 4),
        ("ZeRO-3", large, 1, 1, 1120, 2240, 98, 2), ("ZeRO-3", large, 1, 1, 2240, 2240, 48, 1),
        ("PTD", small, 8, 12, 384, 1536, 153, 1), ("PTD", small, 8, 12, 768, 1536, 149, 1),
        ("PTD", small, 8, 12, 1536, 1536, 141, 1), ("PTD", large, 8, 35, 560, 2240, 171, 1),
        ("PTD", large, 8, 35, 1120, 2240, 167, 1), ("PTD", large, 8, 35, 2240, 2240, 159, 1),
    )  # fmt: skip
    names = {small: "174.6B", large: "529.6B"}
    made = [_at_rate(f"{kind}, {names[size]}", *size, *rest, 1) for kind, size, *rest in rows]
    return [replace(step, zero=3 * step.name.startswith("ZeRO")) for step in made]


def _at_rate(
    name: str,
    heads: int,
    width: int,
    layers: int,
    model: int,
    meshes: int,
    gpus: int,
    batch: int,
    rate: float,
    microbatch: int,
    chunks: int,
) -> Step:
    """A step at so many Tflop/s per GPU, of the operations of the paper's equation 3."""
    flops = 96 * batch * POSITIONS * layers * width**2
    flops *= 1 + POSITIONS / (6 * width) + VOCABULARY / (16 * layers * width)
    seconds, data = flops / (gpus * rate * 1e12), gpus // model // meshes
    return Step(name, width, heads, layers, data, model, meshes, chunks, microbatch, batch, seconds)


def recomputed() -> list[Step]:
    """2205.05198, table 5: full recomputation, and selective with sequence parallelism; the configurations are those of
    its table 3."""
    rows = (
        ("22B", 64, 6144, 48, 1, 1, 4, 4, 1.42, 1.10),
        ("175B", 96, 12288, 96, 8, 3, 64, 1, 18.13, 13.75),
        ("530B", 128, 20480, 105, 35, 3, 280, 1, 49.05, 37.83),
        ("1T", 160, 25600, 128, 64, 1, 512, 1, 94.42, 71.49),
    )
    full = [
        Step(n, w, h, ls, 1, 8, p, c, mb, b, seconds, overlap="auto") for n, h, w, ls, p, c, b, mb, seconds, _ in rows
    ]
    both = zip(full, rows, strict=True)
    return [*full, *(replace(step, seconds=row[-1], selective=True) for step, row in both)]


def dlperf() -> list[Step]:
    """DLPerf's GPT report: data x model x meshes, batch, width x layers, Megatron-LM's sequences per second."""
    rows = (
        (1, 1, 1, 2, 1536, 16, 4.31), (8, 1, 1, 16, 1536, 16, 33.27), (16, 1, 1, 32, 1536, 16, 48.16),
        (32, 1, 1, 64, 1536, 16, 93.63), (1, 1, 1, 8, 768, 12, 13.09), (1, 8, 1, 16, 1536, 16, 23.11),
        (1, 16, 1, 16, 3072, 16, 2.85), (1, 32, 1, 16, 3072, 32, 1.23), (8, 1, 1, 16, 1536, 16, 33.32),
        (1, 8, 1, 16, 1536, 16, 24.07), (2, 4, 1, 16, 1536, 16, 27.75), (4, 2, 1, 16, 1536, 16, 26.95),
        (2, 8, 1, 16, 2304, 24, 12.18), (4, 8, 1, 32, 2304, 24, 21.21), (8, 1, 4, 512, 1536, 16, 104.63),
        (1, 8, 4, 512, 2304, 24, 23.10), (2, 4, 4, 512, 2304, 24, 33.40), (2, 8, 2, 512, 2304, 24, 31.45),
    )  # fmt: skip
    heads = {768: 12, 1536: 16, 2304: 24, 3072: 32}
    found = []
    for data, model, meshes, batch, width, layers, rate in rows:
        name = f"{data}x{model}x{meshes}_{batch}_{width}x{layers}"
        each = batch // data // (32 if meshes > 1 else 1)
        found.append(Step(name, width, heads[width], layers, data, model, meshes, 1, each, batch, batch / rate))
    return found


_KNOWN: dict[tuple, Model] = {}


def pieces_of(step: Step, machine: mt.Machine) -> Model:
    """The pieces of a step's model, for a device's rows of a microbatch."""
    size = step.microbatch, step.width, step.heads
    data = step.data if step.zero == 3 else 1
    key = (*size, data, step.model, step.selective, step.overlap, machine)
    if key not in _KNOWN:
        pieces = pieces_of_gpt(data * step.microbatch, *size[1:], machine, step.model, step.overlap)
        made = pieces.model(Shape(step.microbatch, step.model, step.selective, data, step.zero == 3))
        if step.selective:
            *_, core = layer_seconds(layer_of(*size, machine, step.model, True), machine)
            made = replace(made, layer=replace(made.layer, backward=made.layer.backward + core))
        _KNOWN[key] = made
    return replace(_KNOWN[key], layers=step.layers)


def simulated(step: Step, machine: mt.Machine) -> float:
    """Seconds of a step."""
    model = pieces_of(step, machine)
    return step_seconds(step.choice, model, model.cut(step.choice.stages), machine)


def step_seconds(choice: Choice, model: Model, layers: Sequence[int], machine: mt.Machine) -> float:
    """Seconds of a step whose stages have so many layers, with what is done to gradients before Adam."""
    prepared = _PREPARED * max(weights_of_meshes(choice, model, layers))
    seconds = Composer(machine, STATES).seconds(choice, [model] * choice.meshes, layers)
    return seconds + prepared / machine.main_memory.rate


def weights_of_meshes(choice: Choice, model: Model, layers: Sequence[int]) -> list[int]:
    """Per mesh: the elements of the weights that a device of it has."""
    mesh_of, found = named_schedule(*choice.order).mesh_of, [0] * choice.meshes
    for stage, count in enumerate(layers):
        found[mesh_of[stage]] += model.stage(count, stage == 0, stage == len(layers) - 1).elements
    return found


def as_deepspeed(step: Step, machine: mt.Machine) -> float:
    """Seconds of a step of ZeRO-3 as DeepSpeed ran it: every GPU receives all weights over its own card, while nothing
    computes, forwards, for the recomputation, and but for the last product's, a third, backwards; gradients are sent
    beside the backward, which is three of four parts of the computing."""
    (link,) = machine.links[-1:]
    faster = replace(link, rate=2 * link.rate, start=link.start / 2, hop=link.hop / 2)
    whole, half = (simulated(step, replace(machine, busy=1.0, links=(each,))) for each in (link, faster))
    each_way = (whole - half) / 2  # of what is sent, as much of every time that weights or gradients are
    computing = whole - 4 * each_way
    return computing + (1 + 1 + 2 / 3) * each_way + max(0.0, each_way - 3 / 4 * computing)


def all_ways(step: Step, machine: mt.Machine) -> list[tuple[float, Choice]]:
    """What all ways to train a step's model on as many GPUs take that fit into memory, the fastest first: those that
    Megatron-LM has, with as many layers on every stage."""
    gpus, found = step.data * step.model * step.meshes, []
    for model in (1, 2, 4, 8):
        few, many = (pieces_of(replace(step, model=model, microbatch=rows), machine) for rows in (1, 16))
        for meshes, chunks in product(range(1, step.layers + 1), (1, 2, 3)):
            data = gpus // model // meshes
            whole = data * model * meshes == gpus and step.layers % (meshes * chunks) == 0 and step.batch % data == 0
            if not whole or (meshes == 1 and chunks > 1):
                continue
            for rows in (n for n in (1, 2, 4, 8, 16) if step.batch // data % n == 0):
                each = replace(step, data=data, model=model, meshes=meshes, chunks=chunks, microbatch=rows)
                if chunks > 1 and each.choice.microbatches % meshes:
                    continue
                pieces = between(few, many, 1, 16, rows)
                layers = (step.layers // (meshes * chunks),) * (meshes * chunks)
                if checkpointed(each, pieces, layers) <= machine.main_memory.size:
                    found.append((step_seconds(each.choice, pieces, layers, machine), each.choice))
    return sorted(found)


def checkpointed(step: Step, pieces: Model, layers: Sequence[int]) -> float:
    """The bytes of the GPU that holds most, with checkpoints before every layer, as Megatron-LM has them: 18 bytes per
    weight, what enters the layers of all microbatches that are on their way, and one layer's backward."""
    schedule = named_schedule(*step.choice.order)
    entering = _FLOAT16 * step.microbatch * POSITIONS * step.width
    held = peaks(schedule, {stage: Held(count * entering) for stage, count in enumerate(layers)})
    elements = weights_of_meshes(step.choice, pieces, layers)
    most = max(kept + 18 * _FLOAT16 // 2 * count for kept, count in zip(held, elements, strict=True))
    return most + max(piece.kept + piece.working for piece in (pieces.before, pieces.layer, pieces.after))


_TORCH_DDP = ("1.7B", "3.6B", "7.5B", "18.4B")  # examples/sc21/run_table_1.sh


def as_scripted(step: Step, choice: Choice) -> bool:
    """Whether the scripts of table 1 could run a choice as they are: they fix the rows of a microbatch, and train the
    smaller models with torch's DistributedDataParallel, which Megatron-LM refuses for stages (megatron/training.py)."""
    return choice.rows(step.batch) == step.microbatch and (choice.meshes == 1 or step.name not in _TORCH_DDP)


def ranked(steps: Iterable[Step], machine: mt.Machine, scripted: bool = False) -> Iterator[list[str]]:
    """A row per step: the published choice beside the fastest one, by simulated time; of all, or of those that the
    published scripts could run."""
    for step in steps:
        ways = [way for way in all_ways(step, machine) if not scripted or as_scripted(step, way[1])]
        own = next((number for number, (_, choice) in enumerate(ways) if choice == step.choice), None)
        place = (
            ["-", "doesn't fit"] if own is None else [f"{own + 1} of {len(ways)}", f"{ways[own][0] / ways[0][0]:.3f}"]
        )
        yield [step.name, str(step.choice), *place, str(ways[0][1])]


def compared(steps: list[Step], machine: mt.Machine) -> tuple[list[list[str]], str]:
    """A row per step, and how far off they are."""
    made = [simulated(step, machine) for step in steps]
    errors = [each / step.seconds - 1 for step, each in zip(steps, made, strict=True)]
    rows = [
        _with_error(step.name, str(step.choice), step.seconds, each) for step, each in zip(steps, made, strict=True)
    ]
    sizes = [abs(error) for error in errors]
    rank = spearman([step.seconds for step in steps], made)
    summary = f"mean {statistics.mean(sizes):.1%}, worst {max(sizes):.1%}, Spearman {rank:.3f}"
    return rows, f"{len(rows)} steps: {summary}"


def _with_error(name: str, how: str, published: float, made: float) -> list[str]:
    return [name, how, f"{published:.3f}", f"{made:.3f}", f"{made / published - 1:+.1%}"]


if __name__ == "__main__":
    print(header("Steps of training beside published measurements"))
    tables = [("2104.04473, table 1", ptdp(), "a100"), ("2205.05198, table 5", recomputed(), "a100")]
    tables += [("2104.04473, table 2", beside_zero(), "a100"), ("DLPerf, GPT", dlperf(), "v100")]
    for title, steps, preset in tables:
        rows, summary = compared(steps, half_precision(preset))
        print(f"{title}\n")
        print(table(["model", "configuration", "published, s", "simulated, s", "error"], rows))
        print(f"{summary}\n")
    print("2104.04473, table 2: ZeRO-3 as DeepSpeed 0.3.14 ran it\n")
    machine = half_precision("a100")
    zero = [step for step in beside_zero() if step.zero]
    rows = [[step.name, str(step.data), step.seconds, as_deepspeed(step, machine)] for step in zero]
    print(table(["model", "GPUs", "published, s", "simulated, s", "error"], [_with_error(*row) for row in rows]))
    for others, scripted in (("all others", False), ("those that its scripts could run", True)):
        print(f"2104.04473, table 1: the choices beside {others}\n")
        found = list(ranked(ptdp(), half_precision("a100"), scripted))
        print(table(["model", "published choice", "place", "time over the fastest", "fastest"], found))
