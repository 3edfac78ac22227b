"""A torch program taken apart into the operators that are imported. Alike operators, as those of a model's layers, are
taken apart once: torch's own way traces the whole program again, several times."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import lru_cache
from types import MappingProxyType
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._dispatch.python import enable_python_dispatcher
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree

from .torch_args import op_name
from .torch_autocast import in_submodules
from .torch_functions import FUNCTIONS, GRAPHS, INLINED, graph_of, is_constant, number_in, number_of, with_numbers
from .torch_general import stays
from .torch_pieces import OWN_DECOMPOSITIONS, bag_size
from .torch_program import ASSERTIONS

_FAILED = object()
_INSTANCE_NORM = torch.ops.aten.instance_norm.default
_ARITHMETIC = frozenset(function for function in vars(operator).values() if callable(function))
_aten = torch.ops.aten
#: What torch takes apart in C++ by sizes that are numbers, and in Python by open ones.
_IN_PYTHON = (
    *(_aten.gru.input, _aten.gru_cell.default, _aten.lstm_cell.default, _aten.rnn_relu.input, _aten.rnn_tanh.input),
    *(_aten.stft.default, _aten.stft.center, _aten.istft.default),
)
_SIZES = (torch.ops.aten.sym_size.int, torch.ops.aten.sym_stride.int, torch.ops.aten.sym_numel.default)
Table = Mapping[Any, Callable[..., Any]]


class DecomposedProgram:
    """An exported program with another graph. `chosen_rows`: of how many rows each mask chooses some, where all are
    computed."""

    def __init__(
        self, program: torch.export.ExportedProgram, graph_module: torch.fx.GraphModule, chosen_rows: Sequence[int] = ()
    ) -> None:
        self._program, self.chosen_rows = program, tuple(chosen_rows)
        self.graph_module, self.graph = graph_module, graph_module.graph

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """None: TVM's importer would copy them to where nobody looks."""
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def decomposed(
    program: torch.export.ExportedProgram, kept: Collection[torch._ops.OpOverload], known: Collection[str]
) -> Any:
    """The program, taken apart but for the operators that are `kept`. `known` are the names of operators that can be
    imported. Where torch's own way may do something else, it is taken."""
    norms = [node for node in program.graph.nodes if node.target is _INSTANCE_NORM]
    by_rows = all(node.args[3] is None and node.args[4] is None for node in norms)
    # A dict: torch copies it for each operator, and hashes those of another mapping again.
    ops = dict(_decompositions(_composite_ops(), frozenset(kept), by_rows))
    if (made := _Decomposition(program, ops, kept, known).made()) is not None:
        return made
    program = in_submodules(program).run_decompositions(ops)  # which takes some away
    # What torch's own way leaves: operators of graphs, and operators that are made of others in two ways.
    others = (*GRAPHS, *FUNCTIONS, *INLINED)
    left = any(node.target in others or node.target in ops for node in program.graph.nodes)
    return (_Decomposition(program, ops, kept, known).made() if left else None) or program


def _instance_norm(x: Any, weight: Any, bias: Any, mean: None, var: None, *more: Any) -> torch.Tensor:
    """Without running statistics: over each row's channels by themselves, which torch's own way takes as one row's."""
    *_, epsilon, _ = more
    return torch.ops.aten.group_norm.default(x, x.shape[1], weight, bias, epsilon)


def _composite_ops() -> frozenset[str]:
    """The operators that are registered as made of others: programs may add to them at any time."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key("CompositeImplicitAutograd"))


@lru_cache(maxsize=2)
def _decompositions(_registered: frozenset[str], kept: frozenset[torch._ops.OpOverload], by_rows: bool) -> Table:
    """What is taken apart, of all that is registered: most of the time that the import of a small program takes.
    `by_rows`: whether norms of instances are taken over each row's channels by themselves."""
    known = {**torch.export.default_decompositions().materialize(), **OWN_DECOMPOSITIONS}
    made = {op: made_of for op, made_of in known.items() if op not in kept}
    return MappingProxyType({**made, _INSTANCE_NORM: _instance_norm} if by_rows else made)


