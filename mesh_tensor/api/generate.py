"""generate: tokens from a causal language model whose keys and values stay on the mesh; the next is the likeliest, or
one that is drawn by a generator that counts."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.runtime.ambient import undisturbed

from .decoding import Decoding, same_on_ranks
from .generation_config import OwnFunctions, stated
from .mesh_module import MeshModule
from .sampling import Beams, Sampling

_BY_ROW = ("keys_", "values_")  # what a module keeps for each row of its batch


@undisturbed
def generate(
    run: MeshModule,
    ids: torch.Tensor,
    max_new_tokens: int | None = None,
    *,
    attention_mask: torch.Tensor | None = None,
    generation_config: Any = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float | None = None,
    min_new_tokens: int | None = None,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
    pad_token_id: int | None = None,
    num_return_sequences: int | None = None,
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    stopping_criteria: Any = (),
    logits_processor: Any = (),
    **others: Any,
) -> torch.Tensor:
    """Generate text: one call of `run` for the prompts, then one for each new token.

    Args:
        run: a distributed module as of `from_transformers`: it takes `(ids, mask, positions, start)`, returns logits
            (batch, vocabulary) for the token after the last id, and keeps a cache of earlier positions, which is reset
            before the prompts.
        ids: the prompts, int64 (rows, positions), as a global tensor; on ranks the same on each. If there are more rows
            than the module's batch, they are taken in turns; if there are fewer, the last one is repeated.
        max_new_tokens: the most tokens that are generated per row. Needed unless the config has it.
        attention_mask: of the shape of `ids`: 1 for tokens, 0 for padding, which is on the left; None: no padding.
        generation_config: a GenerationConfig of transformers, or a dict: defaults for the arguments here. Options in it
            that would change tokens, and are not supported, are refused by name.
        do_sample: sample tokens instead of taking the likeliest; None: if a temperature above 0 is given. A
            temperature that contradicts it is refused.
        temperature: divides the logits; 0 takes the likeliest token; None: 1 where tokens are sampled.
        top_k, top_p: sample from the k likeliest tokens only, or from the fewest whose probabilities sum to p.
        repetition_penalty: divides the positive logits of tokens that the row has already, and multiplies the negative
            ones; padding doesn't count.
        min_new_tokens: no row ends before so many new tokens.
        seed: of sampling; tokens are a function of seed, row and position, whatever the mesh.
        eos_token_id: the token, or tokens, that end a row.
        pad_token_id: fills a row after its end; None: the first of `eos_token_id`.
        num_return_sequences: rows returned for each prompt, next to each other: independent samples, or the best of its
            beams. Without sampling or beams there is one.
        num_beams, length_penalty, early_stopping: beam search with so many beams for each prompt, of which the best are
            returned (see `Beams`); with sampling, beams are sampled without replacement. The module's batch has to be
            at least `num_beams`.
        stop_strings: a row ends with the token that completes one of these in the text that `tokenizer` makes of it.
        stopping_criteria: functions of ids (rows, positions) and None that say per row whether it ends there, one or
            several, as transformers' are; they see the prompts of one turn. On ranks, each calls its own.
        logits_processor: functions of these ids and logits (rows, vocabulary) that give other logits, before these are
            divided by the temperature.
        others: none: arguments that transformers' `generate` has beside these are refused by name.

    Returns:
        (rows * num_return_sequences, positions + new tokens) ids: those given, and what follows.

    Raises:
        MeshTensorError: arguments that don't fit, all named, more tokens than the module has room for, functions
            that raise or give something else, or ranks that found different tokens.
    """
    given = {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "repetition_penalty": repetition_penalty,
        "min_new_tokens": min_new_tokens,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "num_return_sequences": num_return_sequences,
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "stop_strings": stop_strings,
    }
    with run.as_call() if isinstance(run, MeshModule) else nullcontext():
        _refuse_unknown(others)
        said = stated(generation_config, given, ids.shape[-1] if isinstance(ids, torch.Tensor) and ids.dim() else 0)
        sampling, ends = _sampling(said, seed), _ends(said.get("eos_token_id"))
        most: Any = said.get("max_new_tokens")
        mask = torch.ones_like(ids) if attention_mask is None and isinstance(ids, torch.Tensor) else attention_mask
        pad = _pad(said.get("pad_token_id", next(iter(ends), 0)))
        batch, length = _room(run, ids, mask, most)
        beams = _beams(run, said, batch)
        each = _returned(said.get("num_return_sequences", 1), sampling, beams)
        own = OwnFunctions.of(run, said.get("stop_strings"), tokenizer, stopping_criteria, logits_processor)
    same_on_ranks(run, "arguments of generate", ids, mask, (most, sampling, beams, each, ends, pad, own.counts))
    drawn, ids = Decoding(run, sampling, own, ends, pad, batch, length, most), ids.to(torch.int64)
    if beams.count == 1:
        ids, mask = (tensor.repeat_interleave(each, dim=0) for tensor in (ids, mask))
    at_once = batch // beams.count
    turns = [slice(row, row + at_once) for row in range(0, len(ids), at_once)]
    with run.turns.one("a call of generate", of_several=True):
        if beams.count == 1:
            made = [drawn.rows(ids[turn], mask[turn], turn.start) for turn in turns]
        else:
            made = [drawn.best(ids[turn], mask[turn], turn.start, beams, each) for turn in turns]
    widest = max(rows.shape[1] for rows in made)
    return torch.cat([torch.nn.functional.pad(rows, (0, widest - rows.shape[1]), value=pad) for rows in made])


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(generate).parameters if name not in ("run", "ids", "others")]
    meant = {"max_length": "; say max_new_tokens, which the prompt doesn't count in"}
    problems = [f"there is no argument {name!r}{meant.get(name) or did_you_mean(name, known)}" for name in others]
    if problems:
        refuse(problems, where="generate", fix=f"leave them out; it takes {listing(known)}")


def _sampling(said: Mapping[str, Any], seed: int) -> Sampling:
    return Sampling(
        _temperature(said.get("do_sample"), said.get("temperature")),
        said.get("top_k"),
        said.get("top_p"),
        seed,
        said.get("repetition_penalty", 1.0),
        said.get("min_new_tokens", 0),
    )


def _returned(each: Any, sampling: Sampling, beams: Beams) -> int:
    """How many rows are returned for each prompt."""
    problem = None
    if not (type(each) is int and each >= 1):
        problem = f"num_return_sequences is {shown(each)}, but it has to be a positive number"
    elif each > beams.count > 1:
        problem = f"{each} rows are to be returned of {beams.count} beams"
    elif each > beams.count and not sampling.temperature:
        problem = f"{each} rows are to be returned, but the likeliest tokens make one"
    if problem:
        refuse(problem, where="generate", fix="draw tokens (do_sample=True), or follow as many beams (num_beams)")
    return int(each)


def _beams(run: MeshModule, said: Mapping[str, Any], batch: int) -> Beams:
    names = {"num_beams": "count", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
    beams = Beams(**{field: said[name] for name, field in names.items() if name in said})
    if beams.count == 1:
        return beams
    problems = []
    if beams.count > batch:
        problems.append(f"{beams.count} beams, but the module takes {batch} rows")
    shapes = run.state_shapes
    others = [name for name, shape in shapes.items() if not name.startswith(_BY_ROW) or shape[:1] != (batch,)]
    if others or not shapes:
        problems.append(f"the module keeps {listing(others)}, of which nothing says which rows it belongs to")
    if problems:
        refuse(problems, where="beams of generate", fix=f"follow fewer, of a module that keeps only {_BY_ROW}")
    return beams


def _temperature(do_sample: bool | None, temperature: float | None) -> float:
    """What logits are divided by; 0 if nothing is drawn."""
    if temperature is None:
        return 1.0 if do_sample else 0.0
    if do_sample is not None and bool(do_sample) != (temperature != 0):
        refuse(
            f"do_sample is {do_sample} and the temperature is {shown(temperature)}",
            where="how tokens are drawn",
            fix="give one of them: at a temperature of 0 the likeliest token is taken, else tokens are drawn",
        )
    return temperature


def _ends(tokens: Any) -> tuple[int, ...]:
    found = tokens.tolist() if isinstance(tokens, torch.Tensor) else tokens
    found = () if found is None else tuple(found) if isinstance(found, Iterable) else (found,)
    if not all(type(token) is int for token in found):
        refuse(f"eos_token_id is {shown(tokens)}", where="generate", fix="pass a token, or several: whole numbers")
    return found


def _pad(token: Any) -> int:
    found = token.item() if isinstance(token, torch.Tensor) and token.numel() == 1 and not token.is_meta else token
    if type(found) is not int:
        refuse(f"pad_token_id is {shown(token)}", where="generate", fix="pass a token: a whole number")
    return found


def _room(run: MeshModule, ids: Any, mask: Any, new: int) -> tuple[int, int]:
    """How many rows the module takes, and how many positions it keeps, once it is known that prompts and `new` tokens
    fit into them."""
    if not isinstance(run, MeshModule):
        refuse(f"a {type(run).__name__} generates no tokens", fix="pass what distribute_module gives")
    shapes = [param.shape for param in run.inputs]
    wanted = "(ids (batch, n), mask (batch, length), positions (batch, n), start ())"
    if [len(shape) for shape in shapes] != [2, 2, 2, 0] or not all(isinstance(size, int) for size in shapes[1]):
        taken = ", ".join(f"{param.name} {param.shape}" for param in run.inputs)
        refuse(
            f"module function {run.function!r} takes ({taken}), but a module that generates takes {wanted}",
            fix="make it with from_transformers, or of a model of that form that keeps keys and values in buffers",
        )
    batch, length = shapes[1]
    if not (type(ids) is torch.Tensor and type(mask) is torch.Tensor and ids.dim() == 2 and mask.shape == ids.shape):
        given = " and ".join(f"{type(t).__name__} {tuple(getattr(t, 'shape', ()))}" for t in (ids, mask))
        fix = "pass whole tensors (batch, positions), shaped alike; one prompt as ids[None]"
        refuse(f"ids and mask are {given}", where="generate", fix=fix)
    if ids.is_meta or mask.is_meta:
        refuse("ids or mask are on device meta, without elements", where="generate", fix="pass tensors that have some")
    if problems := _misfits(ids, mask, new, length):
        refuse(list(problems), where="generate", fix="; ".join(problems.values()))
    return batch, length


def _misfits(ids: torch.Tensor, mask: torch.Tensor, new: Any, length: int) -> dict[str, str]:
    """What does not fit -> the way out."""
    problems: dict[str, str] = {}
    if ids.is_floating_point() or ids.dtype == torch.bool:
        problems[f"ids are {ids.dtype}, but they have to be whole numbers"] = "pass what a tokenizer gives: torch.int64"
    if not len(ids):
        problems["there are no prompts"] = "pass at least one row of ids"
    if not (isinstance(new, int) and new >= 0):
        fix = "say how many tokens at most come after the prompt: max_new_tokens=64"
        problems[f"max_new_tokens is {shown(new)}, but it has to be a number of tokens"] = fix
    elif (wanted := ids.shape[1] + new - 1) > length:
        what = f"prompts of {ids.shape[1]} positions and {new} new tokens need {wanted} positions"
        fix = f"ask for fewer tokens, or make the module for more: from_transformers(model, batch, length={wanted})"
        problems[f"{what}, but the module keeps {length}"] = fix
    if not bool(((mask == 0) | (mask == 1)).all()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
        what = "the attention mask is not 0 before and 1 at the tokens of each row"
        problems[what] = "pad prompts on their left"
    elif not ids.shape[1] or not bool((mask[:, -1] == 1).all()):
        problems["there are prompts without tokens"] = "begin each with a token, such as the model's bos_token_id"
    return problems
