"""search: the layouts of a module's parameters that take least on a machine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tvm import ir

from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.names import check_module, relax_function, with_flat_parameters
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, machine_code, machine_named
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.ir import Graph
from mesh_tensor.program.plan_module import PlanOptions, read_module
from mesh_tensor.searching.evaluate import Evaluator, Strategy
from mesh_tensor.searching.named_dims import Beam, NamedDim, named_dims
from mesh_tensor.simulation import Simulation

from .mesh_module import MeshModule
from .module import distribute_module
from .search_training import TrainingOptions, TrainingPlans, search_training
from .strategies import preset_layouts

_OBJECTIVES: dict[str, Callable[[Strategy], float]] = {"time": lambda s: s.time, "memory": lambda s: s.memory}


def search(
    module: ir.IRModule | ImportedModule,
    devices: int,
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
    progress: Callable[[int, int], None] | None = None,
    uneven: bool = False,
    **only: Sequence[Any],
) -> Found | TrainingPlans:
    """Search how the parameters of a module are laid out best; or, with `batch`, how a model is trained best. Nothing
    is run. Deterministic, unless it is out of time.

    Without `batch`, every strategy that is looked at is planned, and simulated on the machine. With it, the module
    gives a loss, and repeats layers. Ways to train it are combined of data and model parallel meshes, stages,
    microbatches, schedules, ZeRO and recomputation, as `mt.pipeline` runs them. What comes before the layers, a layer,
    and what comes after them are planned and simulated once per size; of these, every way is put together; and the
    best ones are planned in full.

    Args:
        module: a Relax module of known sizes, or what `from_torch` gives.
        devices: how many there are.
        machine: what they are, or a preset's name; None: this project's CPU ranks.
        objective: what counts: "time" or "memory". The other one decides between equals.
        memory_limit: bytes of a device that may be used; None: the machine's memory. What needs more comes last.
        function: the function to lay out.
        meshes: the meshes to try; None: all of one or two axes.
        width: how many strategies are carried on from one step to the next.
        seconds: after which the search ends with what it has.
        batch: the rows of a batch that is trained with.
        inputs: of a Relax module that is trained, the parameters that are no weights.
        states: numbers that the optimizer keeps per weight, in float32: 2 of Adam.
        finalists: how many of the best are planned in full; the best of them is the first.
        known: what an earlier search wrote with `save()`; it goes on from there.
        uneven: stages may be on meshes of different sizes, too, as dynamic programming cuts them best (1F1B).
        progress: called with how many ways were looked at, and how many there are.
        only: what ways to train are held to, as `microbatches=[4, 8]`, `schedules`, `zero`, `recompute`, `sequence`,
            or sizes of the `model` axis.

    Returns:
        What was found, the best first: layouts (`Found`), or ways to train (`TrainingPlans`).

    Raises:
        MeshTensorError: nothing fits into memory (it says what would), or there is nothing to search.
    """
    mod = module.mod if isinstance(module, ImportedModule) else module
    check_module(mod, "search")
    mod = with_flat_parameters(mod, function)
    relax_function(mod, function)
    machine = machine_named(machine) or CPU
    _check(devices, objective, width)
    machine.check_holds(devices, "the search")
    limit = machine.main_memory.size if memory_limit is None else memory_limit
    if batch is not None:
        imported = module if isinstance(module, ImportedModule) else ImportedModule(mod, {})
        taken = [p.name_hint for p in relax_function(mod, function).params if p.name_hint not in imported.params]
        if not isinstance(module, ImportedModule) and inputs is None:
            refuse(
                "a Relax module with a batch, but without inputs", fix="say which parameters are no weights: inputs="
            )
        return search_training(
            imported,
            devices,
            machine,
            batch,
            TrainingOptions(
                function,
                tuple(inputs or taken),
                objective,
                limit,
                states,
                seconds,
                finalists,
                only,
                known,
                progress,
                uneven,
            ),
        )
    if only:
        refuse(f"{', '.join(only)} of a search without a batch", fix="say how many rows a batch has: batch=")
    graph, atoms = read_module(mod, function, Mesh({"x": 1}), {}, PlanOptions(machine=machine))
    dims = named_dims(graph, atoms)
    evaluator = Evaluator(graph, atoms, machine)
    if known is not None:
        evaluator.learn(_read(known, _question(graph, machine, function)))
    rank = _rank(objective, limit)
    end = time.monotonic() + seconds
    found: list[Strategy] = []
    tried = [Mesh(mesh) for mesh in meshes] if meshes is not None else _meshes(devices)
    for mesh in tried:
        presets = [evaluator.strategy(mesh, layouts) for layouts in preset_layouts(module, function, mesh)]
        found += [strategy for strategy in presets if strategy is not None]
        found += Beam(evaluator, dims, rank, width).run(mesh, lambda: time.monotonic() > end)
    if not found:
        refuse("no layout of the module can be planned", where=f"function {function!r}", fix="see mt.distribute_module")
    found = _best_in_full(sorted(dict.fromkeys(found), key=rank), evaluator, rank)
    least = min(strategy.memory for strategy in found)
    if least > limit:
        refuse(
            f"no strategy fits into {limit:,} bytes per device",
            where=f"{devices} devices of machine {machine.name!r}",
            why=f"the smallest that was found needs {least:,}",
            fix="take more devices, or a machine with more memory",
        )
    asked = _question(graph, machine, function)
    return Found(module, function, machine, tuple(dims), tuple(found), evaluator.planned, asked)


@dataclass(frozen=True, eq=False)
class Found:
    """What a search found: `strategies`, the best first, over the module's named `dims`; `planned` were looked at."""

    module: ir.IRModule | ImportedModule = field(repr=False)
    function: str
    machine: Machine
    dims: tuple[NamedDim, ...]
    strategies: tuple[Strategy, ...] = field(repr=False)
    planned: int
    _asked: Mapping[str, str] = field(repr=False, default_factory=dict)

    @property
    def best(self) -> Strategy:
        """The first one."""
        return self.strategies[0]

    def distribute(self, strategy: Strategy | None = None, **options: Any) -> MeshModule:
        """The module on a mesh, laid out as the best strategy says, or this one; the options of `distribute_module`."""
        chosen = strategy or self.best
        mod = self.module
        if isinstance(mod, ImportedModule):
            options = {"weights": mod.params, **options}
            mod = mod.mod
        options = {"function": self.function, "machine": self.machine, **options}
        return distribute_module(_annotated(mod, chosen, self.function), chosen.mesh, **options)

    def simulation(self, strategy: Strategy | None = None) -> Simulation:
        """The best strategy, or this one, simulated in full."""
        return Simulation(self.distribute(strategy).program, self.machine)

    def code(self, strategy: Strategy | None = None) -> str:
        """The strategy as Python that annotates the module; its last line is how to run that."""
        chosen = strategy or self.best
        lines = [f"    {name!r}: {layout}," for name, layout in chosen.shardings.items()]
        opened = f"open={list(chosen.shardings)!r}, function={self.function!r}"
        run = f"# run = mt.distribute_module(mod, machine={machine_code(self.machine)}, weights=...)"
        return "\n".join(
            [f"mod = mt.annotate_module(mod, {dict(chosen.mesh.shape)}, {{", *lines, f"}}, {opened})", run]
        )

    def save(self, path: str | Path) -> None:
        """Write what was found, so that `mt.search(..., known=path)` goes on from it."""
        rows = [{**asdict(each), "mesh": dict(each.mesh.shape)} for each in self.strategies]
        Path(path).write_text(json.dumps({**self._asked, "strategies": rows}), encoding="utf-8")

    def pareto(self) -> list[Strategy]:
        """The strategies than which no other one takes less time and less memory, the fastest first."""
        front: list[Strategy] = []
        for strategy in sorted(self.strategies, key=lambda s: (s.time, s.memory)):
            if not front or strategy.memory < front[-1].memory:
                front.append(strategy)
        return front

    def __str__(self) -> str:
        rows: list[tuple[object, ...]] = [("mesh", "time, ms", "memory, MiB", "received, MiB", "layouts")]
        for strategy in self.strategies[:10]:
            layouts = strategy.shardings
            words = ", ".join(f"{name} {layout}" for name, layout in list(layouts.items())[:4])
            more = f" and {len(layouts) - 4} more" if len(layouts) > 4 else ""
            sizes = f"{strategy.memory / 2**20:.2f}", f"{strategy.received / 2**20:.2f}"
            rows.append((dict(strategy.mesh.shape), f"{strategy.time * 1e3:.4g}", *sizes, words + more))
        return "\n".join([f"{len(self.strategies)} strategies on {self.machine.name}", *columns(rows)])


