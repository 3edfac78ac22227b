"""What counts as a constant when a torch program is differentiated: what was computed under `torch.no_grad()`.

Taking a program apart forgets it, so `detach` is put behind such results before; that becomes `R.grad.no_grad`.
"""

from __future__ import annotations

import copy

import torch
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled


def with_constants(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, in which results of parts under `torch.no_grad()` are detached; it stays as it is."""
    if not any(_forgets(node) for node in program.graph.nodes):
        return program
    module = copy.deepcopy(program.graph_module)
    for node, original in zip(module.graph.nodes, program.graph.nodes, strict=True):
        node.name = original.name  # copies of some get others, which the signature hasn't
    for node in list(module.graph.nodes):
        if _forgets(node):
            for result in list(node.users):  # its fields
                _detach(module.graph, result)
    module.recompile()
    return torch.export.ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=program.module_call_graph,
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _forgets(node: torch.fx.Node) -> bool:
    return node.target is wrap_with_set_grad_enabled and not node.args[0]


def _detach(graph: torch.fx.Graph, result: torch.fx.Node) -> None:
    if not isinstance(value := result.meta.get("val"), torch.Tensor) or not value.is_floating_point():
        return
    with graph.inserting_after(result):
        detached = graph.call_function(torch.ops.aten.detach.default, (result,))
    detached.meta = dict(result.meta)
    result.replace_all_uses_with(detached, delete_user_cb=lambda user: user is not detached)
