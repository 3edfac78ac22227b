"""What a random program is made of while it is drawn: arrays, variables, lines, and expressions at one position.

A program works on elements, as scalar code does: rows of `m` are independent of each other unless they run in order,
positions along `n` are walked by its steps. Whatever TileLang leaves undefined is not drawn: what programs of the grid
share is only updated, by atomics whose order can't matter."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from .spec import Line, OnChip, Param
from .writer import Writer

#: How rows run: not at all, one per program, in blocks, one after the other in one program, or all at once in one.
ROWS = ("none", "grid", "grid", "blocks", "serial", "serial", "parallel")


@dataclass(eq=False)
class Program(Writer):
    """`kind` is one of ROWS; `row` is the row's index where rows run. `hidden` are the arrays that a loop over all
    positions at once may not read elsewhere than it writes."""

    random: Random
    kind: str
    m: int
    n: int
    row: str = ""
    dtype: str = "float32"
    params: dict[str, Param] = field(default_factory=dict)
    variables: dict[str, tuple[str, str]] = field(default_factory=dict)
    carried: set[str] = field(default_factory=set)
    buffers: list[OnChip] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    hidden: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)

    @property
    def has_rows(self) -> bool:
        return self.kind != "none"

    @property
    def in_order(self) -> bool:
        """Whether all that runs, runs one after the other: rows may then depend on earlier ones."""
        return self.kind in ("none", "serial")

    @property
    def one_lane(self) -> bool:
        """Whether a row has its program, or its time, to itself."""
        return self.kind != "parallel"

    # -- arrays and variables --------------------------------------------------------------------------------------

    def array(self, dims: str, role: str = "in", dtype: str = "", below: int | None = None, fresh: bool = False) -> str:
        """An array with these dims, of "mn"; a known one, mostly, if it is only read."""
        dims = dims if self.has_rows else dims.replace("m", "")
        dtype = dtype or self.dtype
        alike = [
            p.name
            for p in self.params.values()
            if (p.dims, p.role, p.dtype, p.below) == (tuple(dims) or ("one",), role, dtype, below)
        ]
        if alike and not fresh and not self.chance(35):
            return self.pick(alike)
        stem = {"in": "A" if below is None else "I", "inout": "Y"}[role]
        shape = tuple({"m": self.m, "n": self.n}[d] for d in dims) or (1,)
        name = self.name(stem)
        self.params[name] = Param(name, shape, dtype, role, below, tuple(dims) or ("one",))
        return name

    def element(self, name: str, at: str) -> str:
        """The element of an array that belongs to this row, at a position."""
        return f"{name}[{self.place(''.join(d for d in self.params[name].dims if d in 'mn'), at)}]"

    def place(self, dims: str, at: str) -> str:
        """The index of an element in an array with these dims: of this row, at a position."""
        parts = [self.row] if "m" in dims and self.has_rows else []
        return ", ".join([*parts, *([at] if "n" in dims else [])]) or "0"

    def variable(self, dtype: str, init: str, *, carried: bool = False) -> str:
        """A variable that starts anew in every row, unless it is carried from one to the next."""
        name = self.name("n" if dtype == "int32" else "v")
        self.variables[name] = (dtype, init)
        if carried and self.in_order:
            self.carried.add(name)
        return name

    def on_chip(self, size: int, dtype: str = "") -> str:
        name = self.name("t")
        self.buffers.append(OnChip(name, (size,), dtype or self.dtype, self.pick(("shared", "local"))))
        return name

    # -- expressions -----------------------------------------------------------------------------------------------

    def const(self, number: int) -> str:
        return f"{number}.0" if self.dtype == "float32" else str(number)

    def cast(self, text: str) -> str:
        return f'T.cast({text}, "float32")' if self.dtype == "float32" else f"({text})"

    def whole(self, at: str) -> str:
        """A small whole number: a position, a variable, a loaded one."""
        options = [*(v for v, (dtype, _) in self.variables.items() if dtype == "int32"), at or "1"]
        options += [self.row] if self.row else []
        ids = self.array(self.pick(("mn", "n", "m", "")) if at else self.pick(("m", "")), "in", "int32", self.n)
        options += [self.element(ids, at)] * 2
        return self.pick(options)

    def index(self, at: str) -> str:
        """A position that is certainly inside `n`."""
        ids = self.array(self.pick(("mn", "n")), "in", "int32", self.n)
        loaded = self.element(ids, at)
        options = [loaded, loaded, f"{self.n - 1} - ({at})", f"(({loaded}) + {at}) % {self.n}"]
        if at.isidentifier():
            options += [self.element(ids, f"{self.n - 1} - {at}")]
        return self.pick(options)

    def load(self, at: str) -> str:
        """An element: of an input or of what was written, here or elsewhere."""
        known = [p for p in self.params.values() if p.role == "inout" and p.dtype == self.dtype and self._own(p)]
        known = [p for p in known if at or "n" not in p.dims]
        if known and self.chance(30):
            param = self.pick(known)
            where = at if param.name in self.hidden or not self.chance(20) or not at else self.index(at)
            return self.element(param.name, where)
        dims = self.pick(("mn", "mn", "mn", "n", "m", "")) if at else self.pick(("m", ""))
        where = self.index(at) if "n" in dims and self.chance(15) else at
        return f"{self.array(dims)}[{self.place(dims, where)}]"

    def _own(self, param: Param) -> bool:
        """Whether only this row, or nobody at the same time, writes the array; and all of it can be named here."""
        return "m" in param.dims if self.has_rows else True

    def value(self, at: str, depth: int = 2) -> str:
        """A value at a position (or, if `at` is empty, of the row)."""
        if depth == 0 or self.chance(30):
            scalars = [v for v, (dtype, _) in self.variables.items() if dtype == self.dtype]
            options = [self.load(at), self.load(at), self.load(at), *scalars[-2:]]
            options += [self.cast(self.whole(at)), self.const(self.pick((0, 1, 2, -1)))]
            return self.pick(options)
        a, b = self.value(at, depth - 1), self.value(at, depth - 1)
        kind = self.pick(("+", "-", "max", "min", "twice", "choice"))
        if kind in ("max", "min"):
            return f"T.{kind}({a}, {b})"
        if kind == "twice":
            return f"({a} * {self.const(self.pick((2, -1)))})"
        if kind == "choice":
            return f"T.if_then_else({self.condition(at, depth - 1)}, {a}, {b})"
        return f"({a} {kind} {b})"

    def condition(self, at: str, depth: int = 1) -> str:
        """A test of values, positions or masks."""
        if depth and self.chance(20):
            return f"({self.condition(at, 0)} {self.pick(('and', 'or'))} {self.condition(at, 0)})"
        kind = self.pick(("value", "value", "value", "whole", "parity"))
        if kind == "value":
            return (
                f"{self.value(at, min(depth, 1))} {self.pick(('>', '<', '>=', '!='))} {self.const(self.pick((0, 1)))}"
            )
        if kind == "whole":
            return f"{self.whole(at)} {self.pick(('<', '>=', '=='))} {self.whole(at)}"
        return f"({self.whole(at)} + {at or self.row or '1'}) % 2 == {self.pick((0, 1))}"
