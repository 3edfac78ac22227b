"""Machine.measure: what operators, kernels and changes of layout take on this machine, as a virtual mesh runs them.

Every operator runs in chains of two lengths, so that what a call takes beside its steps falls out of the difference.
What counts is CPU time, and the least of several runs: others may be using the machine. All chains are gone through
several times, so that no class is measured only while others are.
"""

from __future__ import annotations

import math
import os
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch.backends import mkldnn
from tvm import ir

from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.kernel.cost import loaded_again, loaded_bytes
from mesh_tensor.runtime.virtual.mesh_tensor import distribute
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.pipelines import simulate_pipeline

from .module import distribute_module
from .pipeline import pipeline
from .probe_models import (
    activations,
    block,
    kernel_rate,
    perceptrons,
    product_kernel,
    row_kernel,
    this_processor,
    timed_kernel,
    with_kernel,
)
from .probes import LINEAR, PROBES, PRODUCT, SIDES, Chain, Probe, least

_LARGEST = 1 << 22  # elements: freeing that much once, the C library keeps what is freed later
_MEMORY = (256, 512, 1024, 2048)  # sides of what is read and written: 256 KiB to 16 MiB each
_DTYPES = {"float32": 512, "float64": 512, "bfloat16": 512, "float16": 256}  # with sides of products
_PRODUCTS = (48, 96, 192, 384, 768)  # sides of those in models
_MOVED = (16, 1024)  # sides of tensors whose layout changes
_NEAR, _FAR, _ROWS = 192, 896, 512  # sides of kernels' matrices: the nearest memory holds those of the first product
_BESIDE = 1 << 20  # numbers that are read and written between blocks: more than caches of a core hold
_ROUNDS, _ROUND = 3, 0.02  # how often chains are gone through, and seconds of each
_CHANNELS = {"AVX512": 16}  # in a block of oneDNN's layouts, by what vectors there are
_FAST = 1e9  # a share of the rates at which what is copied takes nothing
_LONGER = 8  # how much longer models are run


def measure(seconds: float) -> Machine:
    """This machine, as `Machine.measure` says."""
    start, spent = time.monotonic(), time.process_time()
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.ones(_LARGEST)
    try:
        machine = _measured(start + seconds)
    finally:
        torch.set_num_threads(threads)
    if "classes" in machine.sources:
        share = (time.process_time() - spent) / (time.monotonic() - start)
        warnings.warn(
            f"Machine.measure({seconds:g}): {machine.sources['classes']}; these are simulated at the rates of"
            f" operations and memory alone. A core worked for this process {min(1.0, share):.0%} of the time: measure"
            " for longer, or when less else is running",
            stacklevel=3,
        )
    return machine


def _measured(end: float) -> Machine:
    one = PROBES[0]
    small, memory = Chain(one, SIDES[0]), {side: Chain(one, side) for side in _MEMORY}
    rates = {dtype: Chain(PRODUCT, side, dtype) for dtype, side in _DTYPES.items()}
    products = {side: Chain(LINEAR, side) for side in _PRODUCTS}
    moved = [_Changes(side) for side in _MOVED]
    models = _models()
    chains: dict[str, dict[int, Chain]] = {}
    made_until = end - 0.4 * (end - time.monotonic())
    for probe in PROBES:
        if time.monotonic() < made_until:
            chains[probe.name] = {side: Chain(probe, side).run(_ROUND) for side in probe.sides}
    needed: tuple[Chain | _Changes | _Model, ...] = (small, *memory.values(), *rates.values(), *products.values())
    needed = (*needed, *moved, *models.values())
    for number in range(_ROUNDS):
        for chain in (*needed, *(chain for sides in chains.values() for chain in sides.values())):
            if number == 0 or time.monotonic() < end or chain in needed:
                chain.run(_ROUND)
    launch = small.step
    machine = Machine(
        f"virtual mesh on {os.cpu_count()} processors",
        {dtype: 2 * _DTYPES[dtype] ** 3 / chain.step for dtype, chain in rates.items()},
        _memory(memory, launch),
        (_link(*moved),),
        launch=launch,
        call=small.call,
        busy=1.0,
        channel_block=_CHANNELS.get(torch.backends.cpu.get_cpu_capability(), 8) if mkldnn.is_available() else None,
        processor=this_processor(),
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        sources={"all": f"mt.Machine.measure() on {time.strftime('%Y-%m-%d')}, CPU time"},
    )
    classes = {"product": _product_class(products, machine), **_kernel_classes(machine)}
    for probe in PROBES:
        if {probe.name, *probe.beside} <= chains.keys():
            classes[probe.name] = _class(probe, chains, replace(machine, classes=classes))
    if late := [probe.name for probe in PROBES if probe.name not in classes]:
        words = f"not measured, out of time: {', '.join(late)}"
        machine = replace(machine, sources={**machine.sources, "classes": words})
    view = Roofline(start=launch + classes["view"].start if "view" in classes else launch)
    return _as_in_programs(replace(machine, classes={**classes, "view": view}), models)


