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

from .beams import Beams, BeamSearch
from .generation_config import stated
from .generation_functions import OwnFunctions
from .mesh_module import MeshModule

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
    num_beams: int | None = None,
    length_penalty: float | None = None,
    early_stopping: bool | str | None = None,
    stop_strings: str | Sequence[str] | None = None,
    tokenizer: Any = None,
    stopping_criteria: Any = (),
    logits_processor: Any = (),
    **others: Any,
) -> torch.Tensor:
    """Prompts and the tokens that follow: the prompts in one call of `run`, then each token in one.

    Args:
        run: a module that takes `(ids, mask, positions, start)`, gives logits (batch, vocabulary) after the last id,
            and keeps what it needs of earlier ones: of `from_transformers`, or any of the same form. What it keeps is
            as it was first before the prompts.
        ids: prompts, (rows, positions), whole tensors; on ranks the same on each. The module takes as many at a time as
            its batch has: more come in turns, and where there are fewer, the last one fills the batch up.
        max_new_tokens: how many tokens follow at most; fewer if all rows have ended. Needed unless the config says it.
        attention_mask: 1 where `ids` are tokens and 0 before, where they are padding, of the same shape; None: all
            are tokens. Shorter prompts are padded on their left.
        generation_config: what transformers' models say of these arguments, as theirs or a dict: it holds for those
            that are not given. What it says beside them and what changes tokens is refused by name.
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
        num_beams, length_penalty, early_stopping: so many rows are followed for each prompt, of which the best is
            returned (see `Beams`). The module's batch has room for so many rows a prompt.
        stop_strings: a row ends with the token that completes one of these in the text that `tokenizer` makes of it.
        stopping_criteria: functions of ids (rows, positions) and None that say per row whether it ends there, one or
            several, as transformers' are; they see the prompts of one turn. On ranks, each calls its own.
        logits_processor: functions of these ids and logits (rows, vocabulary) that give other logits, before these are
            divided by the temperature.
        others: none: arguments that transformers' `generate` has beside these are refused by name.

    Returns:
        (rows, positions + new tokens) ids: those given, and what follows.

    Raises:
        MeshTensorError: arguments that don't fit, all named, more tokens than the module has room for, functions
            that raise or give something else, or ranks that found different tokens.
    """
    _refuse_unknown(others)
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
        "num_beams": num_beams,
        "length_penalty": length_penalty,
        "early_stopping": early_stopping,
        "stop_strings": stop_strings,
    }
    said = stated(generation_config, given, ids.shape[-1] if isinstance(ids, torch.Tensor) and ids.dim() else 0)
    sampling, ends = _sampling(said, seed), _ends(said.get("eos_token_id"))
    most: Any = said.get("max_new_tokens")
    mask = torch.ones_like(ids) if attention_mask is None and isinstance(ids, torch.Tensor) else attention_mask
    pad = said.get("pad_token_id", next(iter(ends), 0))
    batch, length = _room(run, ids, mask, most)
    beams = _beams(run, said, sampling, batch)
    own = OwnFunctions.of(run, said.get("stop_strings"), tokenizer, stopping_criteria, logits_processor)
    _same_on_ranks(run, "arguments of generate", ids, mask, (most, sampling, beams, ends, pad, own.counts))
    at_once = batch // beams.count
    turns = [slice(row, row + at_once) for row in range(0, len(ids), at_once)]
    drawn = _Drawn(run, sampling, own, ends, pad, batch, length, most)
    ids = ids.to(torch.int64)
    if beams.count == 1:
        made = [drawn.rows(ids[turn], mask[turn], turn.start) for turn in turns]
    else:
        made = [drawn.best(ids[turn], mask[turn], beams) for turn in turns]
    widest = max(rows.shape[1] for rows in made)
    return torch.cat([torch.nn.functional.pad(rows, (0, widest - rows.shape[1]), value=pad) for rows in made])


