"""The way of a module from global view to a Program, in order: read, rules, atoms, propagate, reshards, program."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from tvm import ir

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.garbage import uncollected
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.lowering.tile_calls import TileCalls
from mesh_tensor.plan.atoms import Atoms, find_atoms
from mesh_tensor.plan.expansions import expand
from mesh_tensor.plan.explicit import ExplicitGraph
from mesh_tensor.plan.index_checks import IndexCheck, index_checks
from mesh_tensor.plan.ir import ANNOTATE, Graph, Node
from mesh_tensor.plan.propagate import Layouts, propagate
from mesh_tensor.plan.reader import Annotations, read_graph
from mesh_tensor.plan.reshards import insert_reshards
from mesh_tensor.plan.tir_rule import kernel_rule
from mesh_tensor.plan.tir_stages import expand_kernels
from mesh_tensor.rules.operator import OpRule, has_rule, rule_of
from mesh_tensor.rules.operator.call import operator_name
from mesh_tensor.rules.operator.table import whole_rule

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
) -> ModulePlan:
    """Plan a function of known sizes.

    Raises:
        MeshTensorError: an operator has no rule (and `replicate_unknown` is not set), a size is symbolic, ...
    """
    graph, atoms = read_module(mod, function, mesh, annotations, replicate_unknown=replicate_unknown)
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
    return graph, find_atoms(graph, _rules(graph, replicate_unknown))


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
    if (expanded := expand(graph, atoms, layouts)) is not None:
        graph, atoms = expanded, find_atoms(expanded, _rules(expanded, replicate_unknown))
        layouts = propagate(graph, atoms)
    explicit = insert_reshards(graph, atoms, layouts)
    calls = TileCalls(atoms)
    made = to_program(explicit, calls, kernels or {}, overlap, check_indices=check_indices)
    return ModulePlan(graph, atoms, layouts, explicit, calls, made)


def _rules(graph: Graph, replicate_unknown: bool) -> dict[Node, OpRule]:
    """The rule of every node; alike calls have one."""
    known: dict[tuple, OpRule] = {}
    rules = {}
    for node in graph.nodes:
        if node.kernel is not None:
            rules[node] = kernel_rule(node, graph.mesh)
            continue
        kind = (ANNOTATE, node.call.inputs[0]) if node.is_annotation else node.call.kind
        rule = known.get(kind)
        if rule is None:
            rule = known[kind] = _rule(node, replicate_unknown)
        rules[node] = rule
    return rules


def _rule(node: Node, replicate_unknown: bool) -> OpRule:
    if node.is_annotation:
        return OpRule((_dims(node),), (_dims(node),), moves=True)
    if node.call.name == "call_tir_inplace":
        refuse(
            "R.call_tir_inplace can't be distributed",
            where=node.where,
            why="it overwrites its operands",
            fix="use R.call_tir, whose results are new tensors",
        )
    if replicate_unknown and not has_rule(operator_name(node.call)):
        return whole_rule(node.call)
    return rule_of(node.call, node.where)


def _dims(node: Node) -> tuple[str, ...]:
    return tuple(f"d{dim}" for dim in range(node.call.inputs[0].ndim))
