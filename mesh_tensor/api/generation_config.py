"""What a generation config of transformers says of how tokens are made, as arguments of `generate`; and what it says
that `generate` does not do, by name."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mesh_tensor.base.errors import refuse, shown

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
    of the others. Prompts have `width` positions.

    Raises:
        MeshTensorError: the config is none, or says what `generate` does not do.
    """
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
    """All that a config says."""
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
