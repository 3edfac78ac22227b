"""`python -m tests.models.generation`: tokens of transformers' decoders on meshes, beside those of their `generate`."""

from __future__ import annotations

import sys
import warnings
from typing import Any

import torch
import transformers

import mesh_tensor as mt

from .catalogue import declare_torchvision

_TOKENS = {"vocab_size": 99, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "max_position_embeddings": 64,
    "initializer_range": 0.6,  # tokens differ from one another
    **_TOKENS,
}
_GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "initializer_range": 0.6, **_TOKENS}
_CACHES: dict[str, dict[str, int]] = {"keys_*": {"x": 1}, "values_*": {"x": 1}}
_HEADS: dict[str, dict[str, int]] = {
    **{f"*.{name}_proj.weight": {"x": 0} for name in "qkv"},
    "*.o_proj.weight": {"x": 1},
    **_CACHES,
}
_GATED = {"*.gate_proj.weight": {"x": 0}, "*.up_proj.weight": {"x": 0}, "*.down_proj.weight": {"x": 1}, **_HEADS}
_CONV1D = {
    "*.c_attn.weight": {"x": 1},
    "*.c_fc.weight": {"x": 1},
    "*.c_proj.weight": {"x": 0},
    **_CACHES,
}
_DENSE = {
    **{f"*.{name}_proj.*": {"x": 0} for name in "qkv"},
    "*.dense.weight": {"x": 1},
    "*.fc1.*": {"x": 0},
    "*.fc2.weight": {"x": 1},
    **_CACHES,
}
_EXPERTS = {"*.experts.*": {"x": 0}, **_HEADS}
_FEW = {"num_experts_per_tok": 2}
_ROUTED = {**_SMALL, **_FEW, "head_dim": 8, "num_experts": 4, "moe_intermediate_size": 32}
_LATENT = {
    **_ROUTED, "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 4, "n_routed_experts": 4,
}  # fmt: skip
_ONE_HEAD = {name: value for name, value in _SMALL.items() if name not in ("num_key_value_heads", "intermediate_size")}
#: By name: class, what its configuration is given, and Megatron's layout.
DECODERS: dict[str, tuple[str, dict[str, Any], dict[str, dict[str, int]]]] = {
    "gpt2": ("GPT2", _GPT2, _CONV1D),
    "llama": ("Llama", _SMALL, _GATED),
    "mixtral": ("Mixtral", {**_SMALL, "num_local_experts": 4, "num_experts_per_tok": 2}, _EXPERTS),
    "mistral": ("Mistral", {**_SMALL, "sliding_window": 7}, _GATED),
    "qwen2": ("Qwen2", _SMALL, _GATED),
    "phi3": ("Phi3", {**_SMALL, "num_key_value_heads": 4}, _CACHES),
    "gemma": ("Gemma", {**_SMALL, "head_dim": 8}, _GATED),
    "phi": ("Phi", {**_SMALL, "num_key_value_heads": 4}, _DENSE),
    "qwen2_sliding": (
        "Qwen2",
        {**_SMALL, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
        _GATED,
    ),
    "qwen3": ("Qwen3", {**_SMALL, "head_dim": 8}, _GATED),
    "gemma2": ("Gemma2", {**_SMALL, "head_dim": 8, "sliding_window": 7}, _GATED),
    **{name: (name.capitalize(), _SMALL, _HEADS) for name in ("arcee", "jais2", "starcoder2")},
    **{name: (name.capitalize(), _SMALL, _GATED) for name in ("granite", "olmo2")},
    "afmoe": ("Afmoe", {**_ROUTED, "num_dense_layers": 1, "sliding_window": 7}, _HEADS),
    "cohere2": ("Cohere2", {**_SMALL, "sliding_window": 7}, _GATED),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, _CACHES),
    "ernie4_5_moe": (
        "Ernie4_5_Moe",
        {**_SMALL, "moe_num_experts": 4, "moe_k": 2, "moe_intermediate_size": 32},
        _HEADS,
    ),
    "exaone4": ("Exaone4", {**_SMALL, "head_dim": 8, "sliding_window": 7}, _GATED),
    "falcon": ("Falcon", _ONE_HEAD, {"*.dense.weight": {"x": 1}}),
    "flex_olmo": ("FlexOlmo", {**_SMALL, **_FEW, "num_experts": 4}, _EXPERTS),
    "glm4": ("Glm4", {**_SMALL, "head_dim": 8}, _HEADS),
    "gpt_bigcode": ("GPTBigCode", _GPT2, {"*.c_proj.weight": {"x": 1}}),
    "gpt_oss": ("GptOss", {**_SMALL, **_FEW, "num_local_experts": 4, "sliding_window": 7, "head_dim": 8}, _EXPERTS),
    "gpt_neox": ("GPTNeoX", {**_SMALL, "num_key_value_heads": 4}, _CACHES),
    "ministral3": ("Ministral3", {**_SMALL, "head_dim": 8}, _GATED),
    "qwen3_moe": ("Qwen3Moe", _ROUTED, _EXPERTS),
    "smollm3": ("SmolLM3", _SMALL, _GATED),
    "stablelm": ("StableLm", {**_SMALL, "num_key_value_heads": 4}, _GATED),
}
_OTHERS = {"max_position_embeddings": 64, "init_std": 0.6, **_TOKENS}
_ROTARY = {**_GPT2, "rotary_dim": 4}
#: Of these, caches alone are laid out.
DECODERS |= {
    **{name: (kind, _SMALL, _CACHES) for name, kind in (("bitnet", "BitNet"), ("biogpt", "BioGpt"))},
    **{name: (name.capitalize(), _SMALL, _CACHES) for name in ("cohere", "olmo")},
    **{
        name: (name.capitalize(), {**_SMALL, "head_dim": 8}, _CACHES)
        for name in ("apertus", "glm", "helium", "nemotron")
    },
    "bloom": ("Bloom", {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.6, **_TOKENS}, _CACHES),
    "codegen": ("CodeGen", _ROTARY, _CACHES),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}, _CACHES),
    "gemma3": ("Gemma3Text", {**_SMALL, "head_dim": 8, "sliding_window": 5}, _CACHES),
    "gptj": ("GPTJ", _ROTARY, _CACHES),
    "granitemoe": ("GraniteMoe", {**_SMALL, "num_local_experts": 4}, _CACHES),
    "hunyuan": ("HunYuanDenseV1", {**_SMALL, "head_dim": 8}, _CACHES),
    "olmo3": ("Olmo3", {**_SMALL, "sliding_window": 5}, _CACHES),
    "olmoe": ("Olmoe", {**_SMALL, **_FEW, "num_experts": 4}, _CACHES),
    "opt": (
        "OPT",
        {
            **_OTHERS,
            "hidden_size": 32,
            "word_embed_proj_dim": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "ffn_dim": 64,
        },
        _CACHES,
    ),
    "persimmon": ("Persimmon", {**_SMALL, "num_key_value_heads": 4}, _CACHES),
    "phimoe": ("Phimoe", {**_SMALL, "num_local_experts": 4}, _CACHES),
    "qwen2_moe": ("Qwen2Moe", {**_ROUTED, "shared_expert_intermediate_size": 32}, _CACHES),
    "seed_oss": ("SeedOss", {**_SMALL, "head_dim": 8}, _CACHES),
    "xglm": ("XGLM", {**_OTHERS, "d_model": 32, "ffn_dim": 64, "num_layers": 2, "attention_heads": 4}, _CACHES),
}
_MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2})
_NEW = 12


