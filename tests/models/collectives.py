"""What plans of an architecture move, beside what people who place collectives by hand would.

Data parallel: the batch is split, and nothing has to move. Megatron: pairs of linear layers, the first split by its
results, the second by what it takes; each pair ends in one all-reduce, and so does a look-up in an embedding that is
split by its rows. A norm over features that are split takes a number per token."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep

MESH = {"x": 2}
_FLOAT = 4  # bytes
_ATTENTION = (nn.functional.multi_head_attention_forward, torch._native_multi_head_attention)

# First layers of pairs, and last ones, by the ends of their names.
_COLUMNS = (
    "q_proj", "k_proj", "v_proj", "qkv_proj", "query", "key", "value", "query_key_value", "q_lin", "k_lin", "v_lin",
    "query_proj", "key_proj", "value_proj", "c_attn", "Wqkv", "attn.qkv", "SelfAttention.q", "SelfAttention.k",
    "SelfAttention.v", "EncDecAttention.q", "EncDecAttention.k", "EncDecAttention.v", "fc1", "lin1", "fc_in", "c_fc",
    "dense_h_to_4h", "wi", "wi_0", "wi_1", "intermediate.dense", "gate_proj", "up_proj", "gate_up_proj", "w1", "w3",
    "linear_1", "linear_v", "mlp.Wi", "ffn", "attn.attention.q_proj",
)  # fmt: skip
_ROWS = (
    "o_proj", "out_proj", "attention.output.dense", "attention.dense", "self_attention.dense", "self_attn.dense",
    "self_attn.output", "attn.proj", "out_lin", "attn.c_proj", "SelfAttention.o", "EncDecAttention.o", "attn.Wo", "fc2",
    "lin2", "fc_out", "mlp.c_proj", "dense_4h_to_h", "wo", "output.dense", "down_proj", "w2", "mlp.Wo", "ffn_output",
    "x_proj", "conv_kernel_layer",
)  # fmt: skip
# What is called as one of these, and is no layer of a pair.
_OTHERS = ("bottleneck.attention.dense",)
# Second layers inside of a branch: their results are no terms of the stream.
_INSIDE = ("x_proj", "conv_kernel_layer")
# Norms that may be over all features between the layers of a pair.
_NORMS = ("self_attn.q_norm", "self_attn.k_norm", "self_attn.norm", "attn_sub_norm", "ffn_sub_norm", "mamba.norm")
# Attention and MLP side by side: one sum for both.
_SIDE_BY_SIDE = ("codegen", "cohere", "cohere2", "falcon", "gpt_neox", "gptj", "phi")
# What a layer takes is added to what the layer before made of it: none of them are pairs.
_WITHOUT_PAIRS = ("swiftformer",)


@dataclass(frozen=True)
class Moved:
    """How many collectives of each kind there are, and the bytes that a device receives in them."""

    kinds: Mapping[str, int]
    bytes: int

    def __str__(self) -> str:
        kinds = ", ".join(f"{count} {kind.replace('_', '-')}" for kind, count in sorted(self.kinds.items()))
        return f"{kinds}: {self.bytes:,} B" if kinds else "0"


@dataclass(frozen=True)
class Counted:
    """Ours under both layouts, and what the hand would place under Megatron's; None where there are no such pairs."""

    data: Moved | None = None
    tensor: Moved | None = None
    hand: Moved | None = None


def counted(model: nn.Module, kind: str, module: Any, given: Mapping[str, Any]) -> Counted:
    """Both layouts of an imported model that is called with `given`."""
    inputs = [leaf for leaf in pytree.tree_leaves(given) if isinstance(leaf, torch.Tensor)]
    by_hand = None if kind in _WITHOUT_PAIRS else hand(model, kind, given)
    data = moved(module, batches(module, inputs))
    return Counted(data, None if by_hand is None else moved(module, pairs(model, module)), by_hand)


