"""Placements from rules: which factor every mesh axis splits, and where each buffer then has to lie.

Where annotations agree there is nothing to decide. Where they don't: if all inputs that use the axis ask for one
reduced factor, it is split and the outputs are reduced (or reduce-scattered) into their layout; else the outputs
decide (owner computes); among what remains, the choice that moves the fewest bytes wins, and the first one named
breaks ties.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tvm import tirx

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.reductions import reduction
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.sharding_rule import Analysis


@dataclass(eq=False)
class Assignment:
    """What every axis splits (None: nothing), and why. `needed` and `produced` are the layouts in which the kernel
    takes its inputs and leaves its outputs; `whole` are the dims that could not be split as asked, with the reason."""

    axes: dict[str, Factor | None]
    reasons: dict[str, str]
    factors: list[Factor]
    needed: dict[str, Sharding] = field(default_factory=dict)
    produced: dict[str, Sharding] = field(default_factory=dict)
    whole: dict[tuple[str, int], str] = field(default_factory=dict)

    def axes_of(self, factor: Factor) -> tuple[str, ...]:
        return tuple(a for a, f in self.axes.items() if f is factor)


class Propagation:
    """Decides one kernel's assignment.

    `over_tiles`: the kernel is over tiles already (its blocks are whatever its author wrote).
    `asked`: the annotated layouts (others are free). `fixed`: axes that an earlier stage already decided (Factor or
    None). `banned`: factors that a later stage found it can't split, with the reason."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        asked: Mapping[str, Sharding],
        *,
        fixed: Mapping[str, Factor | None] | None = None,
        banned: Mapping[tuple[str, int], str] | None = None,
        over_tiles: bool = False,
    ):
        self.analysis, self.mesh, self.asked = analysis, mesh, asked
        self.fixed, self.banned, self.over_tiles = dict(fixed or {}), dict(banned or {}), over_tiles
        params = analysis.kernel.params
        self.outputs = [p for p in params if analysis.written(p)]
        self.inputs = [p for p in params if p not in self.outputs or analysis.read(p)]

    def decide(self) -> Assignment:
        assignment = Assignment({}, {}, self.analysis.factors)
        for axis in self.mesh.axis_names:
            assignment.axes[axis], assignment.reasons[axis] = self._decide_axis(axis)
        if not self.over_tiles:
            self._respect_blocks(assignment)
        statements = self.analysis.kernel.statements
        for param, buffer in self.analysis.kernel.params.items():
            if param in self.outputs:
                assignment.produced[param] = self._layout(assignment, param, buffer, produced=True)
            if param in self.inputs:
                assignment.needed[param] = self._layout(assignment, param, buffer, produced=False)
                if self.over_tiles and not any(a.buffer.same_as(buffer) for s in statements for a in s.accesses):
                    assignment.needed[param] = self.asked[param]  # nothing uses it: its tiles stay as they are
        assignment.whole = self._whole_dims(assignment)
        return assignment

    def why_whole(self, factor: Factor) -> str | None:
        """Why nothing may split the factor, None if something may."""
        banned = (self.banned[d] for d in factor.dims if d in self.banned)
        return factor.blocked or next(banned, None)

    # -- one axis --------------------------------------------------------------------------------------------------

    def _decide_axis(self, axis: str) -> tuple[Factor | None, str]:
        if axis in self.fixed:
            factor = self.fixed[axis]
            if factor is None or self.why_whole(factor) is None:
                return factor, "follows the kernel's first part"
        from_inputs = self._demands(axis, [p for p in self.inputs if p not in self.outputs])
        from_outputs = self._demands(axis, self.outputs)
        every = list(dict.fromkeys([*from_outputs, *from_inputs]))
        if len(every) < 2:
            chosen = every[0] if every else None
            if chosen is None and any(s.dim_of(axis) is not None for s in self.asked.values()):
                return None, "what it should split is needed whole"
            if chosen is None or from_outputs or self._is_reduction(chosen):
                return chosen, "as annotated" if every else "no annotation uses it"
            return self._cheapest(axis, [chosen, None]), "fewest bytes"
        if len(from_inputs) == 1 and self._is_reduction(from_inputs[0]):
            return from_inputs[0], "the inputs agree; outputs are reduced into their layout"
        if len(from_outputs) == 1:
            return from_outputs[0], "outputs decide"
        candidates: list[Factor | None] = [*from_outputs] if from_outputs else [*from_inputs, None]
        return self._cheapest(axis, candidates), "fewest bytes"

    def _demands(self, axis: str, params: list[str]) -> list[Factor]:
        found: list[Factor] = []
        for param in params:
            dim = self.asked[param].dim_of(axis) if param in self.asked else None
            factor = None if dim is None else self.analysis.factor_of(param, dim)
            if factor is not None and self.why_whole(factor) is None and factor not in found:
                found.append(factor)
        return found

    def _is_reduction(self, factor: Factor) -> bool:
        return bool(self.analysis.reductions[factor].partial)

    def _cheapest(self, axis: str, candidates: list[Factor | None]) -> Factor | None:
        return min(candidates, key=lambda factor: self._bytes(axis, factor))

    def _bytes(self, axis: str, factor: Factor | None) -> float:
        """Bytes per device that splitting `factor` over `axis` moves, relative to the annotated layouts."""
        n = self.mesh.size(axis)
        total = 0.0
        for param, buffer in self.analysis.kernel.params.items():
            if param not in self.asked:
                continue
            size = _bytes_of(buffer) * (n - 1) / n
            asked = self.asked[param].dim_of(axis)
            split = None if factor is None else next((d for p, d in factor.dims if p == param), None)
            if param in self.inputs and asked is not None and asked != split:
                total += size if split is None else size / n
            if param in self.outputs and asked != split:
                total += self._output_bytes(param, factor, asked, split, size, n)
        return total

    def _output_bytes(self, param: str, factor: Factor | None, asked, split, size: float, n: int) -> float:
        if factor is not None and self.partial_op(param, factor) is not None:
            return size if asked is not None else 2 * size
        if split is None:
            return 0.0
        return size if asked is None else size / n

    # -- layouts ---------------------------------------------------------------------------------------------------

    def partial_op(self, param: str, factor: Factor) -> str | None:
        """The operation that completes an output after `factor` was split, None if it is complete."""
        buffer = self.analysis.kernel.params[param]
        partial = self.analysis.reductions[factor].partial
        return next((op for r, op in partial.items() if r.is_param and r.buffer.same_as(buffer)), None)

    def _respect_blocks(self, assignment: Assignment) -> None:
        """Take axes away from factors whose tiles would not be whole blocks, where the kernel depends on its blocks."""
        for factor in self.analysis.factors:
            while factor.aligned is not None and (axes := assignment.axes_of(factor)):
                sizes = [n for a in axes if (n := self.mesh.size(a)) > 1]
                tiles = [tile_extent(factor.size, sizes[: level + 1]) for level in range(len(sizes))]
                can_prove_equal = self.analysis.kernel.analyzer.can_prove_equal
                tile = next((t for t in tiles if not can_prove_equal(tirx.floormod(t, factor.block), 0)), None)
                if tile is None:
                    break
                reason = f"{factor.aligned}, and tiles of {tile} are not whole blocks of {factor.block}"
                assignment.axes[axes[-1]], assignment.reasons[axes[-1]] = None, reason
                for dim in factor.dims:
                    assignment.whole[dim] = reason

    def _layout(self, assignment: Assignment, param: str, buffer: tirx.Buffer, *, produced: bool) -> Sharding:
        shards, partial = {}, {}
        for axis, factor in assignment.axes.items():
            if factor is None:
                continue
            dim = next((d for p, d in factor.dims if p == param), None)
            op = self.partial_op(param, factor)
            if dim is not None:
                shards[axis] = dim
            elif op is not None and (produced or not reduction(op).idempotent):
                partial[axis] = op
        return Sharding.make(self.mesh, len(buffer.shape), shards, partial=partial, name=param)

    def _whole_dims(self, assignment: Assignment) -> dict[tuple[str, int], str]:
        """The dims that an annotation splits and that the kernel needs (or computes) whole, with the reason."""
        whole = {}
        for param, asked in self.asked.items():
            for axis in self.mesh.axis_names:
                dim = asked.dim_of(axis)
                if dim is None:
                    continue
                factor = self.analysis.factor_of(param, dim)
                reason = self.analysis.reason_whole(param, dim) or (factor and self.why_whole(factor))
                reason = reason or assignment.whole.get((param, dim))
                if reason:
                    whole[(param, dim)] = str(reason)
        return whole


def tile_extent(size: Any, parts: list[int]) -> Any:
    """ceildiv of `size` by each of `parts`: the part of a dim that one device holds."""
    for n in parts:
        if n != 1:
            size = -(-int(size) // n) if isinstance(size, (int, tirx.IntImm)) else tirx.floordiv(size + (n - 1), n)
    return size


def _bytes_of(buffer: tirx.Buffer) -> int:
    elements = math.prod(int(s) if isinstance(s, tirx.IntImm) else 1024 for s in buffer.shape)
    return elements * itemsize(buffer.dtype)