class _Model:
    """A model on so many devices, which split its first parameter: the least that a run took so far, each after
    `before`, which doesn't count."""

    def __init__(self, mod: ir.IRModule, devices: int = 1, before: Callable[[], object] | None = None) -> None:
        layouts = {"x": {"x": 0}} if devices > 1 else {}
        self.module = distribute_module(mod, {"x": devices}, layouts, target="c")
        tensors = [torch.rand(tuple(map(int, p.struct_info.shape))) - 0.5 for p in mod["main"].params]
        self._run, self._before, self.took = partial(self.module, *tensors), before, math.inf

    def run(self, budget: float) -> None:
        """Run it again; what takes longer than a chain does, for longer."""
        self.took = min(self.took, least(self._run, _LONGER * budget, self._before))

    def simulated(self, machine: Machine) -> float:
        """What a run would take."""
        return Simulation(self.module.program, machine).time


def _models() -> dict[str, _Model]:
    """What is run in the rounds of the chains, since it is compared with them."""
    return {
        "blocks": _Model(block(8, 16, 8)),
        "cold blocks": _Model(block(8, 16, 8), before=partial(torch.relu, torch.rand(_BESIDE))),
        "one result": _Model(activations(16, 16, 32, 1), 2),
        "results": _Model(activations(16, 16, 32, 32), 2),
        "two devices": _Model(block(16, 16, 8), 2),
        "four devices": _Model(block(16, 16, 8), 4),
    }


def _as_in_programs(machine: Machine, models: Mapping[str, _Model]) -> Machine:
    """Steps of a program are all different: beside their work, they take more than those of a chain of equal ones."""
    blocks = models["blocks"]
    beside = max(0.0, blocks.took - blocks.simulated(machine)) / len(blocks.module.program.ops)
    longer = (machine.launch + beside) / machine.launch
    classes = {name: replace(each, start=each.start * longer) for name, each in machine.classes.items()}
    result = max(0.0, models["results"].took - models["one result"].took) / 31 / 2  # each has two parts
    machine = replace(machine, launch=machine.launch + beside, classes=classes, result=result)
    return _in_turns(replace(machine, cold_start=_cold(models)), models)


def _cold(models: Mapping[str, _Model]) -> float:
    """What a call, and the first step of every operator in it, take more after something large."""
    cold, warm = models["cold blocks"], models["blocks"]
    return max(0.0, cold.took - warm.took) / (1 + len({step.call.operator for step in warm.module.program.ops}))


def _in_turns(machine: Machine, models: Mapping[str, _Model]) -> Machine:
    """One device runs a program's operators as one function; several go through its steps, each device in turn. What a
    step then takes, and what it takes to start a call, is what the same model takes on two and on four devices."""
    alone, rows = replace(machine, processors=1, turn=0.0, start=0.0), []
    for model in (models["two devices"], models["four devices"]):
        made = model.simulated(alone)
        turns = model.simulated(replace(alone, turn=1.0)) - made
        starts = model.simulated(replace(alone, start=1.0)) - made
        rows.append((turns, starts, max(0.0, model.took - made)))
    (turns, two, first), (_, four, second) = rows
    start = max(1.0, (second - first) / max(1e-9, four - two))
    turn = max(0.0, (first - start * two) / max(1.0, turns))
    return _in_actions(replace(machine, start=start, turn=turn, apart=_apart(replace(alone, start=start, turn=turn))))


