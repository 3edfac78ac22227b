"""What goes in and out of an exported torch program: tensors, buffers that it writes, what is no tensor, and what it
asserts. Weights under several names are one parameter of the module."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import torch
from tilelang.language import dtypes
from torch._higher_order_ops.effects import with_effects
from torch.export.graph_signature import (
    ConstantArgument,
    InputKind,
    InputSpec,
    OutputKind,
    OutputSpec,
    SymIntArgument,
    TensorArgument,
)
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.utils import _pytree as pytree
from tvm import ir

from mesh_tensor.base.errors import listing, refuse
from mesh_tensor.targets.dtypes import as_floats

from .imported import JOINT
from .torch_exact import interpreted

CONSTANTS = {InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
_aten = torch.ops.aten
_INPUTS = {InputKind.USER_INPUT, InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR}
_WRITTEN = {OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION}
_RESULTS = {OutputKind.USER_OUTPUT, *_WRITTEN, *JOINT}


@dataclass(frozen=True, eq=False)
class Written:
    """A buffer that a program writes: its name in torch, that of its value in the graph, and of its new value."""

    target: str
    argument: str
    result: str


def written_buffers(program: torch.export.ExportedProgram) -> list[Written]:
    """The buffers (and parameters) that the program writes, in the order of its results."""
    arguments = {spec.target: spec.arg.name for spec in program.graph_signature.input_specs}
    return [
        Written(str(spec.target), arguments[spec.target], spec.arg.name)
        for spec in program.graph_signature.output_specs
        if spec.kind in _WRITTEN
    ]


def check_program(program: torch.export.ExportedProgram) -> None:
    """Refuse what is neither a tensor nor a constant, and writes to anything but buffers; all that is found."""
    specs = program.graph_signature
    if effects := _effects(program):
        refuse(effects, where="the exported program", fix="leave out what prints, or keeps objects")
    if narrow := list(_of_8_bits(program)):
        refuse(narrow, where="the exported program", why="modules have no such numbers", fix="give them as bfloat16")
    if written := [str(spec.target) for spec in specs.output_specs if spec.kind == OutputKind.USER_INPUT_MUTATION]:
        refuse(
            [f"the program writes its input {name!r}" for name in written],
            where="the exported program",
            why="inputs are the caller's: on a mesh they lie in tiles, which are not written back",
            fix=f"take a copy in its forward, {written[0]} = {written[0]}.clone(), and return what callers need of it;"
            " or register what is kept from call to call as a buffer, which runs keep on the mesh",
        )
    problems = [*map(_wrong_result, specs.output_specs), *map(_wrong_input, specs.input_specs)]
    problems += _closed_sizes(program)
    targets = {spec.target for spec in specs.input_specs}
    problems += [
        f"the constant {name!r} has no place in the graph" for name in program.constants if name not in targets
    ]
    unreal = [name for name, weight in {**program.state_dict, **program.constants}.items() if _has_no_memory(weight)]
    if unreal:
        refuse(
            f"the weights {listing(unreal)} have no memory",
            where="the exported program",
            why="it was exported under FakeTensorMode, or with weights on the meta device",
            fix="export the model with real weights",
        )
    if problems := [problem for problem in problems if problem]:
        refuse(problems, where="the exported program", fix="export the model with tensors and constants in and out")


def _closed_sizes(program: torch.export.ExportedProgram) -> Iterator[str]:
    """What is wrong with sizes that were to be open, and of which torch has taken the example's: it tells nobody."""
    for node in program.graph.find_nodes(op="placeholder"):
        for dim, size in enumerate(getattr(node.meta.get("val"), "shape", ())):
            if isinstance(size, torch.SymInt) and size.node.expr.is_number:
                yield f"dim {dim} of {node.name!r} is {size} for good, as an operator has no open size there"


