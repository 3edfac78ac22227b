"""Calls of torch functions, one after the other, as one Python function: what is asked at every call where steps are
interpreted (which operands, in which shapes, until when) is asked once, when the function is written.

Functions, shapes and dtypes are no part of its source, so that the same calls at other sizes share their code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cached_property, lru_cache
from types import CodeType
from typing import Any

import torch

Shape = tuple[int, ...]
_Place = tuple[int, str, int | None]  # of a line by its number, a field of its call, and a number in that


@dataclass(frozen=True)
class TileCall:
    """A torch function of tiles, and what its operands and results have to be.

    function  of the operands; gives the results in a sequence, or a single one bare
    comes     per operand the shape in which it is kept
    takes     ... and in which the function wants it
    makes     per result the shape in which the function gives it
    gives     ... and in which it is kept
    dtypes    per result
    whole     per result, whether it has to lie in one piece
    """

    function: Callable[..., Any]
    comes: tuple[Shape, ...]
    takes: tuple[Shape, ...]
    makes: tuple[Shape, ...]
    gives: tuple[Shape, ...]
    dtypes: tuple[torch.dtype, ...]
    whole: tuple[bool, ...]

    @cached_property
    def nbytes(self) -> tuple[int, ...]:
        """How many bytes each result takes."""
        return tuple([math.prod(shape) * dtype.itemsize for shape, dtype in zip(self.gives, self.dtypes, strict=True)])


@dataclass(frozen=True)
class Line:
    """A call on named tiles. `ends`: those that nothing uses after it. `keeps`: the name of what the function gives
    beside its results, for the line that takes it as its last operand (`kept`), which may be one that runs later.
    `totals`: per result the name of a tile that it is added to, where there is one ("": none), and has the memory of
    then; `added` is the function that does so, of a last operand more, where a call is of one."""

    call: TileCall
    args: tuple[str, ...]
    results: tuple[str, ...]
    ends: tuple[str, ...] = ()
    keeps: str = ""
    kept: str = ""
    totals: tuple[str, ...] = ()
    added: Callable[..., torch.Tensor] | None = None


class StraightLine:
    """Lines as one function, `run`, of a dict from names to tiles, which it changes as the lines say. `listed`: what
    the dict holds are lists of one tile each."""

    def __init__(self, lines: Sequence[Line], *, listed: bool = False) -> None:
        writer = _Writer(lines, listed)
        self._numbers, self._code, self._places = writer.numbers, _compiled("\n".join(writer.source)), writer.places
        self.run = self._run_with(writer.constants)

    def with_calls(self, calls: Sequence[TileCall]) -> StraightLine:
        """The same with these calls, of lines without totals; shapes are alike where they are among those of now."""
        made = copy(self)
        namespace = dict(_GIVEN)
        for name, (number, field, position) in self._places.items():
            value = getattr(calls[number], field)
            namespace[name] = value if position is None else value[position]
        made.run = made._run_with(namespace)
        return made

    def _run_with(self, constants: Mapping[str, Any]) -> Callable[[dict[str, Any]], None]:
        namespace = dict(constants)
        exec(self._code, namespace)
        return namespace["run"]

    def failed_at(self, error: BaseException | None) -> int:
        """The number of the line that raised `error`, or what led to it; of the first one where none did."""
        while error is not None:
            trace = error.__traceback__
            while trace is not None:
                if trace.tb_frame.f_code is self.run.__code__:
                    return self._numbers[trace.tb_lineno]
                trace = trace.tb_next
            error = error.__context__
        return 0


class _Writer:
    """The source of lines; `numbers` has the number of the Line per line of source, counted from 1; `places`: where the
    constants of calls are."""

    def __init__(self, lines: Sequence[Line], listed: bool) -> None:
        ended = {name for line in lines for name in line.ends}
        self._within = {line.keeps for line in lines} & {line.kept for line in lines}
        self._listed, self._kept = listed, {name for line in lines for name in line.results} - ended
        self._locals: dict[str, str] = {}
        self._shapes: dict[str, Shape] = {}  # of the locals
        self._loaded: set[str] = set()
        self._known: dict[Any, str] = {}
        self._count = self._number = 0
        self.constants: dict[str, Any] = dict(_GIVEN)
        self.places: dict[str, _Place] = {}
        self.source, self.numbers = ["def run(held):"], [0, 0]
        for self._number, line in enumerate(lines):
            self._write(line)
        if not lines:
            self._add("pass")

    def _write(self, line: Line) -> None:
        call = line.call
        for name, shape in zip(line.args, call.comes, strict=True):
            self._load(name, shape)
        takes = enumerate(zip(line.args, call.takes, strict=True))
        operands = [self._as(self._locals[name], shape, "takes", position) for position, (name, shape) in takes]
        results = [self._local(name) for name in line.results]
        if line.kept:
            operands.append(self._kept_for(line))
        made = f"{', '.join(results)} = "
        if line.keeps:
            made = f"({', '.join(results)},), {self._local(line.keeps)} = "
        totals = [self._total(name) for name in line.totals]
        self._add(f"{made}{self._called(line, operands, totals)}")
        if line.keeps and line.keeps not in self._within:
            self._add(f"held[{line.keeps!r}] = {self._locals[line.keeps]}")
        if line.kept:
            self._add(f"{operands[-1]} = None")
        if len(results) == 1:
            self._add(f"if {results[0]}.__class__ is not Tensor: {results[0]} = only({results[0]})")
        for position, (name, result) in enumerate(zip(line.results, results, strict=True)):
            self._finish(result, call, position)
            if name in self._kept:
                kept = self._as(result, call.gives[position], "gives", position)
                if totals and totals[position]:
                    there = totals[position] if line.added is not None else f"{totals[position]}.add_({kept})"
                    kept = f"{kept} if {totals[position]} is None else {there}"
                self._add(f"held[{name!r}] = {f'[{kept}]' if self._listed else kept}")
        for name in line.ends:
            self._end(name)

    def _total(self, name: str) -> str:
        """The local that has a total, or None where there is none."""
        if name:
            found = f"held.pop({name!r}, (None,))[0]" if self._listed else f"held.pop({name!r}, None)"
            self._add(f"{self._local(name)} = {found}")
        return self._locals[name] if name else ""

    def _called(self, line: Line, operands: Sequence[str], totals: Sequence[str]) -> str:
        """The call, of a total, too, where its function can add to that and there is one."""
        plain = f"{self._constant('f', line.call.function, 'function')}({', '.join(operands)})"
        if line.added is None:
            return plain
        ((total, gives, makes),) = zip(totals, line.call.gives, line.call.makes, strict=True)
        wanted = total if gives == makes else f"{total}.view({self._constant('s', makes, 'makes', 0)})"
        adds = f"{self._constant('f', line.added, 'added')}({', '.join((*operands, wanted))})"
        return f"{plain} if {total} is None else {adds}"

    def _kept_for(self, line: Line) -> str:
        if line.kept not in self._within:
            self._add(f"{self._local(line.kept)} = held.pop({line.kept!r})")
        return self._locals[line.kept]

    def _as(self, local: str, shape: Shape, field: str, position: int) -> str:
        if self._shapes[local] == shape:
            return local
        return f"reshape({local}, {self._constant('s', shape, field, position)})"

    def _load(self, name: str, shape: Shape) -> None:
        if name not in self._locals:
            self._loaded.add(name)
            self._shapes[self._local(name)] = shape
            self._add(f"{self._locals[name]} = held[{name!r}]{'[0]' if self._listed else ''}")

    def _local(self, name: str) -> str:
        if name not in self._locals:
            self._locals[name] = f"v{self._count}"
            self._count += 1
        return self._locals[name]

    def _finish(self, result: str, call: TileCall, position: int) -> None:
        dtype, self._shapes[result] = (
            self._constant("d", call.dtypes[position], "dtypes", position),
            call.makes[position],
        )
        self._add(f"if {result}.dtype is not {dtype}: {result} = {result}.to({dtype})")
        if call.whole[position]:
            self._add(f"{result} = {result}.contiguous()")

    def _end(self, name: str) -> None:
        """The tile is forgotten, here and, if it came from there, in the dict."""
        local = self._locals.pop(name, None)
        if local is None or name in self._loaded:
            self._add(f"del held[{name!r}]")
            self._loaded.discard(name)
        if local is not None:
            self._add(f"{local} = None")

    def _constant(self, kind: str, value: Any, field: str, position: int | None = None) -> str:
        key = (kind, value if kind != "f" else id(value))
        if key not in self._known:
            self._known[key] = f"{kind}{len(self._known)}"
            self.constants[self._known[key]] = value
            self.places[self._known[key]] = self._number, field, position
        return self._known[key]

    def _add(self, source: str) -> None:
        self.source.append(f" {source}")
        self.numbers.append(self._number)


def _only(made: Any) -> torch.Tensor:
    """The single result of a function that gives it in a sequence, or as a subclass of torch's tensors."""
    if isinstance(made, torch.Tensor):
        return made
    (result,) = made
    return result


_GIVEN = {"Tensor": torch.Tensor, "only": _only, "reshape": torch.reshape}


@lru_cache(maxsize=256)
def _compiled(source: str) -> CodeType:
    return compile(source, "<straight line>", "exec")
