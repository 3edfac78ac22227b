"""Machines as text: JSON to keep and to write by hand, and a table to read."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any

from .errors import refuse, shown
from .machine import Link, Machine, Memory, Roofline, Tuning, unknown_names

_FIX = "write one with machine.to_text(), and change that"


def to_text(machine: Machine) -> str:
    """JSON with a field per line group; what has its default is left out."""
    default = Machine(machine.name, machine.flops, machine.memory)
    needed = ("name", "flops", "memory")
    given = {f.name: getattr(machine, f.name) for f in fields(machine)}
    kept = {name: value for name, value in given.items() if name in needed or value != getattr(default, name)}
    return json.dumps({name: _plain(value) for name, value in kept.items()}, indent=2) + "\n"


def from_text(text: str) -> Machine:
    """The machine that `to_text` gave as text.

    Raises:
        MeshTensorError: lists everything that is wrong with the text.
    """
    try:
        given = json.loads(text)
    except (TypeError, ValueError) as error:
        refuse(f"a machine's text is no JSON: {error}", where=shown(text), fix=_FIX)
    if not isinstance(given, dict):
        refuse(f"a machine's text is {shown(given)}, no object", fix=_FIX)
    problems = list(unknown_names(given, [f.name for f in fields(Machine)], "a machine"))
    problems += [f"it has no {name}" for name in ("name", "flops", "memory") if name not in given]
    made = {name: _part(name, value, problems) for name, value in given.items()}
    if problems:
        refuse(problems, where=f"machine {given.get('name', '')!r}", fix=_FIX)
    return Machine(**made)


def table(machine: Machine) -> str:
    """What the machine can do, in words."""
    rates = ", ".join(f"{dtype} {_short(rate)}" for dtype, rate in machine.flops.items())
    levels = "; ".join(f"{_short(level.size)}B at {_short(level.rate)}B/s" for level in machine.memory)
    count = "" if machine.devices is None else f"{machine.devices} of "
    lines = [f"machine {machine.name}", f"  devices  {count}{rates} flop/s", f"  memory   {levels}"]
    lines += [f"  launch   {_time(machine.launch)}"]
    for link in machine.links:
        reach = "any number" if link.devices is None else f"up to {link.devices}"
        hop = f", {_time(link.hop)} per further message" if link.hop else ""
        lines.append(f"  {link.name:8s} {reach}: {_short(link.rate)}B/s, starts in {_time(link.start)}{hop}")
    for name, each in machine.classes.items():
        shares = f"{each.flops:.0%} of flop/s, {each.memory:.0%} of bytes/s"
        lines.append(f"  class    {name}: {_time(each.start)} and {shares}")
    lines += [f"  source   {what}: {where}" for what, where in machine.sources.items()]
    return "\n".join(lines)


def _plain(value: Any) -> Any:
    """Records as objects."""
    if isinstance(value, (Roofline, Link, Memory, Tuning)):
        return asdict(value)
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, tuple) else value


def _part(name: str, value: Any, problems: list[str]) -> Any:
    """A field of a Machine from its JSON."""
    if name in ("memory", "links"):
        return tuple(_record(_RECORDS[name], item, name, problems) for item in _of_kind(list, value, name, problems))
    if name == "classes":
        items = _of_kind(dict, value, name, problems).items()
        return {key: _record(Roofline, item, f"classes.{key}", problems) for key, item in items}
    if name == "tuning":
        return _record(Tuning, value, name, problems)
    return _of_kind(dict, value, name, problems) if name in ("flops", "sources") else value


_RECORDS: Mapping[str, type] = {"memory": Memory, "links": Link}


def _record(kind: type, value: Any, where: str, problems: list[str]) -> Any:
    """A record from an object with its fields; None, and a problem more, where that can't be."""
    given = _of_kind(dict, value, where, problems)
    known = [f.name for f in fields(kind)]
    found = list(unknown_names(given, known, where))
    try:
        made = None if found else kind(**given)
    except TypeError:
        found.append(f"{where} has {', '.join(given) or 'nothing'}, and needs {', '.join(known)}")
        made = None
    problems += found
    return made


def _of_kind(kind: type, value: Any, where: str, problems: list[str]) -> Any:
    if isinstance(value, kind):
        return value
    problems.append(f"{where} is {shown(value)}, no {'object' if kind is dict else 'list'}")
    return kind()


def _short(number: float) -> str:
    """Three digits and a decimal prefix."""
    for power, prefix in ((15, "P"), (12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if number >= 10**power:
            return f"{number / 10**power:.3g} {prefix}"
    return f"{number:.3g} "


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"
