"""What callers of `generate` bring: a generation config of transformers, as arguments of `generate`, and what it says
that `generate` does not do, by name; and functions that say where rows end, and what becomes of logits."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch

from mesh_tensor.base.errors import MeshTensorError, refuse, shown, words_of

from .mesh_module import MeshModule

_TOP_K = 50  # what transformers draws from where a config leaves it open
_READ = {
    *("max_new_tokens", "max_length", "min_new_tokens", "min_length", "do_sample", "temperature", "top_k", "top_p"),
    *("repetition_penalty", "eos_token_id", "pad_token_id", "stop_strings"),
    *("num_return_sequences", "num_beams", "length_penalty", "early_stopping"),
}
# What changes no token of a model that is given prompts: how it is run, and what of other models.
_NO_TOKENS = {
    *("use_cache", "cache_implementation", "cache_config", "max_cache_len", "compile_config", "disable_compile"),
    *("bos_token_id", "decoder_start_token_id", "transformers_version", "low_memory", "prefill_chunk_size"),
    *("continuous_batching_config", "is_assistant", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    *("assistant_confidence_threshold", "assistant_lookbehind", "target_lookbehind", "assistant_early_exit"),
    *("assistant_ensemble_weight", "max_matching_ngram_size", "_from_model_config"),
}
# Values with which the rest changes nothing; None and False never do.
_NEUTRAL = {
    **dict.fromkeys(("num_beam_groups", "guidance_scale"), 1),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "diversity_penalty", "penalty_alpha"), 0),
    "encoder_repetition_penalty": 1,
}
_NEUTRAL_WHEN_DRAWN = {"typical_p": 1, "epsilon_cutoff": 0, "eta_cutoff": 0, "min_p": 0, "top_h": None}


def stated(config: Any, given: Mapping[str, Any], width: int) -> dict[str, Any]:
    """Arguments of `generate`: those `given` that are not None, and what the config, a dict or what has `to_dict`, says
    of the others. Prompts have `width` positions. Refused where the config is none, or says what `generate` does not
    do."""
    arguments = {name: value for name, value in given.items() if value is not None}
    if config is None:
        return arguments
    says = _as_dict(config)
    draws = arguments.get("do_sample", arguments.get("temperature", says.get("do_sample")) or False)
    _refuse_rest(says, bool(draws))
    if draws:
        says.setdefault("top_k", _TOP_K)
        says = {name: value for name, value in says.items() if not (name == "top_k" and value == 0)}
    else:  # temperatures and the like are said for when tokens are drawn
        says = {name: value for name, value in says.items() if name not in ("temperature", "top_k", "top_p")}
        arguments.setdefault("do_sample", False if arguments.get("temperature") is None else None)
    if "max_new_tokens" not in arguments:
        says = _with_room(says, width)
    if "min_length" in says:
        says.setdefault("min_new_tokens", max(0, says["min_length"] - width))
    rest = {name: value for name, value in says.items() if name in _READ and name not in ("max_length", "min_length")}
    if arguments.get("temperature") is not None:
        rest.pop("do_sample", None)
    return {**rest, **arguments}


def _as_dict(config: Any) -> dict[str, Any]:
    made = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(made, Mapping):
        refuse(
            f"the generation_config is {shown(config)}",
            where="generate",
            fix="pass a model's generation_config, or a dict of what it says",
        )
    return {name: value for name, value in made.items() if value is not None}


def _with_room(says: dict[str, Any], width: int) -> dict[str, Any]:
    """With how many tokens follow prompts of that width."""
    longest = says.get("max_length")
    if longest is None or "max_new_tokens" in says:
        return says
    if longest <= width:
        refuse(
            f"its max_length is {shown(longest)}, but prompts have {width} positions already",
            where="generation_config of generate",
            fix="pass max_new_tokens",
        )
    return {**says, "max_new_tokens": longest - width}


def _refuse_rest(says: Mapping[str, Any], draws: bool) -> None:
    problems = [
        f"its {name} is {shown(value)}"
        for name, value in says.items()
        if name not in _READ | _NO_TOKENS and not _says_nothing(name, value, draws)
    ]
    if problems:
        refuse(
            problems,
            where="generation_config of generate",
            why="that changes which tokens come, and generate does not do it",
            fix="set it to None, or pass what does it among the logits_processor",
        )


def _says_nothing(name: str, value: Any, draws: bool) -> bool:
    if value is False or (isinstance(value, (list, tuple, dict)) and not value):
        return True
    if name in _NEUTRAL_WHEN_DRAWN and (not draws or value == _NEUTRAL_WHEN_DRAWN[name]):
        return True
    return name in _NEUTRAL and value == _NEUTRAL[name]


T = TypeVar("T")


@dataclass(frozen=True)
class OwnFunctions:
    """Functions as transformers' stopping criteria and logits processors are. Where one fails, all ranks refuse."""

    run: MeshModule
    criteria: tuple[Callable[..., Any], ...]
    processors: tuple[Callable[..., Any], ...]

    @staticmethod
    def of(run: MeshModule, strings: Any, tokenizer: Any, criteria: Any, processors: Any) -> OwnFunctions:
        """Of what `generate` is given. Refused where something can't be called, or strings come without what makes text
        of tokens."""
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
            found |= self._tried("stopping_criteria", function, partial(_said, function, ids.clone()))
        return found

    def processed(self, ids: torch.Tensor, logits: torch.Tensor) -> torch.Tensor:
        """The logits (batch, vocabulary), those of the rows that ids has processed in float32."""
        for function in self.processors:
            count, logits = len(ids), logits.to(torch.float32)

            def made(function: Callable[..., Any] = function, old: torch.Tensor = logits[:count]) -> torch.Tensor:
                new = function(ids.clone().to(old.device), old.clone())
                if not isinstance(new, torch.Tensor) or new.shape != old.shape:
                    refuse(f"it gives {shown(new)} for logits {tuple(old.shape)}", fix="give logits of the same shape")
                return new.to(old)

            logits = torch.cat([self._tried("logits_processor", function, made), logits[count:]])
        return logits

    def _tried(self, what: str, function: Callable[..., Any], work: Callable[[], T]) -> T:
        where = f"{what} of generate, {getattr(function, '__name__', type(function).__name__)}"

        def tried(_: int) -> T:
            try:
                with self.run.turns.closed(what):
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
        texts = strings if isinstance(strings, str) else [*strings]
        return StopStringCriteria(tokenizer=tokenizer, stop_strings=texts)
    except Exception as error:  # whatever it finds in the tokenizer's vocabulary
        refuse(f"stop_strings {shown(strings)}: {words_of(error)}", where="generate", fix="pass stopping_criteria")