def _question(graph: Graph, machine: Machine, function: str) -> dict[str, str]:
    """What was searched, as text."""
    return {"machine": machine.to_text(), "function": function, "parameters": ", ".join(map(repr, graph.params))}


def _read(path: str | Path, asked: Mapping[str, str]) -> list[Strategy]:
    """What an earlier search found, if it was the same."""
    try:
        made = json.loads(Path(path).read_text(encoding="utf-8"))
        different = [what for what, text in asked.items() if made[what] != text]
        found = [_strategy(row) for row in made["strategies"]]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        refuse(f"{str(path)!r} holds no search: {error}", fix="pass what save() wrote")
    if different:
        refuse(f"{str(path)!r} is of another search", why=f"other {listing(different)}", fix="leave out known")
    return found


def _strategy(row: Mapping[str, Any]) -> Strategy:
    layouts = tuple((str(name), tuple((str(axis), int(dim)) for axis, dim in each)) for name, each in row["layouts"])
    numbers = float(row["time"]), int(row["memory"]), int(row["received"]), bool(row["in_full"])
    return Strategy(Mesh(row["mesh"]), layouts, *numbers)


def _best_in_full(found: list[Strategy], evaluator: Evaluator, rank: Callable[[Strategy], tuple]) -> list[Strategy]:
    """The strategies in order, of which the first is planned with all of its layers."""
    while found and not found[0].in_full:
        first = evaluator.in_full(found[0])
        found = sorted([*([] if first is None else [first]), *found[1:]], key=rank)
    return found


