"""`python -m tests.models.table FILE ...`: the page of what `python -m tests.models --save FILE` found."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path

from .check import Outcome
from .collectives import Counted, Moved

_HEAD = """# Architectures, one by one

`python -m tests.models --collectives --save FILE`, once more with `--dtype bfloat16`, then
`python -m tests.models.table FILE` make this page; [models.md](models.md) says what is done. Collectives are those of
one call on two devices, with the bytes that a device receives (float32). *Data parallel*: the batch is split; by hand,
nothing moves. *Megatron*: pairs of linear layers, experts' hidden features and the vocabulary are split; by hand, there
is one all-reduce after each pair and each look-up, and one of a number per token in norms over split features.

"""
_COLUMNS = (
    "architecture", "as written", "operators", "layouts right", "in bfloat16", "data parallel", "Megatron", "by hand",
)  # fmt: skip


def save(outcome: Outcome, path: str) -> None:
    """Add an outcome to a file."""
    with Path(path).open("a") as file:
        file.write(json.dumps(asdict(outcome)) + "\n")


def read(paths: Iterable[str]) -> list[Outcome]:
    """What was saved; what was found last of an architecture in a dtype counts."""
    found: dict[tuple[str, str], Outcome] = {}
    for path in paths:
        for line in Path(path).read_text().splitlines():
            told = json.loads(line)
            moved = {name: value and Moved(**value) for name, value in told.pop("counted").items()}
            outcome = Outcome(**told, counted=Counted(**moved))
            found[outcome.title, outcome.dtype] = outcome
    return list(found.values())


def page(outcomes: list[Outcome]) -> str:
    """All architectures that were tried in float32, as Markdown."""
    wide = sorted((one for one in outcomes if one.dtype == "float32"), key=lambda one: one.title)
    narrow = {one.title: one for one in outcomes if one.dtype == "bfloat16" and one.imported}
    rows = [_row(one, narrow.get(one.title)) for one in wide]
    lines = [f"| {' | '.join(cells)} |" for cells in (_COLUMNS, ("---",) * len(_COLUMNS), *rows)]
    return _HEAD + _totals(wide, list(narrow.values())) + "\n\n" + "\n".join(lines) + "\n"


def _row(wide: Outcome, narrow: Outcome | None) -> tuple[str, ...]:
    if not wide.imported:
        return (wide.title, f"no: {_plain(wide.stopped)}", *[""] * (len(_COLUMNS) - 2))
    found = wide.counted
    moved = ["" if one is None else str(one) for one in (found.data, found.tensor, found.hand)]
    return (
        wide.title, "yes", str(wide.operators), f"{wide.right} of {wide.layouts}",
        "" if narrow is None else f"{narrow.right} of {narrow.layouts}", *moved,
    )  # fmt: skip


def _plain(text: str) -> str:
    said = [line for line in text.split(" | ") if not line.endswith("problems:")]
    return said[0].removeprefix("- ").replace("|", "/")[:160]


def _totals(wide: list[Outcome], narrow: list[Outcome]) -> str:
    known = [one for one in wide if one.imported]
    pairs = [(one.counted.tensor, one.counted.hand) for one in known if one.counted.tensor and one.counted.hand]
    still = [one.counted.data.bytes == 0 for one in known if one.counted.data is not None]
    return (
        f"{len(wide)} architectures: {len(known)} imported as written; {sum(one.layouts for one in known)} layouts,"
        f" {sum(one.right for one in known)} right, {sum(len(one.refused) for one in known)} refused,"
        f" {sum(len(one.wrong) for one in known)} wrong.\nIn bfloat16 {len(narrow)}, with errors of at most twice"
        f" torch's own in {sum(one.right for one in narrow)} of {sum(one.layouts for one in narrow)} layouts.\nData"
        f" parallel: nothing moves in {sum(still)} of {len(still)}. Megatron: no more bytes than by hand in"
        f" {sum(ours.bytes <= hand.bytes for ours, hand in pairs)} of {len(pairs)};"
        f" {sum(ours.bytes for ours, _ in pairs):,} bytes in all, by hand {sum(hand.bytes for _, hand in pairs):,}."
    )


if __name__ == "__main__":
    sys.stdout.write(page(read(sys.argv[1:])))
