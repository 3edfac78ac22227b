"""What a function of TIR is called."""

from __future__ import annotations

from typing import Any


def function_name(func: Any) -> str:
    """The name of a function as messages say it: of one without a name, that which TVM gives it."""
    return str((func.attrs or {}).get("global_symbol", "main"))
