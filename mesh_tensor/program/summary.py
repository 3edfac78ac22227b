"""summary: what a Program does in few lines: one for layers that are alike, and one for collectives that are."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence

from mesh_tensor.base.decisions import Decisions, columns

from .explain import costs
from .program import Program
from .steps import CollectiveStep, LoopStep, Step

_OUTSIDE = "(results)"


def summary(program: Program, places: Mapping[str, str]) -> str:
    """The conflicts that were decided; per kind of layer how many there are and what they cost together; per kind of
    collective how many, what they move, and why; and the cost per device.

    Args:
        places: from values to the layers that give them ("layers.0.proj"). A step belongs to the first layer that ends
            with it or after it. Layers that differ in numbers alone are alike.
    """
    unknown = Decisions((f"program {program.name} on {program.mesh}",))
    decided = unknown if program.decided is None else program.decided()
    homes = _homes(program.steps, places)
    sections: list[Sequence[str]] = [
        decided.head,
        *decided.sections,
        ("layers, all of a kind together, on each device", *columns(_layers(program.steps, homes))),
        ("collectives", *columns(_collectives(program, homes)))
        if any(part.collectives for part in program.parts)
        else (),
        (costs(program),),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _homes(steps: Sequence[Step], places: Mapping[str, str]) -> list[str]:
    """The layer of each step; that of a reduction is the one whose results it completes."""
    found, home = [], _OUTSIDE
    for step in reversed(steps):
        home = next((places[name] for name in step.writes if name in places), home)
        found.append(home)
    made, of_value = [], dict[str, str]()
    for step, home in zip(steps, reversed(found), strict=True):
        if isinstance(step, CollectiveStep) and step.op is not None:
            home = of_value.get(step.src, home)
        of_value |= dict.fromkeys(step.writes, home)
        made.append(home)
    return made


def _kind(path: str) -> str:
    """What layers that are alike are called."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def _layers(steps: Sequence[Step], homes: Sequence[str]) -> list[tuple[str, ...]]:
    """A row per kind of layer, in order of appearance."""
    rows: dict[str, dict[str, tuple[int, int]]] = {}
    for step, home in zip(steps, homes, strict=True):
        alike = rows.setdefault(_kind(home), {})
        flops, received = alike.get(home, (0, 0))
        alike[home] = flops + step.flops, received + step.bytes
    made = []
    for kind, alike in rows.items():
        flops, received = (sum(column) for column in zip(*alike.values(), strict=True))
        if flops or received:
            made.append((kind, str(len(alike)), f"{flops:,}", f"{received:,}"))
    return [("layer", "how many", "flops", "bytes received"), *made]


def _collectives(program: Program, homes: Sequence[str]) -> list[tuple[str, ...]]:
    """A row per kind of collective and layer."""
    rows: dict[tuple[str, ...], list[int]] = {}
    for outer, home in zip(program.steps, homes, strict=True):
        for step, times in _collectives_of(outer):
            words = f"{step.kind}{f'({step.op})' if step.op else ''}"
            key = (words, _kind(home), ", ".join(step.axes), _kind_of_reason(step.reason))
            rows.setdefault(key, []).extend([step.bytes] * times)
    head = ("collective", "in", "over", "how many", "bytes received", "because")
    made = [
        (words, kind, axes, str(len(sizes)), f"{sum(sizes):,}", why) for (words, kind, axes, why), sizes in rows.items()
    ]
    return [head, *made]


def _collectives_of(step: Step, times: int = 1) -> Iterator[tuple[CollectiveStep, int]]:
    """The collectives that a step is, or runs, and how often."""
    if isinstance(step, CollectiveStep):
        yield step, times
    elif isinstance(step, LoopStep):
        for inner in step.inner:
            yield from _collectives_of(inner, times * (step.count or 1))


def _kind_of_reason(reason: str) -> str:
    """A reason without the numbers of values."""
    return re.sub(r"(?<=[A-Za-z_])\d+", "*", reason)
