"""U-nets, transformers and autoencoders of diffusers."""

from __future__ import annotations

import diffusers
import torch

from .architecture import Architecture, Made


def _unet_2d() -> Made:
    model = diffusers.UNet2DModel(
        sample_size=16, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, attention_head_dim=8,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16), "timestep": torch.tensor([3, 7]), "return_dict": False}


def _unet_condition() -> Made:
    model = diffusers.UNet2DConditionModel(
        sample_size=16, block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32,
    )  # fmt: skip
    given = {"sample": torch.randn(2, 4, 16, 16), "timestep": torch.tensor([3, 7])}
    return model, given | {"encoder_hidden_states": torch.randn(2, 6, 32)}


def _autoencoder() -> Made:
    model = diffusers.AutoencoderKL(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, latent_channels=4,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16)}


def _vq() -> Made:
    model = diffusers.VQModel(
        block_out_channels=(16, 32), norm_num_groups=8, layers_per_block=1, latent_channels=4, num_vq_embeddings=16,
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 3, 16, 16)}


def _dit() -> Made:
    model = diffusers.DiTTransformer2DModel(
        sample_size=8, num_attention_heads=4, attention_head_dim=8, num_layers=2, norm_num_groups=8,
        num_embeds_ada_norm=10, out_channels=4, in_channels=4,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    return model, given | {"class_labels": torch.tensor([1, 2])}


def _pixart() -> Made:
    model = diffusers.PixArtTransformer2DModel(
        sample_size=8, num_attention_heads=4, attention_head_dim=8, num_layers=2, norm_num_groups=8, in_channels=4,
        out_channels=8, cross_attention_dim=32, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "timestep": torch.tensor([3, 7])}
    given |= {"encoder_hidden_states": torch.randn(2, 6, 16)}
    return model, given | {"added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}


def _sd3() -> Made:
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=16, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4,
        pos_embed_max_size=8,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 16)}
    return model, given | {"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([3, 7])}


def _flux() -> Made:
    model = diffusers.FluxTransformer2DModel(
        patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=16, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 16, 4), "encoder_hidden_states": torch.randn(2, 6, 32)}
    given |= {"pooled_projections": torch.randn(2, 16), "timestep": torch.tensor([0.3, 0.7])}
    return model, given | {"img_ids": torch.rand(16, 3), "txt_ids": torch.rand(6, 3)}


def _unet_1d() -> Made:
    model = diffusers.UNet1DModel(
        sample_size=32, in_channels=4, out_channels=4, block_out_channels=(16, 32), extra_in_channels=0,
        down_block_types=("DownResnetBlock1D",) * 2, up_block_types=("UpResnetBlock1D",),
        mid_block_type="MidResTemporalBlock1D",
        out_block_type="OutConv1DBlock", use_timestep_embedding=True, time_embedding_type="positional", act_fn="mish",
        layers_per_block=1, norm_num_groups=8,
    )  # fmt: skip
    return model, {"sample": torch.randn(2, 4, 32), "timestep": torch.tensor([3])}


def _aura_flow() -> Made:
    model = diffusers.AuraFlowTransformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_mmdit_layers=1, num_single_dit_layers=1, attention_head_dim=8,
        num_attention_heads=4, joint_attention_dim=16, caption_projection_dim=32, out_channels=4, pos_embed_max_size=64,
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 16)}
    return model, given | {"timestep": torch.tensor([0.3, 0.7])}


def _cog_view() -> Made:
    model = diffusers.CogView4Transformer2DModel(
        patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4, out_channels=4,
        text_embed_dim=16, time_embed_dim=8, condition_dim=4, rope_axes_dim=(64, 64),
    )  # fmt: skip
    given = {"hidden_states": torch.randn(2, 4, 8, 8), "encoder_hidden_states": torch.randn(2, 6, 16)}
    sizes = torch.tensor([[8, 8]] * 2)
    given |= {"timestep": torch.tensor([3, 7]), "original_size": sizes, "target_size": sizes.clone()}
    return model, given | {"crop_coords": torch.zeros(2, 2)}


_MAKERS = {
    "aura_flow": _aura_flow,
    "autoencoder_kl": _autoencoder,
    "cog_view_4": _cog_view,
    "dit": _dit,
    "flux": _flux,
    "pixart": _pixart,
    "sd3": _sd3,
    "unet_1d": _unet_1d,
    "unet_2d": _unet_2d,
    "unet_2d_condition": _unet_condition,
    "vq": _vq,
}
DIFFUSERS = [Architecture("diffusers", name, make) for name, make in _MAKERS.items()]
