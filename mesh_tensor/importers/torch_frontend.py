"""from_torch: an exported torch program as a Relax module that computes the same."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.utils import _pytree as pytree

from mesh_tensor.base.errors import listing, refuse, shown
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.dtypes import as_floats

from .imported import ImportedModule, form_of, refuse_differences
from .torch_autocast import under_autocast
from .torch_dropout import counted
from .torch_exact import results_in_float64
from .torch_import import import_torch
from .torch_program import dtypes_inside, results_of


def from_torch(program: torch.export.ExportedProgram, *, check: bool = True, buffers: bool = False) -> ImportedModule:
    """Import a program of `torch.export.export` as a Relax module with its weights.

    The module's function `main` takes the inputs in torch's order and under torch's names (nested inputs flattened),
    then the parameters. A parameter's name is made an identifier: "blocks.0.fc.weight" becomes `blocks_0_fc_weight`
    (with the prefix `p_` if it began with a digit). `annotate_module` takes both names; it also takes the name of a
    submodule, "blocks.0.fc", for its output ("fc@0", "fc@1", ... if it is called several times).

    Buffers are constants, except those that the program updates: these follow the parameters, and their new values are
    the last results. Complex tensors become float tensors with a last dim of 2, also in `params`, whose tensors share
    the model's memory. Inputs and results that are no tensors are left out of `main`, and `distribute_module` restores
    them. A single result is no tuple. `scaled_dot_product_attention`, `layer_norm`, `rms_norm`, `gelu` and other
    operators that Relax has are kept as one operator.

    A program with active dropout has a further last input, the integer `dropout_seed` (passed by name if the program
    has inputs by name, or nested ones). What is dropped depends on the seed and the position in the global tensor, so
    it is the same on any mesh.

    Args:
        program: the ExportedProgram.
        check: run both on the program's example inputs, and refuse a module whose results differ from torch's. (TVM's
            importer ignores some options of some operators.)
        buffers: make the buffers in the model's `state_dict()` parameters, too: they can be sharded by name, replaced,
            and are in the `state_dict()` of a run. Training doesn't change them.

    Raises:
        MeshTensorError: an operator that can't be imported, random or of another result type than in torch, named with
            the torch module it is in; a program that writes its inputs, or takes numbers that are not constant; results
            that differ.
    """
    if not isinstance(program, torch.export.ExportedProgram):
        refuse(f"a {type(program).__name__} is no exported program", fix="pass torch.export.export(model, inputs)")
    program = under_autocast(counted(program))
    module = replace(import_torch(program, buffers), form=form_of(program))
    if check and program.example_inputs is not None:
        _check(module, program)
    return module


def _check(module: ImportedModule, program: torch.export.ExportedProgram) -> None:
    args, kwargs = program.example_inputs
    given = _tensors((args, kwargs))
    with torch.no_grad(), _unwritten(program, module):
        first = {name: module.params[name].clone() for name in module.state}
        expected = [as_floats(result).clone() for result in _tensors(results_of(program, args, kwargs))]
        expected += [module.params[name].clone() for name in module.state]
    with torch.no_grad():
        results = run_sequential(module.mod, [*map(as_floats, given), *{**module.params, **first}.values()])
    refuse_differences(
        results,
        expected,
        "torch",
        exact=lambda: [] if module.state else [*map(as_floats, results_in_float64(program, given))],
        where="the imported program, on its example inputs",
        fix="write the model with other operators",
        computed_in=dtypes_inside(program),
    )


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@contextmanager
def _unwritten(program: torch.export.ExportedProgram, module: ImportedModule) -> Iterator[None]:
    """Buffers that the program writes are as they were afterwards."""
    kept = {name: module.params[name].clone() for name in module.state}
    try:
        yield
    finally:
        for name, value in kept.items():
            module.params[name].copy_(value)


_POSITIONS = 5  # of the prompt that the model is recorded with


class Decoder(torch.nn.Module):
    """A causal language model and its keys and values, of which calls write those at `start` and after."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self._cache = _cache(model, batch, length)
        self._known = set(inspect.signature(model.forward).parameters)
        for number, layer in enumerate(self._cache.layers):
            self.register_buffer(f"keys_{number}", layer.keys, persistent=False)
            self.register_buffer(f"values_{number}", layer.values, persistent=False)

    def forward(
        self, ids: torch.Tensor, mask: torch.Tensor, positions: torch.Tensor, start: torch.Tensor
    ) -> torch.Tensor:
        """Logits (batch, vocabulary) after the last of `ids` (batch, n), which are written from column `start` on.
        `mask` (batch, length): the columns that hold tokens; `positions` (batch, n): where in its row each id is."""
        for number, layer in enumerate(self._cache.layers):
            layer.keys, layer.values = getattr(self, f"keys_{number}"), getattr(self, f"values_{number}")
            layer.cumulative_length = start.clone()  # which the layer adds to
        given = {"position_ids": positions, "logits_to_keep": 1}
        given = {name: value for name, value in given.items() if name in self._known}
        made = self.model(input_ids=ids, attention_mask=mask, past_key_values=self._cache, use_cache=True, **given)
        return made.logits[:, -1]


