"""How true simulations are: programs that run here, beside what is simulated for the machine as it was measured on
other shapes. What counts is CPU time, of which others on this machine take none; but they share its caches, memory and
clocks. So the machine is measured before and after every round of all programs: a round's least times stand beside what
is simulated in the mean of both machines, and the median of the rounds' ratios counts.

Memory is what torch allocates on one device, beside the program's inputs.

With `--ranks`: two gloo ranks, with a core each, beside the machine as one of them has it. What a call takes there, and
what exchanges take, is measured with other programs and tensors. All of it is a rank's CPU time: it sends and receives
in it, but does not wait for the other one.

python -m benchmarks.bench_simulator
python -m benchmarks.bench_simulator --ranks
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.models import convnet, gpt2, llama, mlp
from kernels.softmax import softmax
from mesh_tensor.api.probe_models import activations
from mesh_tensor.base.machine import Link

from ._ranks import alone, on_ranks
from ._timing import header, table


@dataclass(frozen=True)
class Case:
    """A program and its arguments."""

    name: str
    run: Any
    arguments: tuple[torch.Tensor, ...]


class _Loss(nn.Module):
    """A model's cross entropy against labels, or its squared distance from targets."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        """One number."""
        y = self.model(x)
        if wanted.dtype.is_floating_point:
            return ((y - wanted) ** 2).mean()
        return F.cross_entropy(y.reshape(-1, y.shape[-1]), wanted.reshape(-1))


def models() -> Iterator[tuple[str, Callable[[], nn.Module], torch.Tensor, torch.Tensor]]:
    """Name, model, input and what is wanted of it."""
    for batch, width, hidden in ((64, 128, 512), (256, 256, 1024), (512, 512, 2048)):
        config = mlp.Config(batch, width, hidden)
        x = torch.randn(batch, width)
        yield f"mlp {batch} x {width} x {hidden}", lambda c=config: mlp.build(c), x, torch.randn(batch, width)
    for batch, positions, width, layers in ((4, 32, 64, 2), (4, 64, 128, 2), (8, 64, 256, 2), (4, 128, 256, 3)):
        config = gpt2.Config(512, width, 4, layers, batch, positions)
        tokens = torch.randint(512, (batch, positions))
        name = f"gpt {batch} x {positions} x {width}, {layers} layers"
        yield name, lambda c=config: gpt2.build(c), tokens, torch.randint(512, (batch, positions))
    for batch, positions, width in ((4, 32, 64), (4, 64, 128)):
        config = llama.Config(512, width, 2 * width, 8, 4, 2, batch, positions)
        tokens = torch.randint(512, (batch, positions))
        name = f"llama {batch} x {positions} x {width}"
        yield name, lambda c=config: llama.build(c), tokens, torch.randint(512, (batch, positions))
    for batch, size, width in ((4, 16, 16), (8, 32, 16)):
        config = convnet.Config(batch, 3, size, width)
        images = torch.randn(batch, 3, size, size)
        yield f"convnet {batch} x {size} x {width}", lambda c=config: convnet.build(c), images, torch.zeros(0)


def cases(devices: tuple[int, ...]) -> Iterator[Case]:
    """All programs, one after the other."""
    for name, build, x, wanted in models():
        model = build()
        for kind, module, arguments in _steps(model, x, wanted):
            first = module.mod["main"].params[0].name_hint
            for count in devices:
                layouts = {first: {"x": 0}} if count > 1 else {}
                run = mt.distribute_module(module.mod, {"x": count}, layouts, weights=module.params)
                yield Case(f"{name}, {kind}, {count} devices", run, arguments)
    for size in (256, 512, 1024):
        for count in devices:
            func = mt.annotate(matmul(size, size, size), mt.Mesh({"x": count}), {"A": {"x": 0}, "C": {"x": 0}})
            a, b = torch.randn(size, size), torch.randn(size, size)
            yield Case(f"matmul kernel {size}, {count} devices", mt.compile(func, target="c"), (a, b))
    for count in devices:
        func = mt.annotate(softmax(1024, 1024), mt.Mesh({"x": count}), {"X": {"x": 0}, "Y": {"x": 0}})
        yield Case(f"softmax kernel, {count} devices", mt.compile(func, target="c"), (torch.randn(1024, 1024),))


def cpu_seconds(run: Callable[[], object], budget: float = 0.4) -> float:
    """The least CPU time of several runs, of all threads."""
    run()
    times: list[float] = []
    while len(times) < 5 or (sum(times) < budget and len(times) < 100):
        start = time.process_time()
        run()
        times.append(time.process_time() - start)
    return min(times)


