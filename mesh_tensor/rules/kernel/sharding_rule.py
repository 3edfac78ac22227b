"""The sharding rule of a kernel, derived from its TIR: `A[m, k], B[k, n] -> C[m, n]; m, n parallel; k sum`; and which
parameters come in with content that counts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from tvm import tirx

from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.window import Reaches
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import loads

from .coordinates import Coordinates, find_coordinates
from .factor_derivation import Dim
from .factors import Factor
from .granularity import Refined
from .live_ranges import LiveRanges, Taints, find_taints
from .lookups import candidates, find_windows, is_at_constants, lookups
from .normalize import ANALYSES, normalize
from .packed_rows import packed_rows
from .padding import is_inside
from .reader import read_kernel
from .reductions import judge
from .statements import Access, Kernel, Statement
from .verdicts import Reduction
from .whole_numbers import without_overflow

_PARALLEL_NAMES = {1: ("m",), 2: ("m", "n"), 3: ("b", "m", "n"), 4: ("b", "h", "m", "n")}
_REDUCED_NAMES = ("k", "l", "r", "s")
_MORE_NAMES = "cdefgijopqtuvwxyz"


@dataclass(frozen=True, eq=False)
class Analysis:
    """Everything the later stages ask about one kernel (a function with one grid).

    `windows`: the dims that no factor walks, but of which a factor's positions read bounded windows, or, without a
    factor, all devices the same one. `lookups`: those that are indexed by data, each a factor that nothing walks."""

    kernel: Kernel
    coordinates: Coordinates
    reductions: Mapping[Factor, Reduction]
    taints: Taints
    windows: Mapping[Dim, tuple[Factor | None, Reaches]] = field(default_factory=dict)
    lookups: Mapping[Dim, Factor] = field(default_factory=dict)

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self.coordinates.factors

    def factor_of(self, param: str, dim: int) -> Factor | None:
        """The factor that indexes a parameter's dim; None if the dim is needed whole wherever it is used."""
        return next((f for f in self.factors if (param, dim) in f.dims), None)

    def reason_whole(self, param: str, dim: int) -> str | None:
        """Why a parameter's dim can't be split, None if it can."""
        factor = self.factor_of(param, dim)
        return self.coordinates.detached.get((param, dim), "nothing walks it") if factor is None else factor.blocked

    def over_tiles(self) -> Analysis:
        """The same of a kernel that is over tiles already: it means what it says of these, and can't be rewritten."""
        kept = {f: f for f in self.factors if f not in self.lookups.values()}
        reductions = {f: self.reductions[f] for f in kept}
        return replace(
            self, coordinates=self.coordinates.with_factors(kept), reductions=reductions, windows={}, lookups={}
        )

    def read_from(self, param: str, dim: int) -> Factor | None:
        """The factor from whose positions windows of a dim are read; None if there is none."""
        return self.windows[(param, dim)][0] if (param, dim) in self.windows else None

    def written(self, param: str) -> bool:
        buffer = self.kernel.params[param]
        return any(statement.writes(buffer) for statement in self.kernel.statements)

    def read(self, param: str) -> bool:
        """Whether the kernel needs the parameter's earlier content: it reads it before writing it, or writes only
        parts."""
        return param in self._read

    @cached_property
    def _read(self) -> frozenset[str]:
        return frozenset(p for p in self.kernel.params if needs_content(self.kernel, self.coordinates, p))

    def only_kept(self, param: str) -> bool:
        """Whether a parameter that is written is `read` only because some of it may stay as it was."""
        return self.read(param) and self.written(param) and only_keeps_content(self.kernel, param)


@dataclass(frozen=True)
class ShardingRule:
    """Which factors index which dims of which buffers, and how each factor combines.

    `inputs`, `outputs`: per buffer, its factors' names (None: the dim is needed whole). `factors`: per factor
    `parallel`, the operations that reduce it (`sum`, `max, sum`; `scan` for what is carried in order, `turns` where a
    device waits for the one before it), or `whole: reason`. `sizes`: the factors' extents."""

    inputs: dict[str, tuple[str | None, ...]]
    outputs: dict[str, tuple[str | None, ...]]
    factors: dict[str, str]
    sizes: dict[str, tirx.PrimExpr] = field(compare=False)

    def __str__(self) -> str:
        kinds: dict[str, list[str]] = {}
        for name, kind in self.factors.items():
            kinds.setdefault("replicated" if kind.startswith("whole") else kind, []).append(name)
        order = sorted(kinds, key=lambda kind: (kind != "parallel", kind == "replicated"))
        facts = "; ".join(f"{', '.join(kinds[kind])} {kind}" for kind in order)
        signature = f"{_signature(self.inputs)} -> {_signature(self.outputs)}"
        return f"{signature}; {facts}" if facts else signature


