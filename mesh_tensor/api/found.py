"""What searches over layouts found: strategies, the best first, of a module or of a kernel."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from tvm import ir, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.annotations.annotate_module import annotate_module
from mesh_tensor.annotations.names import with_flat_parameters
from mesh_tensor.base.decisions import columns
from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_checks import check_number
from mesh_tensor.base.machine_presets import machine_code
from mesh_tensor.importers import ImportedModule
from mesh_tensor.plan.reshards import cost_of
from mesh_tensor.program.plan_module import PlanOptions, read_module
from mesh_tensor.searching.evaluate import Strategy
from mesh_tensor.searching.exact import exact_price
from mesh_tensor.searching.named_dims import NamedDim
from mesh_tensor.searching.pieces import Estimate
from mesh_tensor.simulation import Simulation

from .compile import MeshKernel, compile
from .mesh_module import MeshModule
from .module import distribute_module
from .training import TrainingStep

T = TypeVar("T")
C = TypeVar("C", Strategy, Estimate)


class Ranked(Generic[C]):
    """Candidates that a search found, the best first: strategies, or plans of training."""

    @property
    def _ranked(self) -> tuple[C, ...]:
        raise NotImplementedError

    @property
    def best(self) -> C:
        """The first one."""
        return self._ranked[0]

    def pareto(self) -> list[C]:
        """The Pareto front: those than which no other takes less time and less memory, the fastest first."""
        front: list[C] = []
        for each in sorted(self._ranked, key=lambda candidate: (candidate.time, candidate.memory)):
            if not front or each.memory < front[-1].memory:
                front.append(each)
        return front

    def _chosen(self, given: C | None) -> C:
        """What a caller chose of these, or the best."""
        if given is not None and not isinstance(given, type(self.best)):
            refuse(f"{shown(given)} is nothing that a search found", fix="pass one of what it has, or leave it out")
        return self.best if given is None else given


class _Strategies(Ranked[Strategy]):
    """Strategies that a search found on a machine, the best first."""

    machine: Machine
    strategies: tuple[Strategy, ...]

    @property
    def _ranked(self) -> tuple[Strategy, ...]:
        return self.strategies

    def __str__(self) -> str:
        return strategies_table(self.strategies, self.machine)


@dataclass(frozen=True, eq=False)
class Found(_Strategies):
    """What a search found: `strategies`, the best first, over the module's named `dims`; `planned` were looked at."""

    module: ir.IRModule | ImportedModule | TrainingStep = field(repr=False)
    function: str
    machine: Machine
    dims: tuple[NamedDim, ...]
    strategies: tuple[Strategy, ...] = field(repr=False)
    planned: int
    _asked: Mapping[str, str] = field(repr=False, default_factory=dict)
    _runs: dict[tuple, Any] = field(repr=False, default_factory=dict)

    def distribute(self, strategy: Strategy | None = None, **options: Any) -> MeshModule:
        """The module on a mesh, laid out as the best strategy says, or this one; the options of `distribute_module`.
        Of a training step: the run that trains it."""
        chosen = self._chosen(strategy)
        mod = self.module
        options = {"function": self.function, "machine": self.machine, **options}
        if isinstance(mod, TrainingStep):
            step = replace(mod, zero=0, mod=annotated(mod.mod, chosen, self.function))  # layouts say what is split
            return distribute_module(step, chosen.mesh, **options)
        if isinstance(mod, ImportedModule):
            options = {"weights": mod.params, **options}
            mod = mod.mod
        return distribute_module(annotated(mod, chosen, self.function), chosen.mesh, **options)

    def run(self, *inputs: Any, strategy: Strategy | None = None, **options: Any) -> Any:
        """What the module gives for its inputs, laid out as the best strategy says, or this one; it is distributed
        once per strategy and options. `options` are those of `distribute_module`."""
        return made_once(self._runs, self.distribute, self._chosen(strategy), options)(*inputs)

    def simulation(self, strategy: Strategy | None = None) -> Simulation:
        """The best strategy, or this one, simulated in full."""
        return Simulation(self.distribute(strategy).program, self.machine)

    def over_exact(self, strategy: Strategy | None = None, seconds: float = 60.0) -> float:
        """What the best strategy, or this one, takes by the planner's prices, over the least that any plan takes on its
        mesh, as an integer program finds it (with the extra `exact`): 1 is best. For a block of a model, no more.

        Raises:
            MeshTensorError: there is no solver, or it found nothing in time.
        """
        fix = "say how long it may take: a number above 0"
        check_number("seconds", seconds, where="over_exact", fix=fix, above_zero=True)
        chosen = self._chosen(strategy)
        mod = with_flat_parameters(
            self.module if isinstance(self.module, ir.IRModule) else self.module.mod, self.function
        )
        graph, atoms = read_module(mod, self.function, chosen.mesh, {}, PlanOptions(machine=self.machine), loops=True)
        plan = self.distribute(chosen).plan
        return cost_of(plan.explicit) / max(1, exact_price(graph, atoms, seconds).price)

    def code(self, strategy: Strategy | None = None) -> str:
        """The strategy as Python that annotates the module; its last line is how to run that."""
        chosen = self._chosen(strategy)
        lines = [f"    {name!r}: {layout}," for name, layout in chosen.shardings.items()]
        opened = f"open={list(chosen.shardings)!r}, function={self.function!r}"
        mesh, machine = dict(chosen.mesh.shape), machine_code(self.machine)
        if isinstance(self.module, TrainingStep):
            head = f"step = dataclasses.replace(step, zero=0, mod=mt.annotate_module(step.mod, {mesh}, {{"
            return "\n".join(
                [head, *lines, f"}}, {opened}))", f"# run = mt.distribute_module(step, {mesh}, machine={machine})"]
            )
        run = f"# run = mt.distribute_module(mod, machine={machine}, weights=...)"
        return "\n".join([f"mod = mt.annotate_module(mod, {mesh}, {{", *lines, f"}}, {opened})", run])

    def save(self, path: str | Path) -> None:
        """Write what was found, so that `mt.search(..., known=path)` goes on from it."""
        rows = [{**asdict(each), "mesh": dict(each.mesh.shape)} for each in self.strategies]
        Path(path).write_text(json.dumps({**self._asked, "strategies": rows}), encoding="utf-8")


