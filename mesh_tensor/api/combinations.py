"""What kernels state by `mt.combine` is tried before anything goes by it: parts of their own loops are run on random
data by the interpreter, and have to combine to what the loop makes of them at once."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from tvm import tirx

from mesh_tensor.annotations.annotate import specialize, symbols
from mesh_tensor.annotations.combination import Combination, stated_combinations, with_tried
from mesh_tensor.base.dtypes import is_float, numpy_dtype
from mesh_tensor.base.errors import MeshTensorError, listing, refuse
from mesh_tensor.lowering.cut import make_param, part_of
from mesh_tensor.lowering.pipeline import read
from mesh_tensor.lowering.ways import rule
from mesh_tensor.rules.kernel.live_ranges import LiveRange
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import body_statements
from mesh_tensor.rules.kernel.states import Stated
from mesh_tensor.tir.effects import pointers, written
from mesh_tensor.tir.grids import grids_of
from mesh_tensor.tir.nodes import function_name
from mesh_tensor.tir.rewrite import loop_like, over_elements

_SIZE = 1536  # of dims whose size isn't known yet
_MOST = 1 << 20  # random numbers; larger tensors repeat them
_TRIALS = ((0, False), (1, True))  # random seeds, each with the grid's first or last program
_ROUNDING = {"float64": 1e-9, "float32": 1e-3}
_COARSE = 3e-2
_FIX = (
    "with_(before, after) takes the states of two parts of the loop, in order, each from where the kernel starts, and "
    "gives that of both; the start has to be neutral: add what the kernel starts with after the loop instead"
)

_State = list[np.ndarray]


def tried(func: tirx.PrimFunc, view: str) -> tirx.PrimFunc:
    """The kernel; what it states about states that loops carry may be gone by, where that lets dims be split. Refused
    where what it states does not hold."""
    stated_there = stated_combinations(func)
    if not stated_there:
        return func
    unknown, held = symbols(func), list[Combination]()
    concrete = with_tried(func, stated_there)
    concrete = specialize(concrete, dict.fromkeys(unknown, _SIZE)) if unknown else concrete
    for grid in grids_of(concrete).funcs:
        analysis = rule(read(grid, view)).analysis
        for top, stated in _used(analysis):
            held.append(stated.combination)
            for problem in _Trial(analysis, top, stated).problems():
                refuse(
                    f"the state {listing(stated.combination.names)} is not combined by what mt.combine states",
                    where=f"kernel {function_name(func)!r}",
                    why=problem,
                    fix=_FIX,
                )
    return with_tried(func, held)


def _used(analysis: Analysis) -> Iterator[tuple[int, Stated]]:
    """The statements by which some factor may be split, and the top-level statements of their loops."""
    for reduction in analysis.reductions.values():
        for scan in (scan for scan in reduction.scans if not scan.is_resumed):
            groups = dict.fromkeys(part.stated for part in scan.carried if part.stated is not None)
            yield from ((scan.top, stated) for stated in groups)


@dataclass(frozen=True, eq=False)
class _Trial:
    """One state of the loop at `top`."""

    analysis: Analysis
    top: int
    stated: Stated

    def problems(self) -> Iterator[str]:
        """The laws that do not hold, in words."""
        for seed, last in _TRIALS:
            inputs = self._inputs(np.random.default_rng(seed), ties=bool(seed))
            for first in self._starts():
                yield from self._laws(first, inputs, last=last)

    def _laws(self, first: int, inputs: Sequence[np.ndarray], *, last: bool) -> Iterator[str]:
        def state(start: int, end: int) -> _State:
            return self._state(first + start, first + end, inputs, last=last)

        def both(before: _State, after: _State) -> _State:
            return _combined(self.stated.combination, before, after)

        start, a, b, c = state(0, 0), state(0, 1), state(1, 2), state(2, 3)
        laws = (
            ("a part of the loop after the start is not that part's state", both(start, a), a),
            ("the start after a part of the loop is not that part's state", both(b, start), b),
            ("two blocks' states don't combine to that of both", both(a, b), state(0, 2)),
            ("three blocks' states don't combine to that of all", both(both(a, b), c), state(0, 3)),
            (
                "three states combine to another one if the last two are combined first",
                both(a, both(b, c)),
                state(0, 3),
            ),
        )
        for law, got, expected in laws:
            wrong = [
                f"{name} is off by {error:.3g}"
                for name, x, y in zip(self.stated.combination.names, got, expected, strict=True)
                if (error := _error(x, y)) > _tolerance(x.dtype)
            ]
            if wrong:
                blocks = f"blocks {first} to {first + 2}"
                yield f"{law}: {', '.join(wrong)} (relative to the largest, on random data, {blocks})"

    def _starts(self) -> list[int]:
        """The first blocks of the parts that are tried: at both ends of the loop, and in its middle."""
        extent = body_statements(self.analysis.kernel.root.body)[self.top].extent
        blocks = int(extent) if isinstance(extent, tirx.IntImm) else 3
        return sorted({0, max(blocks // 2 - 1, 0), max(blocks - 3, 0)})

    @cached_property
    def _funcs(self) -> dict[bool, tirx.PrimFunc]:
        return {last: part_of_loop(self.analysis, self.top, self.stated.held, last=last) for last in (False, True)}

    def _inputs(self, random: np.random.Generator, *, ties: bool) -> list[np.ndarray]:
        return [_random(buffer, random, ties=ties) for buffer in self.analysis.kernel.params.values()]

    def _state(self, start: int, end: int, inputs: Sequence[np.ndarray], *, last: bool) -> _State:
        from mesh_tensor.targets.interpreter import interpret

        func = self._funcs[last]
        names = dict(zip(self.analysis.kernel.params, inputs, strict=True))
        made = [np.zeros([int(s) for s in r.buffer.shape], numpy_dtype(r.buffer.dtype)) for r in self.stated.held]
        buffers = [func.buffer_map[p] for p in func.params if p in func.buffer_map]
        changed, pointed = {*written(func.body)}, pointers(func.body)
        arrays = [
            names[b.name].copy() if b in changed or b.data in pointed else names[b.name]
            for b in buffers[: len(buffers) - len(made)]
        ]
        try:
            interpret(func, [*arrays, *made, start, end])
        except MeshTensorError:  # data that are indices may lie anywhere
            interpret(func, [*(a if a.dtype.kind == "f" else np.zeros_like(a) for a in arrays), *made, start, end])
        return made


def _combined(combination: Combination, before: _State, after: _State) -> _State:
    """What is stated to be the state of both parts."""
    from mesh_tensor.targets.interpreter import interpret

    made = [array.copy() for array in before]
    interpret(combination.func, [*made, *(array.copy() for array in after)])
    return made


def _random(buffer: tirx.Buffer, random: np.random.Generator, *, ties: bool) -> np.ndarray:
    shape, dtype = [int(size) for size in buffer.shape], numpy_dtype(buffer.dtype)
    count = min(math.prod(shape), _MOST)
    if is_float(str(buffer.dtype)) and not ties:
        return np.resize(random.standard_normal(count, np.float32).astype(dtype), shape)
    low, high = (-3, 4) if is_float(str(buffer.dtype)) else (0, 2)
    return np.resize(random.integers(low, high, count).astype(dtype), shape)


def _error(got: np.ndarray, expected: np.ndarray) -> float:
    """How far two states are apart, relative to the largest number in them."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        apart = np.where((a == b) | (np.isnan(a) & np.isnan(b)), 0.0, np.abs(a - b))
    largest = np.max(np.abs(b[np.isfinite(b)]), initial=1e-3)
    return float(np.max(np.where(np.isnan(apart), np.inf, apart), initial=0.0) / largest)


