"""Dropout of torch's as one whose numbers are counted: what is dropped follows from a seed and from where it stands.

A program that drops takes the seed as its last input then, `dropout_seed`; the dropouts in it are numbered in order.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch.export.graph_signature import ExportGraphSignature, InputKind, InputSpec, TensorArgument
from torch.utils import _pytree as pytree
from tvm import relax

from mesh_tensor.rules.operator.dropout import SEED_NAME, Dropout, dropout_call
from mesh_tensor.targets.torch_ops.create import dropped

from .torch_args import arguments, changed_program, copied_graph, emit

aten = torch.ops.aten


@torch.library.custom_op("mesh_tensor_import::counted_dropout", mutates_args=())
def counted_dropout(x: torch.Tensor, seed: torch.Tensor, probability: float, stream: int) -> torch.Tensor:
    """`mesh.dropout` of a whole tensor."""
    return dropped(x, seed, probability, stream, tuple(x.shape), (0,) * x.ndim).contiguous()


@counted_dropout.register_fake
def _(x: torch.Tensor, seed: torch.Tensor, probability: float, stream: int) -> torch.Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    _, ctx.seed, ctx.probability, ctx.stream = inputs


def _backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None, None]:
    return counted_dropout(gradient, ctx.seed, ctx.probability, ctx.stream), None, None, None


counted_dropout.register_autograd(_backward, setup_context=_keep)


def converted(node: torch.fx.Node, importer: Any) -> relax.Expr:
    """A counted dropout as `mesh.dropout`."""
    x, seed, probability, stream = arguments(node, importer, 4)
    return emit(importer, dropout_call(x, seed, Dropout(float(probability), int(stream))))


def counted(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with counted dropouts, and with the seed as its last input; itself if nothing in it drops."""
    if not any(_drops(node) for node in program.graph.nodes):
        return program
    seeds = [spec.arg.name for spec in program.graph_signature.input_specs if spec.arg.name == SEED_NAME]
    if not seeds:
        program = _with_seed(program)
    graph = program.graph
    (seed,) = (node for node in graph.nodes if node.op == "placeholder" and node.name == SEED_NAME)
    drops = [node for node in graph.nodes if _drops(node)]
    for stream, node in enumerate(drops):
        with graph.inserting_before(node):
            made = _DROPS[node.target](_Emitter(graph, node), node, seed, stream)
        operand = node.args[0]
        node.replace_all_uses_with(made)
        if node.target is aten.dropout_.default:
            _replace_later(operand, node, made)
        graph.erase_node(node)
    program.graph_module.recompile()
    return program


