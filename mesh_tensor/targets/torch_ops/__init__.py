"""Relax operators as torch functions: one table, its entries by family."""

from . import conv, create, elementwise, groups, index, linear_algebra, nn, reduce, scatter, shape, update, vjp  # noqa: F401  (they fill the table)
from .linear_algebra import added_function
from .table import Valid, has_torch_function, local_operators, makes_new, torch_function, typed, untyped_function
from .vjp import can_be_recorded, keeps_alike, recorded

__all__ = [
    "Valid",
    "added_function",
    "can_be_recorded",
    "keeps_alike",
    "recorded",
    "has_torch_function",
    "local_operators",
    "makes_new",
    "torch_function",
    "typed",
    "untyped_function",
]
