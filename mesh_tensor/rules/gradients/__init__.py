"""Gradients of Relax operators: one short function per operator, in a table."""

from . import elementwise, nn  # they fill the table
from .table import Backward, Gradient, gradients_of, has_gradient, stops_gradients
