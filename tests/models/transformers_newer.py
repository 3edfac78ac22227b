"""Models of transformers that came later than those of `transformers_models`, or are built of something else."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import transformers

from .architecture import Architecture, Made
from .transformers_models import IMAGE, decoder, encoder, image, wave

_DECODERS: dict[str, dict[str, Any]] = {
    "gemma3n_text": {
        "num_kv_shared_layers": 0,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 99,
        "hidden_size_per_layer_input": 8,
        "laurel_rank": 8,
        "altup_num_inputs": 2,
        "activation_sparsity_pattern": [0.5, 0.0],
    },
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hrm_text": {},
    "internlm3": {},
    "solar_open": {},
    "xlstm": {"num_blocks": 2, "embedding_dim": 32, "num_heads": 4, "chunk_size": 8},
    "zaya": {"num_experts_per_tok": 1},
    "zamba2": {
        "mamba_d_state": 8,
        "n_mamba_heads": 8,
        "mamba_headdim": 8,
        "chunk_size": 8,
        "hybrid_layer_ids": [1],
        "layers_block_type": ["mamba", "hybrid"],
    },
}
# Without options of their own.
_PLAIN = (
    "afmoe", "aria_text", "bailing_hybrid", "beam", "bert-generation", "blenderbot-small",
    "cohere2_moe", "cpmant", "cwm", "deepseek_v4", "doge", "ernie4_5_moe", "exaone_moe",
    "falcon_h1", "flex_olmo", "flint", "glm4_moe", "gpt-sw3", "gpt_neox_japanese", "granite_swa",
    "granitemoe_swa", "hy_v3", "hy_v4", "hyperclovax", "inkling2_text", "inkling_text",
    "iquestcoder", "jais2", "kimi_linear", "kolibri1", "laguna", "lfm2", "lfm3", "llama4_text",
    "mellum", "mimo_v2_flash", "minimax_m2", "minimax_m3_vl_text", "ministral3",
    "modernbert-decoder", "nanochat", "nemotron_h", "olmo3", "olmo_hybrid", "openai-gpt",
    "qwen3_5_text", "qwen3_next", "qwen4_exp_text",
)  # fmt: skip
_ENCODERS: dict[str, dict[str, Any]] = {
    "esmc": {"num_key_value_heads": 4},
    "eurobert": {},
    "nomic_bert": {},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "lsh"]},
}
_IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "aimv2_vision_model": (32, IMAGE),
    "cvt": (64, {}),
    "dinov3_convnext": (64, {}),
    "dinov3_vit": (64, {}),
    "pixio": (32, IMAGE),
    "textnet": (64, {}),
    "tipsv2_vision_model": (32, IMAGE),
}


def _depth_anything() -> Made:
    backbone = transformers.Dinov2Config(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, image_size=56, patch_size=14,
        out_features=["stage1", "stage2", "stage3", "stage4"], reshape_hidden_states=False,
    )  # fmt: skip
    config = transformers.DepthAnythingConfig(
        backbone_config=backbone, patch_size=14, reassemble_hidden_size=32, neck_hidden_sizes=[8, 8, 8, 8],
        fusion_hidden_size=8, head_hidden_size=8,
    )  # fmt: skip
    return transformers.DepthAnythingForDepthEstimation(config), {"pixel_values": torch.randn(2, 3, 56, 56)}


def _deformable_detr() -> Made:
    backbone = transformers.ResNetConfig(
        hidden_sizes=[16, 32, 48], depths=[1, 1, 1], embedding_size=16, out_features=["stage1", "stage2", "stage3"]
    )
    config = transformers.DeformableDetrConfig(
        use_timm_backbone=False, backbone_config=backbone, backbone=None, num_queries=6, num_feature_levels=3,
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=4,
        encoder_ffn_dim=64, decoder_ffn_dim=64, encoder_n_points=2, decoder_n_points=2,
    )  # fmt: skip
    return transformers.DeformableDetrForObjectDetection(config), {"pixel_values": torch.randn(2, 3, 64, 64)}


NEWER = [
    *(Architecture("transformers", name, partial(decoder, name, what)) for name, what in _DECODERS.items()),
    *(Architecture("transformers", name, partial(decoder, name, {})) for name in _PLAIN),
    *(Architecture("transformers", name, partial(encoder, name, what)) for name, what in _ENCODERS.items()),
    *(Architecture("transformers", name, partial(image, name, *what)) for name, what in _IMAGES.items()),
    *(Architecture("transformers", name, partial(wave, name)) for name in ("sew", "sew-d")),
    Architecture("transformers", "deformable_detr", _deformable_detr),
    Architecture("transformers", "depth_anything", _depth_anything),
]
