"""Programs that were recorded under torch.autocast: the graph doesn't say so, but for the dtypes of its values."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter, getitem
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from mesh_tensor.base.errors import refuse

from .torch_args import changed_program
from .torch_functions import INLINED

_WRAP = torch.ops.higher_order.wrap_with_autocast
_INSIDE = "under_autocast"
_NARROW = (torch.float16, torch.bfloat16)
_FIX = "enter torch.autocast in the model's forward, or convert the model: model.to(torch.bfloat16)"


def under_autocast(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, whose whole graph runs under autocast, as if the model's forward entered it; itself if it was not
    recorded so. Refused where autocast of one dtype doesn't give all values the dtypes that were recorded."""
    found = [node for node in _own_nodes(program.graph_module) if _is_narrowed(node)]
    if not found:
        return program
    dtypes = {node.meta["val"].dtype for node in found}
    devices = {node.meta["val"].device.type for node in found}
    problems = [
        f"torch operator {n.target} takes float32 and gives {n.meta['val'].dtype} (value {n.name!r})" for n in found[:4]
    ]
    if len(dtypes) > 1 or len(devices) > 1:
        _refuse(problems, "it was recorded under torch.autocast of several dtypes, or devices")
    (dtype,), (device,) = dtypes, devices
    if other := _first_otherwise(program.graph_module, device, dtype):
        _refuse([*problems, other], f"it was recorded under torch.autocast, but not all of it under that of {dtype}")
    return _wrapped(program, device, dtype)


class _NodeByNode(torch.fx.GraphModule):
    """A graph that is run node by node: where torch records it again, its operators stay in their submodules."""

    def recompile(self) -> Any:
        """As torch makes code of it, which is not what runs."""
        made = super().recompile()
        type(self).forward = lambda module, *given: torch.fx.Interpreter(module).run(*given)
        return made


def in_submodules(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, which keeps submodules of what runs under autocast where torch takes it apart."""
    if not program.graph.find_nodes(op="call_function", target=_WRAP):
        return program
    return changed_program(program, _node_by_node(program.graph_module, torch.fx.GraphModule))


def _node_by_node(module: torch.fx.GraphModule, kind: type[torch.fx.GraphModule]) -> torch.fx.GraphModule:
    named = {str(node.target) for node in module.graph.find_nodes(op="get_attr")}
    held = {name: attrgetter(name)(module) for name in named}
    for node in module.graph.find_nodes(op="call_function", target=_WRAP):
        name = str(node.args[4].target)
        held[name] = _node_by_node(held[name], _NodeByNode)
    return kind(held, module.graph)


def _refuse(problems: list[str], why: str) -> None:
    refuse(problems, where="the exported program", why=why, fix=_FIX)


def _own_nodes(module: torch.fx.GraphModule) -> Iterator[torch.fx.Node]:
    """The operators of a graph, and of those that it runs as they are; under an autocast that the model enters,
    recorded dtypes are those of the graph."""
    for node in module.graph.nodes:
        if node.target in INLINED:
            yield from _own_nodes(getattr(module, str(INLINED[node.target](node.args)[0].target)))
        elif isinstance(node.target, torch._ops.OpOverload):
            yield node


def _is_narrowed(node: torch.fx.Node) -> bool:
    """Whether it makes 16 bits of float32 alone, and doesn't say so."""
    if any(isinstance(leaf, torch.dtype) for leaf in pytree.tree_leaves((node.args, node.kwargs))):
        return False
    taken = [operand.meta.get("val") for operand in node.all_input_nodes]
    floats = {value.dtype for value in taken if isinstance(value, torch.Tensor) and value.is_floating_point()}
    return floats == {torch.float32} and getattr(node.meta.get("val"), "dtype", None) in _NARROW


def _first_otherwise(module: torch.fx.GraphModule, device: str, dtype: torch.dtype) -> str:
    """The first value that has another dtype under this autocast than the one that was recorded; "" if none has."""
    given = [node.meta.get("val") for node in module.graph.find_nodes(op="placeholder")]
    modes = {value.fake_mode for value in given if isinstance(value, FakeTensor)}
    if len(modes) != 1:
        return "the inputs' sizes were not recorded"
    again = _DtypesAgain(module)
    try:
        with modes.pop(), torch.no_grad(), torch.autocast(device, dtype):
            again.run(*given)
    except Exception as error:  # torch's own, such as of sizes that depend on data
        return f"torch can't tell the dtypes again: {error}"
    return again.first


class _DtypesAgain(torch.fx.Interpreter):
    first = ""

    def run_node(self, node: torch.fx.Node) -> Any:
        made = super().run_node(node)
        for value, meant in zip(pytree.tree_leaves(made), pytree.tree_leaves(node.meta.get("val")), strict=False):
            if isinstance(meant, torch.Tensor) and value.dtype != meant.dtype and not self.first:
                self.first = f"torch operator {node.target} gave {meant.dtype}, not {value.dtype} (value {node.name!r})"
        return made


def _wrapped(program: torch.export.ExportedProgram, device: str, dtype: torch.dtype) -> torch.export.ExportedProgram:
    """The program with its graph inside of another one, which calls it under autocast."""
    (output,) = program.graph.find_nodes(op="output")
    results = list(dict.fromkeys(r for r in output.args[0] if isinstance(r, torch.fx.Node) and r.op != "placeholder"))
    inside = torch.fx.Graph()
    copies: dict[torch.fx.Node, torch.fx.Node] = {}
    inside.graph_copy(program.graph, copies)
    inside.output(tuple(copies[result] for result in results))
    for old, new in copies.items():
        new.name = old.name
    outside = torch.fx.Graph()
    places = {node: outside.node_copy(node) for node in program.graph.find_nodes(op="placeholder")}
    graph = outside.get_attr(_INSIDE)
    made = outside.call_function(_WRAP, (device, dtype, True, None, graph, *places.values()))
    made.meta["val"] = tuple(result.meta.get("val") for result in results)
    for number, result in enumerate(results):
        places[result] = outside.call_function(getitem, (made, number))
        places[result].meta = dict(result.meta)
    for old, new in places.items():
        new.name = old.name
    for result, spec in zip(output.args[0], program.graph_signature.output_specs, strict=True):
        if result in places and result.op != "placeholder":
            places[result].name = spec.arg.name  # the signature knows them by their names
    outside.output(torch.fx.map_arg(output.args[0], lambda old: places[old]))
    module = torch.fx.GraphModule({_INSIDE: torch.fx.GraphModule(program.graph_module, inside)}, outside)
    return changed_program(program, module)
