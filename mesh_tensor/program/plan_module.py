"""The way of a module from global view to a Program, in order: read, rules, atoms, propagate, reshards, program."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from tvm import ir

from mesh_tensor.base.garbage import uncollected
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.lowering.tile_calls import TileCalls
from mesh_tensor.plan.atoms import Atoms, find_atoms
from mesh_tensor.plan.expansions import expand
from mesh_tensor.plan.explicit import ExplicitGraph
from mesh_tensor.plan.index_checks import IndexCheck, index_checks
from mesh_tensor.plan.interleave import interleave
from mesh_tensor.plan.ir import Graph
from mesh_tensor.plan.node_rules import node_rules
from mesh_tensor.plan.propagate import Layouts, propagate
from mesh_tensor.plan.reader import Annotations, read_graph
from mesh_tensor.plan.reshards import insert_reshards
from mesh_tensor.plan.slices import joined_slices
from mesh_tensor.plan.sums import regroup_sums
from mesh_tensor.plan.tir_stages import expand_kernels

from .from_graph import Kernels, ModuleProgram, to_program
from .relax_module import relax_module


@dataclass(frozen=True)
class ModulePlan:
    """A function of a module, planned for a mesh: every stage of its way."""

    graph: Graph
    atoms: Atoms
    layouts: Layouts
    explicit: ExplicitGraph
    calls: TileCalls
    made: ModuleProgram

    @cached_property
    def local_module(self) -> ir.IRModule:
        """The Relax module that one device runs."""
        return relax_module(self.made)

    @cached_property
    def index_checks(self) -> tuple[IndexCheck, ...]:
        """What elements of arguments have to be, because they are looked up."""
        return index_checks(self.graph)


def plan_module(
    mod: ir.IRModule,
    function: str,
    mesh: Mesh,
    annotations: Annotations,
    *,
    replicate_unknown: bool = False,
    kernels: Kernels | None = None,
    overlap: str | int = "auto",
    check_indices: bool = True,
    held: Collection[str] = (),
) -> ModulePlan:
    """Plan a function of known sizes. `held`: parameters that are laid out once, so that they may be stored in another
    order than the caller's (`graph.stored` of the plan).

    Raises:
        MeshTensorError: an operator has no rule (and `replicate_unknown` is not set), a size is symbolic, ...
    """
    graph, atoms = read_module(mod, function, mesh, annotations, replicate_unknown=replicate_unknown)
    if (made := interleave(graph, atoms, held)) is not None:
        graph, atoms = made, find_atoms(made, node_rules(made, replicate_unknown=replicate_unknown))
    return plan_graph(
        graph,
        atoms,
        replicate_unknown=replicate_unknown,
        kernels=kernels,
        overlap=overlap,
        check_indices=check_indices,
    )


@uncollected
def read_module(
    mod: ir.IRModule, function: str, mesh: Mesh, annotations: Annotations, *, replicate_unknown: bool = False
) -> tuple[Graph, Atoms]:
    """A function of known sizes as a graph, and the atoms of its values; these are the same for all meshes and
    annotations."""
    graph = read_graph(mod, function, mesh, annotations)
    expand_kernels(graph)
    graph = joined_slices(graph)
    return graph, find_atoms(graph, node_rules(graph, replicate_unknown=replicate_unknown))


@uncollected
def plan_graph(
    graph: Graph,
    atoms: Atoms,
    *,
    replicate_unknown: bool = False,
    kernels: Kernels | None = None,
    overlap: str | int = "auto",
    check_indices: bool = True,
) -> ModulePlan:
    """Plan what was read, for the graph's mesh and annotations."""
    layouts = propagate(graph, atoms)
    for rewrite in (expand, regroup_sums):
        if (rewritten := rewrite(graph, atoms, layouts)) is not None:
            graph, atoms = rewritten, find_atoms(rewritten, node_rules(rewritten, replicate_unknown=replicate_unknown))
            layouts = propagate(graph, atoms)
    explicit = insert_reshards(graph, atoms, layouts)
    calls = TileCalls(atoms)
    made = to_program(explicit, calls, kernels or {}, overlap, check_indices=check_indices)
    return ModulePlan(graph, atoms, layouts, explicit, calls, made)
