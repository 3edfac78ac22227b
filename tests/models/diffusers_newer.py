"""Models of diffusers for video, sound and pictures that came later than those of `diffusers_models`, or are built of
something else."""

from __future__ import annotations

from collections.abc import Callable

import diffusers
import torch

from .architecture import Architecture, Made


def _times() -> torch.Tensor:
    return torch.tensor([3, 7])


def _unet_3d() -> Made:
    model = diffusers.UNet3DConditionModel(
        sample_size=8, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, attention_head_dim=8,
        down_block_types=("CrossAttnDownBlock3D", "DownBlock3D"), up_block_types=("UpBlock3D", "CrossAttnUpBlock3D"),
        cross_attention_dim=32,
    )  # fmt: skip
    given = {"sample": torch.randn(2, 4, 3, 8, 8), "timestep": _times()}
    return model, given | {"encoder_hidden_states": torch.randn(2, 6, 32)}


def _unet_spatio_temporal() -> Made:
    model = diffusers.UNetSpatioTemporalConditionModel(
        sample_size=8, block_out_channels=(32, 32), layers_per_block=1, num_attention_heads=(2, 2), in_channels=8,
        down_block_types=("CrossAttnDownBlockSpatioTemporal", "DownBlockSpatioTemporal"),
        up_block_types=("UpBlockSpatioTemporal", "CrossAttnUpBlockSpatioTemporal"), cross_attention_dim=32,
        addition_time_embed_dim=8, projection_class_embeddings_input_dim=24,
    )  # fmt: skip
    given = {"sample": torch.randn(2, 3, 8, 8, 8), "timestep": _times()}
    return model, given | {"encoder_hidden_states": torch.randn(2, 1, 32), "added_time_ids": torch.randn(2, 3)}


def _controlnet() -> Made:
    model = diffusers.ControlNetModel(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
        conditioning_embedding_out_channels=(8, 16),
    )  # fmt: skip
    given = {"sample": torch.randn(2, 4, 16, 16), "timestep": _times()}
    return model, given | {"encoder_hidden_states": torch.randn(2, 6, 32), "controlnet_cond": torch.randn(2, 3, 32, 32)}


def _hunyuan_dit() -> Made:
    model = diffusers.HunyuanDiT2DModel(
        sample_size=8, num_layers=2, patch_size=2, attention_head_dim=8, num_attention_heads=4, in_channels=4,
        cross_attention_dim=32, cross_attention_dim_t5=16, pooled_projection_dim=16, hidden_size=32, text_len=4,
        text_len_t5=4, activation_fn="gelu-approximate",
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": _times().float()}
    given |= {"encoder_hidden_states": torch.randn(2, 4, 32), "text_embedding_mask": torch.ones(2, 4).long()}
    given |= {"encoder_hidden_states_t5": torch.randn(2, 4, 16), "text_embedding_mask_t5": torch.ones(2, 4).long()}
    given |= {"image_meta_size": torch.randn(2, 6), "style": torch.zeros(2).long()}
    return model, given | {"image_rotary_emb": (torch.randn(16, 8), torch.randn(16, 8))}


def _sana() -> Made:
    model = diffusers.SanaTransformer2DModel(
        patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=4, num_attention_heads=2,
        num_cross_attention_heads=2, cross_attention_head_dim=4, cross_attention_dim=8, caption_channels=8,
        sample_size=8,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": _times()}
    return model, given | {"encoder_hidden_states": torch.randn(2, 6, 8)}


def _wan() -> Made:
    model = diffusers.WanTransformer3DModel(
        patch_size=(1, 2, 2), num_attention_heads=2, attention_head_dim=12, in_channels=4, out_channels=4, text_dim=16,
        freq_dim=32, ffn_dim=32, num_layers=2, cross_attn_norm=True, qk_norm="rms_norm_across_heads",
        rope_max_seq_len=32,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 2, 8, 8), "timestep": _times()}
    return model, given | {"encoder_hidden_states": torch.randn(2, 6, 16)}


def _ltx_video() -> Made:
    model = diffusers.LTXVideoTransformer3DModel(
        in_channels=8, out_channels=8, num_attention_heads=2, attention_head_dim=8, cross_attention_dim=16,
        num_layers=1, caption_channels=16,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 32, 8), "encoder_hidden_states": torch.randn(2, 6, 16)}
    given |= {"timestep": _times(), "encoder_attention_mask": torch.ones(2, 6).bool()}
    return model, given | {"num_frames": 2, "height": 4, "width": 4}


