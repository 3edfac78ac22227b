"""What becomes of a random kernel in two styles: right, refused or wrong, measured against itself on one device."""

from __future__ import annotations

import traceback

import numpy as np
import torch
from tvm import tirx

import mesh_tensor as mt
from mesh_tensor.targets.interpreter import interpret
from tests.styles import Style

from .build import build_with
from .check import RIGHT, Outcome
from .over_tiles import TilesCase

TOLERANCE = 1e-4


def run(case: TilesCase, target: str = "interpret") -> Outcome:
    """Compare both styles on the mesh with the kernel on one device. Over whole tensors, no author can forget."""
    rng = np.random.default_rng(case.seed)
    data = [rng.standard_normal(param.shape).astype(param.dtype) for param in case.params]
    *inputs, _ = (torch.from_numpy(array) for array in data)
    arrays = [array.copy() for array in data]
    whole = build_style(case, "global")
    interpret(whole, arrays)
    refused = ""
    for kind in ("global", "tiles"):
        try:
            func = whole if kind == "global" else build_style(case, kind)
            kernel = mt.compile(func, target=target, poison=target == "interpret")
        except mt.MeshTensorError as error:
            refused = refused or f"{kind}: {error}"
            continue
        except Exception:  # a crash is neither right nor refused, whatever its class
            return Outcome("wrong", f"{kind}\n{traceback.format_exc()}")
        try:
            result = kernel(*inputs).numpy()
        except Exception:
            return Outcome("wrong", f"{kind}\n{traceback.format_exc()}")
        if not np.allclose(
            result, arrays[-1], rtol=TOLERANCE, atol=TOLERANCE * (1 + np.abs(arrays[-1]).max(initial=0))
        ):
            return Outcome("wrong", f"{kind}:\n{result}\nexpected:\n{arrays[-1]}")
    return Outcome("refused", refused) if refused else RIGHT


def build_style(case: TilesCase, kind: str) -> tirx.PrimFunc:
    """The kernel in one style."""
    return build_with(case.source, {"style": Style(kind, case.mesh, case.layouts)})