def _apart(machine: Machine) -> float:
    """What handing a step to another processor takes: a kernel's rows on two devices more than on one."""
    side, rows = 384, {"A": {"x": 0}, "C": {"x": 0}}
    a = torch.rand(side, side)
    alone, both = (timed_kernel(product_kernel(side), rows, a, a, devices=devices) for devices in (1, 2))
    made = [Simulation(run.program, machine).time for run, _ in (alone, both)]
    return max(0.0, (both[1] - alone[1]) - (made[1] - made[0]))


def _in_actions(machine: Machine) -> Machine:
    """What a small model's training takes as a pipeline beside what its fragments and transfers do, per action."""
    machine = replace(machine, value=_value())
    mod, weights = perceptrons(8, 32, 8)
    meshes = {"first": {"x": 1}, "second": {"x": 1}}
    run = pipeline(mod, meshes, 2, microbatches=4, train=True, reduction="sum", weights=weights, target="c")
    took = least(partial(run, torch.rand(4 * 8, 32)), 0.4)
    actions = sum(map(len, run.schedule.rows))
    made = simulate_pipeline(run, replace(machine, processors=1), Simulation).time
    return replace(machine, action=max(0.0, took - made) / actions)


def _value() -> float:
    """What it takes to hand over a value as it lies on a mesh, to a fragment or from it: as many operators take that of
    many values more than that of one."""
    taken, counts, took = distribute(torch.rand(16, 16), Mesh({"x": 1}), {}), (1, 32), [math.inf, math.inf]
    runs = [distribute_module(activations(16, 16, 32, count, count), {"x": 1}, target="c") for count in counts]
    for _ in range(_ROUNDS):
        for place, (run, count) in enumerate(zip(runs, counts, strict=True)):
            took[place] = min(took[place], least(partial(run.call_tiles, [taken] * count, {})))
    return max(0.0, took[1] - took[0]) / 62


def _memory(chains: Mapping[int, Chain], launch: float) -> tuple[Memory, ...]:
    """Rates by the bytes that an element-wise operator touches: those of its caches, and of what lies behind them."""
    levels, rate = [], math.inf
    for side, chain in chains.items():
        nbytes = 8 * side * side
        rate = min(rate, nbytes / max(1e-9, chain.step - launch))
        levels.append(Memory(2 * nbytes, rate))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    return (*levels[:-1], Memory(max(whole, 2 * levels[-1].size), rate))


def _product_class(chains: Mapping[int, Chain], machine: Machine) -> Roofline:
    """What small products take beside their operations, and what they reach of the rate of large ones."""
    peak = machine.peak("float32")
    start, share, _ = _fitted([(2 * side**3 / peak, chain.step) for side, chain in chains.items()], machine.launch)
    return Roofline(start, flops=share)


def _kernel_classes(machine: Machine) -> dict[str, Roofline]:
    """What TileLang kernels reach as this project compiles them for a CPU: products, whose blocks are loaded again and
    again, and rows, which are bound by what they compute, too."""
    rows = kernel_rate(row_kernel(_ROWS), machine.call, torch.rand(_ROWS, _ROWS)) / machine.peak("float32")
    near, far = (_product(side, machine) for side in (_NEAR, _FAR))
    return {"kernel": blocks_class(near, far), "kernel rows": Roofline(flops=rows)}


def _product(side: int, machine: Machine) -> tuple[float, float, float]:
    """Seconds of a product of blocks: what its operations and what it loads again take at the machine's rates, and what
    it took."""
    func, a = product_kernel(side), torch.rand(side, side)
    run, took = timed_kernel(func, {}, a, a)
    nbytes, (step,) = 4 * side * side, run.program.kernels
    again, between = loaded_again(loaded_bytes(step.func), [nbytes] * 3)
    return step.flops / machine.peak("float32"), again / machine.memory_rate(between), max(1e-9, took - machine.call)


def blocks_class(near: tuple[float, float, float], far: tuple[float, float, float]) -> Roofline:
    """The shares of the rates that two products reach, as `_product` has them, of which the nearest memory holds what
    the first one touches."""
    (computed, _, took), (work, again, longer) = near, far
    beside = longer - work * took / computed
    return Roofline(flops=computed / took, again=again / beside if beside > 0 else 0.0)


