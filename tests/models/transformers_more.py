"""More models of transformers: towers of models of text and images, pairs, and decoders of the newest releases."""

from __future__ import annotations

from functools import partial
from typing import Any

from .architecture import Architecture
from .transformers_models import IMAGE, decoder, encoder, image, pair, wave

_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "num_key_value_heads": 4,
    "head_dim": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "mamba_chunk_size": 8}
_INDEXED = _LATENT | {"index_head_dim": 8, "index_n_heads": 4, "index_topk": 4}
_DECODERS: dict[str, dict[str, Any]] = {
    "axk1": _LATENT,
    "axk2": _LATENT,
    "bamba": _MAMBA | {"attn_layer_indices": [1]},
    "deepseek_v32": _INDEXED,
    "glm4_moe_lite": _LATENT,
    "glm_moe_dsa": _INDEXED,
    "granitemoehybrid": _MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    "hunyuan_v1_moe": {"head_dim": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "longcat_flash": _LATENT,
    "minicpm3": _LATENT,
    "ministral": {"head_dim": 8},
    "qwen3_5_moe_text": {},
    "roc_bert": {"is_decoder": True, "vocab_size": 99, "pronunciation_vocab_size": 20, "shape_vocab_size": 20},
    "trocr": {},
    "vaultgemma": {},
    "youtu": _LATENT,
}
_ENCODERS = (
    "clip_text_model", "dpr", "gte", "jina_embeddings_v3", "layoutlm", "luke", "markuplm",
    "molmo2_text", "muse_glimmer_text", "muse_spark_text", "openai_privacy_filter", "qwen3_vl_moe_text",
    "qwen3_vl_text", "roberta-prelayernorm", "tapas", "visual_bert", "xlm-roberta-xl",
)  # fmt: skip
_WINDOWS = {
    "image_size": 32, "patch_size": 4, "embed_dim": 16, "depths": [1, 1], "num_heads": [2, 4], "window_size": 4,
}  # fmt: skip
_PYRAMID = {"image_size": 64, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]}
_IMAGES: dict[str, tuple[int, dict[str, Any]]] = {
    "chinese_clip_vision_model": (32, IMAGE),
    "clip_vision_model": (32, IMAGE),
    "data2vec-vision": (32, IMAGE),
    "donut-swin": (32, _WINDOWS),
    "dpt": (32, IMAGE),
    "glpn": (64, _PYRAMID | {"num_attention_heads": [1, 2, 2, 4]}),
    "maskformer-swin": (32, _WINDOWS),
    "mlcd": (32, IMAGE),
    "pvt": (64, _PYRAMID | {"num_attention_heads": [1, 2, 3, 4]}),
    "sam_vision_model": (32, IMAGE | {"window_size": 2, "global_attn_indexes": [1], "output_channels": 16}),
}

MORE = [
    *(Architecture("transformers", name, partial(decoder, name, what)) for name, what in _DECODERS.items()),
    *(Architecture("transformers", name, partial(encoder, name, {})) for name in _ENCODERS),
    *(
        Architecture("transformers", name, partial(pair, name, {}))
        for name in ("bigbird_pegasus", "nllb-moe", "pegasus_x", "plbart")
    ),
    *(Architecture("transformers", name, partial(image, name, *what)) for name, what in _IMAGES.items()),
    *(
        Architecture("transformers", name, partial(wave, name))
        for name in ("data2vec-audio", "unispeech", "unispeech-sat", "wav2vec2-conformer")
    ),
]
