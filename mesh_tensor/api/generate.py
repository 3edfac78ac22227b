"""generate: tokens from a causal language model whose keys and values stay on the mesh; the next is the likeliest, or
one that is drawn by a generator that counts."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from mesh_tensor.base.errors import did_you_mean, listing, refuse, shown
from mesh_tensor.runtime.ambient import undisturbed

from .mesh_module import MeshModule


@undisturbed
def generate(
    run: MeshModule,
    ids: torch.Tensor,
    max_new_tokens: int,
    *,
    attention_mask: torch.Tensor | None = None,
    do_sample: bool | None = None,
    temperature: float | None = None,
    top_k: int | None = None,
    top_p: float | None = None,
    repetition_penalty: float = 1.0,
    min_new_tokens: int = 0,
    seed: int = 0,
    eos_token_id: int | Sequence[int] | torch.Tensor | None = None,
    pad_token_id: int | None = None,
    **others: Any,
) -> torch.Tensor:
    """Prompts and the tokens that follow: the prompts in one call of `run`, then each token in one.

    Args:
        run: a module that takes `(ids, mask, positions, start)`, gives logits (batch, vocabulary) after the last id,
            and keeps what it needs of earlier ones: of `from_transformers`, or any of the same form. What it keeps is
            as it was first before the prompts.
        ids: prompts, (rows, positions), whole tensors; on ranks the same on each. The module takes as many at a time as
            its batch has: more come in turns, and where there are fewer, the last one fills the batch up.
        max_new_tokens: how many tokens follow at most; fewer if all rows have ended.
        attention_mask: 1 where `ids` are tokens and 0 before, where they are padding, of the same shape; None: all
            are tokens. Shorter prompts are padded on their left.
        do_sample: whether tokens are drawn; None: if a temperature above 0 is given. A temperature that says
            otherwise is refused.
        temperature: logits are divided by this; 0 takes the likeliest token; None: 1 where tokens are drawn.
        top_k, top_p: draw from the most likely tokens only: so many, or as few as make that probability.
        repetition_penalty: positive logits of tokens that a row has are divided by this, negative ones multiplied;
            padding is no token that it has.
        min_new_tokens: no row ends before so many new tokens.
        seed: tokens that are drawn are a function of seed, row and position, on any mesh.
        eos_token_id: the token, or tokens, that end a row.
        pad_token_id: what follows the end of a row; None: the first of `eos_token_id`.
        others: none: arguments that transformers' `generate` has beside these are refused by name. A model's
            `generation_config` is not looked at, either.

    Returns:
        (rows, positions + new tokens) ids: those given, and what follows.

    Raises:
        MeshTensorError: arguments that don't fit, all named, more tokens than the module has room for, or ranks
            that found different tokens.
    """
    _refuse_unknown(others)
    temperature = _temperature(do_sample, temperature)
    sampling = Sampling(temperature, top_k, top_p, seed, repetition_penalty, min_new_tokens)
    ends = _ends(eos_token_id)
    mask = torch.ones_like(ids) if attention_mask is None else attention_mask
    pad = pad_token_id if pad_token_id is not None else next(iter(ends), 0)
    batch, length = _room(run, ids, mask, max_new_tokens)
    _same_on_ranks(run, "arguments of generate", ids, mask, (max_new_tokens, sampling, ends, pad))
    turns = [slice(row, row + batch) for row in range(0, len(ids), batch)]
    drawn = _Drawn(run, sampling, ends, pad, batch, length, max_new_tokens)
    made = [drawn.rows(ids[turn].to(torch.int64), mask[turn], turn.start) for turn in turns]
    widest = max(rows.shape[1] for rows in made)
    return torch.cat([torch.nn.functional.pad(rows, (0, widest - rows.shape[1]), value=pad) for rows in made])


@dataclass(frozen=True)
class _Drawn:
    """What follows prompts: `batch` rows of `length` positions at a time, and at most `most` tokens."""

    run: MeshModule
    sampling: Sampling
    ends: tuple[int, ...]
    pad: int
    batch: int
    length: int
    most: int

    def rows(self, ids: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
        """At most `batch` prompts, the first of which has the number `first`, and the tokens that follow."""
        count, width = ids.shape
        ended = torch.arange(self.batch) >= count
        places = torch.arange(self.batch).clamp(max=count - 1)
        ids, mask = ids[places], mask[places]
        columns = torch.zeros((self.batch, self.length), dtype=torch.int64)
        columns[:, :width] = mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0).to(torch.int64)
        made, filled = [ids], 0
        self.run.reset_state()
        for number in range(self.most):
            if number:
                columns[:, filled] = 1
                positions = positions[:, -1:] + 1
            logits = self.run(made[-1], columns, positions, torch.tensor(filled))
            filled += made[-1].shape[1]
            has = torch.cat(made, dim=1), columns[:, :filled] == 1
            logits = self.sampling.adjusted(logits, *has, number, self.ends)
            tokens = torch.where(ended, self.pad, self.sampling.tokens(logits, number, first).cpu())
            _same_on_ranks(self.run, f"token {number}", tokens)
            made.append(tokens[:, None])
            ended = ended | torch.isin(tokens, torch.tensor(self.ends, dtype=torch.int64))
            if bool(ended.all()):
                break
        return torch.cat(made, dim=1)[:count]


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(generate).parameters if name not in ("run", "ids", "others")]
    if problems := [f"there is no argument {name!r}{did_you_mean(name, known)}" for name in others]:
        refuse(problems, where="generate", fix=f"leave them out; it takes {listing(known)}")


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
        refuse(f"ids and mask are {given}", where="generate", fix="pass whole tensors (batch, positions), shaped alike")
    if problems := _misfits(ids, mask, new, length):
        refuse(problems, where="generate")
    return batch, length


def _misfits(ids: torch.Tensor, mask: torch.Tensor, new: Any, length: int) -> list[str]:
    problems = []
    if ids.is_floating_point() or ids.dtype == torch.bool:
        problems.append(f"ids are {ids.dtype}, but they have to be whole numbers")
    if not len(ids):
        problems.append("there are no prompts")
    if not (isinstance(new, int) and new >= 0):
        problems.append(f"max_new_tokens is {shown(new)}, but it has to be a number of tokens")
    elif ids.shape[1] + new - 1 > length:
        problems.append(
            f"prompts of {ids.shape[1]} positions and {new} new tokens need {ids.shape[1] + new - 1} positions, but "
            f"the module keeps {length}"
        )
    if not bool(((mask == 0) | (mask == 1)).all()) or bool((mask[:, 1:] < mask[:, :-1]).any()):
        problems.append("the attention mask is not 0 before and 1 at the tokens of each row: pad prompts on their left")
    elif not ids.shape[1] or not bool((mask[:, -1] == 1).all()):
        problems.append("there are prompts without tokens")
    return problems


def _same_on_ranks(run: MeshModule, what: str, *found: Any) -> None:
    """Refuse on all ranks what is not the same on all of them."""
    words = hashlib.sha256()
    for item in found:
        words.update(repr(item.tolist() if isinstance(item, torch.Tensor) else item).encode())
    run.on_all_ranks(f"{what}, digest {words.hexdigest()[:16]}", lambda _: None)


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn from logits, once they are `adjusted`: these over `temperature`, of them the `top_k`
    largest, of these the fewest that make `top_p` of the probability. With a temperature of 0, the largest (of equals
    the first).

    A token is a function of its logits, `seed`, its row, and its number in the row: no call depends on another."""

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    repetition_penalty: float = 1.0
    min_new_tokens: int = 0

    def __post_init__(self) -> None:
        problems = []
        if not 0 < self.repetition_penalty < float("inf"):
            problems.append(f"repetition_penalty is {shown(self.repetition_penalty)}, but it has to be above 0")
        if not (isinstance(self.min_new_tokens, int) and self.min_new_tokens >= 0):
            problems.append(f"min_new_tokens is {shown(self.min_new_tokens)}, but it has to be a number of tokens")
        if not 0 <= self.temperature < float("inf"):
            problems.append(f"temperature is {shown(self.temperature)}, but it has to be finite and at least 0")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            problems.append(f"top_k is {shown(self.top_k)}, but it has to be a positive number")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            problems.append(f"top_p is {shown(self.top_p)}, but it has to be above 0 and at most 1")
        if not (isinstance(self.seed, int) and 0 <= self.seed < 1 << 128):
            problems.append(f"the seed is {shown(self.seed)}, but it has to be a number of 128 bits")
        if self.temperature == 0 and (self.top_k is not None or self.top_p is not None):
            problems.append("top_k and top_p say what is drawn from, but at a temperature of 0 nothing is drawn")
        if problems:
            refuse(problems, where="how tokens are drawn", fix="pass temperature=1.0 to draw, 0 for the likeliest")

    def adjusted(
        self, logits: torch.Tensor, made: torch.Tensor, are: torch.Tensor, number: int, ends: Sequence[int]
    ) -> torch.Tensor:
        """The logits (batch, vocabulary) of the `number`th new token, after the ids `made` (batch, positions), of which
        these `are` tokens: those of tokens that a row has are nearer to the others, and none of `ends` comes too
        early."""
        if self.repetition_penalty != 1:
            logits, count = logits.to(torch.float32), logits.shape[1]
            has = torch.zeros(len(logits), count + 1, dtype=torch.bool)  # the last one: padding
            has = has.scatter_(1, torch.where(are, made, count), True)[:, :count].to(logits.device)
            nearer = torch.where(logits < 0, logits * self.repetition_penalty, logits / self.repetition_penalty)
            logits = torch.where(has, nearer, logits)
        if number < self.min_new_tokens and ends:
            ids = torch.arange(logits.shape[1], device=logits.device)
            logits = logits.masked_fill(torch.isin(ids, torch.tensor(ends, device=logits.device)), -torch.inf)
        return logits

    def tokens(self, logits: torch.Tensor, number: int, first: int = 0) -> torch.Tensor:
        """The next token of each row of the logits (batch, vocabulary), the `number`th of those drawn in it. Rows are
        counted from `first`.

        Raises:
            MeshTensorError: logits that are NaN, or rows without a finite one.
        """
        largest = logits.max(dim=-1)
        if bool(torch.isinf(largest.values).any()) or bool(torch.isnan(logits).any()):
            refuse(f"logits of token {number} are NaN or infinite", fix="look at the model's weights and inputs")
        if self.temperature == 0:
            return largest.indices
        rows = logits.to("cpu", torch.float64).numpy()
        drawn = [self._drawn(row, index, number) for index, row in enumerate(rows, first)]
        return torch.tensor(drawn, dtype=torch.int64, device=logits.device)

    def kept(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of one row, the tokens that may be drawn, the likeliest first, and their weights; these sum up to 1 if all
        are kept."""
        scaled = (logits - logits.max()) / self.temperature
        order = np.argsort(-scaled, kind="stable")
        order = order[np.isfinite(scaled[order])]
        if self.top_k is not None and self.top_k < len(order):
            order = order[scaled[order] >= scaled[order[self.top_k - 1]]]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        if self.top_p is None:
            return order, weights
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        return order[before < self.top_p], weights[before < self.top_p]

    def _drawn(self, logits: np.ndarray, row: int, number: int) -> int:
        tokens, weights = self.kept(logits)
        place = np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, row, number])).random()
        ends = np.cumsum(weights)
        return int(tokens[min(int(np.searchsorted(ends, place * ends[-1], side="right")), len(tokens) - 1)])
