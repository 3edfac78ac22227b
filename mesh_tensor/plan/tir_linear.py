"""Functions of TIR that store what they compute element by element: in which operands they are linear, and whether what
they make of finite numbers may be infinite (see `poles`)."""

from __future__ import annotations

import math
from itertools import combinations

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import number

from .tir_nests import loaded

_MOST_OPERANDS = 4
_FREE, _LINEAR = 0, 1
_INFINITE_SOMEWHERE = frozenset({"acosh", "atanh", "infinity", "log", "log10", "log1p", "log2", "pow", "rsqrt", "tan"})


def linear_operands(analysis: Analysis, inputs: list[str]) -> tuple[frozenset[int], ...]:
    """The sets of operands in which all that the kernel stores is linear."""
    statements = analysis.kernel.statements
    if len(inputs) > _MOST_OPERANDS or not _stores_only_results(analysis):
        return ()
    sets = [frozenset(s) for count in range(1, len(inputs) + 1) for s in combinations(range(len(inputs)), count)]
    return tuple(
        chosen for chosen in sets if _is_linear(statements, [analysis.kernel.params[inputs[i]] for i in chosen])
    )


def _stores_only_results(analysis: Analysis) -> bool:
    """Whether a kernel does nothing but store to results what it computes from operands, or sums of such."""
    return all(_is_plain_store(statement, analysis) for statement in analysis.kernel.statements)


def _is_plain_store(statement: Statement, analysis: Analysis) -> bool:
    """A store to a result of what is computed from operands, or a sum of such."""
    if not isinstance(statement.node, tirx.BufferStore) or statement.op not in (None, "sum") or statement.unknown:
        return False
    return analysis.kernel.is_param(statement.target.buffer) and not any(
        analysis.written(str(access.buffer.name)) for access in statement.reads
    )


def _is_linear(statements: list[Statement], operands: list[tirx.Buffer]) -> bool:
    for statement in statements:
        elsewhere = [*statement.conditions, *statement.target.indices]
        if any(buffer in operands for buffer in loaded(elsewhere)):
            return False
        if _LINEAR not in _degrees(statement.values[0], operands):
            return False
    return True


def _degrees(expr: tirx.PrimExpr, operands: list[tirx.Buffer]) -> frozenset[int]:
    """Whether an expression does not depend on the operands, or is linear in them (0 is both), or neither, as what a
    factor with a pole makes of them (see `poles`)."""
    if not any(buffer in operands for buffer in loaded([expr])):
        if _has_pole(expr):
            return frozenset()
        is_zero = isinstance(expr, (tirx.IntImm, tirx.FloatImm)) and expr.value == 0
        return frozenset((_FREE, _LINEAR) if is_zero else (_FREE,))
    if isinstance(expr, tirx.BufferLoad):
        indirect = any(buffer in operands for buffer in loaded(expr.indices))
        return frozenset() if indirect else frozenset((_LINEAR,))
    if isinstance(expr, (tirx.Add, tirx.Sub)):
        return _degrees(expr.a, operands) & _degrees(expr.b, operands)
    if isinstance(expr, tirx.Mul):
        a, b = _degrees(expr.a, operands), _degrees(expr.b, operands)
        return frozenset(i + j for i in a for j in b) & {_FREE, _LINEAR}
    if isinstance(expr, tirx.Div) and expr.dtype.startswith("float"):
        return _degrees(expr.a, operands) if number(expr.b) else frozenset()
    if isinstance(expr, tirx.Select) and _FREE in _degrees(expr.condition, operands):
        return _degrees(expr.true_value, operands) & _degrees(expr.false_value, operands)
    return frozenset()


def has_poles(analysis: Analysis) -> bool:
    """Whether what a kernel computes element by element of finite numbers may be infinite."""
    values = [value for statement in analysis.kernel.statements for value in statement.values]
    return _stores_only_results(analysis) and any(map(_has_pole, values))


def _has_pole(expr: tirx.PrimExpr) -> bool:
    quotients = [quotient for quotient in nodes(expr, tirx.Div) if is_float(quotient.dtype)]
    called = {op_name(call).rpartition(".")[2] for call in nodes(expr, tirx.Call)}
    if any(math.isinf(constant.value) for constant in nodes(expr, tirx.FloatImm)):
        return True
    return not all(number(quotient.b) for quotient in quotients) or not called.isdisjoint(_INFINITE_SOMEWHERE)
