"""Beam search: of the rows that a prompt may go on as, the likeliest few are followed, and the best that ends is it.

As transformers counts: a row's score is the sum of its tokens' logarithmic probabilities, once it has ended over
`length ** length_penalty`, of the new tokens alone; a row that ends counts if it is among the best `count` then.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from mesh_tensor.base.errors import refuse, shown

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
            refuse(problems, where="beams of generate")

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
