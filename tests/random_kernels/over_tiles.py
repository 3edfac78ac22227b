"""Random kernels in two styles from one source: over whole tensors, and over tiles with the helpers.

`style` in the source is a `tests.styles.Style`. In some of them the author forgot, here and there, that a position is
that in a tile: those have to be refused, or be right all the same."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from .spec import Block, Line, Param, render

_MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 4}, {"x": 1, "y": 2})


@dataclass(frozen=True)
class TilesCase:
    """`layouts`: of the parameters that are split. `forgot`: whether positions may lack their offset."""

    source: str
    params: tuple[Param, ...]
    mesh: dict[str, int]
    layouts: dict[str, dict[str, int]]
    forgot: bool
    seed: int

    def __repr__(self) -> str:
        return f"\n{self.source}\nmesh={self.mesh}\nlayouts={self.layouts}\nforgot={self.forgot}, seed={self.seed}\n"


def make_tiles_case(number: int) -> TilesCase:
    """The case with this number."""
    return _Maker(Random(number), number).make()


class _Maker:
    """A[m, n] in blocks of bm x bn; what is computed of an element may use its position, tables that every device has
    whole, and how much of the tile is valid."""

    def __init__(self, random: Random, seed: int):
        self.random, self.seed = random, seed
        self.sizes = {"m": random.choice((1, 4, 7, 12, 13, 24, 31)), "n": random.choice((3, 5, 8, 12, 17))}
        self.blocks = {"m": random.choice((1, 2, 4, 5, 8)), "n": random.choice((2, 4, 8))}
        self.forget = random.choice((0.0, 0.0, 0.15, 0.5))
        self.tables: dict[str, Param] = {}
        self.at = {"m": "", "n": ""}
        self.variables: list[Line] = []

    def make(self) -> TilesCase:
        mesh = self.random.choice(_MESHES)
        dims = {axis: self.random.choice((0, 0, 1)) for axis in mesh}
        a = Param("A", (self.sizes["m"], self.sizes["n"]), "float32")
        kind = self.random.choice(
            (self._map, self._map, self._tile, self._over_rows, self._over_columns, self._normalize)
        )
        out, body = kind()
        params = (a, *self.tables.values(), out)
        split = {
            "A": dims,
            "B": {axis: out.dims.index("mn"[dim]) for axis, dim in dims.items() if "mn"[dim] in out.dims},
        }
        names = ", ".join(p.name for p in params)
        header = ", ".join(f'{p.name}: T.Tensor({p.shape}, "{p.dtype}")' for p in params)
        lines: tuple[Line, ...] = (
            f"style.annotate({names})",
            "tm, tn = style.shape(A)",
            "om, on = style.offset(A)",
            "vm, vn = style.extent(A)",
            *body,
        )
        source = "\n".join(["@T.prim_func", *render(Block(f"def kernel({header})", lines), 0)]) + "\n"
        return TilesCase(source, params, dict(mesh), split, self.forget > 0, self.seed)

    # -- expressions -----------------------------------------------------------------------------------------------

    def position(self, dim: str) -> str:
        """The global position, unless the author forgets."""
        local = self.at[dim]
        if self.random.random() < self.forget:
            return f"({local})"
        return self.random.choice((f"(o{dim} + {local})", f"({local} + o{dim})", f"({local} - (0 - o{dim}))"))

    def number(self, depth: int = 1) -> str:
        """A whole number."""
        dim = self.random.choice("mmn")
        at = self.position(dim)
        kinds = ["at", "at", "quotient", "rest", "scaled", "extreme", *(["sum", "choice"] if depth else [])]
        kind = self.random.choice(kinds)
        step = self.random.choice((2, 3, 5))
        simple = {"at": at, "quotient": f"{at} // {step}", "rest": f"{at} % {step}", "scaled": f"{at} * {step}"}
        if kind in simple:
            return f"({simple[kind]})"
        if kind == "extreme":
            return f"T.min({at}, {self.random.randint(1, 20)})"
        if kind == "sum":
            return f"({self.number(0)} + {self.number(0)})"
        return f"T.if_then_else({self.test()}, {self.number(0)}, {self.random.randint(0, 3)})"

    def test(self) -> str:
        m, n = self.position("m"), self.position("n")
        limit = self.random.randint(1, 20)
        whole = self.sizes["m"]
        return self.random.choice(
            (
                f"{n} <= {m}",
                f"{m} < {n} + {limit}",
                f"{m} % 3 == 1",
                f"{m} < {limit}",
                f"{m} + {n} < {limit + 5}",
                f"{self.at['m']} < vm",
                f"{self.at['n']} < vn",
                f"{self.at['m']} < {whole}",
                *([f"{self.at['m']} < tm", f"{self.at['n']} < tn"] if self.forget else []),
            )
        )

    def value(self, element: str, depth: int = 2) -> str:
        """A small number of float32 that depends on the element."""
        if depth == 0:
            return element
        inner = self.value(element, depth - 1)
        kind = self.random.choice(("mask", "iota", "table", "table", "group", "plain", "variable"))
        if kind == "mask":
            return f"T.if_then_else({self.test()}, {inner}, {self.random.choice((0, -1, 2))}.0)"
        if kind == "iota":
            return f'({inner} + T.Cast("float32", {self.number()}))'
        if kind == "table":
            dim = self.random.choice("mn")
            return f"({inner} + {self._table(dim, self.sizes[dim])}[{self.position(dim)}])"
        if kind == "group":
            dim, step = self.random.choice("mn"), self.random.choice((2, 3))
            name = self._table(f"{dim}{step}", -(-self.sizes[dim] // step))
            return f"({inner} * {name}[{self.position(dim)} // {step}])"
        if kind == "variable" and not self.variables:
            self.variables.append(f"v = {self.number(0)}")
            return f'({inner} + T.Cast("float32", v))'
        return f"({inner} * 2.0)"

    def _table(self, name: str, size: int) -> str:
        """A tensor that every device has whole."""
        param = self.tables.setdefault(f"P{name}", Param(f"P{name}", (size,), "float32"))
        return param.name

    # -- kernels ---------------------------------------------------------------------------------------------------

    def _grid(self, *dims: str) -> str:
        """The grid over blocks, by the tile's size or by what is valid of it."""
        extents = [f"T.ceildiv({self.random.choice(('t', 't', 'v'))}{dim}, {self.blocks[dim]})" for dim in dims]
        names = ", ".join(f"b{dim}" for dim in dims)
        return f"with T.Kernel({', '.join(extents)}, threads=32) as {names if len(dims) == 1 else f'({names})'}"

    def _in_blocks(self, dim: str, var: str, element: str) -> None:
        block = self.blocks[dim]
        self.at[dim] = f"{var} * {block} + {element}" if block > 1 else f"{var} + {element}"

    def _with_variables(self, lines: list[Line], headers: list[str]) -> list[Line]:
        """Positions that go through a T.alloc_var are set where the statement is, in serial loops."""
        body = [*self.variables, *lines]
        for header in reversed(headers):
            body = [Block(header, tuple(body))]
        return [*(['v = T.alloc_var("int32")'] if self.variables else []), *body]

    def _loops(self, *extents: tuple[str, object]) -> list[str]:
        if self.variables:
            return [f"for {name} in T.serial({extent})" for name, extent in extents]
        return [f"for {', '.join(n for n, _ in extents)} in T.Parallel({', '.join(str(e) for _, e in extents)})"]

    def _map(self) -> tuple[Param, list[Line]]:
        """B[m, n] of A[m, n], element by element, in blocks of both dims."""
        self._in_blocks("m", "bm", "i")
        self._in_blocks("n", "bn", "j")
        value = self.value(f"A[{self.at['m']}, {self.at['n']}]", 3)
        store: list[Line] = [f"B[{self.at['m']}, {self.at['n']}] = {value}"]
        if self.random.random() < 0.3:
            store = [Block(f"if {self.at['m']} < vm", tuple(store))]
        body = self._with_variables(store, self._loops(("i", self.blocks["m"]), ("j", self.blocks["n"])))
        out = Param("B", (self.sizes["m"], self.sizes["n"]), "float32", "out", dims=("m", "n"))
        return out, [Block(self._grid("n", "m"), tuple(body))]

    def _whole_rows(self) -> tuple[list[Line], list[str]]:
        """Copies a block of whole rows, and the loops over its elements."""
        self._in_blocks("m", "bm", "i")
        self.at["n"] = "j"
        rows = self.blocks["m"]
        copies: list[Line] = [f't = T.alloc_fragment(({rows}, tn), "float32")', f"T.copy(A[bm * {rows}, 0], t)"]
        return copies, [f"for i, j in T.Parallel({rows}, tn)"]

    def _tile(self) -> tuple[Param, list[Line]]:
        """B[m, n] of A[m, n], by tiles of whole rows."""
        copies, loops = self._whole_rows()
        self.variables = ["pass"]  # tiles are computed in parallel
        change = Block(loops[0], (f"t[i, j] = {self.value('t[i, j]', 3)}",))
        self.variables = []
        out = Param("B", (self.sizes["m"], self.sizes["n"]), "float32", "out", dims=("m", "n"))
        store = f"T.copy(t, B[bm * {self.blocks['m']}, 0])"
        return out, [Block(self._grid("m"), (*copies, change, store))]

    def _over_columns(self) -> tuple[Param, list[Line]]:
        """B[m] = the sum, or the largest, of what becomes of A[m, :]."""
        copies, loops = self._whole_rows()
        self.variables = ["pass"]
        op = self.random.choice(("sum", "sum", "max"))
        rows = self.blocks["m"]
        change = Block(loops[0], (f"t[i, j] = {self.value('t[i, j]', 2)}",))
        self.variables = []
        out = Param("B", (self.sizes["m"],), "float32", "out", dims=("m",))
        total = [
            f's = T.alloc_fragment(({rows},), "float32")',
            f"T.reduce_{op}(t, s, dim=1)",
            f"T.copy(s, B[bm * {rows}])",
        ]
        return out, [Block(self._grid("m"), (*copies, change, *total))]

    def _over_rows(self) -> tuple[Param, list[Line]]:
        """B[n] = the sum of what becomes of A[:, n], block by block."""
        rows = self.blocks["m"]
        self._in_blocks("m", "bm", "i")
        self._in_blocks("n", "bn", "j")
        element = f"A[{self.at['m']}, {self.at['n']}]"
        add: list[Line] = [f"s[j] += {self.value(element, 2)}"]
        if self.random.random() < 0.7:
            add = [Block(f"if {self.at['m']} < vm", tuple(add))]
        inner = self._with_variables(add, [f"for i in T.serial({rows})", f"for j in T.serial({self.blocks['n']})"])
        alloc = [line for line in inner if isinstance(line, str)]
        nest = [line for line in inner if not isinstance(line, str)]
        extent = self.random.choice(("tm", "tm", "vm"))
        loop = Block(f"for bm in T.serial(T.ceildiv({extent}, {rows}))", tuple(nest))
        start = [f's = T.alloc_fragment(({self.blocks["n"]},), "float32")', "T.clear(s)", *alloc]
        out = Param("B", (self.sizes["n"],), "float32", "out", dims=("n",))
        return out, [Block(self._grid("n"), (*start, loop, f"T.copy(s, B[bn * {self.blocks['n']}])"))]

    def _normalize(self) -> tuple[Param, list[Line]]:
        """B[m, n] = what becomes of A[m, n], less its row's largest, and then something of that."""
        copies, loops = self._whole_rows()
        self.variables = ["pass"]
        rows = self.blocks["m"]
        body: list[Line] = [
            *copies,
            f's = T.alloc_fragment(({rows},), "float32")',
            Block(loops[0], (f"t[i, j] = {self.value('t[i, j]', 2)}",)),
            "T.reduce_max(t, s, dim=1)",
            Block(loops[0], (f"t[i, j] = {self.value('t[i, j] - s[i]', 2)}",)),
            f"T.copy(t, B[bm * {rows}, 0])",
        ]
        self.variables = []
        out = Param("B", (self.sizes["m"], self.sizes["n"]), "float32", "out", dims=("m", "n"))
        return out, [Block(self._grid("m"), tuple(body))]