def main() -> int:
    """Print a line per decoder and mesh; 1 if tokens differ."""
    declare_torchvision()
    wrong = 0
    for name in sys.argv[1:] or DECODERS:
        for line, right in check(name):
            print(f"{name}: {line}", flush=True)
            wrong += not right
    return int(wrong > 0)


def check(name: str) -> list[tuple[str, bool]]:
    """Per mesh what became of three prompts of several lengths, and whether it is what transformers makes of them."""
    kind, config, layout = DECODERS[name]
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, f"{kind}Config")(**config)).eval()
    ids, mask = torch.randint(3, 99, (3, 9)), torch.ones(3, 9, dtype=torch.long)
    for row, padding in enumerate((0, 5, 1)):
        mask[row, :padding] = 0
    ids *= mask
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {"attention_mask": mask, "max_new_tokens": _NEW, "pad_token_id": 0}
        expected = model.generate(ids, do_sample=False, eos_token_id=None, **options)
        beams = {**options, "num_beams": 3, "eos_token_id": list(range(10, 30)), "pad_token_id": 7}
        beams["num_return_sequences"] = 2
        best = model.generate(ids, do_sample=False, **beams)
        module = mt.from_transformers(model, 3, 9 + _NEW)
    found = []
    for mesh in _MESHES:
        stated = {"ids": {"y": 0}} | {k: {**v, "y": 0} for k, v in layout.items() if "_*" in k} if "y" in mesh else {}
        run = mt.distribute_module(module, mesh, {**layout, **stated}, poison=True)
        made = mt.generate(run, ids, _NEW, attention_mask=mask)
        alike, kinds = torch.equal(made, expected), len(made[:, 9:].unique())
        found.append((f"{mesh}: {'the same' if alike else 'OTHER'} tokens, {kinds} different ones", alike))
        alike = torch.equal(mt.generate(run, ids, **beams), best)
        found.append((f"{mesh}: {'the same' if alike else 'OTHER'} tokens of 3 beams", alike))
    return found


if __name__ == "__main__":
    sys.exit(main())
