"""Decoding: the tokens that follow prompts, from a module that keeps keys and values."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch

from .generation_config import OwnFunctions
from .mesh_module import MeshModule
from .sampling import Beams, BeamSearch, Sampling


@dataclass(frozen=True)
class Decoding:
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
            same_on_ranks(self.run, f"token {number}", tokens)
            model.take(tokens)
            ended = ended | torch.isin(tokens, torch.tensor(self.ends, dtype=torch.int64))
            if self.own.criteria:
                ended[:count] |= self.own.ended(model.ids[:count])
                same_on_ranks(self.run, f"rows that end with token {number}", ended)
            if bool(ended.all()):
                break
        return model.ids[:count]

    def best(self, ids: torch.Tensor, mask: torch.Tensor, first: int, beams: Beams, each: int) -> torch.Tensor:
        """At most `batch` rows of beams, the first prompt of which has the number `first`: the `each` best of each
        prompt."""
        search = BeamSearch(beams, ids, self.most, len(self.ends))
        prompts, sampling, least = len(ids), self.sampling, max(2, 1 + len(self.ends))
        ids, mask = (tensor.repeat_interleave(beams.count, dim=0) for tensor in (ids, mask))
        count, ends = len(ids), torch.tensor(self.ends, dtype=torch.int64)
        model = _Model(self.run, ids, mask, self.batch, self.length)

        def ended(made: torch.Tensor) -> torch.Tensor:
            return torch.isin(made[:, -1], ends) | self.own.ended(made)

        for number in range(self.most):
            logits = sampling.checked(model.logits(), number).to("cpu", torch.float32)
            scores = sampling.adjusted(logits.log_softmax(-1), *model.has, number, self.ends)
            scores, noise = self.own.processed(model.has[0][:count], scores)[:count], None
            if sampling.temperature:
                scores = sampling.warped(scores, least)
                noise = sampling.noise(scores.numel() // prompts, number, range(first, first + prompts))
            places, tokens = search.step(scores, ended, noise)
            same_on_ranks(self.run, f"token {number}", places, tokens, search.is_over)
            if search.is_over:
                break
            model.go_on_from(places)
            model.take(tokens)
        return search.best(self.pad, each)


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
            self._run.reorder_state(places)


def same_on_ranks(run: MeshModule, what: str, *found: Any) -> None:
    """Refuse on all ranks what is not the same on all of them."""
    words = hashlib.sha256()
    for item in found:
        words.update(repr(item.tolist() if isinstance(item, torch.Tensor) else item).encode())
    run.on_all_ranks(f"{what}, digest {words.hexdigest()[:16]}", lambda _: None)