def _signature(buffers: dict[str, tuple[str | None, ...]]) -> str:
    return ", ".join(f"{name}[{', '.join(d or '*' for d in dims)}]" for name, dims in buffers.items())


@made_once(ANALYSES)
def analyse(func: tirx.PrimFunc, in_windows: tuple[Dim, ...] = ()) -> Analysis:
    """Analyse a normalized function with one grid. `in_windows`: dims that nothing is to walk, so that windows of them
    may be read."""
    kernel, ranges, derived = _walked(func, in_windows)
    taints = find_taints(kernel, ranges)
    packed = packed_rows(kernel, derived)
    rows = {dim for factor in packed for dim in factor.dims}
    indexed = [factor for factor in candidates(kernel, derived) if rows.isdisjoint(factor.dims)]
    names = factor_names(kernel, [*derived.factors, *packed, *indexed])
    factors, reductions = {}, {}
    for old in derived.factors:
        verdict = judge(kernel, derived, old, taints)
        new = factors[old] = replace(
            old,
            name=names[old],
            blocked=verdict.blocked,
            aligned=verdict.aligned,
            lanes=verdict.lanes,
            first=verdict.first,
        )
        reductions[new] = verdict.reduction
    windows, by_data = find_windows(kernel, derived.with_factors(factors)), dict[Dim, Factor]()
    for old in packed:
        new = factors[old] = replace(old, name=names[old])
        reductions[new] = Reduction()
        by_data |= dict.fromkeys(new.dims, new)
    for found in lookups(kernel, derived, indexed):
        new = factors[found.factor] = replace(found.factor, name=names[found.factor])
        reductions[new] = found.reduction
        by_data |= dict.fromkeys(found.dims, new)
    return Analysis(kernel, derived.with_factors(factors), reductions, taints, windows, by_data)


@made_once(ANALYSES)
def _walked(func: tirx.PrimFunc, in_windows: tuple[Dim, ...]) -> tuple[Kernel, LiveRanges, Coordinates]:
    kernel = read_kernel(func)
    ranges = LiveRanges(kernel)
    return kernel, ranges, find_coordinates(kernel, ranges, in_windows)


@made_once(ANALYSES)
def may_read_windows(func: tirx.PrimFunc, dims: tuple[Dim, ...]) -> bool:
    """Whether `analyse(func, dims)` may find that windows of all these dims are read: most often they are not, which
    shows before any factor is judged."""
    shapes = {buffer.name: buffer.shape for buffer in func.buffer_map.values()}
    if not all(isinstance(shapes[param][dim], tirx.IntImm) for param, dim in dims):
        return False
    kernel, _, coordinates = _walked(func, dims)
    return find_windows(kernel, coordinates).keys() >= set(dims)


def sharding_rule(prim_func: tirx.PrimFunc) -> ShardingRule:
    """The sharding rule of a TileLang kernel in global view.

    Args:
        prim_func: a PrimFunc with one `T.Kernel`, annotated or not.

    Returns:
        The rule; `str(rule)` reads like `A[m, k], B[k, n] -> C[m, n]; m, n parallel; k sum`. A dim printed as `*` and
        a factor listed as `replicated` can't be split; `rule.factors` has the reason.

    Raises:
        MeshTensorError: the function is not one TileLang kernel.
    """
    func = check_kernel(prim_func)
    with without_overflow(func):
        return sharding_rule_of(analyse(normalize(func)))


def sharding_rule_of(analysis: Analysis, made: Refined | None = None) -> ShardingRule:
    """What an analysis found, as the rule that users see; a dim that was taken apart is the product of its factors,
    `(h g)`."""
    inputs, outputs = {}, {}
    for name, buffer in analysis.kernel.params.items():
        factors = (analysis.factor_of(name, d) for d in range(len(buffer.shape)))
        dims = tuple(None if f is None else f.name for f in factors)
        if made is not None and made.groups:
            dims = tuple(_product(parts) for parts in made.by_dim(name, dims))
        if (analysis.read(name) and not analysis.only_kept(name)) or not analysis.written(name):
            inputs[name] = dims
        if analysis.written(name):
            outputs[name] = dims
    named = sorted(analysis.factors, key=lambda f: f.name)
    kinds = {f.name: _kind(f, analysis.reductions[f]) for f in analysis.factors}
    return ShardingRule(inputs, outputs, kinds, {f.name: f.size for f in named})


def _product(parts: list[str | None]) -> str | None:
    return parts[0] if len(parts) == 1 else f"({' '.join(part or '*' for part in parts)})"


def _kind(factor: Factor, reduction: Reduction) -> str:
    if factor.blocked is not None:
        return f"whole: {factor.blocked}"
    orders = dict.fromkeys("turns" if scan.in_turns else "scan" for scan in reduction.scans)
    return ", ".join([*reduction.ops, *orders]) or "parallel"


