"""Machine.with_kernel: what share of a machine's rates a kernel reaches, measured here."""

from __future__ import annotations

import platform
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import torch
from tvm import tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine, Roofline
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.simulate import check_sizes_known
from mesh_tensor.targets.dtypes import torch_dtype

from .compile import MeshKernel, compile
from .probes import least

_SECONDS = 0.3  # for which a kernel is run
_FAST = 1e9  # a share of the rates at which work takes nothing


def with_kernel(machine: Machine, func: tirx.PrimFunc) -> Machine:
    """The machine, as `Machine.with_kernel` says."""
    if machine.processor != this_processor():
        refuse(
            f"a kernel that is measured on {this_processor()!r} says nothing of {machine.processor or 'another one'!r}",
            where=f"machine {machine.name!r}",
            why="its class would be a share of rates that nothing here has",
            fix="take mt.Machine.measure(), which is this one; a class of another one is stated: "
            "dataclasses.replace(machine, classes={**machine.classes, 'kernel NAME': Roofline(flops=...)})",
        )
    func = check_kernel(func)
    check_sizes_known(func)
    run = compile(annotate(func, {"x": 1}, {}), target="c")
    (step,) = run.program.kernels
    name = f"kernel {step.name}"
    if name in machine.classes:
        return machine
    if not any(run.program.values[each].tile_bytes for each in step.args):
        refuse(f"kernel {step.name!r} has no elements", fix="measure it at sizes that it is used at")

    def taking(each: Roofline) -> Machine:
        return replace(machine, classes={**machine.classes, name: each})

    took = least(partial(run, *_arguments(run)), _SECONDS)
    nothing, by = Roofline(flops=_FAST, memory=_FAST), "flops" if step.flops else "memory"
    beside, whole = (Simulation(run.program, taking(each)).time for each in (nothing, replace(nothing, **{by: 1.0})))
    return taking(replace(nothing, **{by: (whole - beside) / max(1e-9, took - beside)}))


@lru_cache(maxsize=1)
def this_processor() -> str:
    """What the processor is called that this runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _arguments(run: MeshKernel) -> list[torch.Tensor]:
    """Numbers from 0 to 1 for what a kernel takes; zeros where these are whole."""
    values = run.program.values
    taken = [values[each.input] for each in run.program.parameters if each.input is not None]
    dtypes = [(value, torch_dtype(value.dtype)) for value in taken]
    return [
        torch.rand(value.shape).to(dtype) if dtype.is_floating_point else torch.zeros(value.shape, dtype=dtype)
        for value, dtype in dtypes
    ]