def _qwen_image() -> Made:
    model = diffusers.QwenImageTransformer2DModel(
        patch_size=2, in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=16, axes_dims_rope=(8, 4, 4),
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 16, 16), "encoder_hidden_states": torch.randn(2, 6, 16)}
    given |= {"encoder_hidden_states_mask": torch.ones(2, 6).long(), "timestep": torch.rand(2)}
    return model, given | {"img_shapes": [[(1, 4, 4)]] * 2}


def _chroma() -> Made:
    model = diffusers.ChromaTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, axes_dims_rope=(4, 4, 8), approximator_num_channels=8, approximator_hidden_dim=16,
        approximator_layers=1,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 32)}
    return model, given | {"timestep": torch.rand(2), "img_ids": torch.rand(16, 3), "txt_ids": torch.rand(6, 3)}


def _stable_audio() -> Made:
    model = diffusers.StableAudioDiTModel(
        sample_size=4, in_channels=4, num_layers=2, attention_head_dim=4, num_key_value_attention_heads=2,
        out_channels=4, cross_attention_dim=4, time_proj_dim=8, global_states_input_dim=8, cross_attention_input_dim=4,
        num_attention_heads=2,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 16), "timestep": _times()}
    given |= {"encoder_hidden_states": torch.randn(2, 4, 4), "global_hidden_states": torch.randn(2, 1, 8)}
    return model, given | {"rotary_embedding": (torch.randn(17, 2), torch.randn(17, 2))}


def _autoencoder_tiny() -> Made:
    model = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), num_encoder_blocks=(1, 1),
        num_decoder_blocks=(1, 1),
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16)}


def _autoencoder_dc() -> Made:
    kinds, scales = ("ResBlock", "EfficientViTBlock"), ((), (5,))
    model = diffusers.AutoencoderDC(
        in_channels=3, latent_channels=4, attention_head_dim=2, encoder_block_types=kinds, decoder_block_types=kinds,
        encoder_block_out_channels=(8, 8), decoder_block_out_channels=(8, 8), encoder_qkv_multiscales=scales,
        decoder_qkv_multiscales=scales, encoder_layers_per_block=(1, 1), decoder_layers_per_block=[1, 1],
        downsample_block_type="conv", upsample_block_type="interpolate", decoder_norm_types="rms_norm",
        decoder_act_fns="silu", scaling_factor=0.4,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16)}


def _autoencoder_oobleck() -> Made:
    model = diffusers.AutoencoderOobleck(
        encoder_hidden_size=8, downsampling_ratios=[2, 4], channel_multiples=[1, 2], decoder_channels=8,
        decoder_input_channels=4, audio_channels=2,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 2, 32)}


def _autoencoder_wan() -> Made:
    model = diffusers.AutoencoderKLWan(
        base_dim=3, z_dim=4, dim_mult=[1, 1, 1, 1], num_res_blocks=1, temperal_downsample=[False, True, True]
    )
    return model, {"sample": torch.randn(2, 3, 1, 16, 16)}


def _autoencoder_temporal() -> Made:
    model = diffusers.AutoencoderKLTemporalDecoder(
        block_out_channels=(32, 32), layers_per_block=1, latent_channels=4, down_block_types=("DownEncoderBlock2D",) * 2
    )
    return model, {"sample": torch.randn(2, 3, 16, 16), "num_frames": 2}


_MAKERS: dict[str, Callable[[], Made]] = {
    "autoencoder_dc": _autoencoder_dc,
    "autoencoder_kl_temporal": _autoencoder_temporal,
    "autoencoder_kl_wan": _autoencoder_wan,
    "autoencoder_oobleck": _autoencoder_oobleck,
    "autoencoder_tiny": _autoencoder_tiny,
    "chroma": _chroma,
    "controlnet": _controlnet,
    "hunyuan_dit": _hunyuan_dit,
    "ltx_video": _ltx_video,
    "qwen_image": _qwen_image,
    "sana": _sana,
    "stable_audio": _stable_audio,
    "unet_3d_condition": _unet_3d,
    "unet_spatio_temporal": _unet_spatio_temporal,
    "wan": _wan,
}
DIFFUSERS_NEWER = [Architecture("diffusers", name, make) for name, make in _MAKERS.items()]