@dataclass(frozen=True, eq=False)
class FoundKernel(_Strategies):
    """What a search over a kernel's buffers found: `strategies`, the best first; buffers that they don't name lie whole
    on every device. `dims` are what was split, `planned` were looked at."""

    kernel: tirx.PrimFunc = field(repr=False)
    machine: Machine
    dims: tuple[NamedDim, ...]
    strategies: tuple[Strategy, ...] = field(repr=False)
    planned: int
    _runs: dict[tuple, Any] = field(repr=False, default_factory=dict)

    def annotated(self, strategy: Strategy | None = None) -> tirx.PrimFunc:
        """The kernel with the layouts of the best strategy, or of this one."""
        chosen = self._chosen(strategy)
        whole = {buffer.name: dict[str, int]() for buffer in self.kernel.buffer_map.values()}
        return annotate(self.kernel, chosen.mesh, whole | chosen.shardings)

    def compile(self, strategy: Strategy | None = None, **options: Any) -> MeshKernel:
        """The same, compiled; the options of `mt.compile`."""
        return compile(self.annotated(strategy), **{"machine": self.machine, **options})

    def run(self, *tensors: Any, strategy: Strategy | None = None, **options: Any) -> Any:
        """What the kernel gives for tensors, its buffers as the best strategy says, or this one; it is compiled once
        per strategy and options. `options` are those of `mt.compile`."""
        return made_once(self._runs, self.compile, self._chosen(strategy), options)(*tensors)

    def simulation(self, strategy: Strategy | None = None) -> Simulation:
        """The best strategy, or this one, simulated."""
        return Simulation(self.compile(strategy).program, self.machine)

    def code(self, strategy: Strategy | None = None) -> str:
        """The strategy as Python that annotates the kernel; its last line is how to run that."""
        chosen = self._chosen(strategy)
        names = [buffer.name for buffer in self.kernel.buffer_map.values()]
        lines = [f"    {name!r}: {chosen.shardings.get(name, {})}," for name in names]
        run = f"# run = mt.compile(kernel, machine={machine_code(self.machine)})"
        return "\n".join([f"kernel = mt.annotate(kernel, {dict(chosen.mesh.shape)}, {{", *lines, "})", run])


