"""What repeats in a Relax function: expressions that differ in nothing but their operands, and stretches of
bindings that are as others."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby
from typing import Any

from tvm import ir, relax

from mesh_tensor.rules.operator.call import Structure, op_name

_WHOLE = (relax.Constant, relax.ShapeExpr, relax.PrimValue, relax.StringImm, relax.DataTypeImm, relax.ExternFunc)


class UnknownKindError(Exception):
    """An expression is no call, tuple, field, variable or constant."""


def called(value: relax.Expr) -> str:
    """The operator that an expression calls; nothing if it calls none."""
    return op_name(value.op) if isinstance(value, relax.Call) and isinstance(value.op, ir.Op) else ""


def kind_of(value: relax.Expr, refs: list[relax.Var]) -> tuple:
    """All of an expression but its operands, which are added to `refs`: equal for those that do the same. Raises
    UnknownKindError where it is none of those that are looked at."""
    if isinstance(value, relax.Var):
        refs.append(value)
        return ("operand",)
    if isinstance(value, relax.Tuple):
        return ("tuple", *[kind_of(one, refs) for one in value.fields])
    if isinstance(value, relax.TupleGetItem):
        return "field", int(value.index), kind_of(value.tuple_value, refs)
    if isinstance(value, ir.GlobalVar):
        return "function", value.name_hint
    if isinstance(value, _WHOLE):
        return "as it is", Structure(value)
    if not isinstance(value, relax.Call):
        raise UnknownKindError
    attrs = None if value.attrs is None else Structure(value.attrs)
    infos = tuple([Structure(info) for info in value.sinfo_args[:]])
    op: Any = called(value) or kind_of(value.op, refs)
    return op, attrs, infos, *[kind_of(arg, refs) for arg in value.args[:]]


def stretches(same: Iterable[bool]) -> Iterator[tuple[int, int]]:
    """Where stretches start of what is the same as something else, and how long they are.

    >>> list(stretches([True, True, False, True]))
    [(0, 2), (3, 1)]
    """
    start = 0
    for is_same, stretch in groupby(same):
        size = sum(1 for _ in stretch)
        if is_same:
            yield start, size
        start += size
