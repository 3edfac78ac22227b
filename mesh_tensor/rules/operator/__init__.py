"""Sharding rules of Relax operators: one short function per operator, in a table."""

from mesh_tensor.base.dtypes import TensorType

from . import (
    aten,
    conv,
    dropout,
    elementwise,
    index,
    linear_algebra,
    manual,
    nn,
    shape,
    shifts,
    update,
    vjp,
)  # they fill the table
from .call import OpCall
from .rule import Dim, LocalCall, OpRule, has_rule, rule_of
