"""What a Program does, as text for people. explain: why, and what it costs; summary: in few lines, one for layers that
are alike, and one for collectives."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mesh_tensor.base.decisions import Decisions, columns
from mesh_tensor.rules.operator.aten import name_of

from .loop_step import LoopStep
from .program import Parameter, Program
from .steps import CollectiveStep, KernelStep, OpStep, Step, WaitStep, of_kinds
from .verify import peak_bytes

_MOST_NAMES = 8


def explain(program: Program, *notes: Sequence[str]) -> str:
    """What was decided before there were steps; every parameter's layout as asked and as used; every step with its
    bytes and reason; what runs beside what; what else is to be said (`notes`: lines, the title first); and the cost
    per device.

    Returns:
        Text in tables. Bytes and flops are those of one device.
    """
    unknown = Decisions((f"program {program.name} on {program.mesh}",))
    decided = unknown if program.decided is None else program.decided()
    overlap = ("overlap", *(f"  {note}" for note in program.overlap)) if program.overlap else ()
    sections = [
        decided.head,
        *decided.sections,
        ("parameters", *columns(_parameters(program, decided))),
        ("steps of each device", *columns(_steps(program))),
        *_loops(program),
        overlap,
        *decided.notes,
        *notes,
        (costs(program),),
    ]
    return "\n\n".join("\n".join(section) for section in sections if section)


def _parameters(program: Program, decided: Decisions) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("parameter", "shape", "dtype", "asked", "used as", "tile")]
    for parameter in program.parameters:
        if decided.params is None or parameter.name in decided.params:
            value = program.values[str(parameter.output or parameter.input)]
            asked, used = decided.asked.get(parameter.name, "(any)"), "; ".join(_layouts_used(program, parameter))
            tile = _size(value.tile_shape)
            rows.append((parameter.name, _size(value.shape), value.dtype, str(asked), used or "(unused)", tile))
    return rows


def _layouts_used(program: Program, parameter: Parameter) -> list[str]:
    """The layouts in which kernels and operators take or leave a parameter."""
    values = program.values
    mine = {values[name].storage for name in (parameter.input, parameter.output) if name is not None}
    moved = [{values[name].storage for name in step.uses} for step in program.collectives]
    for storages in (*moved, *reversed(moved)):
        if mine & storages:
            mine |= storages
    names = [name for step in program.steps if step.collective is None for name in step.uses]
    return list(dict.fromkeys(str(values[name].sharding) for name in names if values[name].storage in mine))


def _steps(program: Program) -> list[tuple[str, ...]]:
    """Per step that does something: what, what it makes of what, over which axes, bytes, flops, and why."""

    def kernel(step: KernelStep) -> tuple[str, ...]:
        return (step.words, _names(step.reads), _names(step.writes), "", "", f"{step.flops:,}", "")

    def op(step: OpStep) -> tuple[str, ...]:
        by = "torch" if step.kernel is None else f"kernel {step.kernel.attrs['global_symbol']} for"
        words, why = f"{by} {name_of(step.call)}", f"one for {', '.join(step.one_for)}" if step.one_for else ""
        return (words, _names(step.reads), _names(step.writes), "", "", f"{step.flops:,}", why)

    def collective(step: CollectiveStep) -> tuple[str, ...]:
        words = f"{'' if step.wait else 'start '}{step.kind}{f'({step.op})' if step.op else ''}"
        why = f"{step.reason} ({program.values[step.src].sharding} -> {program.values[step.dst].sharding})"
        return (words, step.src, step.dst, ", ".join(step.axes), f"{step.bytes:,}", "", why)

    def wait(step: WaitStep) -> tuple[str, ...]:
        return (f"wait {step.collective.kind}", "", step.collective.dst, "", "", "", "")

    def loop(step: LoopStep) -> tuple[str, ...]:
        words = f"loop {step.where}, {step.times}"
        return (words, _names(step.reads), _names(step.writes), "", f"{step.bytes:,}", f"{step.flops:,}", "as below")

    kinds: dict[type, Callable[[Any], tuple[str, ...]]]
    kinds = {KernelStep: kernel, OpStep: op, CollectiveStep: collective, WaitStep: wait, LoopStep: loop}
    head = ("step", "on", "makes", "over", "bytes received", "flops", "because")
    return [head, *of_kinds(program.steps, kinds)]


def _loops(program: Program) -> Iterator[Sequence[str]]:
    """Per loop, and those in it, the steps of one time, and what is handed on to the next."""
    for loop in program.loops:
        carried = ", ".join(f"{each.then} -> {each.now} {program.values[each.now].sharding}" for each in loop.carried)
        for title, body in (("test before each", loop.test), ("steps", loop.body)):
            if isinstance(body, Program):
                lines = columns(_steps(body))
                yield (f"loop {loop.where}, {loop.times}: {title}, on each device", *lines, f"  carried: {carried}")
                yield from _loops(body)


def _names(names: Sequence[str]) -> str:
    """As many names as fit into a column."""
    return ", ".join(names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], "..."])


def costs(program: Program) -> str:
    """What a device computes, receives and holds, in a line; and which loops count as if they ran once in it."""
    flops, received = sum(step.flops for step in program.steps), sum(step.bytes for step in program.steps)
    held = peak_bytes(program)
    once = ", ".join(dict.fromkeys(_of_unknown_length(program)))
    note = f"; data says how often these loops run, of which one time is counted: {once}" if once else ""
    return f"per device: {flops:,} flops, {received:,} bytes received, at most {held:,} bytes held{note}"


def _of_unknown_length(program: Program) -> Iterator[str]:
    for loop in program.loops:
        if loop.count is None:
            yield loop.where
        for body in (loop.test, loop.body):
            if isinstance(body, Program):
                yield from _of_unknown_length(body)


def _size(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"


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
    homes, sends = _homes(program.steps, places), any(part.collectives for part in program.parts)
    sections: list[Sequence[str]] = [
        decided.head,
        *decided.sections,
        ("layers, all of a kind together, on each device", *columns(_layers(program.steps, homes))),
        ("collectives", *columns(_collectives(program, homes))) if sends else (),
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
        if step.starts is not None and step.starts.op is not None:
            home = of_value.get(step.starts.src, home)
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
        for step, times in outer.sends:
            words = f"{step.kind}{f'({step.op})' if step.op else ''}"
            reason = re.sub(r"(?<=[A-Za-z_])\d+", "*", step.reason)  # without the numbers of values
            key = (words, _kind(home), ", ".join(step.axes), reason)
            rows.setdefault(key, []).extend([step.bytes] * times)
    head = ("collective", "in", "over", "how many", "bytes received", "because")
    made = [
        (words, kind, axes, str(len(sizes)), f"{sum(sizes):,}", why) for (words, kind, axes, why), sizes in rows.items()
    ]
    return [head, *made]
