"""The inputs of an exported torch program as it is imported: tensors of their own, in plain containers."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch.utils import _pytree as pytree

from mesh_tensor.base.errors import listing, refuse


def refuse_one_for_another(program: torch.export.ExportedProgram) -> None:
    """Refuse a program that was recorded with one tensor as several inputs, or as an input and a parameter: torch takes
    one of them for the others, which are not looked at, or are no more there."""
    signature, leaves = program.graph_signature, pytree.tree_leaves(program.example_inputs or ())
    if len(leaves) != len(signature.user_inputs):
        return
    of = {spec.target: spec.arg.name for spec in signature.input_specs if spec.target is not None}
    named = [*zip(signature.user_inputs, leaves, strict=True)]
    named += [
        (of.get(name, name), tensor) for name, tensor in (*program.state_dict.items(), *program.constants.items())
    ]
    places: dict[int, list[str]] = {}
    for name, value in named:
        if isinstance(value, torch.Tensor):
            places.setdefault(id(value), []).append(str(name))
    looked_at = {node.name for node in program.graph.nodes if node.op == "placeholder" and node.users}
    problems = [
        f"{listing(names)} were one tensor, of which the program looks at {listing(used)} alone"
        for names in places.values()
        if not set(signature.user_inputs).isdisjoint(names)
        and 0 < len(used := [name for name in names if name in looked_at]) < len(names)
    ]
    if problems:
        refuse(
            problems,
            where="the exported program",
            why="what is computed of the others can't be told from that",
            fix="export the model with a tensor of its own for every input, such as x.clone()",
        )


def with_plain_inputs(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, which takes and gives tensors one by one where it had classes, such as a cache of transformers':
    torch makes these anew when it takes the program apart, and finds constants in what their constructors do."""
    entry, *others = program.module_call_graph
    signature = copy.copy(entry.signature)
    if signature is None or not any(map(_has_classes, (signature.in_spec, signature.out_spec))):
        return program
    signature.in_spec = pytree.tree_structure(((0,) * signature.in_spec.num_leaves, {}))
    signature.out_spec = pytree.tree_structure((0,) * signature.out_spec.num_leaves)
    signature.forward_arg_names = None
    plain = copy.copy(entry)
    plain.signature = signature
    inputs = program.example_inputs
    return torch.export.ExportedProgram(
        root=program.graph_module,
        graph=program.graph,
        graph_signature=program.graph_signature,
        state_dict=program.state_dict,
        range_constraints=program.range_constraints,
        module_call_graph=[plain, *others],
        example_inputs=None if inputs is None else (tuple(pytree.tree_leaves(inputs)), {}),
        constants=program.constants,
        verifiers=program.verifiers,
    )


def _has_classes(spec: pytree.TreeSpec) -> bool:
    return any(kind not in (None, tuple, list, dict) for kind in _kinds(spec))


def _kinds(spec: pytree.TreeSpec) -> Iterator[type | None]:
    yield spec.type
    for child in spec.children():
        yield from _kinds(child)