def made_once(known: dict[tuple, Any], make: Callable[..., Any], strategy: Any, options: Mapping[str, Any]) -> Any:
    """What `make` gives for a strategy and options, which is made the first time."""
    key = (strategy, *sorted((name, id(value)) for name, value in options.items()))
    if key not in known:
        known[key] = make(strategy, **options), options  # kept, so that no other value has its identity
    return known[key][0]


def read_saved(path: str | Path, asked: Mapping[str, Any], rows: str, read: Callable[[Any], T]) -> list[T]:
    """What an earlier search wrote, row by row. Refused where it can't be read, or was asked something else."""
    try:
        made = json.loads(Path(path).read_text(encoding="utf-8"))
        different = [what for what, text in asked.items() if made[what] != text]
        found = [] if different else [read(row) for row in made[rows]]
    except KeyError as error:
        missing = f"{str(path)!r} holds no search like this one: it has no {error}"
        refuse(missing, fix="pass what save() of such a search wrote: over layouts, or with a batch over ways to train")
    except (OSError, ValueError, TypeError, AttributeError, RecursionError) as error:
        refuse(f"{str(path)!r} holds no search: {error}", fix="pass what save() wrote")
    if different:
        refuse(f"{str(path)!r} is of another search", why=f"other {listing(different)}", fix="leave out known")
    return found


def amount(row: Mapping[str, Any], name: str) -> Any:
    """A number of what a search wrote, from 0 up."""
    value = row[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise ValueError(f"{name} is {shown(value)}")
    return value


def cost_head(machine: Machine) -> list[str]:
    """The head of a column of costs, where the machine has a price."""
    return [] if machine.price is None else ["cost of 1000"]


def costs(machine: Machine, seconds: float, devices: int) -> list[str]:
    """What a thousand runs cost on so many devices, where the machine has a price."""
    return [] if machine.price is None else [f"{1000 * seconds * devices * machine.price / 3600:.4g}"]


def strategies_table(strategies: tuple[Strategy, ...], machine: Machine) -> str:
    """The ten best."""
    rows: list[tuple[object, ...]] = [
        ("mesh", "time, ms", "memory, MiB", "received, MiB", *cost_head(machine), "layouts")
    ]
    for strategy in strategies[:10]:
        layouts = strategy.shardings
        words = ", ".join(f"{name} {layout}" for name, layout in list(layouts.items())[:4])
        more = f" and {len(layouts) - 4} more" if len(layouts) > 4 else ""
        sizes = [f"{strategy.memory / 2**20:.2f}", f"{strategy.received / 2**20:.2f}"]
        sizes += costs(machine, strategy.time, strategy.mesh.num_devices)
        rows.append((dict(strategy.mesh.shape), f"{strategy.time * 1e3:.4g}", *sizes, words + more))
    return "\n".join([f"{len(strategies)} strategies on {machine.name}", *columns(rows)])


def annotated(mod: ir.IRModule, strategy: Strategy, function: str) -> ir.IRModule:
    mod = with_flat_parameters(mod, function)
    if not strategy.shardings:
        return mod
    return annotate_module(mod, strategy.mesh, strategy.shardings, function, open=list(strategy.shardings))
