"""Prints and assertions in C: their numbers are noted one by one, then reported together."""

from __future__ import annotations

from collections.abc import Callable

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.user_reports import report_of

#: The function that reports (in C it takes the number of the report), and those that note a number.
REPORT = "mt_report"
NOTES = {"int64": "mt_note_int64", "float64": "mt_note_float64"}


def report_statements(call: tirx.Call, rewrite: Callable[[tirx.PrimExpr], tirx.PrimExpr]) -> list[tirx.Stmt]:
    """The statements that report what a print or an assertion says; `rewrite` is applied to its numbers."""
    report, numbers = report_of(call)
    notes = [_note(rewrite(number)) for number in numbers]
    return [*notes, tirx.Evaluate(tirx.call_extern("void", REPORT, report.encode()))]


def _note(number: tirx.PrimExpr) -> tirx.Stmt:
    dtype = "float64" if is_float(number.dtype) else "int64"
    wide = number if number.dtype == dtype else tirx.Cast(dtype, number)
    return tirx.Evaluate(tirx.call_extern("void", NOTES[dtype], wide))
