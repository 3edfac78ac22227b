"""Sampling: the next token of each row of logits, the likeliest, or drawn by a generator that counts.

Beam search: of the rows that a prompt may go on as, the likeliest few are followed, and the best that ends is it. As
transformers counts: a row's score is the sum of its tokens' logarithmic probabilities, once it has ended over
`length ** length_penalty`, of the new tokens alone; a row that ends counts if it is among the best `count` then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.base.optimizer import is_number


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
        if not (is_number(self.repetition_penalty) and self.repetition_penalty > 0):
            problems.append(f"repetition_penalty is {shown(self.repetition_penalty)}, but it has to be above 0")
        if not (isinstance(self.min_new_tokens, int) and self.min_new_tokens >= 0):
            problems.append(f"min_new_tokens is {shown(self.min_new_tokens)}, but it has to be a number of tokens")
        if not is_number(self.temperature):
            problems.append(f"temperature is {shown(self.temperature)}, but it has to be finite and at least 0")
        if self.top_k is not None and not (isinstance(self.top_k, int) and self.top_k >= 1):
            problems.append(f"top_k is {shown(self.top_k)}, but it has to be a positive number")
        if self.top_p is not None and not (is_number(self.top_p) and 0 < self.top_p <= 1):
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
        counted from `first`. Refused: logits that are NaN, or rows without a finite one."""
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

    def kept(self, logits: np.ndarray, least: int = 1) -> tuple[np.ndarray, np.ndarray]:
        """Of one row, the tokens that may be drawn, at `least` so many, the likeliest first, and their weights; these
        sum up to 1 if all are kept."""
        scaled = (logits - logits.max()) / self.temperature
        order = np.argsort(-scaled, kind="stable")
        order = order[np.isfinite(scaled[order])]
        if self.top_k is not None and (most := max(self.top_k, least)) < len(order):
            order = order[scaled[order] >= scaled[order[most - 1]]]
        weights = np.exp(scaled[order])
        weights /= weights.sum()
        if self.top_p is None:
            return order, weights
        before = np.concatenate([[0.0], np.cumsum(weights)[:-1]])
        stays = (before < self.top_p) | (np.arange(len(order)) < least)
        return order[stays], weights[stays]

    def warped(self, scores: torch.Tensor, least: int) -> torch.Tensor:
        """Scores (rows, vocabulary) over the temperature, and -inf for what may not be drawn."""
        made = torch.full_like(scores, -torch.inf)
        for new, old in zip(made, scores, strict=True):
            if bool(old.isfinite().any()):
                order = torch.from_numpy(self.kept(old.to(torch.float64).numpy(), least)[0])
                new[order] = old[order] / self.temperature
        return made

    def noise(self, count: int, number: int, rows: range) -> torch.Tensor:
        """Gumbel's noise for the `number`th draw of each of the rows, (rows, count)."""
        drawn = [self._generator(row, number).random(count) for row in rows]
        return torch.from_numpy(-np.log(-np.log(np.maximum(drawn, np.finfo(np.float64).tiny))))

    def _drawn(self, logits: np.ndarray, row: int, number: int) -> int:
        tokens, weights = self.kept(logits)
        place = self._generator(row, number).random()
        ends = np.cumsum(weights)
        return int(tokens[min(int(np.searchsorted(ends, place * ends[-1], side="right")), len(tokens) - 1)])

    def _generator(self, row: int, number: int) -> np.random.Generator:
        return np.random.Generator(np.random.Philox(key=self.seed, counter=[0, 0, row, number]))


_NEVER = -1e9  # the score of a row that is not followed; what follows it stays below all others


@dataclass(frozen=True)
class Beams:
    """So many (`count`) rows are followed for each prompt. `early_stopping`: True ends when as many have ended, False
    when the best of those that go on is worse now than all of these, "never" when it can't be better at any length."""

    count: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | str = False

    def __post_init__(self) -> None:
        problems = []
        if not (type(self.count) is int and self.count >= 1):
            problems.append(f"num_beams is {shown(self.count)}, but it has to be a positive number")
        if not isinstance(self.length_penalty, (int, float)) or not abs(self.length_penalty) < float("inf"):
            problems.append(f"length_penalty is {shown(self.length_penalty)}, but it has to be a finite number")
        if self.early_stopping not in (True, False, "never"):
            problems.append(f"early_stopping is {shown(self.early_stopping)}, but it has to be a bool or 'never'")
        if problems:
            refuse(problems, where="beams of generate", fix="leave out what is as by default: 1, 1.0 and False")

    def shares(self, length: int) -> float:
        """What the score of a row with so many new tokens is over."""
        return length**self.length_penalty


