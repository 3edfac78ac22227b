"""Image models of timm."""

from __future__ import annotations

from functools import partial
from typing import Any

import timm
import torch

from .architecture import Architecture, Made

# From a model's name to the size of its images, and what makes it small.
_MODELS: dict[str, tuple[int, dict[str, Any]]] = {
    "resnet18": (64, {}),
    "resnet50": (64, {"layers": (1, 1, 1, 1)}),
    "resnext50_32x4d": (64, {"layers": (1, 1, 1, 1)}),
    "seresnet50": (64, {"layers": (1, 1, 1, 1)}),
    "res2net50_26w_4s": (64, {"layers": (1, 1, 1, 1)}),
    "regnetx_002": (64, {}),
    "densenet121": (64, {"block_config": (2, 2, 2, 2)}),
    "vgg11": (64, {}),
    "mobilenetv2_050": (64, {}),
    "mobilenetv3_small_050": (64, {}),
    "mobilenetv4_conv_small_050": (64, {}),
    "efficientnet_b0": (64, {}),
    "ghostnet_050": (64, {}),
    "repvgg_a0": (64, {}),
    "tinynet_e": (64, {}),
    "convnext_atto": (64, {}),
    "convnextv2_atto": (64, {}),
    "test_byobnet": (64, {}),
    "test_nfnet": (64, {}),
    "cspresnet50": (64, {}),
    "dla34": (64, {}),
    "hrnet_w18_small": (64, {}),
    "edgenext_xx_small": (64, {}),
    "poolformer_s12": (64, {}),
    "fastvit_t8": (64, {}),
    "vit_tiny_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "deit_tiny_distilled_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "beit_base_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}),
    "beitv2_base_patch16_224": (64, {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4}),
    "eva02_tiny_patch14_224": (56, {"img_size": 56, "depth": 2}),
    "cait_xxs24_224": (64, {"img_size": 64, "depth": 2}),
    "xcit_nano_12_p16_224": (64, {"depth": 2}),
    "swin_tiny_patch4_window7_224": (56, {"img_size": 56, "window_size": 7, "embed_dim": 24, "depths": (2, 2)}),
    "swinv2_tiny_window8_256": (64, {"img_size": 64, "window_size": 8, "embed_dim": 24, "depths": (2, 2)}),
    "mixer_s16_224": (64, {"img_size": 64}),
    "gmlp_ti16_224": (64, {"img_size": 64}),
    "resmlp_12_224": (64, {"img_size": 64}),
    "pit_ti_224": (224, {"depth": (1, 1, 1)}),
    "pvt_v2_b0": (64, {}),
    "twins_pcpvt_small": (64, {"depths": (1, 1, 1, 1)}),
    "coat_lite_tiny": (64, {"img_size": 64}),
    "levit_128s": (224, {}),
    "crossvit_9_240": (240, {}),
    "maxvit_rmlp_pico_rw_256": (64, {"img_size": 64}),
    "coatnet_nano_rw_224": (64, {"img_size": 64}),
    "efficientformer_l1": (224, {}),
    "mobilevit_xxs": (64, {}),
    "mobilevitv2_050": (64, {}),
    "volo_d1_224": (64, {"img_size": 64}),
    "davit_tiny": (64, {"depths": (1, 1, 1, 1)}),
    "focalnet_tiny_srf": (64, {}),
    "gcvit_xxtiny": (224, {}),
    "nest_tiny": (224, {}),
    "visformer_tiny": (64, {"img_size": 64}),
    "inception_v3": (96, {}),
    "xception41": (96, {}),
    "naflexvit_base_patch16_gap": (64, {"depth": 2}),
    "tiny_vit_5m_224": (224, {}),
    "ese_vovnet19b_dw": (64, {}),
    "vit_srelpos_small_patch16_224": (64, {"img_size": 64, "depth": 2}),
    "tresnet_m": (64, {}),
    "dpn48b": (64, {}),
    "hgnetv2_b0": (64, {}),
    "efficientvit_b0": (64, {}),
    "inception_next_atto": (64, {}),
    "botnet26t_256": (64, {"img_size": 64}),
    "convit_tiny": (64, {"img_size": 64, "depth": 3}),
    "cpubone_b0_bfrobust": (64, {}),
    "cpubone_t0": (64, {}),
    "csatv2": (64, {}),
    "cspnext_l": (64, {}),
    "efficientformerv2_s0": (224, {}),
    "efficientvim_m1": (64, {}),
    "efficientvit_m0": (224, {}),
    "fasternet_t0": (64, {}),
    "gemma4_vit_167m": (64, {"depth": 2}),
    "hardcorenas_a": (64, {}),
    "hiera_tiny_224": (64, {"img_size": (64, 64), "embed_dim": 16, "stages": (1, 1, 1, 1)}),
    "hieradet_small": (64, {"stages": (1, 1, 1, 1)}),
    "iformer_t": (64, {}),
    "inception_resnet_v2": (96, {}),
    "inception_v4": (96, {}),
    "lcnetv2_base": (64, {}),
    "lowformer_b0": (64, {}),
    "mambaout_femto": (64, {"depths": (1, 1, 1, 1)}),
    "mobilenetv5_base": (64, {}),
    "qwen3_vit_88m_merge": (64, {"depth": 2}),
    "rdnet_tiny": (64, {}),
    "repvit_m0_9": (64, {}),
    "resnest14d": (64, {}),
    "rexnet_100": (64, {}),
    "samvit_base_patch16": (
        64,
        {"img_size": 64, "depth": 2, "embed_dim": 48, "num_heads": 4, "global_attn_indexes": (1,)},
    ),
    "skresnet18": (64, {}),
    "starnet_s050": (64, {}),
    "swinv2_cr_tiny_224": (64, {"img_size": 64, "depths": (1, 1, 1, 1), "window_size": 2}),
    "vitamin_small_224": (64, {"img_size": 64, "depth": 2}),
}


def _made(name: str, size: int, options: dict[str, Any]) -> Made:
    model = timm.create_model(name, pretrained=False, num_classes=10, **options)
    return model, {"x": torch.randn(2, 3, size, size)}


TIMM = [Architecture("timm", name, partial(_made, name, *what)) for name, what in _MODELS.items()]
