"""torch's operators that run graphs: which are loops and branches, which are the graph itself, and what the others are
made of."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._higher_order_ops.cond import cond_op
from torch._higher_order_ops.flex_attention import flex_attention, math_attention
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map_impl
from torch._higher_order_ops.scan import scan_op
from torch._higher_order_ops.strict_mode import strict_mode_op
from torch._higher_order_ops.while_loop import while_loop_op
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled

GRAPHS = (cond_op, map_impl, scan_op, while_loop_op)

#: Of their arguments, the graph that is run, and on what. What counts as a constant under no_grad was said before.
INLINED: dict[Any, Callable[[Sequence[Any]], tuple[torch.fx.Node, Sequence[Any]]]] = {
    hints_wrapper: lambda args: (args[0], args[1]),
    strict_mode_op: lambda args: (args[0], args[1]),
    wrap_with_set_grad_enabled: lambda args: (args[1], args[2:]),
}


def graph_of(node: torch.fx.Node) -> torch.fx.GraphModule | None:
    """The graph that a node names; None of any other."""
    if node.op != "get_attr":
        return None
    found = getattr(node.graph.owning_module, str(node.target), None)
    return found if isinstance(found, torch.fx.GraphModule) else None


def _mapped(body: torch.fx.GraphModule, rows: Sequence[torch.Tensor], more: Sequence[Any]) -> Any:
    """All rows at once."""
    along = (*(0 for _ in rows), *(None for _ in more))
    return torch.vmap(body, along)(*rows, *more)


#: What they do, in torch's own operators. Where torch can't record that, those that are in GRAPHS stay.
FUNCTIONS: dict[Any, Callable[..., Any]] = {flex_attention: math_attention, map_impl: _mapped}


def with_numbers(traced: torch.fx.GraphModule) -> torch.fx.Graph:
    """A recorded graph, with numbers in place of the tensors without dims that stand for them."""
    graph = traced.graph
    for node in list(graph.nodes):
        if node.target is _aten.lift_fresh_copy.default:
            node.args[0].meta.setdefault("val", node.meta["val"])
            node.replace_all_uses_with(node.args[0])
        elif node.target is _aten._to_copy.default and not isinstance(node.args[0], torch.fx.Node):
            _replace(graph, node, node.args[0], node.kwargs["dtype"])
    for node in graph.find_nodes(op="get_attr"):
        if (value := number_of(node)) is not None:
            _replace(graph, node, value.item(), value.dtype)
    return graph


def number_of(node: torch.fx.Node) -> torch.Tensor | None:
    """The tensor without dims that a node names, of a graph that keeps its constants; None of any other."""
    found = getattr(node.graph.owning_module, str(node.target), None)
    is_number = type(found) is torch.Tensor and not found.dim()
    return found if node.op == "get_attr" and is_number else None


def is_constant(node: torch.fx.Node) -> bool:
    """Whether the node copies, or detaches, such a tensor."""
    if node.target is _aten.detach_.default:
        node = node.args[0]  # type: ignore[assignment]
    return node.target is _aten.lift_fresh_copy.default and number_of(node.args[0]) is not None  # type: ignore[arg-type]


def number_in(graph: torch.fx.Graph, number: torch.Tensor) -> torch.fx.Node:
    """A node that makes it."""
    made = graph.call_function(_aten.scalar_tensor.default, (number.item(),), {"dtype": number.dtype})
    made.meta["val"] = number
    return made


_aten = torch.ops.aten


def _replace(graph: torch.fx.Graph, node: torch.fx.Node, number: Any, dtype: torch.dtype) -> None:
    with graph.inserting_before(node):
        made = graph.call_function(_aten.scalar_tensor.default, (number,), {"dtype": dtype})
    made.meta = dict(node.meta)
    node.replace_all_uses_with(made)