def factor_names(kernel: Kernel, factors: Sequence[Factor]) -> dict[Factor, str]:
    """m, n for what the outputs are indexed by, k for what is reduced: the names that people expect."""
    of_dim = {dim: factor for factor in factors for dim in factor.dims}
    outputs = [name for name, buffer in kernel.params.items() if any(s.writes(buffer) for s in kernel.statements)]
    dims = [(n, d) for n in sorted(outputs, key=lambda n: -_ndim(kernel, n)) for d in range(_ndim(kernel, n))]
    at_constants = [f for f in factors if any(is_at_constants(kernel, kernel.params[p], d) for p, d in f.dims)]
    written = dict.fromkeys(of_dim[dim] for dim in dims if dim in of_dim)
    parallel = [f for f in written if f not in at_constants]
    others = [*(f for f in factors if f not in parallel and f not in at_constants), *at_constants]
    more = iter([*_MORE_NAMES, *(f"f{i}" for i in range(len(factors)))])
    names = [*(_PARALLEL_NAMES.get(len(parallel)) or [next(more) for _ in parallel])]
    names += [*_REDUCED_NAMES, *more][: len(others)]
    return dict(zip([*parallel, *others], names, strict=True))


def _ndim(kernel: Kernel, param: str) -> int:
    return len(kernel.params[param].shape)


def needs_content(kernel: Kernel, coordinates: Coordinates, param: str) -> bool:
    """Whether a parameter's earlier content is read, combined into, or partly kept.

    It is not if some store covers all of it, and whatever else touches it comes later and, in every program of the
    grid, touches only what that program stored."""
    buffer = kernel.params[param]
    uses = _uses(kernel, buffer)
    stores = [s for s in kernel.statements if s.write is not None and s.write.buffer.same_as(buffer) and s.op is None]
    if any(s.unknown and s.writes(buffer) for s in kernel.statements):
        return True
    if not stores:
        return bool(uses)
    covering = next((s for s in stores if _covers(s, kernel, coordinates)), None)
    if covering is None:
        return True
    return any(s.top <= covering.top or not _same_program(a, covering.target, kernel, coordinates) for s, a in uses)


def only_keeps_content(kernel: Kernel, param: str) -> bool:
    """Whether earlier content, if it matters, does so only because it may not all be overwritten: nothing looks at
    it."""
    opaque = any(s.unknown and s.writes(kernel.params[param]) for s in kernel.statements)
    return not opaque and not _uses(kernel, kernel.params[param])


def _uses(kernel: Kernel, buffer: tirx.Buffer) -> list[tuple[Statement, Access]]:
    """Every access to a parameter but plain stores."""
    return [
        (s, a)
        for s in kernel.statements
        for a in s.accesses
        if a.buffer.same_as(buffer) and not (a is s.write and s.op is None and not s.unknown)
    ]


def _covers(statement: Statement, kernel: Kernel, coordinates: Coordinates) -> bool:
    """Whether the store, over all its loops, reaches every element of its buffer whatever the data are."""
    write = statement.target
    if statement.may_be_skipped:
        return False
    if any(kernel.analyzer.can_prove_equal(size, 0) for size in write.buffer.shape):
        return True
    forms = [coordinates.of_access(write, dim) for dim in range(len(write.indices))]
    sizes = [kernel.analyzer.can_prove_equal(size, 1) for size in write.buffer.shape]
    if any(form is None and not one for form, one in zip(forms, sizes, strict=True)):
        return False
    inside = [(entry[1], entry[0].size) for entry in forms if entry is not None]
    if not all(_runs(loop.extent, kernel) for loop in statement.loops):
        return False
    return all(is_inside(condition, inside, kernel) for condition in statement.conditions)


def _runs(extent: tirx.PrimExpr, kernel: Kernel) -> bool:
    """Whether a loop certainly runs: neither data nor other loops nor scalars decide, only the sizes of dims."""
    if isinstance(extent, tirx.IntImm):
        return int(extent) > 0
    sizes = vars_of([size for buffer in kernel.params.values() for size in buffer.shape], {})
    return not loads(extent) and vars_of([extent], kernel.binds) <= sizes


def _same_program(access: Access, stored: Access, kernel: Kernel, coordinates: Coordinates) -> bool:
    """Whether a program of the grid touches, through `access`, only elements that it stored."""
    grid = {loop.var for loop in kernel.grid}
    for dim, size in enumerate(access.buffer.shape):
        if kernel.analyzer.can_prove_equal(size, 1):
            continue
        a, b = coordinates.of_access(access, dim), coordinates.of_access(stored, dim)
        if a is None or b is None or _grid_part(a[1], grid) != _grid_part(b[1], grid):
            return False
    return True


def _grid_part(form: Linear, grid: set[tirx.Var]) -> dict[tirx.Var, int]:
    return {var: c for var, c in form.terms.items() if var in grid}
