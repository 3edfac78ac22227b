"""Machine.measure: what operators, kernels and changes of layout take on this machine, as a virtual mesh runs them.

Every operator runs in chains of two lengths, so that what a call takes beside its steps falls out of the difference.
What counts is CPU time, and the least of several runs: others may be using the machine.
"""

from __future__ import annotations

import math
import os
import statistics
import time
from dataclasses import replace
from functools import partial

import torch

from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.rules.operator.cost import class_of
from mesh_tensor.runtime.virtual.mesh_tensor import distribute
from mesh_tensor.simulation import Simulation

from .module import distribute_module
from .probes import (
    PROBES,
    SIDES,
    Probe,
    block,
    kernel_seconds,
    least,
    product,
    product_kernel,
    row_kernel,
    step_time,
)

_LARGEST = 1 << 22  # elements: freeing that much once, the C library keeps what is freed later


def measure(seconds: float) -> Machine:
    """This machine, as `Machine.measure` says."""
    end = time.monotonic() + seconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    torch.ones(_LARGEST)
    try:
        return _measured(end)
    finally:
        torch.set_num_threads(threads)


def _measured(end: float) -> Machine:
    small = [step_time(PROBES[0], SIDES[0]) for _ in range(4)]
    launch, call = (statistics.median(each) for each in zip(*small, strict=True))  # a difference may be far too small
    machine = Machine(
        f"virtual mesh on {os.cpu_count()} processors",
        {dtype: _product_rate(dtype) for dtype in ("float32", "float64", "bfloat16", "float16")},
        _memory(launch),
        (_link(),),
        launch=launch,
        call=call,
        busy=1.0,
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        sources={"all": f"mt.Machine.measure() on {time.strftime('%Y-%m-%d')}, CPU time"},
    )
    classes = {"product": _product_class(machine), "kernel": _kernel_class(machine)}
    for probe in PROBES:
        if time.monotonic() < end:
            classes[probe.name] = _class(probe, machine)
    if late := [probe.name for probe in PROBES if probe.name not in classes]:
        words = f"not measured, out of time: {', '.join(late)}"
        machine = replace(machine, sources={**machine.sources, "classes": words})
    return _as_in_programs(replace(machine, classes=classes))


def _as_in_programs(machine: Machine) -> Machine:
    """Steps of a program are all different: beside their work, they take more than those of a chain of equal ones.
    Views take as much beside theirs, which is nothing; and what starts other operators grows alike."""
    mod = block(8, 16, 8)
    run = distribute_module(mod, {"x": 1}, target="c")
    tensors = [torch.rand(tuple(map(int, p.struct_info.shape))) - 0.5 for p in mod["main"].params]
    took, made = least(partial(run, *tensors), 0.2), Simulation(run.program, machine)
    views = sum(1 for step in run.program.ops if class_of(step.call.name) == "view")
    took -= views * machine.launch
    launch = machine.launch + max(0.0, took - made.time) / len(run.program.ops)
    colder = launch / machine.launch
    classes = {name: replace(each, start=each.start * colder) for name, each in machine.classes.items()}
    return _in_turns(replace(machine, launch=launch, classes={**classes, "view": Roofline(start=launch)}))


def _in_turns(machine: Machine) -> Machine:
    """One device runs a program's operators as one function; several go through its steps, each device in turn. What a
    step then takes, and what it takes to start a call, is what the same model takes on two and on four devices."""
    alone, rows = replace(machine, processors=1, turn=0.0, start=0.0), []
    for devices in (2, 4):
        mod = block(16, 16, 8)
        run = distribute_module(mod, {"x": devices}, {"x": {"x": 0}}, target="c")
        tensors = [torch.rand(tuple(map(int, p.struct_info.shape))) - 0.5 for p in mod["main"].params]
        made = Simulation(run.program, alone).time
        turns = Simulation(run.program, replace(alone, turn=1.0)).time - made
        starts = Simulation(run.program, replace(alone, start=1.0)).time - made
        rows.append((turns, starts, max(0.0, least(partial(run, *tensors), 0.2) - made)))
    (turns, two, first), (_, four, second) = rows
    start = max(1.0, (second - first) / max(1e-9, four - two))
    return replace(machine, start=start, turn=max(0.0, (first - start * two) / max(1.0, turns)))


def _memory(launch: float) -> tuple[Memory, ...]:
    """Rates by the bytes that an element-wise operator touches: those of its caches, and of what lies behind them."""
    levels, rate = [], math.inf
    for side in (256, 512, 1024, 2048):
        nbytes = 8 * side * side
        rate = min(rate, nbytes / max(1e-9, step_time(PROBES[0], side)[0] - launch))
        levels.append(Memory(2 * nbytes, rate))
    whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    return (*levels[:-1], Memory(max(whole, 2 * levels[-1].size), rate))


def _product_rate(dtype: str) -> float:
    side = 256 if dtype == "float16" else 512
    return 2 * side**3 / step_time(product(side), side, dtype)[0]


def _product_class(machine: Machine) -> Roofline:
    """What small products take beside their operations."""
    step = step_time(product(64), 64)[0]
    return Roofline(start=max(0.0, step - machine.launch - 2 * 64**3 / machine.peak("float32")))


def _kernel_class(machine: Machine) -> Roofline:
    """What TileLang kernels reach as this project compiles them for a CPU: products, and rows."""
    side, a = 512, torch.rand(512, 512)
    products = kernel_seconds(product_kernel(side), a, a) - machine.call
    rows = kernel_seconds(row_kernel(side), a) - machine.call
    flops = 2 * side**3 / machine.peak("float32") / max(1e-9, products)
    return Roofline(flops=flops, memory=8 * side**2 / machine.memory_rate(8 * side**2) / max(1e-9, rows))


def _class(probe: Probe, machine: Machine) -> Roofline:
    """Its start from a small call, its share of the rates from larger ones."""
    start = max(0.0, step_time(probe, SIDES[0])[0] - machine.launch)
    shares = []
    for side in SIDES[1:]:
        work = max(1e-9, step_time(probe, side)[0] - machine.launch - start)
        if probe.flops is not None:
            shares.append(probe.flops(side) / machine.peak("float32") / work)
            continue
        shapes = probe.shapes(side)
        nbytes = 4 * (sum(math.prod(shape) for shape in shapes) + math.prod(shapes[0]))
        shares.append(nbytes / machine.memory_rate(nbytes) / work)
    share = math.prod(shares) ** (1 / len(shares))
    return Roofline(start, memory=share) if probe.flops is None else Roofline(start, flops=share)


def _link() -> Link:
    """Changes of layout on a virtual mesh of two: what one takes without bytes, and per byte; per device."""
    mesh, times = Mesh({"x": 2}), {}
    for side in (16, 1024):
        tensor = distribute(torch.rand(side, side), mesh, {"x": 0})
        ways = [least(partial(tensor.redistribute, to)) for to in ({}, {"x": 1})]
        times[side] = sum(ways) / len(ways) / mesh.num_devices
    received = 4 * 1024 * 1024 * 3 / 8  # the mean of a half and a quarter of the tensor
    return Link("memory", None, rate=received / max(1e-9, times[1024] - times[16]), start=times[16])


Machine._measure = staticmethod(measure)