def moved(module: Any, shardings: Mapping[str, Any]) -> Moved:
    """What a call of the module moves."""
    steps = mt.distribute_module(module, MESH, shardings).program.steps
    found = [step for step in steps if isinstance(step, CollectiveStep) and step.bytes]
    return Moved(dict(Counter(step.kind for step in found)), sum(step.bytes for step in found))


def batches(module: Any, inputs: list[torch.Tensor]) -> dict[str, dict[str, int]]:
    """Inputs that have the batch, the first dim of the first of them, split over the mesh."""
    params = list(module.mod["main"].params)[: len(inputs)]
    batch = inputs[0].shape[0]
    return {param.name_hint: {"x": 0} for param in params if [*param.struct_info.shape][:1] == [batch]}


def pairs(model: nn.Module, module: Any) -> dict[str, dict[str, int]]:
    """Megatron's layout, by wildcards, of what the imported module uses."""
    made: dict[str, dict[str, int]] = {}
    names = dict(model.named_modules())
    for ends, dim in ((_COLUMNS, 0), (_ROWS, 1)):
        for end in ends:
            called = {name: layer for name, layer in names.items() if _ends(name, (end,)) and _is_linear(layer)}
            layers = {name: layer for name, layer in called.items() if not _ends(name, _OTHERS)}
            for pattern in [f"*.{end}"] if layers == called and layers else layers:
                turned = not isinstance(next(iter(layers.values())), nn.Linear)
                made[f"{pattern}.weight"] = {"x": 1 - dim if turned else dim}
                if dim == 0 and any(layer.bias is not None for layer in layers.values()):
                    made[f"{pattern}.bias"] = {"x": 0}
    from tvm import relax  # which mesh_tensor brings

    taken = {var.name_hint for var in relax.analysis.free_vars(module.mod["main"].body)}
    used = [theirs for theirs, ours in module.names.items() if ours in taken]
    made |= _experts(names) | _vocabulary(model)
    return {name: layout for name, layout in made.items() if any(fnmatchcase(theirs, name) for theirs in used)}


def _ends(name: str, ends: Iterable[str]) -> bool:
    return any(fnmatchcase(name, f"*.{end}") for end in ends)


def _is_linear(layer: nn.Module) -> bool:
    return isinstance(layer, nn.Linear) or type(layer).__name__ == "Conv1D"


def _experts(names: Mapping[str, nn.Module]) -> dict[str, dict[str, int]]:
    """Weights of all experts in one: the hidden features split."""
    made: dict[str, dict[str, int]] = {}
    for layer in names.values():
        first, last = getattr(layer, "gate_up_proj", None), getattr(layer, "down_proj", None)
        if isinstance(first, nn.Parameter) and isinstance(last, nn.Parameter):
            turned = first.shape[-1] == 2 * last.shape[1]  # (experts, features, 2 x hidden)
            made["*.experts.gate_up_proj"] = {"x": 2 if turned else 1}
            made["*.experts.down_proj"] = {"x": 1 if turned else 2}
            if isinstance(getattr(layer, "gate_up_proj_bias", None), nn.Parameter):
                made["*.experts.gate_up_proj_bias"] = {"x": 1}
    return made


def _vocabulary(model: nn.Module) -> dict[str, dict[str, int]]:
    """Embeddings by their rows, and the layer that makes logits, too."""
    tables = {id(table.weight) for table in _tables(model)}
    return {name: {"x": 0} for name, value in model.named_parameters() if id(value) in tables}


def _tables(model: nn.Module) -> list[nn.Module]:
    found = []
    for what in ("get_input_embeddings", "get_output_embeddings"):
        try:
            table = getattr(model, what)()
        except (AttributeError, NotImplementedError):
            continue
        if isinstance(table, (nn.Embedding, nn.Linear)):
            found.append(table)
    return found


