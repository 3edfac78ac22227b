"""Relax operators as torch functions: one table, which its entries, by family, fill when they are imported."""

from . import conv, create, elementwise, groups, index, linear_algebra, nn, reduce, scatter, shape, update, vjp
from .linear_algebra import added_function
from .table import Valid, has_torch_function, local_operators, makes_new, torch_function, typed, untyped_function
from .vjp import keeps_alike, recorded
