"""docs/constructs.md, made from the table: `python -m tests.constructs.page` writes it."""

from __future__ import annotations

from pathlib import Path

import mesh_tensor  # noqa: F401  (brings TileLang's TVM)

from .row import Row
from .table import TABLE

PAGE = Path(__file__).parents[2] / "docs" / "constructs.md"

_HEAD = """# What TileLang offers, and what becomes of it

Every name of `tilelang.language` (0.1.15), every operator that it registers for kernels and every node of TIR is in one
row. *Understood*: the examples of [tests/constructs](../tests/constructs) give the same results on one device and on
several, on `interpret` and on `c`. *Refused*: a `MeshTensorError` that says so by name. Nothing else happens to any of
them, and what no row names, a test finds.

This page is made from the table in [tests/constructs/table.py](../tests/constructs/table.py) by
`python -m tests.constructs.page`; a test keeps them equal. `*` stands for any letters.
"""


def page() -> str:
    """The page's text."""
    sections = [_section(verdict) for verdict in ("understood", "refused", "not in kernels")]
    return "\n".join([_HEAD, *sections])


def _section(verdict: str) -> str:
    rows = [_line(row) for row in TABLE if row.verdict == verdict]
    return "\n".join(
        [f"## {verdict.capitalize()}", "", "| constructs | names | what is said of them |", "|---|---|---|", *rows, ""]
    )


def _line(row: Row) -> str:
    names = ", ".join(f"`{name}`" for name in (row.names or row.ops).split())
    return f"| {row.title} | {names or '-'} | {row.says} |"


if __name__ == "__main__":
    PAGE.write_text(page())