class _Decomposition:
    def __init__(
        self,
        program: torch.export.ExportedProgram,
        table: Table,
        kept: Collection[torch._ops.OpOverload],
        known: Collection[str],
    ) -> None:
        self._program, self._table, self._kept, self._names = program, table, kept, known
        self._known: dict[Hashable, torch.fx.Graph | None] = {}
        self._graphs: dict[str, torch.fx.GraphModule] = {}  # of loops and branches
        self._sizes: dict[Any, torch.fx.Node] = {}  # by expression, what computes an open size in the new graph

    def made(self) -> DecomposedProgram | None:
        """The program, or None if some of it is nothing that can be taken apart by itself."""
        graph = torch.fx.Graph()
        if self._copy(self._program.graph_module, graph, {}) is _FAILED:
            return None
        graph.eliminate_dead_code()
        return DecomposedProgram(self._program, torch.fx.GraphModule(self._graphs, graph))

    def _copy(self, module: torch.fx.GraphModule, graph: torch.fx.Graph, place: dict[Any, Any]) -> Any:
        """What a graph gives, its operators in `graph`; `place` has what its placeholders are, if they are not its
        own."""
        for node in module.graph.nodes:
            if node.op == "output":
                if module is self._program.graph_module:
                    graph.node_copy(node, lambda old: place[old])
                return torch.fx.map_arg(node.args[0], lambda old: place[old])
            if node.op == "placeholder":
                if node not in place:
                    place[node] = graph.node_copy(node)
                    place[node].name = node.name  # as the signature has it; a graph has other names for some
                    self._note_sizes(place[node], graph)
            elif node.op != "get_attr":
                made = self._call(module, node, graph, place)
                if made is _FAILED:
                    return _FAILED
                place[node] = made
            elif (number := number_of(node)) is not None:
                place[node] = number_in(graph, number)
            elif graph_of(node) is None:
                return _FAILED
        raise AssertionError("a graph without an output")

    def _call(
        self, module: torch.fx.GraphModule, node: torch.fx.Node, graph: torch.fx.Graph, place: dict[Any, Any]
    ) -> Any:
        args: Any = node.args
        if node.target in INLINED:
            name, operands = INLINED[node.target](args)
            inner = getattr(module, str(name.target))
            places = inner.graph.find_nodes(op="placeholder")
            return self._copy(inner, graph, {p: place.get(arg, arg) for p, arg in zip(places, operands, strict=True)})
        if node.target in FUNCTIONS:
            inner = self._taken_apart(node)
            if inner is not None:
                return self._inlined(graph, inner, node, place)
        if node.target in GRAPHS:
            return self._with_graphs(module, node, graph, place)
        if is_constant(node):
            return place[args[0]]
        if not self._is_plain(node):
            return _FAILED
        if node.target is operator.getitem and isinstance(place[args[0]], (tuple, list)):
            return place[args[0]][args[1]]
        if self._is_made_of_others(node.target):
            inner = self._taken_apart(node)
            if inner is not None:
                return self._inlined(graph, inner, node, place)
            is_known = op_name(node) in self._names  # perhaps not with all options
            return self._copied(graph, node, place) if stays(node) and not is_known else _FAILED
        return self._copied(graph, node, place) if self._is_known(node) else _FAILED

    def _with_graphs(
        self, module: torch.fx.GraphModule, node: torch.fx.Node, graph: torch.fx.Graph, place: dict[Any, Any]
    ) -> Any:
        """A loop, or a choice of branches, its graphs taken apart."""
        graphs = [arg for arg in node.args if isinstance(arg, torch.fx.Node) and graph_of(arg) is not None]
        for one in graphs:
            inner, made = getattr(module, str(one.target)), torch.fx.Graph()
            sizes, self._sizes = self._sizes, {}
            result = self._copy(inner, made, {})
            self._sizes = sizes
            if result is _FAILED:
                return _FAILED
            made.output(result)
            made.eliminate_dead_code()
            name = f"graph_{len(self._graphs)}"
            self._graphs[name] = torch.fx.GraphModule(self._graphs, made)
            place[one] = graph.get_attr(name)
        return graph.node_copy(node, lambda old: place[old])

    def _note_sizes(self, placeholder: torch.fx.Node, graph: torch.fx.Graph) -> None:
        """The symbols that an input's shape has: nodes that read them."""
        value = placeholder.meta.get("val")
        shape: Sequence[Any] = value.shape if isinstance(value, torch.Tensor) else ()
        for dim, size in enumerate(shape):
            if isinstance(size, torch.SymInt) and size.node.expr.is_symbol and size.node.expr not in self._sizes:
                made = graph.call_function(torch.ops.aten.sym_size.int, (placeholder, dim))
                made.meta["val"] = size
                self._sizes[size.node.expr] = made

    def _copied(self, graph: torch.fx.Graph, node: torch.fx.Node, place: dict[Any, Any]) -> torch.fx.Node:
        """A node in the graph; an open size that is there already is not computed again."""
        value = node.meta.get("val")
        if not isinstance(value, torch.SymInt):
            return graph.node_copy(node, lambda old: place[old])
        if value.node.expr not in self._sizes:
            self._sizes[value.node.expr] = graph.node_copy(node, lambda old: place[old])
        return self._sizes[value.node.expr]

    def _is_plain(self, node: torch.fx.Node) -> bool:
        """Whether the node is an operator that writes nothing, on tensors of sizes that don't depend on data."""
        if node.op != "call_function" or not all(_is_sized(value) for value in _tensors_of(node)):
            return False
        if node.target is operator.getitem or _is_arithmetic(node):
            return True
        return isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.is_mutable

    def _is_made_of_others(self, target: Any) -> bool:
        if target in _SIZES or not isinstance(target, torch._ops.OpOverload) or target in self._kept:
            return False
        if target.__name__.startswith("upsample") and target.__name__ in self._names:
            return False  # tracing these takes an open size for the example's
        if target in self._table or (target.__name__ not in self._names and target in decomposition_table):
            return True
        return torch._C._dispatch_has_kernel_for_dispatch_key(target.name(), "CompositeImplicitAutograd")

    def _taken_apart(self, node: torch.fx.Node) -> torch.fx.Graph | None:
        """The operators that one is made of, or None; of alike ones found once."""
        leaves, spec = _leaves_of(node)
        types = tuple(
            _type(leaf.meta["val"]) if isinstance(leaf, torch.fx.Node) else (type(leaf), leaf) for leaf in leaves
        )
        key = (node.target, str(spec), types)
        if key not in self._known:
            self._known[key] = self._traced(node, leaves, spec)
        return self._known[key]

    def _traced(self, node: torch.fx.Node, leaves: Sequence[Any], spec: pytree.TreeSpec) -> torch.fx.Graph | None:
        operands = [leaf.meta["val"] for leaf in leaves if isinstance(leaf, torch.fx.Node)]
        modes = {value.fake_mode for value in _tensors_of(node) if hasattr(value, "fake_mode")}
        if len(modes) != 1:
            return None

        def call(*tensors: torch.Tensor) -> Any:
            rest = iter(tensors)
            args, kwargs = pytree.tree_unflatten(
                [next(rest) if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], spec
            )
            return target(*args, **kwargs)

        target: Any = node.target
        target = FUNCTIONS.get(target) or OWN_DECOMPOSITIONS.get(target, target)
        table = self._table
        if node.target not in table and node.target in decomposition_table:
            table = {**table, node.target: decomposition_table[node.target]}
        dispatcher = enable_python_dispatcher() if node.target in _IN_PYTHON else nullcontext()
        # Lazy: no code is made of the graph, which nobody runs.
        with torch.no_grad(), dispatcher, modes.pop(), _use_lazy_graph_module(True):
            try:
                traced = make_fx(call, decomposition_table=table)(*operands)
            except Exception:  # such as what torch.vmap has no rule for: it may be taken otherwise
                return None
        graph = with_numbers(traced)
        graph.eliminate_dead_code()
        calls = [inner for inner in graph.nodes if inner.op not in ("placeholder", "output")]
        fine = all(self._is_plain(inner) and self._is_known(inner) for inner in calls)
        return graph if fine else None

    def _is_known(self, node: torch.fx.Node) -> bool:
        if node.target is operator.getitem or _is_arithmetic(node):
            return True
        return node.target in _SIZES or node.target in ASSERTIONS or op_name(node) in self._names or stays(node)

    def _inlined(self, graph: torch.fx.Graph, inner: torch.fx.Graph, node: torch.fx.Node, place: dict[Any, Any]) -> Any:
        """What the operators that a node is made of give, in the graph."""
        operands = iter([place[leaf] for leaf in _leaves_of(node)[0] if isinstance(leaf, torch.fx.Node)])
        mine: dict[Any, Any] = {}
        for step in inner.nodes:
            if step.op == "placeholder":
                mine[step] = next(operands)
            elif step.op == "output":
                return pytree.tree_map_only(torch.fx.Node, lambda old: mine[old], step.args[0])
            else:
                mine[step] = self._copied(graph, step, mine)
                if not isinstance(step.meta.get("val"), torch.SymInt):
                    mine[step].meta = {**node.meta, **step.meta}
        raise AssertionError("a graph without an output")


