"""Image and video models of torchvision."""

from __future__ import annotations

from functools import partial

import torch
import torchvision

from .architecture import Architecture, Made

# From a model's name to the shape of one input.
_MODELS = {
    "alexnet": (3, 64, 64),
    "squeezenet1_1": (3, 64, 64),
    "shufflenet_v2_x0_5": (3, 64, 64),
    "mnasnet0_5": (3, 64, 64),
    "googlenet": (3, 64, 64),
    "resnet34": (3, 64, 64),
    "wide_resnet50_2": (3, 64, 64),
    "efficientnet_v2_s": (3, 64, 64),
    "convnext_tiny": (3, 64, 64),
    "vit_b_32": (3, 64, 64),
    "swin_t": (3, 64, 64),
    "regnet_y_400mf": (3, 64, 64),
    "mobilenet_v3_small": (3, 64, 64),
    "r3d_18": (3, 4, 32, 32),
    "r2plus1d_18": (3, 4, 32, 32),
    "fcn_resnet50": (3, 64, 64),
    "deeplabv3_mobilenet_v3_large": (3, 64, 64),
    "lraspp_mobilenet_v3_large": (3, 64, 64),
    "raft_small": (3, 128, 128),
    "densenet121": (3, 64, 64),
    "efficientnet_b0": (3, 64, 64),
    "inception_v3": (3, 96, 96),
    "mc3_18": (3, 4, 32, 32),
    "mobilenet_v2": (3, 64, 64),
}


def _made(name: str, shape: tuple[int, ...]) -> Made:
    options = {"image_size": shape[-1]} if name.startswith("vit") else {}
    if name == "inception_v3":
        options = {"init_weights": True}
    if name == "googlenet":
        options = {"init_weights": True, "aux_logits": False}
    if name.startswith(("fcn", "deeplab", "lraspp")):
        options = {"weights_backbone": None}
    model = torchvision.models.get_model(name, weights=None, **options)
    given = {"x": torch.randn(2, *shape)}
    if name.startswith("lraspp"):
        given = {"input": given["x"]}
    if name.startswith("raft"):
        given = {"image1": given["x"], "image2": torch.randn(2, *shape)}
    return model, given


TORCHVISION = [Architecture("torchvision", name, partial(_made, name, shape)) for name, shape in _MODELS.items()]
