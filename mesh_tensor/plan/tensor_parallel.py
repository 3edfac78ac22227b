"""Where weights can be split as Megatron splits them: groups of linear layers that meet again in a linear layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mesh_tensor.rules.operator.dropout import DROPOUT

from .gradient import SEED
from .ir import Graph, Node, Value

# What works feature by feature, or keeps the features of a head together.
_LOCAL_NAMES = (
    "nn.gelu nn.gelu_tanh nn.relu nn.silu nn.leakyrelu nn.selu nn.softplus tanh sigmoid exp negative square abs astype"
    " reshape permute_dims expand_dims squeeze split strided_slice concat nn.attention nn.attention_bias broadcast_to"
    " multiply add subtract divide mesh.dropout"
)
_LOCAL = frozenset(_LOCAL_NAMES.split())
_SUMS = ("add", "subtract")


@dataclass(frozen=True)
class Weight:
    """A parameter that activations are multiplied with: which of its dims they have, and which it gives them; and the
    biases that are added."""

    name: str
    in_dim: int
    out_dim: int
    biases: tuple[str, ...]


@dataclass(frozen=True)
class Pairs:
    """The weights of the first and of the second layers of groups; `sums`: activations that second layers are added to;
    `tables` of embeddings; `last`: the layers whose results are no features any more."""

    columns: tuple[Weight, ...]
    rows: tuple[Weight, ...]
    sums: tuple[str, ...]
    tables: tuple[str, ...]
    last: tuple[Weight, ...]


def find_pairs(graph: Graph) -> Pairs:
    """The groups in the forward part of a graph, in order."""
    return _Search(graph).pairs()


class _Search:
    """Looks at what is computed before the gradients."""

    def __init__(self, graph: Graph) -> None:
        names = [node.outputs[0].name for node in graph.nodes]
        end = names.index(SEED) if SEED in names else len(names)
        self._nodes = graph.nodes[:end]
        self._uses = replace(graph, nodes=self._nodes).uses()
        self._parameters = set(graph.params)
        self._made = {value: node for node in self._nodes for value in node.outputs}
        self._linears = {node: found for node in self._nodes if (found := self._linear(node)) is not None}

    def pairs(self) -> Pairs:
        """First layers, and second ones that are reached by first ones alone."""
        reached = {node: ends for node in self._linears if (ends := self._reached(node))}
        rows = {end for ends in reached.values() for end in ends}
        columns = [node for node in reached if node not in rows]
        rows = {end for node in columns for end in reached[node]}
        others = [node for node in self._linears if node not in columns and node not in rows]
        takes = [node.inputs[0] for node in self._nodes if node.call.name == "take"]
        return Pairs(
            tuple(self._linears[node] for node in columns),
            tuple(found for node, found in self._linears.items() if node in rows),
            tuple(dict.fromkeys(value.name for node in self._linears if node in rows for value in self._sums(node))),
            tuple(dict.fromkeys(table.name for table in takes if table in self._parameters)),
            tuple(self._linears[node] for node in others[-1:]),
        )

    def _linear(self, node: Node) -> Weight | None:
        """The weight of a product of activations with a parameter."""
        if node.call.name != "matmul" or node.inputs[1].type.ndim != 2:
            return None
        weight, turned = node.inputs[1], False
        while weight not in self._parameters:
            made = self._made.get(weight)
            if made is None or made.call.name not in ("permute_dims", "astype"):
                return None
            turned, weight = turned != (made.call.name == "permute_dims"), made.inputs[0]
        in_dim = 1 if turned else 0
        return Weight(weight.name, in_dim, 1 - in_dim, tuple(bias.name for bias in self._biases(node)))

    def _biases(self, node: Node) -> Iterator[Value]:
        for user, _ in self._uses.get(node.outputs[0], ()):
            if user.call.name == "add":
                yield from (v for v in user.inputs if v in self._parameters and v.type.ndim == 1)

    def _reached(self, start: Node) -> set[Node]:
        """The linear layers that take what this one gives; none if something on the way needs all features at once."""
        inside: set[Value] = set(start.outputs)
        ends: set[Node] = set()
        for node in self._nodes:
            if not inside.intersection(node.inputs):
                continue
            if node in self._linears and node.inputs[0] in inside:
                ends.add(node)
            elif node.call.operator in _LOCAL and self._stays(node, inside):
                inside.update(node.outputs)
            else:
                return set()
        return ends

    def _stays(self, node: Node, inside: set[Value]) -> bool:
        """Nothing is added from outside but biases."""
        others = [value for value in node.inputs if value not in inside and value.data is None]
        return node.call.name not in _SUMS or all(value in self._parameters for value in others)

    def _sums(self, node: Node) -> Iterator[Value]:
        """What is made of a second layer's result, with its bias, and what that is added to."""
        (value,) = node.outputs
        while True:
            drops = [user for user, _ in self._uses.get(value, ()) if user.call.operator == DROPOUT]
            if len(drops) == 1:
                (value,) = drops[0].outputs
                continue
            adds = [(user, position) for user, position in self._uses.get(value, ()) if user.call.name == "add"]
            if len(adds) != 1:
                return
            ((user, position),) = adds
            (value,) = user.outputs
            if user.inputs[1 - position] not in self._parameters:
                yield value
                return