def from_transformers(model: Any, batch: int, length: int, *, check: bool = True) -> ImportedModule:
    """The Relax module of a causal language model of transformers, for `generate`: it takes ids (batch, n) of any n,
    and keeps the keys and values of all layers, `keys_0`, `values_0`, ..., each (batch, key heads, length, size).

    Args:
        model: what `AutoModelForCausalLM` and its like give, in eval mode. Weights have its names, after `model.`.
        batch: how many sequences there are.
        length: how many positions the cache has, for prompt and new tokens.
        check: as in `from_torch`.

    Raises:
        MeshTensorError: a model whose layers keep something else than keys and values, or one that torch or
            `from_torch` can't take in.
    """
    if not (hasattr(model, "config") and hasattr(model, "generate")):
        refuse(f"a {type(model).__name__} is no causal language model of transformers", fix="use from_torch")
    if model.training:
        refuse("the model is in training mode, where dropout is random", fix="call model.eval() first")
    if batch < 1 or length < 1:
        refuse(f"a batch of {shown(batch)}, a length of {shown(length)}", fix="give both as positive numbers")
    prompt = min(_POSITIONS, length)
    positions = torch.arange(prompt).expand(batch, -1).contiguous()
    mask = (torch.arange(length) < prompt).long().expand(batch, -1).contiguous()
    inputs = (torch.zeros_like(positions), mask, positions, torch.tensor(0))
    any_size = {1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        decoder = Decoder(model, batch, length).eval()
        try:
            program = torch.export.export(decoder, inputs, dynamic_shapes=(any_size, None, any_size, None))
        except Exception as error:  # whatever the model's own code raises while it is recorded
            refuse(
                f"torch.export can't record this {type(model).__name__} with a cache of {length} positions",
                why=str(error),
                fix="write a module that keeps its keys and values in buffers, and export it yourself",
            )
        return from_torch(program, check=check)


def _cache(model: Any, batch: int, length: int) -> Any:
    """A cache of transformers' of that length, of keys and values for every layer."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    config = model.config.get_text_config()
    try:
        cache = StaticCache(config=config, max_cache_len=length)
    except Exception as error:  # transformers' own, of a configuration without attention
        refuse(f"transformers has no static cache for a {type(model).__name__}", why=str(error), fix=_OTHER)
    # Windows are in the masks: what lies outside is kept, and not looked at.
    layers = [StaticLayer(length) if type(x) is StaticSlidingWindowLayer else x for x in cache.layers]
    if other := [type(layer).__name__ for layer in layers if type(layer) is not StaticLayer]:
        kinds = listing(list(dict.fromkeys(other)))
        refuse(f"layers of the {type(model).__name__} keep something else than keys and values: {kinds}", fix=_OTHER)
    cache.layers = layers
    try:  # which heads a layer keeps, and how large they are, its own first call says
        ids = torch.zeros(batch, 1, dtype=torch.long, device=model.device)
        with torch.no_grad():
            model(input_ids=ids, past_key_values=cache, use_cache=True)
    except Exception as error:  # whatever the model's own code raises
        refuse(f"the {type(model).__name__} can't fill a static cache", why=str(error), fix=_OTHER)
    known = [layer for layer in layers if layer.is_initialized]
    if not known:
        refuse(f"the {type(model).__name__} puts nothing into a static cache", fix=_OTHER)
    for layer in layers:
        if not layer.is_initialized:  # it looks at another one's
            layer.lazy_initialization(known[0].keys, known[0].values)
        layer.keys.zero_()
        layer.values.zero_()
    return cache


_OTHER = "pass all tokens at every call: export the model with use_cache=False, and use from_torch"
