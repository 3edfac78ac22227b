"""A random kernel as data: parameters, grid, on-chip buffers and a body of nested lines, printed as TileLang source."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class Param:
    """A buffer parameter. `role` is "in", "out" (every element is written, none is read before) or "inout" (earlier
    content counts); the elements of an index buffer are in [0, `below`). `dims` names the logical dims it has. Its
    author may have said how it lies in memory (`strides`)."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    role: str = "in"
    below: int | None = None
    dims: tuple[str, ...] = ()
    strides: tuple[int, ...] = ()

    def declared(self) -> str:
        """The parameter as its kernel declares it."""
        if self.strides:
            return f'{self.name}: T.StridedTensor({self.shape}, {self.strides}, "{self.dtype}")'
        return f'{self.name}: T.Tensor({self.shape}, "{self.dtype}")'


@dataclass(frozen=True)
class OnChip:
    """An on-chip buffer; `scope` is "fragment", "shared" or "local", or "reducer" of an `op`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    scope: str
    op: str = ""

    def declared(self) -> str:
        """The line that allocates it."""
        op = f', op="{self.op}"' if self.op else ""
        return f'{self.name} = T.alloc_{self.scope}({self.shape}, "{self.dtype}"{op})'


@dataclass(frozen=True)
class Block:
    """A compound statement: `header:` and what stands below it."""

    header: str
    body: tuple[Block | str, ...]


Line = Block | str

#: All programs wait for each other.
BARRIER = "T.sync_grid()"


@dataclass(frozen=True)
class KernelSpec:
    """One kernel. `grid` is the launch variables with their extents."""

    params: tuple[Param, ...]
    grid: tuple[tuple[str, int], ...]
    buffers: tuple[OnChip, ...]
    body: tuple[Line, ...]

    def source(self) -> str:
        """The kernel as TileLang source."""
        params = ", ".join(param.declared() for param in self.params)
        extents = ", ".join(str(extent) for _, extent in self.grid)
        names = ", ".join(name for name, _ in self.grid)
        header = f"with T.Kernel({extents}, threads=128) as {names if len(self.grid) == 1 else f'({names})'}"
        allocs = tuple(buffer.declared() for buffer in self.buffers)
        kernel = Block(f"def kernel({params})", (Block(header, (*allocs, *self.body)),))
        return "\n".join(["@T.prim_func", *render(kernel, 0)]) + "\n"


def without_barriers(source: str) -> str:
    """The source without barriers."""
    return "\n".join(line for line in source.split("\n") if line.strip() != BARRIER)


def render(line: Line, depth: int) -> Iterator[str]:
    """The lines of the source."""
    indent = "    " * depth
    if isinstance(line, str):
        yield indent + line
        return
    yield f"{indent}{line.header}:"
    for inner in line.body or ("pass",):
        yield from render(inner, depth + 1)


@dataclass(frozen=True)
class Case:
    """The source of a kernel, how its parameters lie on a mesh (`shardings` is as `annotate` takes it; what it leaves
    out is not annotated), and its data: small integers, or normal values. `exact`: with small integers, the order of
    its sums can't matter. With `blank`, the call leaves the outputs out, else it passes tensors for them. `as_python`:
    it has nothing in it that `reference.run_as_python` doesn't know. `seen`: the constructs in it. `machine`: which
    of `other_machines` it is planned for; None: any."""

    source: str
    params: tuple[Param, ...]
    mesh: dict[str, int]
    shardings: dict[str, dict]
    exact: bool = True
    integers: bool = True
    blank: bool = False
    as_python: bool = False
    seed: int = 0
    seen: frozenset[str] = frozenset()
    machine: int | None = None

    def __repr__(self) -> str:
        """What it takes to write the case down as a test."""
        rest = f"exact={self.exact}, integers={self.integers}, blank={self.blank}, seed={self.seed}"
        return f"\n{self.source}\nmesh={self.mesh}\nshardings={self.shardings}\n{rest}\n"
