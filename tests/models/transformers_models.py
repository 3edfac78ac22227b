"""Language, vision and audio models of transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import transformers

from .architecture import Architecture, Made, ids

# What makes a configuration small, where it has that.
_SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 64,
    "vocab_size": 99,
    "max_position_embeddings": 64,
    "head_dim": 8,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "d_model": 32,
    "d_ff": 64,
    "d_kv": 8,
    "ffn_dim": 64,
    "num_layers": 2,
    "num_heads": 4,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "embedding_size": 32,
    "word_embed_proj_dim": 32,
    "moe_intermediate_size": 32,
    "num_local_experts": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 32,
    "n_routed_experts": 4,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
    "sliding_window": 8,
    "state_size": 8,
    "encoder_layerdrop": 0.0,
}
_UNSET = object()  # a usual value that stays
_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
_LATENT = {"q_lora_rank": 16, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 8, "v_head_dim": 8}

# Decoders: a causal language model, from token ids alone.
_DECODERS: dict[str, dict[str, Any]] = {
    "apertus": {},
    "arcee": {},
    "biogpt": {},
    "bitnet": {},
    "bloom": {},
    "codegen": {"rotary_dim": 4},
    "cohere": {},
    "cohere2": {},
    "ctrl": {"n_ctx": 64, "dff": 64},
    "deepseek_v2": _LATENT | {"num_key_value_heads": 4, "head_dim": 4, "num_experts_per_tok": 2},
    "deepseek_v3": _LATENT | {"num_key_value_heads": 4, "head_dim": 4},
    "diffllama": {},
    "ernie4_5": {},
    "exaone4": {},
    "falcon": {"head_dim": _UNSET},
    "falcon_mamba": {},
    "gemma": {},
    "gemma2": {},
    "gemma3_text": {},
    "glm": {},
    "glm4": {},
    "gpt2": {},
    "gpt_bigcode": {},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "gpt_neox": {},
    "gpt_oss": {},
    "gptj": {"rotary_dim": 4},
    "granite": {},
    "granitemoe": {},
    "helium": {},
    "hunyuan_v1_dense": {"head_dim": 8},
    "jamba": {"mamba_d_state": 8, "mamba_dt_rank": 4, "attn_layer_period": 2, "attn_layer_offset": 1},
    "jetmoe": {"kv_channels": 8},
    "llama": {},
    "mamba": {},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2, "chunk_size": 8},
    "minimax": {},
    "mistral": {},
    "mixtral": {},
    "mpt": {"n_heads": 4, "n_layers": 2},
    "nemotron": {"num_key_value_heads": 2},
    "olmo": {},
    "olmo2": {},
    "olmoe": {},
    "opt": {},
    "persimmon": {},
    "phi": {},
    "phi3": {},
    "phimoe": {},
    "qwen2": {},
    "qwen2_moe": {},
    "qwen3": {},
    "qwen3_moe": {},
    "recurrent_gemma": {"lru_width": 32},
    "rwkv": {"attention_hidden_size": 32},
    "seed_oss": {},
    "smollm3": {},
    "stablelm": {},
    "starcoder2": {},
    "xglm": {},
}

# Encoders: hidden states, from token ids alone.
_ENCODERS: dict[str, dict[str, Any]] = {
    "albert": {},
    "bert": {},
    "big_bird": {"attention_type": "original_full"},
    "camembert": {},
    "canine": {},
    "convbert": {},
    "data2vec-text": {},
    "deberta": {},
    "deberta-v2": {},
    "distilbert": {"dim": 32, "hidden_dim": 64, "n_heads": 4, "n_layers": 2},
    "electra": {},
    "ernie": {},
    "esm": {"vocab_size": 99},
    "flaubert": {"emb_dim": 32, "n_heads": 4, "n_layers": 2},
    "fnet": {},
    "funnel": {
        "architectures": ["FunnelModel"],
        "num_hidden_layers": _UNSET,
        "block_sizes": [1, 1],
        "d_head": 8,
        "d_inner": 64,
    },
    "ibert": {},
    "longformer": {"attention_window": 8},
    "megatron-bert": {},
    "mobilebert": {"intra_bottleneck_size": 32, "true_hidden_size": 32},
    "modernbert": {},
    "mpnet": {},
    "mra": {},
    "nystromformer": {"num_landmarks": 12, "segment_means_seq_len": 12},
    "rembert": {"input_embedding_size": 32, "output_embedding_size": 32},
    "roberta": {},
    "roformer": {},
    "splinter": {},
    "squeezebert": {},
    "xlm": {"emb_dim": 32, "n_heads": 4, "n_layers": 2},
    "xlm-roberta": {},
    "xlnet": {"max_position_embeddings": _UNSET, "d_inner": 64, "d_head": 8},
    "xmod": {"default_language": "en_XX"},
    "yoso": {"use_expectation": True},
}

# Encoders and decoders: logits, from token ids of both.
_PAIRS: dict[str, dict[str, Any]] = {
    "bart": {},
    "blenderbot": {},
    "fsmt": {},
    "led": {"attention_window": 8, "max_encoder_position_embeddings": 64, "max_decoder_position_embeddings": 64},
    "longt5": {"local_radius": 4},
    "m2m_100": {},
    "marian": {},
    "mbart": {},
    "mt5": {},
    "mvp": {},
    "pegasus": {},
    "prophetnet": {
        "num_hidden_layers": _UNSET,
        "num_encoder_layers": 2,
        "num_decoder_layers": 2,
        "num_encoder_attention_heads": 4,
    },
    "switch_transformers": {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1},
    "t5": {},
    "umt5": {},
}

IMAGE = {"image_size": 32, "patch_size": 8, "num_labels": 10}
# Image models: from a model's type to its images' size, and what makes it small.
_IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "beit": (32, IMAGE),
    "bit": (64, {"num_groups": 4, "depths": [1, 1], "hidden_sizes": [32, 64], "embedding_size": 32}),
    "convnext": (32, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "convnextv2": (32, {"hidden_sizes": [8, 16], "depths": [1, 1], "num_stages": 2}),
    "deit": (32, IMAGE),
    "dinov2": (32, IMAGE),
    "dinov2_with_registers": (32, IMAGE),
    "efficientnet": (64, {}),
    "focalnet": (
        32,
        {"image_size": 32, "depths": [1, 1], "embed_dim": 16, "focal_levels": [2, 2], "focal_windows": [3, 3]},
    ),
    "hiera": (64, {"image_size": [64, 64], "embed_dim": 16, "num_heads": [1, 2, 4, 8], "depths": [1, 1, 1, 1]}),
    "ijepa": (32, IMAGE),
    "levit": (
        64,
        {
            "image_size": 64,
            "hidden_sizes": [16, 32, 48],
            "num_attention_heads": [2, 2, 2],
            "depths": [1, 1, 1],
            "key_dim": [8, 8, 8],
        },
    ),
    "mobilenet_v1": (64, {}),
    "mobilenet_v2": (64, {}),
    "mobilevit": (64, {"image_size": 64}),
    "mobilevitv2": (64, {"image_size": 64}),
    "poolformer": (64, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}),
    "pvt_v2": (
        64,
        {
            "image_size": 64,
            "hidden_sizes": [8, 16, 24, 32],
            "depths": [1, 1, 1, 1],
            "num_attention_heads": [1, 2, 3, 4],
        },
    ),
    "regnet": (64, {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16, "groups_width": 8}),
    "resnet": (64, {"hidden_sizes": [16, 32], "depths": [1, 1], "embedding_size": 16}),
    "segformer": (64, {"hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1], "num_attention_heads": [1, 2, 2, 4]}),
    "siglip_vision_model": (32, IMAGE),
    "swiftformer": (64, {"embed_dims": [16, 32, 64, 64], "depths": [1, 1, 1, 1]}),
    "swin": (
        32,
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "swin2sr": (16, {"image_size": 16, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 2], "window_size": 4}),
    "swinv2": (
        32,
        {"image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4},
    ),
    "vit": (32, IMAGE),
    "vit_msn": (32, IMAGE),
    "vitdet": (32, IMAGE | {"pretrain_image_size": 32}),
    "yolos": (32, {"image_size": [32, 32], "patch_size": 8, "num_detection_tokens": 5}),
}


def _config(kind: str, **options: Any) -> Any:
    """A small configuration."""
    usual = transformers.AutoConfig.for_model(kind)
    small = {name: value for name, value in _SMALL.items() if isinstance(getattr(usual, name, None), (int, float))}
    if hasattr(usual, "depths"):  # which says how many layers there are
        small = {name: value for name, value in small.items() if name not in ("num_layers", "num_hidden_layers")}
    options = small | _TOKENS | {"use_cache": False} | options
    return transformers.AutoConfig.for_model(kind, **{n: value for n, value in options.items() if value is not _UNSET})


def decoder(kind: str, options: dict[str, Any]) -> Made:
    return transformers.AutoModelForCausalLM.from_config(_config(kind, **options)), {"input_ids": ids()}


def encoder(kind: str, options: dict[str, Any]) -> Made:
    return transformers.AutoModel.from_config(_config(kind, **options)), {"input_ids": ids()}


def pair(kind: str, options: dict[str, Any]) -> Made:
    model = transformers.AutoModelForSeq2SeqLM.from_config(_config(kind, decoder_start_token_id=2, **options))
    tokens = {"input_ids": ids(), "decoder_input_ids": ids(length=6)}
    return model, tokens | ({"attention_mask": torch.ones(4, 12, dtype=torch.long)} if kind == "longt5" else {})


def image(kind: str, size: int, options: dict[str, Any]) -> Made:
    model = transformers.AutoModel.from_config(_config(kind, **options))
    return model, {"pixel_values": torch.randn(2, 3, size, size)}


def _clip() -> Made:
    text, vision = ({**_SMALL_TOWER, **_TOKENS}, {**_SMALL_TOWER, "image_size": 32, "patch_size": 8})
    model = transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=16))
    return model, {"input_ids": ids(length=8), "pixel_values": torch.randn(4, 3, 32, 32)}


_SMALL_TOWER = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 99,
}


def _siglip() -> Made:
    text, vision = ({**_SMALL_TOWER, **_TOKENS}, {**_SMALL_TOWER, "image_size": 32, "patch_size": 8})
    model = transformers.SiglipModel(transformers.SiglipConfig(text_config=text, vision_config=vision))
    return model, {"input_ids": ids(length=8), "pixel_values": torch.randn(4, 3, 32, 32)}


def _whisper() -> Made:
    options = {"num_mel_bins": 16, "max_source_positions": 20, "max_target_positions": 16, "decoder_start_token_id": 2}
    model = transformers.WhisperForConditionalGeneration(_config("whisper", **options))
    return model, {"input_features": torch.randn(2, 16, 40), "decoder_input_ids": ids(2, 6)}


def wave(kind: str) -> Made:
    layers = {"conv_dim": (16, 16), "conv_stride": (5, 4), "conv_kernel": (10, 8), "num_feat_extract_layers": 2}
    more = {"num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4, "hidden_size": 32}
    model = transformers.AutoModel.from_config(_config(kind, **layers, **more))
    return model, {"input_values": torch.randn(2, 800)}


def _spectrogram() -> Made:
    options = {"max_length": 48, "num_mel_bins": 16, "patch_size": 8, "frequency_stride": 8, "time_stride": 8}
    model = transformers.ASTModel(_config("audio-spectrogram-transformer", **options))
    return model, {"input_values": torch.randn(2, 48, 16)}


def _detr() -> Made:
    backbone = transformers.ResNetConfig(
        hidden_sizes=[16, 32], depths=[1, 1], embedding_size=16, out_features=["stage2"]
    )
    config = _config("detr", use_timm_backbone=False, backbone_config=backbone, backbone=None, num_queries=6)
    return transformers.DetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


def _time_series() -> Made:
    config = transformers.PatchTSTConfig(
        num_input_channels=3, context_length=32, patch_length=8, patch_stride=8, d_model=16, ffn_dim=32,
        num_hidden_layers=2, num_attention_heads=4, prediction_length=8,
    )  # fmt: skip
    return transformers.PatchTSTForPrediction(config), {"past_values": torch.randn(4, 32, 3)}


def _videomae() -> Made:
    options = {"image_size": 16, "patch_size": 8, "num_frames": 4, "tubelet_size": 2}
    return transformers.VideoMAEModel(_config("videomae", **options)), {"pixel_values": torch.randn(2, 4, 3, 16, 16)}


def _perceiver() -> Made:
    options = {
        "num_latents": 8,
        "d_latents": 16,
        "num_blocks": 1,
        "num_self_attends_per_block": 2,
        "num_cross_attention_heads": 4,
        "num_self_attention_heads": 4,
    }
    model = transformers.PerceiverForMaskedLM(_config("perceiver", **options))
    return model, {"input_ids": ids(length=64)}


def _blip() -> Made:
    text, vision = ({**_SMALL_TOWER, **_TOKENS}, {**_SMALL_TOWER, "image_size": 32, "patch_size": 8})
    text |= {"encoder_hidden_size": 32, "projection_dim": 16, "max_position_embeddings": 64}
    model = transformers.BlipModel(transformers.BlipConfig(text_config=text, vision_config=vision, projection_dim=16))
    return model, {"input_ids": ids(length=8), "pixel_values": torch.randn(4, 3, 32, 32)}


_OTHERS: dict[str, Callable[[], Made]] = {
    "audio-spectrogram-transformer": _spectrogram,
    "blip": _blip,
    "clip": _clip,
    "detr": _detr,
    "hubert": partial(wave, "hubert"),
    "patchtst": _time_series,
    "perceiver": _perceiver,
    "siglip": _siglip,
    "videomae": _videomae,
    "wav2vec2": partial(wave, "wav2vec2"),
    "wavlm": partial(wave, "wavlm"),
    "whisper": _whisper,
}

TRANSFORMERS = [
    *(Architecture("transformers", name, partial(decoder, name, what)) for name, what in _DECODERS.items()),
    *(Architecture("transformers", name, partial(encoder, name, what)) for name, what in _ENCODERS.items()),
    *(Architecture("transformers", name, partial(pair, name, what)) for name, what in _PAIRS.items()),
    *(Architecture("transformers", name, partial(image, name, *what)) for name, what in _IMAGES.items()),
    *(Architecture("transformers", name, make) for name, make in _OTHERS.items()),
]
