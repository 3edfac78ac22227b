"""What an imported program's weights, states and results are called, in torch's names and in the module's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.export.graph_signature import InputKind, TensorArgument
from tvm import ir, relax

from mesh_tensor.annotations.annotate_module import SOURCE_NAMES_ATTR
from mesh_tensor.annotations.names import renamed_parameters
from mesh_tensor.plan.ir import CHOSEN_ROWS_ATTR, STATE_ATTR
from mesh_tensor.targets.dtypes import as_floats

from .constants import Constants, Copy
from .imported import ImportedModule, identifiers
from .torch_program import CONSTANTS, is_kept_buffer, without_tied, written_buffers

_BATCH_NORM = torch.ops.aten._native_batch_norm_legit_functional.default


def named(
    mod: ir.IRModule, program: torch.export.ExportedProgram, values: Mapping[torch.fx.Node, Any], buffers: bool
) -> ImportedModule:
    """The weights and what the program writes, and the module with their names and those of submodules. `values`: what
    the program's nodes became."""
    specs = [spec for spec in program.graph_signature.input_specs if isinstance(spec.arg, TensorArgument)]
    tensors = {**program.state_dict, **program.constants}
    written = written_buffers(program)
    new_values = {buffer.argument for buffer in written}
    weights = {
        spec.arg.name: str(spec.target)
        for spec in specs
        if spec.kind == InputKind.PARAMETER or spec.arg.name in new_values or (buffers and is_kept_buffer(spec))
    }
    alone = {name: target for name, target in weights.items() if name not in new_values}  # what is written is not tied
    mod, tied = without_tied(mod, alone, program.state_dict)
    kept = {old: target for old, target in weights.items() if old not in tied}
    inputs = [spec.arg.name for spec in specs if spec.kind == InputKind.USER_INPUT]
    names = identifiers(list(kept.values()), inputs)
    new = {old: names[target] for old, target in kept.items()}
    made = {path: values[node] for path, node in _results(program).items()}
    made = {path: value.name_hint for path, value in made.items() if isinstance(value, relax.Var)}
    func = renamed_parameters(mod, mod["main"], new)
    every = {**{path: new.get(name, name) for path, name in made.items()}, **names}
    every |= {weights[old]: new[same] for old, same in tied.items()}
    state = tuple(names[buffer.target] for buffer in written)
    mod.update_func(
        mod.get_global_var("main"), _with_attributes(func, every, state, getattr(program, "chosen_rows", ()))
    )
    params = {names[target]: as_floats(tensors[target].detach()) for target in names}
    parameters = {str(spec.target) for spec in specs if spec.kind == InputKind.PARAMETER}
    frozen = tuple(names[target] for target in names if target in parameters and not tensors[target].requires_grad)
    fixed = tuple(names[target] for spec in specs if is_kept_buffer(spec) and (target := str(spec.target)) in names)
    used = {node.name for node in program.graph.find_nodes(op="placeholder") if node.users}
    copied = {
        target: Copy.of(tensors[target])
        for spec in specs
        if spec.kind in CONSTANTS and spec.arg.name in used - weights.keys() and (target := str(spec.target)) in tensors
    }
    unwritten = tuple(name for name in fixed if name not in state)
    unread = {str(spec.target) for spec in specs if is_kept_buffer(spec)} - names.keys() - copied.keys()
    constants = Constants(copied, frozenset(unread))
    return ImportedModule(mod, params, every, state, unwritten, frozen, constants=constants)


def _with_attributes(
    func: relax.Function, names: dict[str, str], state: tuple[str, ...], rows: Sequence[int]
) -> relax.Function:
    """The function without the weights' values; names of elsewhere, which of its last results replace what, and of how
    many rows masks choose."""
    func = func.without_attr("params").with_attr(SOURCE_NAMES_ATTR, names)
    if rows:
        func = func.with_attr(CHOSEN_ROWS_ATTR, list(rows))
    if not state:
        return func
    count = len(func.ret_struct_info.fields) - len(state)
    return func.with_attr(STATE_ATTR, {name: number for number, name in enumerate(state, count)})


def _results(program: torch.export.ExportedProgram) -> dict[str, torch.fx.Node]:
    """From submodules to the nodes that make what they give, where that is one tensor beside what they write; calls of
    one that is called several times are "fc@0", "fc@1", ..."""
    found: dict[str, set[torch.fx.Node]] = {}
    kept = _only_written(program)
    for node in program.graph.nodes:
        is_size = isinstance(node.meta.get("val"), torch.SymInt)
        if node.op == "call_function" and node not in kept and not is_size:
            for path in _paths(node) - _inside_all_users(node):
                found.setdefault(path, set()).add(node)
    again = {path.partition("@")[0] for path in found if "@" in path}
    return {
        f"{path}@0" if path in again else path: next(iter(nodes)) for path, nodes in found.items() if len(nodes) == 1
    }


def _only_written(program: torch.export.ExportedProgram) -> set[torch.fx.Node]:
    """The nodes of which nothing but what the program writes depends, perhaps by way of another call."""
    signature = program.graph_signature
    written = signature.buffers_to_mutate.keys() - set(signature.user_outputs)
    found: set[torch.fx.Node] = set()

    def keeps(user: torch.fx.Node, node: torch.fx.Node) -> bool:
        if user.op == "output":
            return node.name in written
        if user.target is _BATCH_NORM and user.args[5]:  # in training it gives the running statistics on
            return node not in user.args[:3]
        return user in found

    for node in reversed(program.graph.nodes):
        if node.op == "call_function" and node.users and all(keeps(user, node) for user in node.users):
            found.add(node)
    return found


def _inside_all_users(node: torch.fx.Node) -> set[str]:
    """The submodules that no use of the node is outside of."""
    return set.intersection(*(_paths(user) for user in node.users)) if node.users else _paths(node)


def _paths(node: torch.fx.Node) -> set[str]:
    """The submodules that the node is in; a second call of one ends with "@1"."""
    stack = node.meta.get("nn_module_stack") or {}
    return {path + "".join(key.partition("@")[1:]) for key, (path, _) in stack.items() if path}
