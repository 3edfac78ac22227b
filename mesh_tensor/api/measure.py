"""Machine.measure: what operators and changes of layout take on this machine, as a virtual mesh runs them.

Every operator runs in chains of two lengths, so that what a call takes beside its steps falls out of the difference.
What counts is CPU time, and the least of several runs: others may be using the machine.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from tvm import ir, relax

from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.runtime.virtual.mesh_tensor import distribute

from .module import distribute_module

Shapes = Sequence[tuple[int, ...]]
Emit = Callable[..., relax.Expr]

_SHORT, _LONG = 2, 10  # steps of a chain
_ops = relax.op


@dataclass(frozen=True)
class _Probe:
    """An operator on its own result, and on other operands; `shapes` of all, by the length of a side."""

    name: str
    emit: Emit
    shapes: Callable[[int], Shapes] = lambda side: [(side, side)]


def _row(side: int) -> Shapes:
    return [(side, side), (side,), (side,)]


def _two(side: int) -> Shapes:
    return [(side, side), (side, side)]


_PROBES = (
    _Probe("elementwise", lambda x: _ops.nn.relu(x)),
    _Probe("add", lambda x, y: _ops.add(x, y), _two),
    _Probe("multiply", lambda x, y: _ops.multiply(x, y), _two),
    _Probe("exp", lambda x: _ops.exp(x)),
    _Probe("tanh", lambda x: _ops.tanh(x)),
    _Probe("sigmoid", lambda x: _ops.sigmoid(x)),
    _Probe("power", lambda x, y: _ops.power(x, y), _two),
    _Probe("divide", lambda x, y: _ops.divide(x, y), _two),
    _Probe("nn.gelu", lambda x: _ops.nn.gelu(x)),
    _Probe("nn.gelu_tanh", lambda x: _ops.nn.gelu_tanh(x)),
    _Probe("nn.silu", lambda x: _ops.nn.silu(x)),
    _Probe("reduce", lambda x: _ops.nn.softmax(x, -1)),
    _Probe("nn.layer_norm", lambda x, g, b: _ops.nn.layer_norm(x, g, b, [1]), _row),
    _Probe("nn.rms_norm", lambda x, g, b: _ops.nn.rms_norm(x, g, [1]), _row),
    _Probe("move", lambda x: _ops.flip(x, 0)),
    _Probe("take", lambda x: _ops.take(x, relax.const(list(range(8)) * 8, "int64"), 0), lambda side: [(64, side * 4)]),
)
_SIDES = (16, 256, 1024)  # 1 KiB, 256 KiB and 4 MiB of float32


def measure(seconds: float) -> Machine:
    """This machine, as `Machine.measure` says."""
    end = time.monotonic() + seconds
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return _measured(end)
    finally:
        torch.set_num_threads(threads)


def _measured(end: float) -> Machine:
    first = _PROBES[0]
    sides = (256, 512, 1024, 2048)
    launch, call = _step_time(first, 16)
    levels = [Memory(*_level(first, side, launch)) for side in sides]
    flops = {dtype: _product_rate(dtype) for dtype in ("float32", "float64", "bfloat16", "float16")}
    link = _link()
    machine = Machine(
        f"virtual mesh on {os.cpu_count()} processors",
        flops,
        _growing(levels),
        (link,),
        launch=launch,
        call=call,
        busy=1.0,
        processors=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        classes={},
        sources={"all": f"mt.Machine.measure() on {time.strftime('%Y-%m-%d')}, CPU time"},
    )
    classes = {"product": _product_class(machine), "view": Roofline(start=launch), "kernel": Roofline()}
    for probe in _PROBES:
        if time.monotonic() < end:
            classes[probe.name] = _class(probe, machine)
    return Machine(**{**vars(machine), "classes": classes})


def _step_time(probe: _Probe, side: int, dtype: str = "float32") -> tuple[float, float]:
    """Seconds of a step, and of a call beside its steps."""
    shapes = probe.shapes(side)
    tensors = [torch.rand(shape).to(getattr(torch, dtype)) * 0.5 + 0.5 for shape in shapes]
    times = []
    for count in (_SHORT, _LONG):
        run = distribute_module(_chain(probe, shapes, dtype, count), {"x": 1}, target="c")
        times.append(_least(partial(run, *tensors)))
    step = max(1e-9, (times[1] - times[0]) / (_LONG - _SHORT))
    return step, max(0.0, times[0] - _SHORT * step)


def _chain(probe: _Probe, shapes: Shapes, dtype: str, count: int) -> ir.IRModule:
    """A function that applies the operator `count` times."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorStructInfo(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            value = params[0]
            for _ in range(count):
                value = builder.emit(probe.emit(value, *params[1:]))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def _least(run: Callable[[], object], budget: float = 0.04) -> float:
    """The least CPU time of several runs."""
    run()
    least, spent, runs = math.inf, 0.0, 0
    while runs < 5 or (spent < budget and runs < 200):
        start = time.process_time()
        run()
        took = time.process_time() - start
        least, spent, runs = min(least, took), spent + took, runs + 1
    return least


