"""TVM's constants in bfloat16 and 8-bit floats.

TileLang narrows what `tvm_ffi.dtype` takes to dtypes that it lists, and leaves out those that ml_dtypes adds to numpy;
`relax.const(1.0, "bfloat16")`, which TVM's importers say, then fails.
"""

from __future__ import annotations

import ml_dtypes
import numpy as np
from tilelang.language import dtypes


def allow_constants() -> None:
    """Add numpy's dtypes of ml_dtypes to those that TileLang lists."""
    for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        dtypes._DTYPE_TO_STR.setdefault(np.dtype(getattr(ml_dtypes, name)), name)
