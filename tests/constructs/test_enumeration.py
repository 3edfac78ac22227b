"""Whatever TileLang offers is in exactly one row of the table, and the table has nothing that TileLang lacks."""

import inspect
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

import pytest
import tilelang.language as T
from tvm import ir, tirx

from .row import Row
from .table import TABLE

#: What TileLang registers for one machine and its runtime, and for Relax.
_NAMESPACES = ("tl.", "tirx.")


def _names() -> list[str]:
    return [name for name in T.__all__ if not inspect.ismodule(getattr(T, name))]


def operators() -> list[str]:
    """The registered operators that a kernel can call."""
    return [str(name) for name in ir.Op.list_op_names() if str(name).startswith(_NAMESPACES)]


def _nodes() -> list[str]:
    classes = {name: getattr(tirx, name) for name in dir(tirx) if inspect.isclass(getattr(tirx, name))}
    return [name for name, cls in classes.items() if issubclass(cls, (tirx.Stmt, tirx.PrimExpr))]


@pytest.mark.parametrize(
    ("kind", "offered", "has"),
    [
        ("names", _names, Row.has_name),
        ("ops", operators, Row.has_op),
        ("nodes", _nodes, Row.has_node),
    ],
    ids=["names", "operators", "nodes"],
)
def test_everything_has_one_row(kind: str, offered: Callable[[], Sequence[str]], has: Callable[[Row, str], bool]):
    found = {name: [row.title for row in TABLE if has(row, name)] for name in offered()}
    assert not [name for name, rows in found.items() if not rows], "new in TileLang: give it a row"
    assert not {name: rows for name, rows in found.items() if len(rows) > 1}
    patterns = {pattern for row in TABLE for pattern in getattr(row, kind).split()}
    assert not {p for p in patterns if not any(fnmatchcase(name, p) for name in found)}, "TileLang has it no longer"


def test_what_is_understood_is_shown():
    assert not [row.title for row in TABLE if row.verdict == "understood" and not row.examples and row.title != "views"]
    assert not [e.name for row in TABLE for e in row.examples if (e.reference is None) != (row.verdict == "refused")]
    assert len({row.title for row in TABLE}) == len(TABLE)