def spearman(xs: list[float], ys: list[float]) -> float:
    """The correlation of ranks."""
    ranks = [[sorted(values).index(value) for value in values] for values in (xs, ys)]
    return statistics.correlation(*ranks)


def allocated(run: Callable[[], object]) -> int:
    """The most bytes that torch has allocated at once during a run, beside what was there before."""
    run()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as made:
        run()
    sizes = [event.nbytes() for event in made.profiler.kineto_results.events() if event.name() == "[memory]"]
    return max(accumulate(sizes, initial=0))


def memory(case: Case, simulated: int) -> str:
    """A case's allocated bytes and inputs, and the simulated bytes over them."""
    program = case.run.program
    taken = allocated(lambda: case.run(*case.arguments))
    taken += sum(program.stored[storage].tile_bytes for storage in program.inputs)
    return f"{taken:,} ({simulated / taken:.2f})"


def measured_machine() -> mt.Machine:
    """This machine, as CPU time sees it: that of all devices, one after the other."""
    return replace(mt.Machine.measure(300.0), processors=1)  # the machine may be busy: nothing is left out


def main(devices: tuple[int, ...], rounds: int) -> None:
    """The table, and how far off it is."""
    everything = list(cases(devices))
    machines = [measured_machine()]
    measured: list[list[float]] = [[] for _ in everything]
    for _ in range(rounds):  # what others do to caches and clocks changes: machine and programs are measured in turns
        for case, times in zip(everything, measured, strict=True):
            times.append(cpu_seconds(lambda case=case: case.run(*case.arguments), 0.2))
        machines.append(measured_machine())
    print(*machines, sep="\n\n", end="\n\n")
    rows, ratios, took, simulated = [], [], [], []
    for case, times in zip(everything, measured, strict=True):
        made = [mt.simulate(case.run, machine) for machine in machines]
        between = [(first.time + second.time) / 2 for first, second in pairwise(made)]
        took.append(statistics.median(times))
        simulated.append(statistics.median(between))
        ratios.append(statistics.median(each / time for each, time in zip(between, times, strict=True)))
        bytes_ = memory(case, made[0].peak_bytes) if case.run.program.mesh.num_devices == 1 else ""
        rows.append([case.name, f"{took[-1] * 1e3:.3f}", f"{simulated[-1] * 1e3:.3f}", f"{ratios[-1]:.2f}", bytes_])
    print(table(["program", "measured, ms of CPU", "simulated, ms", "ratio", "bytes (simulated over them)"], rows))
    print(summary(took, simulated, ratios))


def summary(took: list[float], simulated: list[float], ratios: list[float] | None = None) -> str:
    """How far off simulations are; `ratios` are those of their times, if they are not of one round each."""
    ratios = ratios or [made / time for made, time in zip(simulated, took, strict=True)]
    errors = [abs(ratio - 1) for ratio in ratios]
    return (
        f"{len(ratios)} programs: MAPE {statistics.mean(errors):.1%}, median {statistics.median(errors):.1%}, "
        f"worst {max(errors):.0%}, Spearman {spearman(took, simulated):.3f}"
    )


_SENT = 16, 512  # sides of tensors that ranks reduce to know their link
_LINK = "gloo"


def on_two_ranks(calls: int) -> list[tuple[str, float, float]]:
    """On each of two ranks: name, measured and simulated seconds of every program, with rows or weights split."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    (machine,) = _all_have(alone(mt.Machine.measure)(60.0))
    torch.manual_seed(0)  # one rank has drawn numbers
    machine = replace(machine, processors=None, call=0.0)
    machine = replace(machine, links=(_measured_link(mesh, machine, calls),))
    machine = replace(machine, result=_measured_result(mesh, calls))
    machine = replace(machine, call=_measured_call(mesh, machine, calls))
    found = []
    for name, run, arguments in _rank_cases(mesh):
        took = rank_seconds(lambda run=run, arguments=arguments: run(*arguments), calls)
        found.append((name, took, mt.simulate(run, machine).time))
    return found


def _rank_cases(mesh: Any) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """Perceptrons, GPTs and LLaMAs, forwards and with gradients: rows split, and the first kind's weights, too."""
    for name, build, x, wanted in models():
        if not wanted.numel():
            continue
        model = build()
        for kind, module, arguments in _steps(model, x, wanted):
            params = [param.name_hint for param in module.mod["main"].params][: len(arguments)]
            layouts = [("rows", dict.fromkeys(params, {"x": 0}))]
            if kind == "forward":
                layouts.append(("weights", mt.strategies.tensor_parallel(module, "x")))
            for what, layout in layouts:
                run = mt.distribute_module(module.mod, mesh, layout, weights=module.params)
                split = Shard(0) if what == "rows" else Replicate()
                yield f"{name}, {kind}, {what}", run, tuple(_shared(each, mesh, split) for each in arguments)


