"""torch.distributed.pipelining's CSV of a schedule, read: a row per rank, a cell per action, empty where it idles."""

from __future__ import annotations

import csv
import io
import re

from ..base.errors import refuse, shown
from .schedule import Action, Schedule

_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")  # a forward and a backward that torch runs as one
_NOT_COMPUTED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read(text: str, name: str) -> Schedule:
    """The schedule of a CSV; what is sent and gathered follows from it, so cells that say so are left out."""
    rows: list[tuple[Action, ...]] = []
    problems: list[str] = []
    for line, cells in enumerate(csv.reader(io.StringIO(text)), start=1):
        row: list[Action] = []
        for column, cell in enumerate(cells, start=1):
            try:
                row += [Action.parse(part) for part in _parts(cell)]
            except ValueError:
                problems.append(f"{shown(cell)} in row {line}, cell {column}, is no action")
        rows.append(tuple(row))
    if problems:
        refuse(problems, where=f"schedule {name!r}", fix="a cell is stage, kind and microbatch, as in 2F0, or empty")
    return Schedule(name, tuple(rows))


def _parts(cell: str) -> list[str]:
    cell = cell.strip()
    if not cell or _NOT_COMPUTED.fullmatch(cell):
        return []
    together = _TOGETHER.fullmatch(cell)
    return together[1].split(";") if together else [cell]