def hand(model: nn.Module, kind: str, given: Mapping[str, Any]) -> Moved | None:
    """An all-reduce at the end of every pair, of what a call has there; for every look-up in a split embedding; and for
    every norm over split features. None if there are no pairs."""
    sizes: dict[str, list[int]] = {}
    handles = []

    def listen(layer: nn.Module, key: str) -> None:
        def add(layer: nn.Module, given: Any, result: Any) -> None:
            sizes.setdefault(key, []).append(_first(result) * _rows_of_each(layer, given))

        handles.append(layer.register_forward_hook(add))

    weights: dict[int, str] = {}
    norms: list[int] = []
    for name, layer in model.named_modules():
        rows = _is_linear(layer) and _ends(name, _ROWS) and not _ends(name, _OTHERS)
        experts = name.endswith(".experts") and isinstance(getattr(layer, "down_proj", None), nn.Parameter)
        if rows or experts:
            listen(layer, name)
        if rows:
            weights[id(layer.weight)] = name
    rows_of_pairs = len(handles)
    for layer in _norms(model):
        per_token = layer.weight.numel()
        handles.append(layer.register_forward_hook(lambda *given, n=per_token: norms.append(_first(given[2]) // n)))
    split = {id(table.weight) for table in _tables(model)}
    for layer in model.modules():
        if isinstance(layer, nn.Embedding) and id(layer.weight) in split:
            listen(layer, "vocabulary")
    functions = _Functions(weights)
    with functions:
        model(**given)
    sizes = functions.sizes | sizes  # torch's attention takes its last layer's weight, and never calls the layer
    for handle in handles:
        handle.remove()
    if not rows_of_pairs:
        return None
    branches: dict[str, list[int]] = {}
    for key, found in sizes.items():
        branch = key if key == "vocabulary" else _branch(key, kind in _SIDE_BY_SIDE)
        branches[branch] = max(branches.get(branch, []), found, key=sum)
    elements = sum(map(sum, branches.values())) + sum(norms)
    parts = MESH["x"]
    count = sum(map(len, branches.values())) + len(norms)
    return Moved({"all_reduce": count}, 2 * elements * _FLOAT * (parts - 1) // parts)


def _norms(model: nn.Module) -> list[nn.Module]:
    """Norms over all that a first layer beside them gives, or a second one takes."""
    names, split = dict(model.named_modules()), set[tuple[str, int]]()
    for name, layer in names.items():
        if isinstance(layer, nn.Linear) and _ends(name, (*_COLUMNS, *_ROWS)) and not _ends(name, _OTHERS):
            columns = _ends(name, _COLUMNS)
            split.add((name.rpartition(".")[0], layer.out_features if columns else layer.in_features))
    return [
        layer
        for name, layer in names.items()
        if _ends(name, _NORMS) and (name.rpartition(".")[0], layer.weight.numel()) in split
    ]


class _Functions(TorchFunctionMode):
    """How many elements attention gave whose last layer has one of these weights, by name."""

    def __init__(self, weights: Mapping[int, str]) -> None:
        super().__init__()
        self._weights, self.sizes = weights, dict[str, list[int]]()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for name in {self._weights.get(id(arg)) for arg in args} - {None} if func in _ATTENTION else ():
            self.sizes.setdefault(name, []).append(_first(made))
        return made


def _rows_of_each(layer: nn.Module, given: Any) -> int:
    """How many rows of a token are completed: of experts with a norm of their own, one for each that is chosen."""
    return given[1].shape[-1] if hasattr(layer, "post_expert_norm") else 1


def _first(result: Any) -> int:
    return (result if isinstance(result, torch.Tensor) else result[0]).numel()


def _branch(name: str, whole: bool) -> str:
    """The part of a layer that is added to the stream at once: what is in it is added first. `whole`: the layer."""
    if _ends(name, _INSIDE):
        return name
    found = re.match(r"(.*\.\d+)\.([^.]*)", name)
    return name if found is None else found[1] if whole else f"{found[1]}.{found[2]}"