def _annotated(mod: ir.IRModule, strategy: Strategy, function: str) -> ir.IRModule:
    mod = with_flat_parameters(mod, function)
    if not strategy.shardings:
        return mod
    return annotate_module(mod, strategy.mesh, strategy.shardings, function, open=list(strategy.shardings))


def _rank(objective: str, limit: int) -> Callable[[Strategy], tuple]:
    """What fits first; then by the objective; then by the other one, and the least to say."""
    measure = _OBJECTIVES[objective]
    return lambda s: (max(0, s.memory - limit), measure(s), s.time, s.memory, len(s.mesh.shape), str(s))


def _check(devices: int, objective: str, width: int) -> None:
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        refuse(f"devices is {shown(devices)}", fix="give the number of devices")
    if objective not in _OBJECTIVES:
        refuse(f"objective is {shown(objective)}", fix=f"it is one of {', '.join(_OBJECTIVES)}")
    if not isinstance(width, int) or width < 1:
        refuse(f"width is {shown(width)}", fix="it is how many strategies are carried on, 4 if it is left out")


def _meshes(devices: int) -> list[Mesh]:
    """One axis, or two, of which the second one are neighbours."""
    pairs = [(devices // inner, inner) for inner in range(2, devices) if devices % inner == 0]
    return [Mesh({"x": devices}), *(Mesh({"x": outer, "y": inner}) for outer, inner in pairs)]
