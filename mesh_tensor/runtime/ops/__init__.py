"""Relax operators as torch functions: one table, its entries by family."""

from . import elementwise, linear_algebra, nn, padding, reduce, shape  # noqa: F401  (they fill the table)
from .table import has_torch_function, torch_function

__all__ = ["has_torch_function", "torch_function"]
