"""Relax operators as torch functions: one table, its entries by family."""

from . import (  # noqa: F401  (they fill the table)
    aten,
    conv,
    create,
    dropout,
    elementwise,
    fft,
    index,
    linear_algebra,
    nn,
    padding,
    reduce,
    resize,
    shape,
    update,
    vjp,
)
from .table import Valid, has_torch_function, local_operators, torch_function

__all__ = ["Valid", "has_torch_function", "local_operators", "torch_function"]
