"""What a composition is made of while it is drawn: three dims, parameters, on-chip buffers and lines."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from tests.random_kernels.spec import Line, OnChip, Param
from tests.random_kernels.writer import Writer


@dataclass(frozen=True)
class Dim:
    """A logical dim of `size` positions, which kernels walk in blocks."""

    name: str
    size: int
    block: int

    @property
    def blocks(self) -> int:
        return -(-self.size // self.block)


@dataclass(eq=False)
class Scene(Writer):
    """The whole function; `places` is the text of each open dim's block, `made` the parameters that earlier grids left,
    `complete` the states that earlier loops of the program left, with their dims, `seen` the constructs that were
    drawn. What is `calm` has few of them, and blocks that are whole: with more, most of what is split is needed whole
    for some reason."""

    random: Random
    dims: dict[str, Dim] = field(default_factory=dict)
    params: dict[str, Param] = field(default_factory=dict)
    buffers: list[OnChip] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    places: dict[str, str] = field(default_factory=dict)
    made: list[Param] = field(default_factory=list)
    seen: set[str] = field(default_factory=set)
    counts: dict[str, int] = field(default_factory=dict)
    calm: bool = True
    complete: list[tuple[str, str]] = field(default_factory=list)
    few: dict[tuple[str, ...], list[str]] = field(default_factory=dict)

    # -- drawing ---------------------------------------------------------------------------------------------------

    def kind(self, options: Sequence[str]) -> str:
        """One of them, which is noted as a construct. A calm scene takes the first of them, and few others."""
        if self.calm:
            options = self.few.setdefault(
                tuple(options), [options[0]] * 2 + self.random.sample(options, self.pick((0, 1, 1, 2)))
            )
        found = self.pick(options)
        self.seen.add(found)
        return found

    def twist(self, *options: str) -> str:
        """What is not as it should be: mostly nothing."""
        return self.pick(options) if self.chance(8 if self.calm else 25) else ""

    # -- names, parameters, buffers, lines -------------------------------------------------------------------------

    def param(
        self, stem: str, shape: Sequence[int], dims: Sequence[str], dtype="float32", role="in", below=None
    ) -> str:
        """A new parameter's name."""
        name = self.name(stem)
        self.params[name] = Param(name, tuple(shape), dtype, role, below, tuple(dims))
        return name

    def output(self, dims: str, dtype: str = "float32", role: str = "out") -> str:
        name = self.param("Y", [self.dims[d].size for d in dims], tuple(dims), dtype, role)
        self.made.append(self.params[name])
        return name

    def buffer(self, stem: str, dims: str, dtype: str = "float32", scope: str = "") -> str:
        """A buffer for a block in each of the dims; of one element without any."""
        shape = tuple(self.dims[d].block for d in dims) or (1,)
        return self.buffer_of(stem, shape, dtype, scope)

    def buffer_of(self, stem: str, shape: tuple[int, ...], dtype: str = "float32", scope: str = "") -> str:
        name = self.name(stem)
        self.buffers.append(OnChip(name, shape, dtype, scope or self.pick(("fragment", "fragment", "shared"))))
        return name

    def reducer(self, stem: str, dims: str, op: str) -> str:
        """A reducer for a block in each of the dims; of one element without any."""
        name = self.name(stem)
        shape = tuple(self.dims[d].block for d in dims) or (1,)
        self.buffers.append(OnChip(name, shape, "float32", "reducer", op))
        return name

    def dtype_of(self, buffer: str) -> str:
        return next(b.dtype for b in self.buffers if b.name == buffer)

    # -- positions -------------------------------------------------------------------------------------------------

    def start(self, dim: str) -> str:
        """Where the open block of a dim starts."""
        block = self.dims[dim].block
        return self.places[dim] if block == 1 else f"{self.places[dim]} * {block}"

    def at(self, dim: str, element: str | None = None) -> str:
        """The position of an element in the open block."""
        element = element or ELEMENTS[dim]
        return self.start(dim) if self.dims[dim].block == 1 else f"{self.start(dim)} + {element}"

    def element(self, buffer: str, dims: str, **other: str) -> str:
        names = [other.get(d, "0" if self.dims[d].block == 1 else ELEMENTS[d]) for d in dims]
        return f"{buffer}[{', '.join(names) or '0'}]"

    def loops(self, dims: str, serial: str = "") -> list[str]:
        """Headers of loops over the elements of a block; those of `serial` go in order, and are outermost."""
        headers = [f"for {ELEMENTS[d]} in T.serial({self.dims[d].block})" for d in serial if self.dims[d].block > 1]
        free = [d for d in dims if d not in serial and self.dims[d].block > 1]
        if free:
            names, extents = (
                ", ".join(str(x) for x in xs)
                for xs in zip(*[(ELEMENTS[d], self.dims[d].block) for d in free], strict=True)
            )
            headers.append(f"for {names} in T.Parallel({extents})")
        return headers or ["for one in T.Parallel(1)"]


#: The loop variables over the elements of a block.
ELEMENTS = {"m": "i", "k": "q", "n": "j"}