class BeamSearch:
    """The search from prompts (prompts, positions), of at most `most` new tokens. `ends`: how many tokens end rows."""

    def __init__(self, beams: Beams, ids: torch.Tensor, most: int, ends: int) -> None:
        self._beams, self._most, self._kept = beams, most, max(2, 1 + ends) * beams.count
        self._ids = ids[:, None].expand(-1, beams.count, -1)
        self._scores = torch.full((len(ids), beams.count), _NEVER)
        self._scores[:, 0] = 0  # or all rows of a prompt would be one
        self._ended: list[list[tuple[float, torch.Tensor]]] = [[] for _ in ids]
        self._open = [True] * len(ids)
        self._number = 0

    def step(
        self, scores: torch.Tensor, ended: Callable[[torch.Tensor], torch.Tensor], noise: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of the next token's logarithmic probabilities, (rows, vocabulary), those that are followed: per row the one
        that it goes on from, and the token. `ended` tells which of rows of ids (rows, positions) end there. With
        Gumbel's `noise`, (prompts, beams * vocabulary), the likeliest are those drawn without putting back."""
        (prompts, _, width), words = self._ids.shape, scores.shape[1]
        total = (scores.reshape(prompts, -1, words) + self._scores[..., None]).reshape(prompts, -1)
        places = (total if noise is None else total + noise).topk(min(self._kept, total.shape[1])).indices
        likeliest = total.gather(1, places)
        rows, tokens = places // words, places % words
        ids = torch.cat([self._ids.gather(1, rows[..., None].expand(-1, -1, width)), tokens[..., None]], dim=2)
        self._number += 1
        done = ended(ids.flatten(0, 1)).reshape(likeliest.shape) | (self._number >= self._most)
        self._end(ids, likeliest / self._beams.shares(self._number), done)
        self._scores, chosen = (likeliest + done * _NEVER).topk(self._beams.count)
        self._ids = ids.gather(1, chosen[..., None].expand(-1, -1, width + 1))
        self._close(bool(done.all()))
        first = torch.arange(prompts)[:, None] * self._beams.count
        return (first + rows.gather(1, chosen)).flatten(), tokens.gather(1, chosen).flatten()

    @property
    def is_over(self) -> bool:
        """Whether no prompt goes on."""
        return not any(self._open)

    def best(self, pad: int, each: int) -> torch.Tensor:
        """The `each` best rows of each prompt, filled up with `pad`."""
        both = zip(self._ended, self._ids, strict=True)
        found = [row for ended, ids in both for row in ([row for _, row in ended] or list(ids))[:each]]
        widest = max(map(len, found))
        return torch.stack([torch.nn.functional.pad(row, (0, widest - len(row)), value=pad) for row in found])

    def _end(self, ids: torch.Tensor, scores: torch.Tensor, done: torch.Tensor) -> None:
        """Rows that end, of the best, are among the best of those that ended."""
        count = self._beams.count
        for number, ended in enumerate(self._ended):
            if not self._open[number] or (self._beams.early_stopping is True and len(ended) == count):
                continue
            new = [(float(scores[number, k]), ids[number, k]) for k in range(count) if done[number, k]]
            ended[:] = sorted([*ended, *new], key=lambda one: -one[0])[:count]

    def _close(self, all_done: bool) -> None:
        """Prompts for which nothing better can come, or all of them, are over."""
        beams = self._beams
        longest = self._most if beams.early_stopping == "never" and beams.length_penalty > 0 else self._number
        for number, ended in enumerate(self._ended):
            full = len(ended) == beams.count
            if full and float(self._scores[number, 0] / beams.shares(longest)) <= ended[-1][0]:
                self._open[number] = False
        enough = beams.early_stopping is True and all(len(ended) == beams.count for ended in self._ended)
        if all_done or enough:
            self._open = [False] * len(self._open)
