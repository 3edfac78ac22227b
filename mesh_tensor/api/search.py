"""search: the layouts of a module's parameters, or of a kernel's buffers, that take least on a machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tvm import ir, tirx

from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.annotations.module_annotations import stated_meshes
from mesh_tensor.annotations.named_values import named_mesh
from mesh_tensor.annotations.names import check_module, meant_function, reachable, relax_function, with_flat_parameters
from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, machine_named
from mesh_tensor.base.mesh import Mesh, check_countable
from mesh_tensor.base.topology import Topology
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.ir import Graph
from mesh_tensor.plan.manual import NO_AXES
from mesh_tensor.searching.choices import divisors
from mesh_tensor.searching.evaluate import Evaluator, KernelEvaluator, Strategy, meshes_around
from mesh_tensor.searching.named_dims import Beam, Rank, kernel_dims, named_dims
from mesh_tensor.simulation.simulate import check_sizes_known

from .found import Found, FoundKernel, amount, read_saved
from .progress import bar
from .search_training import TrainingOptions, check_names, search_training
from .strategies import preset_layouts
from .training import TrainingStep
from .training_plans import TrainingPlans

_OBJECTIVES: dict[str, Callable[[Strategy], float]] = {
    "time": lambda s: s.time,
    "memory": lambda s: s.memory,
    "cost": lambda s: s.time * s.mesh.num_devices,
}


def search(
    module: ir.IRModule | ImportedModule | TrainingStep | tirx.PrimFunc,
    devices: int | Mesh | Topology,
    machine: Machine | str | None = None,
    *,
    objective: str = "time",
    memory_limit: int | None = None,
    function: str = "main",
    meshes: Sequence[Mapping[str, int]] | None = None,
    width: int = 4,
    seconds: float = 60.0,
    batch: int | None = None,
    inputs: Sequence[str] | None = None,
    states: int = 2,
    finalists: int = 3,
    known: str | Path | None = None,
    progress: Callable[[int, int], None] | bool = False,
    uneven: bool = False,
    **only: Sequence[Any],
) -> Found | FoundKernel | TrainingPlans:
    """Search the best layouts of a module's parameters or a kernel's buffers; or, with `batch`, the best way to train a
    model. Nothing is run. The result is deterministic unless `seconds` run out or Ctrl-C ends the search with the best
    that it has found so far.

    Without `batch`, every candidate is planned, and simulated on the machine. With `batch`, the module gives a loss and
    has repeated layers, and candidates combine data and tensor parallel meshes, stages, microbatches, schedules, ZeRO
    and recomputation, as `mt.pipeline` runs them. What precedes the layers, one layer, and what follows them are
    planned and simulated once per size; each candidate's time is composed of these, and the best ones are planned in
    full.

    Args:
        module: a Relax module of known sizes, an ImportedModule, or a training step; or a kernel of known sizes, for
            which only meshes, width, objective, memory_limit and seconds count. What it costs to bring a kernel's
            buffers into the layouts is not counted.
        devices: the number of devices; or a mesh; or a topology, whose meshes are the stages of a model in order (each
            one's number of devices is kept, and its axes are found).
        machine: a Machine, or a preset's name; None: this project's CPU ranks.
        objective: "time"; "memory", the peak bytes of a device; or "cost", time x devices, for which fewer devices are
            tried, too (all divisors of `devices`). The other two decide between equals.
        memory_limit: bytes per device; None: the machine's memory. Candidates that need more come last.
        function: the name of the function.
        meshes: the meshes to try; None: all with one or two axes.
        width: the width of the beam search: candidates that are kept from one step to the next.
        seconds: after which the search ends with what it has.
        batch: the number of rows of a training batch.
        inputs: of a Relax module that is trained, the names of the parameters that are no weights.
        states: float32 numbers that the optimizer keeps per weight: 2 for Adam.
        finalists: how many of the best candidates are planned in full, which decides their order.
        known: a file that `save()` of an earlier search wrote, to continue from.
        uneven: also try stages on meshes of different sizes, cut by dynamic programming (1F1B).
        progress: a function of the number of candidates (for layouts: meshes) looked at so far, and of all; True: a
            progress bar on stderr.
        only: restrictions on the ways to train, e.g. `microbatches=[4, 8]`; also `schedules`, `zero`, `recompute`,
            `sequence`, and sizes of the `model` axis.

    Returns:
        The candidates, the best first: layouts (`Found`, `FoundKernel`), or ways to train (`TrainingPlans`).

    Raises:
        MeshTensorError: nothing fits into memory (it says what would), or there is nothing to search.
    """
    machine = machine_named(machine) or CPU
    topology = _topology(devices, batch is not None)
    count = devices.num_devices if isinstance(devices, (Mesh, Topology)) else devices
    _check(count, objective, width, memory_limit, seconds, progress)
    check_names(only)
    machine.check_holds(count, "the search")
    check_countable(Mesh({"x": count}))
    limit = machine.main_memory.size if memory_limit is None else memory_limit
    tried = _tried(count, topology, meshes, objective)
    told = (bar if progress else None) if isinstance(progress, bool) else progress
    if isinstance(module, tirx.PrimFunc):
        if batch is not None or known is not None or only:
            given = {"batch": batch, "known": known, **only}
            names = ", ".join(name for name, value in given.items() if value is not None)
            refuse(f"{names} of a search over a kernel", fix="search a module that calls it")
        kernel = _search_kernel(check_kernel(module), tried, machine, _rank(objective, limit), width, seconds)
        _check_fits(kernel.strategies, limit, machine, tried)
        return kernel
    mod, function = _searched(module, function)
    if batch is not None:
        imported = _trained(module, mod, inputs)
        taken = [p.name_hint for p in relax_function(mod, function).params if p.name_hint not in imported.params]
        rows = tuple(inputs or taken)
        options = TrainingOptions(
            function, rows, objective, limit, states, seconds, finalists, only, known, told, uneven, topology
        )
        return search_training(imported, count, machine, batch, options)
    if trained := [*only, *["inputs"] * (inputs is not None), *["uneven"] * bool(uneven)]:
        refuse(f"{', '.join(trained)} of a search without a batch", fix="say how many rows a batch has: batch=")
    evaluator = Evaluator(mod, function, machine)
    if meshes is None and topology is None and evaluator.manual != NO_AXES:
        tried = meshes_around(evaluator.manual, tried)
    asked = _question(evaluator.graph, machine, function)
    learned = [] if known is None else read_saved(known, asked, "strategies", lambda r: _strategy(r, evaluator.graph))
    evaluator.learn(learned)
    dims, rank = named_dims(evaluator.graph, evaluator.atoms), _rank(objective, limit)
    end = time.monotonic() + seconds
    found = [strategy for strategy in learned if strategy.mesh in tried]
    with _until_stopped(found):
        for number, mesh in enumerate(tried, 1):
            presets = (evaluator.strategy(mesh, layouts) for layouts in preset_layouts(module, function, mesh))
            found += (strategy for strategy in presets if strategy is not None)
            found += Beam(evaluator, dims, rank, width).run(mesh, lambda: time.monotonic() > end)
            if told is not None:
                told(number, len(tried))
    if not found:
        evaluator.refuse_whole(tried[0])
        refuse("no layout of the module was looked at", where=f"function {function!r}", fix="take more seconds")
    found = _best_in_full(sorted(dict.fromkeys(found), key=rank), evaluator, rank)
    _check_fits(found, limit, machine, tried)
    return Found(module, function, machine, tuple(dims), tuple(found), evaluator.planned, asked)


def _searched(module: ir.IRModule | ImportedModule | TrainingStep, function: str) -> tuple[ir.IRModule, str]:
    """The Relax module, which has no layouts yet, and the function that is meant."""
    mod = module.mod if isinstance(module, (ImportedModule, TrainingStep)) else module
    check_module(mod, "search", takes_imported=True)
    function = meant_function(mod, function)
    mod = with_flat_parameters(mod, function)
    if stated := stated_meshes(reachable(mod, function)):
        refuse(
            [f"{where} is annotated for {named_mesh(mod, device)} already" for device, where in stated],
            where="search",
            why="it finds layouts of modules that have none",
            fix="search the module as it was before it was annotated",
        )
    return mod, function


def _trained(module: object, mod: ir.IRModule, inputs: Sequence[str] | None) -> ImportedModule:
    """The model that a search over ways to train is for."""
    if isinstance(module, TrainingStep):
        refuse(
            "a step of training with a batch, which it has", fix="search the module that gives the loss, or no batch"
        )
    if isinstance(module, ImportedModule):
        return module
    if inputs is None:
        refuse("a Relax module with a batch, but without inputs", fix="say which parameters are no weights: inputs=")
    return ImportedModule(mod, {})


@contextmanager
def _until_stopped(found: Sequence[Strategy]) -> Iterator[None]:
    """Ctrl-C ends what is done here, if something was found."""
    try:
        yield
    except KeyboardInterrupt:
        if not found:
            raise


def _search_kernel(
    func: tirx.PrimFunc, tried: Sequence[Mesh], machine: Machine, rank: Rank, width: int, seconds: float
) -> FoundKernel:
    end = time.monotonic() + seconds
    check_sizes_known(func)
    evaluator, dims, found = KernelEvaluator(func, machine), kernel_dims(func), list[Strategy]()
    with _until_stopped(found):
        for mesh in tried:
            found += Beam(evaluator, dims, rank, width).run(mesh, lambda: time.monotonic() > end)
    if not found:
        evaluator.refuse_whole(tried[0])
        refuse("no layout of the kernel's buffers was looked at", fix="take more seconds")
    found = sorted(dict.fromkeys(found), key=rank)
    return FoundKernel(func, machine, tuple(dims), tuple(found), evaluator.planned)


def _check_fits(found: Sequence[Strategy], limit: int, machine: Machine, tried: Sequence[Mesh]) -> None:
    least = min(strategy.memory for strategy in found)
    if least > limit:
        refuse(
            f"no strategy fits into {limit:,} bytes per device",
            where=f"{max(mesh.num_devices for mesh in tried)} devices of machine {machine.name!r}",
            why=f"the smallest that was found needs {least:,}",
            fix="take more devices, or a machine with more memory",
        )


def _question(graph: Graph, machine: Machine, function: str) -> dict[str, str]:
    """What was searched, as text."""
    return {"machine": machine.to_text(), "function": function, "parameters": ", ".join(map(repr, graph.params))}


def _strategy(row: Mapping[str, Any], graph: Graph) -> Strategy:
    """What a search wrote of a strategy."""
    mesh, sizes = Mesh(row["mesh"]), {param.name: param.type.ndim for param in graph.params}
    layouts = tuple((str(name), tuple((str(axis), int(dim)) for axis, dim in each)) for name, each in row["layouts"])
    for name, layout in layouts:
        if name not in sizes or any(axis not in mesh or not 0 <= dim < sizes[name] for axis, dim in layout):
            raise ValueError(f"{shown(name)} can't lie as {dict(layout)} on {mesh}")
    numbers = float(amount(row, "time")), int(amount(row, "memory")), int(amount(row, "received"))
    return Strategy(mesh, layouts, *numbers, bool(row["in_full"]))


def _best_in_full(found: list[Strategy], evaluator: Evaluator, rank: Callable[[Strategy], tuple]) -> list[Strategy]:
    """The strategies in order, of which the first is planned with all of its layers, unless Ctrl-C ends that."""
    with _until_stopped(found):
        while found and not found[0].in_full:
            first = evaluator.in_full(found[0])
            found = sorted([*([] if first is None else [first]), *found[1:]], key=rank)
    return found


def _rank(objective: str, limit: int) -> Callable[[Strategy], tuple]:
    """What fits first; then by the objective; then by the other one, and the least to say."""
    measure = _OBJECTIVES[objective]
    return lambda s: (max(0, s.memory - limit), measure(s), s.time, s.memory, len(s.mesh.shape), str(s))


def _check(
    devices: object, objective: object, width: object, memory_limit: object, seconds: object, progress: object
) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        refuse(f"devices is {shown(devices)}", fix="give the number of devices")
    if not isinstance(objective, str) or objective not in _OBJECTIVES:
        refuse(f"objective is {shown(objective)}", fix=f"it is one of {', '.join(_OBJECTIVES)}")
    if not isinstance(width, int) or isinstance(width, bool) or width < 1:
        refuse(f"width is {shown(width)}", fix="it is how many strategies are carried on, 4 if it is left out")
    if not (memory_limit is None or (_is_number(memory_limit) and memory_limit > 0)):  # type: ignore[operator]
        refuse(f"memory_limit is {shown(memory_limit)}", fix="give the bytes of a device that may be used")
    if not _is_number(seconds) or math.isnan(seconds):  # type: ignore[arg-type]
        refuse(f"seconds is {shown(seconds)}", fix="say after how many the search ends with what it has")
    if not (isinstance(progress, bool) or callable(progress)):
        refuse(f"progress is {shown(progress)}", fix="pass True, or a function of how many were looked at, and of all")


def _is_number(given: object) -> bool:
    return isinstance(given, (int, float)) and not isinstance(given, bool)


def _topology(devices: int | Mesh | Topology, trained: bool) -> Topology | None:
    """The meshes that are given, if any are."""
    if isinstance(devices, Mesh):
        return Topology({"mesh": devices})
    if isinstance(devices, Topology) and len(devices.names) > 1 and not trained:
        refuse(f"layouts of a module on several meshes: {devices}", fix="give a mesh, or train in stages: batch=")
    return devices if isinstance(devices, Topology) else None


def _tried(
    devices: int, topology: Topology | None, meshes: Sequence[Mapping[str, int]] | None, objective: str
) -> list[Mesh]:
    """The meshes of layouts."""
    if meshes is not None:
        if isinstance(meshes, (str, Mapping)) or not isinstance(meshes, Sequence) or not meshes:
            refuse(f"meshes is {shown(meshes)}", fix='give a list of the meshes to try, as [{"x": 4}], or leave it out')
        made = [Mesh(mesh) for mesh in meshes]
        sizes = {mesh: mesh.num_devices for mesh in made}
        if large := [f"{mesh} has {n} devices, the search {devices}" for mesh, n in sizes.items() if n > devices]:
            refuse(large, fix=f"give devices={max(sizes.values())}, or smaller meshes")
        return made
    if topology is not None:
        return [topology[name] for name in topology.names]
    counts = divisors(devices) if objective == "cost" else [devices]
    return [mesh for count in counts for mesh in _meshes(count)]


def _meshes(devices: int) -> list[Mesh]:
    """One axis, or two, of which the second one are neighbours."""
    pairs = [(devices // inner, inner) for inner in divisors(devices)[1:-1]]
    return [Mesh({"x": devices}), *(Mesh({"x": outer, "y": inner}) for outer, inner in pairs)]