def kept_whole(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program, in which nothing is dropped any more."""
    for node in [node for node in program.graph.nodes if _drops(node)]:
        if node.target is aten.scaled_dot_product_attention.default:
            node.args = tuple(0.0 if number == 4 else arg for number, arg in enumerate(node.args))
            node.kwargs = {name: value for name, value in node.kwargs.items() if name != "dropout_p"}
        else:
            node.replace_all_uses_with(node.args[0])
            program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def _with_seed(program: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    """The program with one more input, the last one: by name, where there are such, or nested ones."""
    module, specs = copied_graph(program), program.graph_signature
    *_, last = (node for node in module.graph.nodes if node.op == "placeholder")
    with module.graph.inserting_after(last):
        seed = module.graph.placeholder(SEED_NAME)
    seed.name = SEED_NAME
    modes = [getattr(node.meta.get("val"), "fake_mode", None) for node in module.graph.nodes]
    with next(mode for mode in modes if mode is not None):
        seed.meta["val"] = torch.zeros((), dtype=torch.int64)
    module.recompile()
    argument, (entry, *others) = TensorArgument(SEED_NAME), program.module_call_graph
    entry = copy.copy(entry)
    if (form := entry.signature) is not None:
        entry.signature = form = copy.copy(form)
        form.inputs = [*form.inputs, argument]
        form.in_spec = pytree.tree_structure(_and_last(form.in_spec.unflatten([0] * form.in_spec.num_leaves), 0))
        if form.forward_arg_names is not None:
            form.forward_arg_names = [*form.forward_arg_names, SEED_NAME]
    inputs = program.example_inputs
    made = changed_program(
        program,
        module,
        graph_signature=ExportGraphSignature(
            [*specs.input_specs, InputSpec(InputKind.USER_INPUT, argument, None)], specs.output_specs
        ),
        module_call_graph=[entry, *others],
        example_inputs=None if inputs is None else _and_last(inputs, torch.zeros((), dtype=torch.int64)),
    )
    made._guards_code = getattr(program, "_guards_code", [])
    return made


def _and_last(inputs: Any, seed: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Inputs in order and by name, with the seed as the last one."""
    args, named = inputs
    by_name = named or not all(pytree.tree_structure(arg).is_leaf() for arg in args)
    return (tuple(args), {**named, SEED_NAME: seed}) if by_name else ((*args, seed), {})


class _Emitter:
    """Adds operators to a graph, which know what they give, as part of the module that `like` is in."""

    def __init__(self, graph: torch.fx.Graph, like: torch.fx.Node) -> None:
        self._graph, self._like = graph, like

    def __call__(self, target: Any, *args: Any) -> torch.fx.Node:
        node = self._graph.call_function(target, args)
        operands = torch.fx.map_arg(args, lambda other: other.meta["val"])
        with ExitStack() as entered:
            mode = getattr(self._like.meta["val"], "fake_mode", None)
            if mode is not None:
                entered.enter_context(mode)
            entered.enter_context(torch.no_grad())
            value = target(*operands)
        node.meta = {**self._like.meta, "val": value}
        return node


def _replace_later(value: torch.fx.Node, written: torch.fx.Node, made: torch.fx.Node) -> None:
    """Let what comes after a node that wrote into a value take what it made instead."""
    after = set(_after(written))
    value.replace_all_uses_with(made, delete_user_cb=lambda user: user in after)


def _after(node: torch.fx.Node) -> Iterator[torch.fx.Node]:
    while node.op != "output":
        node = node.next
        yield node


def _drops(node: torch.fx.Node) -> bool:
    """Whether some of what the node makes is dropped at random."""
    if node.op != "call_function" or node.target not in _DROPS:
        return False
    if node.target is aten.scaled_dot_product_attention.default:
        return bool(_argument(node, 4, "dropout_p", 0.0))
    return bool(node.args[1]) and bool(node.args[2])


def _argument(node: torch.fx.Node, position: int, name: str, default: Any) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def _elements(emitter: _Emitter, node: torch.fx.Node, seed: torch.fx.Node, stream: int) -> torch.fx.Node:
    return emitter(_COUNTED, node.args[0], seed, float(node.args[1]), stream)  # type: ignore[arg-type]


def _channels(emitter: _Emitter, node: torch.fx.Node, seed: torch.fx.Node, stream: int) -> torch.fx.Node:
    """Of whole channels."""
    x: Any = node.args[0]
    shape = [*x.meta["val"].shape[:2], *[1] * (x.meta["val"].ndim - 2)]
    if all(isinstance(size, int) for size in shape):
        ones = emitter(aten.to.dtype, emitter(aten.full.default, shape, 1.0), x.meta["val"].dtype)
    else:
        first = x
        for dim in range(2, len(shape)):
            first = emitter(aten.slice.Tensor, first, dim, 0, 1)
        ones = emitter(aten.ones_like.default, first)
    return emitter(aten.mul.Tensor, x, emitter(_COUNTED, ones, seed, float(node.args[1]), stream))  # type: ignore[arg-type]


def _weights(emitter: _Emitter, node: torch.fx.Node, seed: torch.fx.Node, stream: int) -> torch.fx.Node:
    """Attention whose weights are dropped, as torch computes it."""
    query, key, value = node.args[:3]
    mask, probability = _argument(node, 3, "attn_mask", None), _argument(node, 4, "dropout_p", 0.0)
    causal, scale = _argument(node, 5, "is_causal", False), node.kwargs.get("scale")
    shapes = [other.meta["val"].shape for other in (query, key)]  # type: ignore[union-attr]
    if node.kwargs.get("enable_gqa", False) and shapes[0][-3] != shapes[1][-3]:
        times = shapes[0][-3] // shapes[1][-3]
        key, value = (emitter(aten.repeat_interleave.self_int, other, times, -3) for other in (key, value))
    turned = emitter(aten.transpose.int, key, -2, -1)
    scores = emitter(aten.matmul.default, query, turned)
    scores = emitter(aten.mul.Tensor, scores, 1 / math.sqrt(shapes[0][-1]) if scale is None else scale)
    if causal:
        sizes = [shapes[0][-2], shapes[1][-2]]
        known = all(isinstance(size, int) for size in sizes)
        allowed = emitter(aten.full.default, sizes, 1.0) if known else emitter(aten.ones_like.default, scores)
        mask = emitter(aten.gt.Scalar, emitter(aten.tril.default, allowed), 0.5)
    if mask is not None and mask.meta["val"].dtype == torch.bool:
        scores = emitter(aten.masked_fill.Scalar, scores, emitter(aten.logical_not.default, mask), -math.inf)
    elif mask is not None:
        scores = emitter(aten.add.Tensor, scores, mask)
    weights = emitter(aten.softmax.int, scores, -1)
    return emitter(aten.matmul.default, emitter(_COUNTED, weights, seed, float(probability), stream), value)


_COUNTED = torch.ops.mesh_tensor_import.counted_dropout.default
_DROPS: dict[Any, Callable[[_Emitter, torch.fx.Node, torch.fx.Node, int], torch.fx.Node]] = {
    aten.dropout.default: _elements,
    aten.dropout_.default: _elements,
    aten.feature_dropout.default: _channels,
    aten.scaled_dot_product_attention.default: _weights,
}


def has_seed(program: torch.export.ExportedProgram) -> bool:
    """Whether the program takes a seed."""
    specs = program.graph_signature.input_specs
    return any(spec.kind == InputKind.USER_INPUT and spec.arg.name == SEED_NAME for spec in specs)
