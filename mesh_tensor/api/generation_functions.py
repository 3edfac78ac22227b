"""What callers of `generate` bring of their own: functions that say where rows end, and what becomes of logits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse, shown, words_of

from .mesh_module import MeshModule

T = TypeVar("T")


@dataclass(frozen=True)
class OwnFunctions:
    """Functions as transformers' stopping criteria and logits processors are. Where one fails, all ranks refuse."""

    run: MeshModule
    criteria: tuple[Callable[..., Any], ...]
    processors: tuple[Callable[..., Any], ...]

    @staticmethod
    def of(run: MeshModule, strings: Any, tokenizer: Any, criteria: Any, processors: Any) -> OwnFunctions:
        """Of what `generate` is given.

        Raises:
            MeshTensorError: something that can't be called, or strings without what makes text of tokens.
        """
        known = (_functions("stopping_criteria", criteria), _functions("logits_processor", processors))
        if strings is None or strings == []:
            return OwnFunctions(run, *known)
        return OwnFunctions(run, (*known[0], _stops(strings, tokenizer)), known[1])

    @property
    def counts(self) -> tuple[int, int]:
        """How many there are of each: the same on all ranks."""
        return len(self.criteria), len(self.processors)

    def ended(self, ids: torch.Tensor) -> torch.Tensor:
        """Per row of the ids (rows, positions), whether it ends there."""
        found = torch.zeros(len(ids), dtype=torch.bool)
        for function in self.criteria:
            found |= self._tried("stopping_criteria", function, partial(_said, function, ids))
        return found

    def processed(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits (batch, vocabulary), those of the rows that ids has processed in float32."""
        for function in self.processors:
            count, logits = len(ids), logits.to(torch.float32)

            def made(function: Callable[..., Any] = function, old: torch.Tensor = logits[:count]) -> torch.Tensor:
                new = function(ids.to(old.device), old.clone())
                if not isinstance(new, torch.Tensor) or new.shape != old.shape:
                    refuse(f"it gives {shown(new)} for logits {tuple(old.shape)}", fix="give logits of the same shape")
                return new.to(old)

            logits = torch.cat([self._tried("logits_processor", function, made), logits[count:]])
        return logits

    def _tried(self, what: str, function: Callable[..., Any], work: Callable[[], T]) -> T:
        where = f"{what} of generate, {getattr(function, '__name__', type(function).__name__)}"

        def tried(_: int) -> T:
            try:
                return work()
            except Exception as error:  # whatever a caller's function raises: the other ranks wait for this one
                raise MeshTensorError(f"{words_of(error)}\n  where: {where}") from error

        return self.run.on_all_ranks(what, tried)


def _functions(what: str, given: Any) -> tuple[Callable[..., Any], ...]:
    found = tuple(given) if isinstance(given, (list, tuple)) else () if given is None else (given,)
    if problems := [f"{shown(one)} in {what} can't be called" for one in found if not callable(one)]:
        refuse(problems, where="generate", fix="pass a function, or a list of them")
    return found


def _said(criterion: Callable[..., Any], ids: torch.Tensor) -> torch.Tensor:
    found, rows = criterion(ids, None), len(ids)
    if isinstance(found, bool):
        return torch.full((rows,), found)
    if not isinstance(found, torch.Tensor) or found.dtype != torch.bool or tuple(found.shape) != (rows,):
        refuse(f"it gives {shown(found)} for {rows} rows", fix="give a bool, or a tensor of one per row")
    return found.cpu()


def _stops(strings: str | Sequence[str], tokenizer: Any) -> Callable[..., Any]:
    """The criterion that transformers has of these strings."""
    if tokenizer is None:
        refuse(f"stop_strings {shown(strings)} without a tokenizer", where="generate", fix="pass the model's tokenizer")
    try:
        from transformers import StopStringCriteria
    except ImportError:
        refuse(
            "stop_strings without transformers, which tells where in a text tokens end",
            where="generate",
            fix="install transformers, or pass stopping_criteria",
        )
    try:
        return StopStringCriteria(tokenizer=tokenizer, stop_strings=strings)
    except Exception as error:  # whatever it finds in the tokenizer's vocabulary
        refuse(f"stop_strings {shown(strings)}: {words_of(error)}", where="generate", fix="pass stopping_criteria")