def _steps(model: nn.Module, x: torch.Tensor, wanted: torch.Tensor) -> Iterator[tuple[str, Any, tuple[Any, ...]]]:
    """A model as it runs, and with its gradients where there is something wanted of it."""
    yield "forward", mt.from_torch(torch.export.export(model, (x,)), check=False), (x,)
    if wanted.numel():
        loss = mt.from_torch(torch.export.export(_Loss(model), (x, wanted)), check=False)
        yield "training", mt.gradient(loss), (x, wanted)


def _shared(tensor: torch.Tensor, mesh: Any, placement: Any) -> DTensor:
    """A tensor that both ranks have, as DTensor."""
    own = tensor.chunk(2)[dist.get_rank()].contiguous() if placement.is_shard() else tensor
    return DTensor.from_local(own, mesh, [placement], run_check=False)


def rank_seconds(run: Callable[[], object], calls: int) -> float:
    """The least CPU time of so many calls, which both ranks begin together; the mean of both."""
    took = math.inf
    for number in range(calls + 1):
        dist.barrier()
        start = time.process_time()
        run()
        took = min(took, time.process_time() - start) if number else took
    return statistics.mean(_all_have(took))


def _all_have(given: Any) -> list[Any]:
    """What every rank has that has something."""
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, given)
    return [each for each in found if each is not None]


def _measured_link(mesh: Any, machine: mt.Machine, calls: int) -> Link:
    """What a reduction takes between the ranks, without bytes and per byte: what layers that sum over split features
    take beside what they compute, in chains of two lengths."""
    nothing = replace(machine, links=(Link(_LINK, None, rate=1e18, start=0.0),))
    took, received = list[float](), list[float]()
    for side in _SENT:
        x, beside, nbytes = torch.randn(side, side), list[float](), list[int]()
        for count in (2, 10):
            model = nn.Sequential(*[nn.Linear(side, side, bias=False) for _ in range(count)])
            module = mt.from_torch(torch.export.export(model, (x,)), check=False)
            layouts = {name: {"x": 1} for name in module.params}
            run = mt.distribute_module(module.mod, mesh, layouts, weights=module.params)
            shared = _shared(x, mesh, Replicate())
            beside.append(rank_seconds(lambda run=run, x=shared: run(x), calls) - mt.simulate(run, nothing).time)
            nbytes.append(sum(step.bytes for step in run.program.steps))
        took.append((beside[1] - beside[0]) / 8)
        received.append((nbytes[1] - nbytes[0]) / 8)
    rate = (received[1] - received[0]) / max(1e-9, took[1] - took[0])
    return Link(_LINK, None, rate, start=max(0.0, took[0]))


def _measured_result(mesh: Any, calls: int) -> float:
    """What a rank takes to hand on a result as a DTensor."""
    shared = _shared(torch.rand(16, 16), mesh, Shard(0))
    runs = [mt.distribute_module(activations(16, 16, 32, count), mesh, {"x": {"x": 0}}) for count in (1, 32)]
    few, many = (rank_seconds(lambda run=run: run(shared), calls) for run in runs)
    return max(0.0, many - few) / 31


def _measured_call(mesh: Any, machine: mt.Machine, calls: int) -> float:
    """What a call takes on ranks beside its steps: that of a small program whose rows are split, so that nothing is
    sent."""
    model, x = mlp.build(mlp.Config(8, 16, 16)), torch.randn(8, 16)
    module = mt.from_torch(torch.export.export(model, (x,)), check=False)
    run = mt.distribute_module(module.mod, mesh, {"x": {"x": 0}}, weights=module.params)
    shared = _shared(x, mesh, Shard(0))
    return max(0.0, rank_seconds(lambda: run(shared), calls) - mt.simulate(run, machine).time)


def beside_ranks(calls: int) -> None:
    """The table of programs on two ranks."""
    found = on_ranks(on_two_ranks, calls)
    rows = [[name, f"{took * 1e3:.3f}", f"{made * 1e3:.3f}", f"{made / took:.2f}"] for name, took, made in found]
    print(table(["program on two ranks", "measured, ms of CPU", "simulated, ms", "ratio"], rows))
    print(summary([took for _, took, _ in found], [made for *_, made in found]))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--ranks", action="store_true")
    options = parser.parse_args()
    print(header("Simulations beside what they simulate"))
    torch.set_num_threads(1)
    if options.ranks:
        beside_ranks(10 * options.rounds)
    else:
        main(tuple(options.devices), options.rounds)
