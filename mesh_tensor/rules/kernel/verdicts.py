"""What comes of splitting a factor: what it leaves partial, or why it may not be split."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from mesh_tensor.tir.linear import Linear

from .live_ranges import LiveRange
from .scans import Scan
from .statements import Statement
from .states import State


@dataclass(frozen=True, eq=False)
class Reduction:
    """What splitting a factor leaves partial.

    `partial`: live ranges with the operation that completes them. `updates`: the statements that combine over the
    factor, with their coordinate in it (padding must be neutral there). `gated`: statements whose contribution must
    count on one device only. `cut`: the top-level statement before which the partial values must be completed, None if
    only outputs are partial; `completed` are the live ranges that are used whole. `masked`: False where padding that a
    block reaches past the tile's end is known to be neutral. `states`: what loops carry that is combined, but is no
    plain reduction; `scans`: what each carries in order. `products`: those of blocks that one device looked up, each
    with the copy that did; the others leave them out. `owners`: what writes parameters what one device has all
    data for, each with a statement that looks these up; the others write 0."""

    partial: Mapping[LiveRange, str] = field(default_factory=dict)
    updates: Mapping[Statement, Linear] = field(default_factory=dict)
    gated: tuple[Statement, ...] = ()
    cut: int | None = None
    completed: tuple[LiveRange, ...] = ()
    masked: bool = True
    states: tuple[State, ...] = ()
    scans: tuple[Scan, ...] = ()
    products: Mapping[Statement, Statement] = field(default_factory=dict)
    owners: Mapping[Statement, Statement] = field(default_factory=dict)

    @property
    def scan(self) -> Scan | None:
        """The first scan that devices don't resume yet, or the first of all."""
        return next((scan for scan in self.scans if not scan.is_resumed), next(iter(self.scans), None))

    @property
    def is_plain(self) -> bool:
        """Whether devices exchange nothing in the middle of the kernel."""
        return self.cut is None and not self.scans

    @property
    def ops(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(self.partial.values()))


@dataclass(frozen=True)
class Verdict:
    """What comes of splitting a factor: `blocked`, `aligned`, `lanes` and `first` as in `Factor`, and the reduction (an
    empty one where nothing may split the factor)."""

    blocked: str | None
    aligned: str | None = None
    lanes: str | None = None
    first: str | None = None
    reduction: Reduction = Reduction()
