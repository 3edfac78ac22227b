"""Making a counterexample small: fewer results, lines, parameters, annotations and axes, as long as it stays wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace

from .check import run
from .spec import Case

_NAME = re.compile(r"\b[vfx]\d+(?:_a\d+)?\b")
_BINDING = re.compile(r"^ *(v\d+) = ")


def reduced(case: Case, kind_of: Callable[[Case], str] | None = None) -> Case:
    """The smallest case found that is wrong as `case` is (`kind_of` says how; "" is right)."""
    kind_of = kind_of or _kind
    kind, smaller = kind_of(case), None
    while kind and smaller is not case:
        smaller = case
        for candidates in (_less_stated, _fewer_results, _fewer_lines, _fewer_functions, _fewer_params, _fewer_axes):
            case = _greedy(case, kind, candidates, kind_of)
    return case


def _kind(case: Case) -> str:
    outcome = run(case)
    if outcome.verdict != "wrong":
        return ""
    last = outcome.reason.strip().splitlines()[-1]
    return re.sub(r"\d+|'.*?'", "", last)[:60] if "Traceback" in outcome.reason else outcome.reason[:6]


def _greedy(
    case: Case, kind: str, candidates: Callable[[Case], Iterator[Case]], kind_of: Callable[[Case], str]
) -> Case:
    """Take every candidate that is still wrong; go on from there."""
    position = 0
    while True:
        options = [option for option in candidates(case) if _size(option) < _size(case)]
        while position < len(options) and kind_of(options[position]) != kind:
            position += 1
        if position >= len(options):
            return case
        case = options[position]


def _size(case: Case) -> tuple[int, int]:
    return len(str(case)), sum(case.mesh.values())


def _less_stated(case: Case) -> Iterator[Case]:
    yield replace(case, weights=(), spread={}, typed=False, open=(), priority={})
    for name, layout in case.shardings.items():
        rest = {other: stated for other, stated in case.shardings.items() if other != name}
        yield _restated(case, rest)
        if isinstance(layout, dict) and "sharding" not in layout:
            for axis in layout:
                less = {other: dim for other, dim in layout.items() if other != axis}
                yield _restated(case, {**case.shardings, name: less})
    for name in case.open:
        yield replace(case, open=tuple(other for other in case.open if other != name))
    for name in case.priority:
        yield replace(case, priority={other: p for other, p in case.priority.items() if other != name})


def _restated(case: Case, shardings: dict[str, object]) -> Case:
    return replace(
        case,
        shardings=shardings,
        open=tuple(name for name in case.open if name in shardings),
        priority={name: p for name, p in case.priority.items() if name in shardings},
    )


def _fewer_results(case: Case) -> Iterator[Case]:
    """Main returns one of its values."""
    head, main = _main(case)
    for name in dict.fromkeys(_NAME.findall(main)[::-1]):
        lines = [line for line in main.splitlines() if "R.output" not in line]
        lines = [line for line in lines if not line.strip().startswith(("return", "out ="))]
        lines = [line.replace("    ", "", 1) if "R.dataflow" in main else line for line in lines]
        lines = [line for line in lines if "R.dataflow" not in line]
        if not name.startswith("f"):
            made = head + "\n".join(
                ["    " + line.strip() if "def " in line or "@" in line else line for line in lines]
            )
            yield replace(case, source=f"{made}\n        return {name}\n", exact=())


def _fewer_lines(case: Case) -> Iterator[Case]:
    """A line that binds what nothing uses goes, and an operand takes the place of a result of the same name's type."""
    lines = case.source.splitlines(keepends=True)
    for index in range(len(lines) - 1, -1, -1):
        found = _BINDING.match(lines[index])
        if not found:
            continue
        text = "".join(lines[:index] + lines[index + 1 :])
        name = found[1]
        stated = {n: layout for n, layout in case.shardings.items() if n.split(".")[-1] != name}
        if not re.search(rf"\b{name}\b", text):
            yield replace(_restated(case, stated), source=text)
        else:
            for other in dict.fromkeys(_NAME.findall(lines[index].split("=", 1)[1])):
                yield replace(_restated(case, stated), source=re.sub(rf"\b{name}\b", other, text), exact=())


def _fewer_functions(case: Case) -> Iterator[Case]:
    parts = case.source.split("    @R.function")
    for index in range(1, len(parts) - 1):
        name = re.search(r"def (\w+)", parts[index])[1]
        if f"cls.{name}(" not in case.source:
            stated = {n: layout for n, layout in case.shardings.items() if not n.startswith(name + ".")}
            text = "    @R.function".join(parts[:index] + parts[index + 1 :])
            yield replace(_restated(case, stated), source=text)


def _fewer_params(case: Case) -> Iterator[Case]:
    head, main = _main(case)
    for param in case.params:
        if len(re.findall(rf"\b{param.name}\b", main)) == 1 and len(case.params) > 1:
            text = re.sub(rf"{param.name}: R\.Tensor\(\([^)]*\), \"\w+\"\)(, )?", "", main).replace(", )", ")")
            stated = {n: layout for n, layout in case.shardings.items() if n != param.name}
            yield replace(
                _restated(case, stated),
                source=head + text,
                params=tuple(p for p in case.params if p != param),
                weights=tuple(name for name in case.weights if name != param.name),
                spread={name: layout for name, layout in case.spread.items() if name != param.name},
            )


def _fewer_axes(case: Case) -> Iterator[Case]:
    for axis in case.mesh:
        if len(case.mesh) > 1:
            stated = {
                name: {a: dim for a, dim in layout.items() if a != axis}
                for name, layout in case.shardings.items()
                if isinstance(layout, dict) and "sharding" not in layout
            }
            mesh = {a: size for a, size in case.mesh.items() if a != axis}
            yield replace(_restated(case, stated), mesh=mesh, spread={}, typed=False)
    for axis, size in case.mesh.items():
        if size > 2:
            yield replace(case, mesh={**case.mesh, axis: 2})


def _main(case: Case) -> tuple[str, str]:
    at = case.source.index("    @R.function\n    def main")
    return case.source[:at], case.source[at:]
