"""Schedule: which fragment every mesh runs, in which order. Pure data; read from torch.distributed.pipelining's CSV:
a row per rank, a cell per action."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from mesh_tensor.base.errors import refuse, shown

KINDS = {"F": "forward", "B": "backward", "I": "input gradient", "W": "weight gradient"}
_TEXT = re.compile(r"(\d+)([FBIW])(\d+)")


class Action(NamedTuple):
    """One fragment of one stage on one microbatch: F (forward), B (backward), or B's halves I and W.

    >>> Action("F", stage=2, microbatch=0), Action.parse("2W1").name
    (2F0, 'weight gradient')
    """

    kind: str
    stage: int
    microbatch: int

    @property
    def name(self) -> str:
        """The kind in words."""
        return KINDS[self.kind]

    @classmethod
    def parse(cls, text: str) -> Action:
        """Of the text that an action prints as: stage, kind, microbatch."""
        found = _TEXT.fullmatch(text.strip())
        if found is None:
            refuse(f"{shown(text)} is no action", fix="write stage, kind (F, B, I or W) and microbatch, as in 2F0")
        return cls(found[2], int(found[1]), int(found[3]))

    def __repr__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"

    def __str__(self) -> str:
        return repr(self)


@dataclass(frozen=True)
class Schedule:
    """Per mesh of a topology, in its order, the actions that it runs one after another.

    >>> schedule = Schedule.named("1f1b", meshes=2, microbatches=2)
    >>> print(schedule)
    1f1b: 2 meshes, 2 stages, 2 microbatches
    mesh 0: 0F0 0F1 0B0 0B1
    mesh 1: 1F0 1B0 1F1 1B1
    """

    name: str
    rows: tuple[tuple[Action, ...], ...]

    @classmethod
    def named(cls, name: str, meshes: int, microbatches: int, chunks: int | None = None) -> Schedule:
        """A schedule that has a name, for so many meshes and microbatches.

        Args:
            name: "gpipe", "1f1b", ...; an unknown one is refused with the list of all.
            meshes: how many meshes there are.
            microbatches: how many parts a batch is cut into.
            chunks: how many stages each mesh has; None: what is usual for the schedule.

        Raises:
            MeshTensorError: an unknown name, numbers that are no whole ones from 1 up, or that the schedule is not
                defined for.
        """
        from .orders import make  # the orders are made of this module's values

        return make(name, meshes, microbatches, chunks)

    @classmethod
    def of(cls, rows: Iterable[str | Iterable[Action | str]], name: str = "own") -> Schedule:
        """Of lists of one's own: per mesh its actions, or their texts ("0F0 0F1 0B0 0B1": stage, kind, microbatch).

        Whether it is complete, and can go on, is checked where it is used (`mt.pipeline`).

        Raises:
            MeshTensorError: something is no list of actions, or no action.
        """
        given = list(rows) if isinstance(rows, Iterable) and not isinstance(rows, str) else [rows]
        if wrong := [shown(row) for row in given if given == [rows] or not isinstance(row, Iterable)]:
            refuse(
                [f"{row} is no list of actions" for row in wrong], fix='pass a list per mesh, or its text: "0F0 0B0"'
            )
        lists = [row.split() if isinstance(row, str) else list(row) for row in given]
        return cls(name, tuple(tuple(_action(item) for item in row) for row in lists))

    @classmethod
    def from_csv(cls, text: str, name: str = "csv") -> Schedule:
        """Of what torch.distributed.pipelining writes: the text of a CSV with a row per rank. Sends, receives, FSDP are
        left out. Refused where a cell is no action; all such cells are named."""

        return read(text, name)

    def to_csv(self) -> str:
        """As torch.distributed.pipelining reads it ("compute_only"): the text of a CSV with a row per mesh."""
        return "".join(",".join(map(str, row)) + "\r\n" for row in self.rows)

    @cached_property
    def mesh_of(self) -> dict[int, int]:
        """Stage -> the position of its mesh: that of the first action found."""
        found: dict[int, int] = {}
        for mesh, row in enumerate(self.rows):
            for action in row:
                found.setdefault(action.stage, mesh)
        return dict(sorted(found.items()))

    @cached_property
    def num_stages(self) -> int:
        """One more than the last stage."""
        return max((action.stage + 1 for row in self.rows for action in row), default=0)

    @cached_property
    def num_microbatches(self) -> int:
        """One more than the last microbatch."""
        return max((action.microbatch + 1 for row in self.rows for action in row), default=0)

    @cached_property
    def has_backward(self) -> bool:
        """Whether anything but forwards is run."""
        return any(action.kind != "F" for row in self.rows for action in row)

    @property
    def num_meshes(self) -> int:
        """How many meshes have a row."""
        return len(self.rows)

    def __str__(self) -> str:
        counts = (
            _counted(self.num_meshes, "mesh"),
            _counted(self.num_stages, "stage"),
            _counted(self.num_microbatches, "microbatch"),
        )
        rows = [f"mesh {mesh}: {' '.join(map(str, row))}" for mesh, row in enumerate(self.rows)]
        return "\n".join([f"{self.name}: {', '.join(counts)}", *rows])


def _action(item: Action | str) -> Action:
    if isinstance(item, str):
        return Action.parse(item)
    kind, stage, microbatch = item if isinstance(item, tuple) and len(item) == 3 else ("", -1, -1)
    if kind not in KINDS or not _is_count(stage) or not _is_count(microbatch):
        refuse(f"{shown(item)} is no action", fix='write Action("F", stage, microbatch), or its text, as in "2F0"')
    return Action(kind, int(stage), int(microbatch))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _counted(number: int, noun: str) -> str:
    plural = "es" if noun.endswith(("sh", "ch")) else "s"
    return f"{number} {noun}{plural if number != 1 else ''}"


_TOGETHER = re.compile(r"\((.*)\)OVERLAP_F_B")  # a forward and a backward that torch runs as one
_NOT_COMPUTED = re.compile(r"\d+(UNSHARD|RESHARD|REDUCE_GRAD|SEND_F|RECV_F|SEND_B|RECV_B)\d*")


def read(text: str, name: str) -> Schedule:
    """The schedule of a CSV; what is sent and gathered follows from it, so cells that say so are left out."""
    if not isinstance(text, str):
        refuse(f"{shown(text)} is no CSV", where=f"schedule {name!r}", fix="pass the text of the file")
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