def _tolerance(dtype: np.dtype) -> float:
    return _ROUNDING.get(dtype.name, _COARSE) if dtype.kind not in "iub" else 0.0


def part_of_loop(analysis: Analysis, top: int, held: Sequence[LiveRange], *, last: bool) -> tirx.PrimFunc:
    """The first or `last` program of a grid's, with the blocks from `start` to `end` of the loop that is the top-level
    statement `top`. It takes the kernel's parameters that it uses, tensors for what is `held` in the end, `start`
    and `end`."""
    stmts = body_statements(analysis.kernel.root.body)
    loop = stmts[top]
    assert isinstance(loop, tirx.For)
    start, end = tirx.Var("start", "int32"), tirx.Var("end", "int32")
    extent = tirx.max(tirx.min(end, loop.extent) - start, 0)
    part = loop_like(loop, extent, loop.body, start=loop.min + start)
    made = [make_param(f"{r.buffer.name}_made", list(r.buffer.shape), r.buffer.dtype) for r in held]
    saves = [_saved(r.buffer, buffer) for r, (_, buffer) in zip(held, made, strict=True)]
    func = part_of(analysis, [*stmts[:top], part, *saves], [])
    params = [*func.params, *(handle for handle, _ in made), start, end]
    grid = {x.var: x.extent - 1 if last else tirx.IntImm(x.var.dtype, 0) for x in analysis.kernel.grid}
    body = tirx.stmt_functor.substitute(_of_one_program(func.body, set(grid)), grid)
    return tirx.PrimFunc(params, body, func.ret_type, {**func.buffer_map, **dict(made)})


def _saved(on_chip: tirx.Buffer, tensor: tirx.Buffer) -> tirx.Stmt:
    return over_elements(on_chip, lambda at: tirx.BufferStore(tensor, tirx.BufferLoad(on_chip, at), at))


def _of_one_program(body: tirx.Stmt, grid: set[tirx.Var]) -> tirx.Stmt:
    """The body without its grid's loops."""

    def inside(node: tirx.For) -> tirx.Stmt | None:
        return node.body if node.loop_var in grid else None

    return tirx.stmt_functor.ir_transform(body, None, inside, ["tirx.For"])