def _class(probe: Probe, chains: Mapping[str, Mapping[int, Chain]], machine: Machine) -> Roofline:
    """What a call takes beside its work, and what share of the rates that reaches: of the memory's, or, where that
    tells less of how it grows, of the operations', of which there is one per element."""
    by_flops, by_bytes, copies = [], [], []
    for side, chain in chains[probe.name].items():
        beside = sum(chains[other][side].step for other in probe.beside)
        if probe.reduced:
            beside += machine.work(probe.reduced(side), 0, "float32", "reduce").flops
        step = max(1e-9, chain.step - beside)
        shapes = probe.shapes(side)
        nbytes = 4 * (sum(math.prod(shape) for shape in shapes) + math.prod(shapes[0])) * probe.times
        elements = max(math.prod(shape) for shape in shapes) * probe.times
        by_bytes.append((nbytes / machine.memory_rate(nbytes), step))
        by_flops.append(((probe.flops(side) if probe.flops else elements) / machine.peak("float32"), step))
        copied = probe.copied(side) if probe.copied else 0
        copies.append(copied / machine.memory_rate(copied))
    if probe.copied:
        return _beside_copies(by_flops, copies, machine.launch)
    (start, flops, off), (other, memory, worse) = (_fitted(rows, machine.launch) for rows in (by_flops, by_bytes))
    if probe.flops or (memory < 1 and off < worse):
        return Roofline(start, flops=flops)
    return Roofline(other, memory=memory)


def _fitted(rows: Sequence[tuple[float, float]], launch: float) -> tuple[float, float, float]:
    """A start, from 0 up, and a share of the rates, of rows of seconds: what the work takes at the rates, and what a
    step took, in which a launch is. The squares of relative errors are least; and what their sum is."""
    aa, ab, bb, ac, bc = (
        sum(x * y for x, y in each)
        for each in zip(*[_terms(work / step, 1 / step, 1 - launch / step) for work, step in rows], strict=True)
    )
    determinant = aa * bb - ab * ab
    start = (aa * bc - ab * ac) / determinant if determinant else 0.0
    slope = (bb * ac - ab * bc) / determinant if determinant else 0.0
    if start < 0 or slope <= 0:
        start, slope = 0.0, ac / aa
    if slope <= 0:  # all of it is the launch
        slope = 1.0
    return start, 1 / slope, sum(((launch + start + slope * work) / step - 1) ** 2 for work, step in rows)


def _beside_copies(rows: Sequence[tuple[float, float]], copies: Sequence[float], launch: float) -> Roofline:
    """The class of rows of seconds, as `_fitted` has them, beside what copies take at the machine's rate, which nothing
    hides."""
    steps = np.array([step for _, step in rows])
    terms = np.array([(work, copy, 1.0) for (work, _), copy in zip(rows, copies, strict=True)]) / steps[:, None]
    used, found = [0, 1, 2], np.zeros(3)
    while True:
        found[used] = np.linalg.lstsq(terms[:, used], 1 - launch / steps, rcond=None)[0]
        below = [term for term in used if found[term] <= 0]
        if not below or len(used) == 1:
            break
        dropped = max(below) or used[-1]
        used.remove(dropped)
        found[dropped] = 0.0
    computing, copying, start = map(float, found)
    return Roofline(start, flops=1 / computing, again=1 / max(1 / _FAST, copying))


def _terms(work: float, one: float, took: float) -> tuple[tuple[float, float], ...]:
    """The products of a row's terms that normal equations are sums of."""
    return (work, work), (work, one), (one, one), (work, took), (one, took)


class _Changes:
    """Changes of layout on a virtual mesh of two, of a tensor of a side: the least that each took so far."""

    def __init__(self, side: int) -> None:
        tensor = distribute(torch.rand(side, side), Mesh({"x": 2}), {"x": 0})
        self._ways = {partial(tensor.redistribute, to): math.inf for to in ({}, {"x": 1})}

    def run(self, budget: float) -> None:
        """Change it again for so many seconds."""
        self._ways = {way: min(took, least(way, budget)) for way, took in self._ways.items()}

    @property
    def seconds(self) -> float:
        """Of a change, per device."""
        return sum(self._ways.values()) / len(self._ways) / 2


def _link(small: _Changes, large: _Changes) -> Link:
    """What a change of layout takes without bytes, and per byte; per device."""
    received = 4 * _MOVED[1] ** 2 * 3 / 8  # the mean of a half and a quarter of the tensor
    return Link("memory", None, rate=received / max(1e-9, large.seconds - small.seconds), start=small.seconds)


Machine._measure = staticmethod(measure)
Machine._with_kernel = staticmethod(with_kernel)
