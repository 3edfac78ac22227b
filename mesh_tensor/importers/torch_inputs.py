"""What an exported torch program is called with as it is imported: tensors of their own, in plain containers; and the
sizes that it is good for: what torch found out of open sizes while it recorded the model."""

from __future__ import annotations

import ast
import copy
import re
from collections.abc import Iterable, Iterator, Mapping

import torch
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree
from tvm import ir

from mesh_tensor.annotations.size_conditions import CONDITIONS_ATTR, SizeCondition
from mesh_tensor.base.errors import listing, refuse

from .imported import children_of
from .torch_args import changed_program


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
    inputs = None if inputs is None else (tuple(pytree.tree_leaves(inputs)), {})
    return changed_program(program, program.graph_module, module_call_graph=[plain, *others], example_inputs=inputs)


def _has_classes(spec: pytree.TreeSpec) -> bool:
    return any(kind not in (None, tuple, list, dict) for kind in _kinds(spec))


def _kinds(spec: pytree.TreeSpec) -> Iterator[type | None]:
    yield spec.type
    for child in children_of(spec):
        yield from _kinds(child)


def with_size_conditions(
    mod: ir.IRModule, program: torch.export.ExportedProgram, others: Iterable[str] = ()
) -> ir.IRModule:
    """The program's module, with what the program's guards ask of the sizes of its inputs, and what `others` do."""
    guards, more = [text for text in getattr(program, "_guards_code", ()) if _SIZE in text], list(others)
    if not guards and not more:
        return mod
    func, result = mod["main"], mod.clone()
    shapes = {param.name_hint: getattr(param.struct_info, "shape", None) for param in func.params}
    inputs = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind == InputKind.USER_INPUT]
    known = {
        source: [str(size) for size in shape]
        for source, number in _sources(program)
        if (shape := shapes.get(inputs[number])) is not None
    }
    conditions = [*(SizeCondition(_Named(known, text).made()) for text in guards), *map(SizeCondition, more)]
    texts = dict.fromkeys(condition.text for condition in conditions if condition.names)
    if texts:
        result.update_func(mod.get_global_var("main"), func.with_attr(CONDITIONS_ATTR, list(texts)))
    return result


_SIZE = ".size()["


def _sources(program: torch.export.ExportedProgram) -> Iterator[tuple[str, int]]:
    """What guards call the program's inputs, with their numbers: by number, or by the arguments of forward; of
    `*args`, forward's second one is called args_1 elsewhere."""
    spec = program.call_spec.in_spec
    args, kwargs = spec.unflatten(range(spec.num_leaves))
    signature = program.module_call_graph[0].signature
    names = (signature.forward_arg_names if signature is not None else None) or []
    for path, number in pytree.tree_leaves_with_path({**dict(zip(names, args, strict=False)), **kwargs}):
        source = pytree.keystr(path)
        yield f"L{source}", number
        yield "L" + re.sub(r"^\['(\w+)_(\d+)'\]", r"['\1'][\2]", source), number
    yield from ((f"L['flat_args'][{number}]", number) for number in range(spec.num_leaves))


class _Named(ast.NodeTransformer):
    """A guard over the module's symbols, in place of `L['x'].size()[0]`."""

    def __init__(self, known: Mapping[str, list[str]], guard: str) -> None:
        self._known, self._guard = known, guard

    def made(self) -> str:
        """The guard, so."""
        return ast.unparse(self.visit(ast.parse(self._guard, mode="eval")))

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        source, _, dim = ast.unparse(node).rpartition(_SIZE)
        sizes = self._known.get(source)
        if sizes is None:
            refuse(
                f"it is for sizes with {self._guard}, but {ast.unparse(node)} is of no input",
                where="the exported program",
                fix="export the model with its inputs as arguments that have names",
            )
        return ast.parse(sizes[int(dim.rstrip("]"))], mode="eval").body