def _of_8_bits(program: torch.export.ExportedProgram) -> Iterator[str]:
    for node in program.graph.find_nodes(op="placeholder"):
        dtype = getattr(node.meta.get("val"), "dtype", None)
        if isinstance(dtype, torch.dtype) and dtype.is_floating_point and dtype.itemsize == 1:
            yield f"{node.name!r} is of {dtype}"


def operators(program: torch.export.ExportedProgram) -> Iterator[torch.fx.Node]:
    """The calls of operators, those under autocast and the like among them."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            yield from (node for node in module.graph.nodes if node.op == "call_function")


def dtypes_inside(program: torch.export.ExportedProgram) -> set[torch.dtype]:
    """The dtypes of all that the program computes, under autocast, too."""
    made = (leaf for node in operators(program) for leaf in pytree.tree_leaves(node.meta.get("val")))
    return {leaf.dtype for leaf in made if isinstance(leaf, torch.Tensor)}


def _effects(program: torch.export.ExportedProgram) -> list[str]:
    """What operators do besides giving results."""
    found = [node.args[1] for node in operators(program) if node.target is with_effects]
    return [f"{getattr(op, '__name__', op)} has effects besides its results" for op in dict.fromkeys(found)]


def _wrong_input(spec: InputSpec) -> str:
    if isinstance(spec.arg, SymIntArgument):
        return f"the input {spec.arg.name!r} is a number that is not constant"
    if spec.kind not in _INPUTS or not isinstance(spec.arg, (TensorArgument, ConstantArgument)):
        return f"the input {spec.arg.name!r} is no tensor"
    return ""


def _wrong_result(spec: OutputSpec) -> str:
    if spec.kind not in _RESULTS:
        return f"the program writes {spec.target!r} ({spec.kind.name.lower()})"
    return "" if isinstance(spec.arg, (TensorArgument, ConstantArgument)) else f"the result {spec.arg} is no tensor"


def _has_no_memory(weight: Any) -> bool:
    return isinstance(weight, torch.Tensor) and (type(weight).__name__ == "FakeTensor" or weight.device.type == "meta")


def is_kept_buffer(spec: InputSpec) -> bool:
    """Whether it is a buffer that the model's `state_dict()` has."""
    return spec.kind == InputKind.BUFFER and bool(spec.persistent)