def _level(probe: _Probe, side: int, launch: float) -> tuple[int, float]:
    """The bytes that an element-wise operator touches, and at which rate."""
    nbytes = 8 * side * side
    return 2 * nbytes, nbytes / max(1e-9, _step_time(probe, side)[0] - launch)


def _growing(levels: Sequence[Memory]) -> tuple[Memory, ...]:
    """The last level is all of the memory; no level is faster than a nearer one."""
    rates = [min(level.rate for level in levels[: i + 1]) for i in range(len(levels))]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 2**34
    sizes = [*(level.size for level in levels[:-1]), max(memory, 2 * levels[-1].size)]
    return tuple(Memory(size, rate) for size, rate in zip(sizes, rates, strict=True))


def _product(side: int) -> _Probe:
    return _Probe("matmul", lambda x, y: _ops.matmul(x, y), lambda _: _two(side))


def _product_rate(dtype: str) -> float:
    side = 256 if dtype == "float16" else 512
    return 2 * side**3 / _step_time(_product(side), side, dtype)[0]


def _product_class(machine: Machine) -> Roofline:
    """What small products take beside their operations."""
    step = _step_time(_product(64), 64)[0]
    return Roofline(start=max(0.0, step - machine.launch - 2 * 64**3 / machine.peak("float32")))


def _class(probe: _Probe, machine: Machine) -> Roofline:
    """Its start from a small call, its share of the memory's rate from larger ones."""
    start = max(0.0, _step_time(probe, _SIDES[0])[0] - machine.launch)
    shares = []
    for side in _SIDES[1:]:
        shapes = probe.shapes(side)
        nbytes = 4 * (sum(math.prod(shape) for shape in shapes) + math.prod(shapes[0]))
        work = max(1e-9, _step_time(probe, side)[0] - machine.launch - start)
        shares.append(nbytes / machine.memory_rate(nbytes) / work)
    return Roofline(start=start, memory=math.prod(shares) ** (1 / len(shares)))


def _link() -> Link:
    """Changes of layout on a virtual mesh of two: what one takes without bytes, and per byte; per device."""
    mesh, times = Mesh({"x": 2}), {}
    for side in (16, 1024):
        tensor = distribute(torch.rand(side, side), mesh, {"x": 0})
        ways = [_least(partial(tensor.redistribute, to)) for to in ({}, {"x": 1})]
        times[side] = sum(ways) / len(ways) / mesh.num_devices
    received = 4 * 1024 * 1024 * 3 / 8  # the mean of a half and a quarter of the tensor
    return Link("memory", None, rate=received / max(1e-9, times[1024] - times[16]), start=times[16])


Machine._measure = staticmethod(measure)
