"""from_transformers: a causal language model of transformers as a Relax module that keeps its keys and values."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch

from mesh_tensor.base.errors import listing, refuse, shown

from .imported import ImportedModule, refuse_differences
from .torch_frontend import from_torch

_POSITIONS = 5  # of the prompt that the model is recorded with


class Decoder(torch.nn.Module):
    """A causal language model and its keys and values, of which calls write those at `start` and after."""

    def __init__(self, model: Any, batch: int, length: int) -> None:
        super().__init__()
        self.model = model
        self._cache = _cache(model, batch, length)
        self.known = set(inspect.signature(model.forward).parameters)
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
        given = {name: value for name, value in given.items() if name in self.known}
        made = self.model(input_ids=ids, attention_mask=mask, past_key_values=self._cache, use_cache=True, **given)
        return made.logits[:, -1]


def from_transformers(model: Any, batch: int, length: int, *, check: bool = True) -> ImportedModule:
    """The Relax module of a causal language model of transformers, for `generate`: it takes ids (batch, n) of any n,
    and keeps the keys and values of all layers, `keys_0`, `values_0`, ..., each (batch, key heads, length, size).

    Args:
        model: what `AutoModelForCausalLM` and its like give, in eval mode. Weights have its names, after `model.`.
        batch: how many sequences there are.
        length: how many positions the cache has, for prompt and new tokens.
        check: as in `from_torch`; and run the model with a cache and without, and refuse logits that differ.

    Raises:
        MeshTensorError: a model whose layers keep something else than keys and values, that computes something else
            with a cache that is longer than what is in it, that rotates all keys otherwise from some length on
            ("longrope") which the cache exceeds, or that torch or `from_torch` can't take in.
    """
    if not (hasattr(model, "config") and hasattr(model, "generate")):
        refuse(f"a {type(model).__name__} is no causal language model of transformers", fix="use from_torch")
    if model.training:
        refuse("the model is in training mode, where dropout is random", fix="call model.eval() first")
    if batch < 1 or length < 1:
        refuse(f"a batch of {shown(batch)}, a length of {shown(length)}", fix="give both as positive numbers")
    inputs = _inputs(model, batch, length, min(_POSITIONS, length))
    any_size = {1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        decoder = Decoder(model, batch, length).eval()
        if check:
            refuse_another_rotation(model, length)
            refuse_other_logits(decoder, batch, length)
        try:
            program = torch.export.export(decoder, inputs, dynamic_shapes=(any_size, None, any_size, None))
        except Exception as error:  # whatever the model's own code raises while it is recorded
            refuse(
                f"torch.export can't record this {type(model).__name__} with a cache of {length} positions",
                why=str(error).partition("\n\n")[0],  # then where in torch, which the traceback has, too
                fix="write a module that keeps its keys and values in buffers, and export it yourself",
            )
        return from_torch(program, check=check)


def _inputs(model: Any, batch: int, length: int, count: int) -> tuple[torch.Tensor, ...]:
    """What a decoder takes first: so many different ids in each row."""
    words = getattr(model.config.get_text_config(), "vocab_size", 1)
    ids = (torch.arange(batch * count) % words).view(batch, count)
    mask = (torch.arange(length) < count).long().expand(batch, -1).contiguous()
    return ids, mask, torch.arange(count).expand(batch, -1).contiguous(), torch.tensor(0)


def refuse_another_rotation(model: Any, length: int) -> None:
    """Refuse a cache in which rows can outgrow the length from which on all keys are to be rotated otherwise."""
    rope = getattr(model.config.get_text_config(), "rope_parameters", None) or {}
    kinds = [rope, *(kind for kind in rope.values() if isinstance(kind, dict))]  # of all layers, or of kinds of them
    ends = [kind["original_max_position_embeddings"] for kind in kinds if kind.get("rope_type") == "longrope"]
    if ends and length > min(ends):
        refuse(
            f"the cache has {length} positions, and keys are rotated otherwise in rows of more than {min(ends)}",
            where=f"a {type(model).__name__} with rotations of the type 'longrope'",
            why="a row that grows beyond that keeps the keys that it has, which the model's own generate makes anew",
            fix=f"take length={min(ends)}, or, if no row begins below and ends above that, check=False",
        )


def refuse_other_logits(decoder: Any, batch: int, length: int) -> None:
    """Refuse a decoder whose model gives other logits without the cache. A prompt and a token after it are tried, every
    other row padded by one; then the cache is empty again."""
    model = decoder.model
    count = min(_POSITIONS + 1, length)
    ids, mask, positions, start = _inputs(model, batch, length, count)
    if count > 2:
        mask[1::2, 0] = 0
        positions[1::2] = (positions[1::2] - 1).clamp_min(0)
    made, last = [], count - 1
    for part in ([slice(0, last)] if last else []) + [slice(last, count)]:
        seen = mask * (torch.arange(length) < part.stop)
        made.append(decoder(ids[:, part], seen, positions[:, part], start + part.start))

    def whole(model: Any) -> list[torch.Tensor]:
        known = {"position_ids": positions} if "position_ids" in decoder.known else {}
        logits = model(input_ids=ids, attention_mask=mask[:, :count], use_cache=False, **known).logits
        return list(logits[:, -len(made) :].unbind(1))

    refuse_differences(
        tuple(made),
        whole(model),
        "the uncached model",
        exact=lambda: whole(copy.deepcopy(model).double()),
        where=f"a {type(model).__name__} with a cache of {length} positions, on a prompt and a token after it",
        why="some models go by how many keys there are, and a static cache has columns for tokens to come",
        fix=_OTHER,
    )
    for state in decoder.buffers(recurse=False):
        state.zero_()


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