class ProgramOfTensors:
    """An exported program as TVM's importer reads it: inputs that are no tensors are left out, buffers that are written
    are parameters, whose new values come after the other results; results that are no tensors are left out. Complex
    numbers go in and out as pairs of floats. `buffers`: those that are kept are parameters, too; all others are
    constants."""

    def __init__(self, program: torch.export.ExportedProgram, buffers: bool) -> None:
        written = written_buffers(program)
        arguments = {buffer.argument for buffer in written}
        specs = [
            InputSpec(InputKind.PARAMETER, spec.arg, spec.target, None)
            if spec.arg.name in arguments or (buffers and is_kept_buffer(spec))
            else spec
            for spec in program.graph_signature.input_specs
            if isinstance(spec.arg, TensorArgument)
        ]
        self.graph_module, self.graph = program.graph_module, program.graph
        for node in program.graph.find_nodes(op="placeholder"):  # of loaded programs, it is missing
            if isinstance(value := node.meta.get("val"), torch.Tensor):
                if value.is_complex():
                    node.meta["tensor_meta"] = SimpleNamespace(shape=(*value.shape, 2), dtype=value.real.dtype)
                node.meta.setdefault("tensor_meta", SimpleNamespace(shape=value.shape, dtype=value.dtype))
        self.graph_signature = SimpleNamespace(input_specs=specs)
        self.range_constraints = program.range_constraints
        self.state_dict = {**program.state_dict, **program.constants}
        self.state_dict = {name: as_floats(value) for name, value in self.state_dict.items()}
        self.tensor_constants = self.state_dict
        self.constants: dict[str, torch.Tensor] = {}
        kept = [str(spec.target) for spec in specs if spec.kind in CONSTANTS]
        self._kept = {name: self.state_dict[name].detach().clone() for name in kept}  # whatever the model writes later
        (output,) = program.graph.find_nodes(op="output")
        new, given = output.args[0][: len(written)], output.args[0][len(written) :]
        made = (*(value for value in given if isinstance(value, torch.fx.Node)), *new)
        with program.graph.inserting_before(output):
            output.args = (tuple(_of_floats(program.graph, value) for value in made),)

    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """What becomes constants."""
        yield from self._kept.items()

    def named_parameters(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Nothing: their values are not needed."""
        yield from ()


def _of_floats(graph: torch.fx.Graph, value: torch.fx.Node) -> torch.fx.Node:
    """A result of floats: of complex ones, pairs."""
    meant = value.meta.get("val")
    if not isinstance(meant, torch.Tensor) or not meant.is_complex():
        return value
    made = graph.call_function(torch.ops.aten.view_as_real.default, (value,))
    made.meta["val"] = torch.view_as_real(meant.resolve_conj())
    return made


def without_tied(
    mod: ir.IRModule, weights: Mapping[str, str], state: Mapping[str, torch.Tensor]
) -> tuple[ir.IRModule, dict[str, str]]:
    """The module with one parameter for all that are the same memory: the first; and the others, each with that one.

    `weights`: from parameters to their names in torch, and so to tensors of `state`."""
    first: dict[tuple, str] = {}
    tied = {}
    for name, target in weights.items():
        same = first.setdefault(_memory(state[target]), name)
        if same != name:
            tied[name] = same
    if not tied:
        return mod, tied
    func = mod["main"]
    params = {param.name_hint: param for param in func.params}
    merged = func.bind_params({params[name]: params[same] for name, same in tied.items()})
    result = mod.clone()
    result.update_func(result.get_global_var("main"), merged)
    return result, tied


def _memory(weight: torch.Tensor) -> tuple:
    """What tells a tensor's elements from another's; a tensor without elements is like no other."""
    if weight.numel() == 0:
        return (id(weight),)
    return weight.data_ptr(), weight.dtype, tuple(weight.shape), weight.stride()


def allow_constants() -> None:
    """Add numpy's dtypes of ml_dtypes to those that TileLang lists."""
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtypes._DTYPE_TO_STR.setdefault(np.dtype(getattr(ml_dtypes, name)), name)


ASSERTIONS = {
    *(_aten._assert_async.msg, _aten._assert_scalar.default, _aten._assert_tensor_metadata.default),
    *(_aten.sym_constrain_range.default, _aten.sym_constrain_range_for_size.default),
}


def drop_assertions(program: torch.export.ExportedProgram) -> None:
    """Take assertions out of the program's graph, and what is only computed for them."""
    for node in reversed(program.graph.nodes):
        unused = node.op == "call_function" and not node.users
        if node.target in ASSERTIONS or (unused and (_reads_number(node) or not node.is_impure())):
            program.graph.erase_node(node)
    program.graph_module.recompile()


def depends_on_data(node: torch.fx.Node) -> bool:
    """Whether the node gives a number, or a tensor of a size, that only data tell."""
    values = node.meta.get("val")
    return any(_is_unknown(value) for value in (values if isinstance(values, (tuple, list)) else [values]))


def _is_unknown(value: Any) -> bool:
    if isinstance(value, torch.Tensor):  # where it begins in memory doesn't matter
        return any(_is_unknown(size) for size in value.shape)
    return isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) and bool(free_unbacked_symbols(value))


def _reads_number(node: torch.fx.Node) -> bool:
    return node.target is _aten._local_scalar_dense.default


def results_of(program: torch.export.ExportedProgram, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """What torch computes for these arguments, in the order of the program; buffers that it writes are written.
    (`program.module()` would make modules of the program first, which takes longer than small models do.)"""
    values = {**program.state_dict, **program.constants}
    made, written = interpreted(program, values, pytree.tree_leaves((args, kwargs))), written_buffers(program)
    for buffer, new in zip(written, made, strict=False):
        values[buffer.target].copy_(new)
    return list(made[len(written) :])
