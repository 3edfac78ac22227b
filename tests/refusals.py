"""What calls are refused with, in this process or on ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mesh_tensor as mt


def refusal(call: Callable[..., Any], /, *args: Any, **named: Any) -> str:
    """The message of the MeshTensorError that the call raises, which is a ValueError."""
    try:
        call(*args, **named)
    except ValueError as error:
        if isinstance(error, mt.MeshTensorError):
            return str(error)
        raise
    raise AssertionError("nothing was refused")
