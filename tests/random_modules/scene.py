"""The function that is being written: its lines, the values that it has so far, and dice."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from .spec import Param

T = TypeVar("T")
MOST = 2048  # elements of a value
EXACT = {"float32": 2.0**20, "float16": 1000.0, "int32": 2.0**20, "int64": 2.0**20, "bool": 1.0}
FLOATS = ("float32", "float16")


@dataclass(frozen=True)
class Value:
    """A tensor in a function. `whole`: its elements are whole numbers, found without rounding. No element is larger
    than `bound` (as far as is known), nor are whole ones ever larger than what their dtype holds exactly."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    whole: bool
    bound: float

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def is_float(self) -> bool:
        return self.dtype in FLOATS


@dataclass(frozen=True)
class Function:
    """A function that can be called: what it takes and gives (several results are a tuple)."""

    name: str
    params: tuple[Value, ...]
    results: tuple[Value, ...]


@dataclass
class Shared:
    """What all functions of a module have in common. `favourites`: operators that it has more of than others. `mesh`:
    the one that manual computations are written for."""

    random: Random
    sizes: tuple[int, ...]
    whole: bool
    favourites: frozenset[str]
    mesh: dict[str, int]
    texts: list[str] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    count: int = 0
    started: int = 0


class Scene:
    """One function in the making."""

    def __init__(self, shared: Shared, name: str) -> None:
        self.shared, self.name, self.random = shared, name, shared.random
        self.params: list[Param] = []
        self.values: list[Value] = []
        self.lines: list[str] = []
        self.named: list[Value] = []  # what a binding of the function's own block binds
        self.conditions: list[str] = []
        self.indent = 0
        self.may_branch = True
        self.devices: tuple[str, ...] = ()  # the manual axes
        self.focus: Value | None = None  # what the next operator shall take
        self.summed: list[dict[str, int]] = []  # dims, by value, that are summed over together

    # -- dice ----------------------------------------------------------------------------------------------------

    def pick(self, options: Sequence[T]) -> T:
        return self.random.choice(options)

    def chance(self, percent: float) -> bool:
        return self.random.random() * 100 < percent

    def number(self, low: int, high: int) -> int:
        return self.random.randint(low, high)

    def some(self, options: Iterable[T], low: int, high: int) -> list[T]:
        found = list(options)
        return self.random.sample(found, min(len(found), self.number(low, high)))

    def size(self) -> int:
        return self.pick(self.shared.sizes)

    def shape(self, low: int = 1, high: int = 4) -> tuple[int, ...]:
        shape = [self.size() for _ in range(self.number(low, high))]
        while math.prod(shape) > MOST // 4:
            shape[shape.index(max(shape))] = 2
        return tuple(shape)

    # -- values --------------------------------------------------------------------------------------------------

    def find(
        self, *, dtypes: Sequence[str] = (), ndim: int = 0, whole: bool = False, empty: bool = False
    ) -> Value | None:
        """One of the last values, mostly. `empty`: it may have no elements."""
        found = [
            v
            for v in self.values
            if (not dtypes or v.dtype in dtypes) and v.ndim >= ndim and (v.whole or not whole) and (empty or v.elements)
        ]  # fmt: skip
        focus, self.focus = self.focus, None
        if focus in found:
            return focus
        if not found:
            return None
        return self.pick(found[-4:]) if self.chance(75) else self.pick(found)

    def parameter(self, shape: Sequence[int], dtype: str = "float32", below: int | None = None) -> Value:
        """A new parameter of main."""
        name = f"x{len(self.params)}"
        bound = float(below) if below else (1.0 if dtype == "bool" else 3.0)
        self.params.append(Param(name, tuple(shape), dtype, bound, below))
        whole = self.shared.whole or dtype not in FLOATS
        value = Value(name, tuple(shape), dtype, whole, 6.0 if not whole else bound)
        if below is None:
            self.values.append(value)
        return value

    def fresh(self) -> str:
        self.shared.count += 1
        return f"v{self.shared.count}"

    def line(self, text: str) -> None:
        self.lines.append("    " * self.indent + text)

    def bind(self, text: str, shape: Sequence[int], dtype: str, whole: bool, bound: float) -> Value:
        """A line that binds an operator's result."""
        value = Value(self.fresh(), tuple(shape), dtype, whole, max(1.0, bound))
        self.line(f"{value.name} = {text}")
        return self.add(value)

    def add(self, value: Value) -> Value:
        self.values.append(value)
        if not self.indent:
            self.named.append(value)
        return value

    def pending(self, value: Value, dims: dict[str, int]) -> None:
        """A value that is a sum over `dims` of others: where those are split, devices have parts of it, which what
        comes next may or may not take as they are."""
        self.summed.append({name: dim for name, dim in dims.items() if name.isidentifier()})
        self.focus = value if self.chance(60) else None

    def fits(self, bound: float, dtype: str, whole: bool, shape: Sequence[int] = ()) -> bool:
        """Whether values so large can be made: whole ones stay exact, others tame."""
        return bound <= (EXACT[dtype] if whole or dtype not in FLOATS else EXACT["float16"]) and (
            math.prod(shape) <= MOST
        )

    def operand(self, shape: Sequence[int], dtype: str) -> Value | None:
        """A tensor of that shape: one that there is, a constant, or (in main) a new parameter."""
        same = [v for v in self.values if v.shape == tuple(shape) and v.dtype == dtype]
        if same and self.chance(70):
            return self.pick(same)
        if self.name == "main" and len(self.params) < 6 and self.chance(75):
            return self.parameter(shape, dtype)
        return self.constant(shape, dtype)

    def constant(self, shape: Sequence[int], dtype: str) -> Value | None:
        """A constant, as text in the place of a name."""
        if math.prod(shape) > 64 or 0 in shape:
            return None
        if dtype == "bool":
            text = self._nested(shape, lambda: str(self.chance(50)))
        elif dtype in FLOATS and not self.shared.whole:
            text = self._nested(shape, lambda: f"{self.random.uniform(-2, 2):.3f}")
        else:
            text = self._nested(shape, lambda: str(self.number(-3, 3)))
        whole = self.shared.whole or dtype not in FLOATS
        return Value(f'R.const({text}, "{dtype}")', tuple(shape), dtype, whole, 3.0)

    def _nested(self, shape: Sequence[int], make) -> str:
        if not shape:
            return make()
        return "[" + ", ".join(self._nested(shape[1:], make) for _ in range(shape[0])) + "]"