@dataclass(frozen=True)
class _Drawn:
    """What follows prompts: `batch` rows of `length` positions at a time, and at most `most` tokens."""

    run: MeshModule
    sampling: Sampling
    own: OwnFunctions
    ends: tuple[int, ...]
    pad: int
    batch: int
    length: int
    most: int

    def rows(self, ids: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
        """At most `batch` prompts, the first of which has the number `first`, and the tokens that follow."""
        count = len(ids)
        ended = torch.arange(self.batch) >= count
        model = _Model(self.run, ids, mask, self.batch, self.length)
        for number in range(self.most):
            logits = self.sampling.adjusted(model.logits(), *model.has, number, self.ends)
            logits = self.own.processed(model.has[0][:count], logits)
            tokens = torch.where(ended, self.pad, self.sampling.tokens(logits, number, first).cpu())
            _same_on_ranks(self.run, f"token {number}", tokens)
            model.take(tokens)
            ended = ended | torch.isin(tokens, torch.tensor(self.ends, dtype=torch.int64))
            if self.own.criteria:
                ended[:count] |= self.own.ended(model.ids[:count])
                _same_on_ranks(self.run, f"rows that end with token {number}", ended)
            if bool(ended.all()):
                break
        return model.ids[:count]

    def best(self, ids: torch.Tensor, mask: torch.Tensor, beams: Beams) -> torch.Tensor:
        """At most `batch` rows of beams, and what follows their prompts best."""
        search = BeamSearch(beams, ids, self.most, len(self.ends))
        ids, mask = (tensor.repeat_interleave(beams.count, dim=0) for tensor in (ids, mask))
        count, ends = len(ids), torch.tensor(self.ends, dtype=torch.int64)
        model = _Model(self.run, ids, mask, self.batch, self.length)

        def ended(made: torch.Tensor) -> torch.Tensor:
            return torch.isin(made[:, -1], ends) | self.own.ended(made)

        for number in range(self.most):
            logits = self.sampling.checked(model.logits(), number).to("cpu", torch.float32)
            scores = self.sampling.adjusted(logits.log_softmax(-1), *model.has, number, self.ends)
            places, tokens = search.step(self.own.processed(model.has[0][:count], scores)[:count], ended)
            _same_on_ranks(self.run, f"token {number}", places, tokens, search.is_over)
            if search.is_over:
                break
            model.go_on_from(places)
            model.take(tokens)
        return search.best(self.pad)


class _Model:
    """Calls of a module: prompts (rows, positions) first, then what follows them token by token; the last row fills the
    batch up."""

    def __init__(self, run: MeshModule, ids: torch.Tensor, mask: torch.Tensor, batch: int, length: int) -> None:
        self._batch, places = batch, torch.arange(batch).clamp(max=len(ids) - 1)
        self.ids = self._next = ids[places]
        mask = mask[places]
        self._columns = torch.zeros((batch, length), dtype=torch.int64)
        self._columns[:, : ids.shape[1]] = mask
        self._positions = (mask.cumsum(-1) - 1).clamp(min=0).to(torch.int64)
        self._run, self._filled = run, 0
        run.reset_state()

    def logits(self) -> torch.Tensor:
        """Of what follows (batch, vocabulary)."""
        if self._filled:
            self._columns[:, self._filled] = 1
            self._positions = self._positions[:, -1:] + 1
        made = self._run(self._next, self._columns, self._positions, torch.tensor(self._filled))
        self._filled = self.ids.shape[1]
        return made

    @property
    def has(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The ids so far, and which of them are tokens."""
        return self.ids, self._columns[:, : self.ids.shape[1]] == 1

    def take(self, tokens: torch.Tensor) -> None:
        """These follow (rows, or the batch)."""
        self._next = tokens[torch.arange(self._batch).clamp(max=len(tokens) - 1)][:, None]
        self.ids = torch.cat([self.ids, self._next], dim=1)

    def go_on_from(self, places: torch.Tensor) -> None:
        """Each row is what the one at its place was. Rows of one prompt take each other's places alone."""
        places = places[torch.arange(self._batch).clamp(max=len(places) - 1)]
        self.ids = self.ids[places]
        if not torch.equal(places, torch.arange(self._batch)):
            self._run.change_state(lambda _, tensor: tensor[places.to(tensor.device)])


def _refuse_unknown(others: Mapping[str, Any]) -> None:
    known = [name for name in inspect.signature(generate).parameters if name not in ("run", "ids", "others")]
    if problems := [f"there is no argument {name!r}{did_you_mean(name, known)}" for name in others]:
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


def _beams(run: MeshModule, said: Mapping[str, Any], sampling: Sampling, batch: int) -> Beams:
    names = {"num_beams": "count", "length_penalty": "length_penalty", "early_stopping": "early_stopping"}
    beams = Beams(**{field: said[name] for name, field in names.items() if name in said})
    if beams.count == 1:
        return beams
    problems = [f"{beams.count} beams of drawn tokens"] if sampling.temperature else []
    if beams.count > batch:
        problems.append(f"{beams.count} beams, but the module takes {batch} rows")
    shapes = run.state_shapes
    others = [name for name, shape in shapes.items() if not name.startswith(_BY_ROW) or shape[:1] != (batch,)]
    if others or not shapes:
        problems.append(f"the module keeps {listing(others)}, of which nothing says which rows it belongs to")
    if problems:
        refuse(problems, where="beams of generate", fix=f"take the likeliest tokens of a module that keeps {_BY_ROW}")
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
        self.checked(logits, number)
        if self.temperature == 0:
            return logits.argmax(dim=-1)
        rows = logits.to("cpu", torch.float64).numpy()
        drawn = [self._drawn(row, index, number) for index, row in enumerate(rows, first)]
        return torch.tensor(drawn, dtype=torch.int64, device=logits.device)

    @staticmethod
    def checked(logits: torch.Tensor, number: int) -> torch.Tensor:
        """The logits, of which each row has a finite one and none is NaN; else refused."""
        if bool(torch.isinf(logits.amax(dim=-1)).any()) or bool(torch.isnan(logits).any()):
            refuse(f"logits of token {number} are NaN or infinite", fix="look at the model's weights and inputs")
        return logits

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
