"""Decisions: what was decided before there were steps, and why, for people; and text in columns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from .sharding import Sharding

Row = Sequence[object]


@dataclass(frozen=True)
class Decisions:
    """What `explain` says of a program beside its steps.

    head      what it is a program of: lines
    sections  lines, the title first, that come before the steps
    notes     the same, after the steps
    params    the parameters that people know; None: all
    asked     per parameter, the layout that was asked for, where one was
    """

    head: tuple[str, ...]
    sections: tuple[tuple[str, ...], ...] = ()
    notes: tuple[tuple[str, ...], ...] = ()
    params: tuple[str, ...] | None = None
    asked: Mapping[str, Sharding] = field(default_factory=dict)


def columns(rows: Iterable[Row]) -> list[str]:
    """Left-aligned columns, two spaces apart; the first row is the header."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts) for column in range(len(texts[0]))]
    lines = ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in texts]
    return [line.rstrip() for line in lines]
