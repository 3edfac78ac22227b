"""Facts about integer expressions of loop variables, proved by trying all of their values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from tvm import tirx

from .effects import op_name

_MOST_POINTS = 1 << 20

Values = Mapping[tirx.Var, np.ndarray]


def _truncated(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return np.sign(a) * np.sign(b) * (np.abs(a) // np.abs(b))


_BINARY: dict[type, Callable[[np.ndarray, np.ndarray], np.ndarray]] = {
    tirx.Add: np.add,
    tirx.Sub: np.subtract,
    tirx.Mul: np.multiply,
    tirx.FloorDiv: np.floor_divide,
    tirx.FloorMod: np.mod,
    tirx.Div: _truncated,
    tirx.Mod: np.fmod,
    tirx.Min: np.minimum,
    tirx.Max: np.maximum,
    tirx.LT: np.less,
    tirx.LE: np.less_equal,
    tirx.GT: np.greater,
    tirx.GE: np.greater_equal,
    tirx.EQ: np.equal,
    tirx.NE: np.not_equal,
    tirx.And: np.logical_and,
    tirx.Or: np.logical_or,
}


_DIVISIONS = (tirx.FloorDiv, tirx.FloorMod, tirx.Div, tirx.Mod)


class Unknown(Exception):
    """An expression that is not evaluated: it reads memory, or has symbols."""


def holds_always(
    fact: tirx.PrimExpr, loops: Sequence[tuple[tirx.Var, tirx.PrimExpr, tirx.PrimExpr]], given: Sequence[tirx.PrimExpr]
) -> bool:
    """Whether the fact holds for all values of the loops' variables (variable, start, extent; outer ones first, whose
    variables may be in the bounds of inner ones) for which all that is `given` does. False if that is not known; what
    is given and can't be evaluated is left out."""
    values: dict[tirx.Var, np.ndarray] = {}
    count = 1
    try:
        for var, start, extent in loops:
            low = np.broadcast_to(_evaluated(start, values), (count,))
            lengths = np.maximum(np.broadcast_to(_evaluated(extent, values), (count,)), 0)
            if int(lengths.sum()) > _MOST_POINTS:
                return False
            at = np.repeat(np.arange(count), lengths)
            values = {other: array[at] for other, array in values.items()}
            values[var] = low[at] + np.arange(len(at)) - np.repeat(np.cumsum(lengths) - lengths, lengths)
            count = len(at)
        true = np.broadcast_to(_evaluated(fact, values), (count,))
    except Unknown:
        return False
    for condition in given:
        try:
            true = true | ~np.broadcast_to(_evaluated(condition, values), (count,)).astype(bool)
        except Unknown:
            continue
    return bool(np.all(true))


def _evaluated(expr: tirx.PrimExpr, values: Values) -> np.ndarray:
    if isinstance(expr, (int, tirx.IntImm)):
        return np.asarray(int(expr), np.int64)
    if isinstance(expr, tirx.Var) and expr in values:
        return values[expr]
    if isinstance(expr, tirx.Cast) and expr.dtype in ("int32", "int64"):
        return _evaluated(expr.value, values)
    if isinstance(expr, tirx.Not):
        return np.logical_not(_evaluated(expr.a, values))
    if type(expr) in _BINARY:
        a, b = _evaluated(expr.a, values), _evaluated(expr.b, values)
        if isinstance(expr, _DIVISIONS) and not np.all(b):
            raise Unknown
        return _BINARY[type(expr)](a, b)
    if isinstance(expr, tirx.Select) or op_name(expr) in ("tirx.if_then_else", "tirx.likely"):
        parts = [expr.condition, expr.true_value, expr.false_value] if isinstance(expr, tirx.Select) else expr.args
        found = [_evaluated(part, values) for part in parts]
        return found[0] if len(found) == 1 else np.where(found[0].astype(bool), *found[1:])
    raise Unknown
