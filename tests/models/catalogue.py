"""All architectures of the table."""

from __future__ import annotations

import torch

from .architecture import Architecture

_NEEDED_BY_TORCHVISION = ("nms", "qnms")


def architectures() -> list[Architecture]:
    """Those of the libraries that are installed (the extra `models`)."""
    declare_torchvision()
    from .diffusers_models import DIFFUSERS
    from .diffusers_newer import DIFFUSERS_NEWER
    from .timm_models import TIMM
    from .torchvision_models import TORCHVISION
    from .transformers_models import TRANSFORMERS
    from .transformers_more import MORE
    from .transformers_newer import NEWER

    return [*TRANSFORMERS, *NEWER, *MORE, *TIMM, *TORCHVISION, *DIFFUSERS, *DIFFUSERS_NEWER]


def declare_torchvision() -> None:
    """torchvision's own operators, as far as importing it takes: where it was built for CUDA and torch was not, they
    don't load. No model of the table uses them."""
    try:
        import torchvision  # noqa: F401  # where they load, they must not be there before
    except RuntimeError:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in _NEEDED_BY_TORCHVISION:
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _LIBRARIES.append(library)


_LIBRARIES: list[torch.library.Library] = []
