"""The way of a module from global view to a Program, in order: read, rules, atoms, propagate, reshards, program."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

from tvm import ir

from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import uncollected
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.sub_axes import Refinement
from mesh_tensor.lowering.local_calls import TileCalls
from mesh_tensor.plan.atoms import Atoms, Sizes, find_atoms
from mesh_tensor.plan.counted_places import counted_slices
from mesh_tensor.plan.expand import expand
from mesh_tensor.plan.expansions import refined_annotations, refinements, regroup_sums, with_merged_dims
from mesh_tensor.plan.explicit import ExplicitGraph, Run, left_partial
from mesh_tensor.plan.gathers import gathered_first
from mesh_tensor.plan.interleave import interleave
from mesh_tensor.plan.ir import Graph, Interleaved, leaves
from mesh_tensor.plan.orders import IndexCheck, index_checks
from mesh_tensor.plan.prices import prices_on
from mesh_tensor.plan.propagate import Late, Layouts, other_turns, propagate
from mesh_tensor.plan.reader import Annotations, read_graph
from mesh_tensor.plan.reshards import cost_of, insert_reshards
from mesh_tensor.plan.rewrites import (
    joined_slices,
    parts_side_by_side,
    sliced_splits,
    without_fixed_rows,
    without_joins,
)
from mesh_tensor.plan.tir_rule import node_rules
from mesh_tensor.plan.tir_stages import expand_kernels

from .from_graph import Kernels, ModuleProgram, to_program
from .relax_module import relax_module


@dataclass(frozen=True)
class Stages:
    """What was made on the way of a function to its Program, `made`."""

    graph: Graph
    atoms: Atoms
    layouts: Layouts
    explicit: ExplicitGraph
    calls: TileCalls
    made: ModuleProgram


@dataclass(frozen=True)
class Port:
    """A parameter or a result of a Program: `dims` are the atoms of each of its dims, `sharding` lies over all atoms.
    `order`: in which order the program has a dim, if that is not the caller's."""

    name: str
    dtype: str
    dims: tuple[Sizes, ...]
    sharding: Sharding
    order: Interleaved | None = None


@dataclass(frozen=True, eq=False)
class ModulePlan:
    """A function of a module, planned for a mesh. `ports`: its parameters and results; `params`: its parameters' names,
    in order; `state`: by parameter, the result that replaces it in the next call; `index_checks`: what elements of
    arguments have to be, because they are looked up. `stages` finds what was made on the way, for the same sizes.
    Plans of the same `kin` differ in numbers only; where one `tells` them apart, a number that is as another is that in
    all of them. `cost`: what it takes by its prices, where it was planned by itself."""

    made: ModuleProgram
    ports: tuple[Port, ...]
    params: tuple[str, ...]
    state: Mapping[str, str]
    index_checks: tuple[IndexCheck, ...]
    base: Mesh
    stages: Callable[[], Stages]
    kin: object = None
    tells: bool = True
    cost: int = 0

    @property
    def mesh(self) -> Mesh:
        """The program's mesh."""
        return self.made.program.mesh

    @cached_property
    def refinement(self) -> Refinement | None:
        """How the caller's mesh, `base`, became the plan's, if axes of it are taken apart."""
        return None if self.base == self.mesh else Refinement.between(self.base, self.mesh)

    @cached_property
    def local_module(self) -> ir.IRModule:
        """The Relax module that one device runs."""
        return relax_module(self.stages().made)

    @property
    def graph(self) -> Graph:
        """What the function was read as."""
        return self.stages().graph

    @property
    def atoms(self) -> Atoms:
        """What the dims of its values are made of."""
        return self.stages().atoms

    @property
    def layouts(self) -> Layouts:
        """The layout of every value."""
        return self.stages().layouts

    @property
    def explicit(self) -> ExplicitGraph:
        """The graph with every change of layout."""
        return self.stages().explicit


# By the names of what nodes give, what axes split in them.
Decided = Mapping[tuple[str, ...], Mapping[str, str]]


def decisions(plan: ModulePlan) -> Decided:
    """What a plan decided."""
    return {step.node.names: step.split for step in plan.explicit.steps if isinstance(step, Run)}


@dataclass(frozen=True)
class PlanOptions:
    """How functions are planned, on whatever mesh. `replicate_unknown`: operators without a rule run on whole tensors;
    `kernels`, `overlap`, `fuse`: see `to_program`; `check_indices`: elements that are looked up are checked;
    `sub_axes`: plans may take axes apart where that takes less. `machine`: what takes less is what does on it; None: on
    this project's CPU ranks."""

    replicate_unknown: bool = False
    kernels: Kernels = field(default_factory=dict)
    overlap: str | int = "auto"
    check_indices: bool = True
    machine: Machine | None = None
    sub_axes: bool = False
    fuse: bool = True

    def atoms(self, graph: Graph) -> Atoms:
        """What the dims of a graph's values are made of."""
        return find_atoms(graph, node_rules(graph, replicate_unknown=self.replicate_unknown))