def _leaves_of(node: torch.fx.Node) -> tuple[list[Any], pytree.TreeSpec]:
    """What a call is given: values, numbers and graphs."""
    leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
    return [_known(leaf, node) if isinstance(leaf, torch.fx.Node) else leaf for leaf in leaves], spec


def _known(operand: torch.fx.Node, of: torch.fx.Node) -> Any:
    """What is known of an operand, or else the operand."""
    size = bag_size(operand, of)
    return size if size is not None else graph_of(operand) or operand


def _tensors_of(node: torch.fx.Node) -> Iterator[Any]:
    """What the node gives, and what it takes from other nodes."""
    for one in (node, *node.all_input_nodes):
        yield from pytree.tree_leaves(one.meta.get("val"))


def _is_sized(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return value.layout == torch.strided and all(_is_sized(size) for size in (*value.shape, *value.stride()))
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        return not free_unbacked_symbols(value)
    return value is None or isinstance(value, (bool, int, float))


def _is_arithmetic(node: torch.fx.Node) -> bool:
    """Whether the node computes with open sizes."""
    is_size = isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_size and (node.target in _ARITHMETIC or node.target is torch.sym_float)


def _type(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        sizes = tuple([_size(size) for size in (*value.shape, *value.stride())])
        return sizes, value.dtype, str(value.device), value.requires_grad
    return type(value), _size(value)


def _size(value: Any) -> Hashable:
    """A number, or the expression that an open size is."""
    return value.node.expr if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
