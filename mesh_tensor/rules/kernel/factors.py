"""What a factor is: one iteration dimension of a kernel, and why it may not be split; and whether a nest of loops
walks a dim from end to end."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import tirx

from mesh_tensor.tir.linear import Linear
from mesh_tensor.tir.prover import Prover
from mesh_tensor.tir.tile_position import as_helper

from .statements import Loop, Statement


@dataclass(frozen=True, eq=False)
class Factor:
    """One iteration dimension. `dims` are the parameters' dims it indexes, `roles` its loop variables with their
    coefficients, `blocked` why it can't be split at all, `aligned` why tiles have to be whole blocks. `lanes` is the
    reason where a buffer keeps one value per position in a block, `first` why the first tile has to hold a whole
    block."""

    name: str
    size: tirx.PrimExpr
    dims: tuple[tuple[str, int], ...]
    roles: Mapping[tirx.Var, int]
    blocked: str | None = None
    aligned: str | None = None
    lanes: str | None = None
    first: str | None = None

    @property
    def block(self) -> int:
        """What one iteration of the outermost loops handles: the least common multiple, where they differ."""
        return math.lcm(*self.roles.values())


class Blocked(Exception):
    """The factor (of a split, if it is known which) can't be split; the message is the reason."""

    def __init__(self, reason: str, factor: Factor | None = None):
        super().__init__(reason)
        self.factor = factor


def tile_extent(size: Any, parts: list[int]) -> Any:
    """ceildiv of `size` by each of `parts`: the part of a dim that one device holds."""
    for n in parts:
        if n != 1:
            size = -(-int(size) // n) if isinstance(size, (int, tirx.IntImm)) else tirx.floordiv(size + (n - 1), n)
    return size


def why_not_covered(
    form: Linear | None, size: tirx.PrimExpr, statement: Statement, analyzer: Prover, *, or_beyond: bool = False
) -> str | None:
    """Why `form`, over the statement's loops, is not each of 0 .. size-1 exactly once; None if it is.

    The last block may reach past the end, and with `or_beyond` loops may go on behind it."""
    if form is None:
        return "it is no sum of loop variables and constants"
    if not form.terms:
        return "it is the same in every iteration"
    loops = {loop.var: loop for loop in statement.loops}
    if any(var not in loops for var in form.terms):
        return "it uses a variable that is no loop's"
    if any(coefficient < 0 for coefficient in form.terms.values()):
        return "it is reversed"
    if form.const != 0:
        return "it is shifted"
    below = 1
    *inner, outer = form.ordered[::-1]
    for var, coefficient in (*inner, outer):
        loop = loops[var]
        if not analyzer.can_prove_equal(loop.min, 0):
            return f"loop {var} does not start at 0"
        if coefficient != below:
            return f"loop {var} steps by {coefficient} where blocks are {below} long"
        if var is not outer[0]:
            if not isinstance(loop.extent, tirx.IntImm):
                return f"loop {var} has no constant extent"
            below = coefficient * int(loop.extent)
    if or_beyond and goes_beyond(loops[outer[0]].extent, outer[1], size):
        return None
    return _outer_covers(*outer, loops[outer[0]], size, analyzer)


def goes_beyond(extent: tirx.PrimExpr, coefficient: int, size: tirx.PrimExpr) -> bool:
    """Whether a loop over blocks is known to go on behind a dim's end."""
    are_known = isinstance(extent, tirx.IntImm) and isinstance(size, tirx.IntImm)
    return are_known and int(extent) * coefficient > int(size)


def _outer_covers(var: tirx.Var, coefficient: int, loop: Loop, size: tirx.PrimExpr, analyzer: Prover) -> str | None:
    extent = with_whole_tiles(loop.extent)
    pairs = (extent * coefficient, size), (extent, tirx.floordiv(size + (coefficient - 1), coefficient))
    if any(tirx.analysis.expr_deep_equal(a, b) for a, b in pairs):  # next to nothing, where proofs take long
        return None
    if any(analyzer.can_prove_equal(a, b) for a, b in pairs):
        return None
    if coefficient == 1 and loop.kind == "tile" and analyzer.can_prove(extent >= size):
        return None
    return f"loop {var} of {extent} blocks of {coefficient} does not walk a dim of {size}"


def with_whole_tiles(extent: tirx.PrimExpr) -> tirx.PrimExpr:
    """How far a loop goes on a device whose tiles are full: it need not go further than what is valid."""

    def widen(node: tirx.Call) -> tirx.PrimExpr | None:
        helper = as_helper(node)
        return None if helper is None or not helper.is_extent else helper.tile

    if isinstance(extent, tirx.IntImm):
        return extent
    return tirx.stmt_functor.ir_transform(tirx.Evaluate(extent), None, widen, ["tirx.Call"]).value