def plan_module(
    mod: ir.IRModule,
    function: str,
    mesh: Mesh,
    annotations: Annotations,
    options: PlanOptions = PlanOptions(),
    *,
    held: Collection[str] = (),
    base: Mesh | None = None,
    decided: Decided | None = None,
) -> ModulePlan:
    """Plan a function of known sizes. `held`: parameters that are laid out once, so that they may be stored in another
    order than the caller's (`graph.stored` of the plan). `base`: the caller's mesh, if annotations are for one in which
    axes of it are taken apart. `decided`: what another plan of it decided, which is taken where it may be.

    Raises:
        MeshTensorError: an operator has no rule (and `replicate_unknown` is not set), a size is symbolic, ...
    """

    def planned(mesh: Mesh, annotations: Annotations) -> ModulePlan:
        graph, atoms = read_module(mod, function, mesh, annotations, options, loops=True, held=held)
        return plan_graph(replace(graph, decided=decided or {}), atoms, options)

    plan = planned(mesh, annotations)
    if base is not None and base != mesh:
        return replace(plan, base=base)
    found = refinements(plan.graph, plan.atoms, plan.layouts) if options.sub_axes else []
    if others := [planned(made.mesh, refined_annotations(annotations, made)) for made in found]:
        plan = min([plan, *others], key=lambda tried: cost_of(tried.explicit))
    return replace(plan, base=mesh)


@uncollected
def read_module(
    mod: ir.IRModule,
    function: str,
    mesh: Mesh,
    annotations: Annotations,
    options: PlanOptions = PlanOptions(),
    *,
    loops: bool = False,
    held: Collection[str] = (),
) -> tuple[Graph, Atoms]:
    """A function of known sizes as a graph that is planned for a machine, and the atoms of its values; without `held`,
    which is as `plan_module` takes it, these are the same for all meshes, annotations and machines. `loops`: its loops
    are planned once, not step by step."""
    graph = read_graph(mod, function, mesh, annotations, loops=loops)
    graph = replace(graph, prices=prices_on(mesh, options.machine))
    expand_kernels(graph)
    graph = without_joins(joined_slices(parts_side_by_side(counted_slices(without_fixed_rows(graph)))))
    atoms = options.atoms(graph)
    if (made := interleave(graph, atoms, held)) is not None:
        graph, atoms = made, options.atoms(made)
    if (made := with_merged_dims(graph, atoms)) is not None:
        graph, atoms = made, options.atoms(made)
    return graph, atoms


@uncollected
def plan_graph(graph: Graph, atoms: Atoms, options: PlanOptions = PlanOptions()) -> ModulePlan:
    """Plan what was read, for the graph's mesh and annotations."""
    graph, atoms, layouts, explicit = _laid_out(graph, atoms, options)
    if (sliced := sliced_splits(graph, atoms, layouts)) is not None:
        other = _laid_out(sliced, options.atoms(sliced), options)
        if cost_of(other[-1]) < cost_of(explicit):
            graph, atoms, layouts, explicit = other
    return _planned(explicit, TileCalls(atoms), options)


def with_parts(plan: ModulePlan, numbers: Collection[int], options: PlanOptions) -> ModulePlan:
    """The plan, in which the results of these numbers are left as their parts, which it completes at its end (see
    `left_partial`)."""
    stages = plan.stages()
    names = {leaves(stages.explicit.result)[number].name for number in numbers}
    return replace(_planned(left_partial(stages.explicit, names), stages.calls, options), base=plan.base)


def _planned(explicit: ExplicitGraph, calls: TileCalls, options: PlanOptions) -> ModulePlan:
    """The plan whose changes of layout are these."""
    graph, atoms = explicit.graph, explicit.atoms
    checks, fuse = options.check_indices, options.fuse
    made = to_program(explicit, calls, options.kernels, options.overlap, check_indices=checks, fuse=fuse)
    stages = Stages(graph, atoms, explicit.layouts, explicit, calls, made)
    forms = dict.fromkeys([*explicit.params, *leaves(explicit.result)])
    stored = graph.stored
    ports = [Port(f.name, f.dtype, atoms.of[f.value], f.sharding, stored.get(f.value)) for f in forms]
    results = dict(zip(leaves(graph.result), leaves(explicit.result), strict=True))
    state = {replaced.name: results[result].name for replaced, result in graph.state.items()}
    params = tuple(value.name for value in graph.params)
    return ModulePlan(
        made, tuple(ports), params, state, index_checks(graph), graph.mesh, lambda: stages, cost=cost_of(explicit)
    )


_LaidOut = tuple[Graph, Atoms, Layouts, ExplicitGraph]


def _laid_out(graph: Graph, atoms: Atoms, options: PlanOptions) -> _LaidOut:
    """The graph as it is best written for the layouts of its values, these, and every change of layout."""
    made = _heard(graph, atoms, options)
    others = [_heard(graph, atoms, options, late) for late in other_turns(graph, atoms, made[2], made[:2])]
    return min([made, *others], key=lambda tried: cost_of(tried[-1])) if others else made


def _heard(graph: Graph, atoms: Atoms, options: PlanOptions, late: Late | None = None) -> _LaidOut:
    """The same, for one order in which annotations are heard."""
    layouts = propagate(graph, atoms, late)
    for rewrite in (expand, regroup_sums):
        if (rewritten := rewrite(graph, atoms, layouts)) is not None:
            graph, atoms = rewritten, options.atoms(rewritten)
            layouts = propagate(graph, atoms, late)
    return graph, atoms, layouts, gathered_first(insert_reshards(graph, atoms, layouts))
