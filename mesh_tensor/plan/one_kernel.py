"""A kernel as a graph of one node: what every mesh axis splits in it, and where each buffer then has to lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from tvm import tirx

from mesh_tensor.annotations.module_annotations import Annotation
from mesh_tensor.base.blocks import whole_blocks
from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import made_once
from mesh_tensor.base.reductions import reduction
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.window import Reaches
from mesh_tensor.rules.kernel.cost import flops_of
from mesh_tensor.rules.kernel.factors import Factor
from mesh_tensor.rules.kernel.normalize import ANALYSES
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.operator.call import OpCall

from .atoms import find_atoms
from .decide import Decider, with_window
from .ir import Graph, Node, Value
from .kernel_blocks import KernelBlocks
from .prices import PRICES, Prices
from .propagate import propagate
from .tir_rule import Sizes, rule_of_analysis, typical_size

_flops = made_once(ANALYSES)(flops_of)  # the same in all layouts


@dataclass(eq=False)
class Assignment:
    """What every axis splits (None: nothing), and why. `needed` and `produced` are the layouts in which the kernel
    takes its inputs and leaves its outputs; `whole` are the dims that could not be split as asked, with the reason;
    `blocks` the factors of which tiles are whole blocks, that long, although axes don't divide the dim so."""

    axes: dict[str, Factor | None]
    reasons: dict[str, str]
    factors: tuple[Factor, ...]
    needed: dict[str, Sharding] = field(default_factory=dict)
    produced: dict[str, Sharding] = field(default_factory=dict)
    whole: dict[tuple[str, int], str] = field(default_factory=dict)
    blocks: dict[Factor, int] = field(default_factory=dict)

    def walked(self, factor: Factor, parts: Sequence[int], size: tirx.PrimExpr | None = None) -> tirx.PrimExpr | int:
        """How long the dim would be (else `size`, or the factor's) of which so many tiles are full."""
        size = factor.size if size is None else size
        return whole_blocks(int(size), math.prod(parts), self.blocks[factor]) if factor in self.blocks else size

    def axes_of(self, factor: Factor) -> tuple[str, ...]:
        """The axes that split a factor."""
        return tuple(a for a, f in self.axes.items() if f is factor)


class KernelDecision:
    """Decides one kernel's assignment.

    `asked`: the annotated layouts (others are free). `fixed`: axes that were decided before (Factor or None). `banned`:
    dims that a later stage found it can't split, with the reason. `in_place`: tensors stay in the layouts that they are
    annotated with wherever that can be. `sizes`: those of symbols, as far as they are known. `over_tiles`: the kernel
    is over tiles already (its blocks are whatever its author wrote). `prices`: what is cheap. `blocks`: of what fixed
    axes split, tiles are whole blocks that long, and no others. Parameters that nothing uses are left as they are asked
    to lie."""

    def __init__(
        self,
        analysis: Analysis,
        mesh: Mesh,
        asked: Mapping[str, Sharding],
        *,
        fixed: Mapping[str, Factor | None] | None = None,
        banned: Mapping[tuple[str, int], str] | None = None,
        in_place: bool = False,
        over_tiles: bool = False,
        sizes: Sizes = MappingProxyType({}),
        prices: Prices = PRICES,
        blocks: Mapping[str, int] = MappingProxyType({}),
    ):
        params = analysis.kernel.params
        self.unused = [p for p, buffer in params.items() if not analysis.kernel.uses(buffer)]
        self.left = {p: asked[p] if p in asked else Sharding.make(mesh, len(params[p].shape)) for p in self.unused}
        self.analysis, self.mesh, self.sizes, self.prices = analysis, mesh, sizes, prices
        self.asked = {p: layout for p, layout in asked.items() if p not in self.unused}
        self.banned, self.over_tiles, self.in_place = dict(banned or {}), over_tiles, in_place
        self.blocks = dict(blocks)
        self.fixed = {a: f for a, f in (fixed or {}).items() if f is None or self.why_whole(f) is None}
        self.outputs = [p for p in params if analysis.written(p)]
        self.inputs = [p for p in params if p not in self.unused and (p not in self.outputs or analysis.read(p))]
        self._tiles = KernelBlocks(analysis, mesh, self.asked, sizes, self.inputs, self.outputs, in_place)

    def decide(self) -> Assignment:
        """What the axes split: what is annotated where that is one thing, else what costs least."""
        demands = {axis: self._demands(axis) for axis in self.mesh}
        axes = {axis: self.fixed.get(axis, demands[axis][0] if demands[axis] else None) for axis in self.mesh}
        if not self.over_tiles and not self._is_plain(demands):
            axes = self._cheapest()
        reasons = {axis: self._reason(axis, axes[axis], demands[axis]) for axis in self.mesh}
        assignment = Assignment(axes, reasons, self.analysis.factors)
        if not self.over_tiles:
            self._respect_blocks(assignment, demands)
        for param, buffer in self.analysis.kernel.params.items():
            if param in self.outputs:
                assignment.produced[param] = self._layout(assignment, param, buffer, produced=True)
            if param in self.inputs:
                assignment.needed[param] = self._layout(assignment, param, buffer, produced=False)
        assignment.needed |= self.left
        assignment.whole = self._whole_dims(assignment)
        return assignment

    def why_whole(self, factor: Factor) -> str | None:
        """Why nothing may split the factor, None if something may."""
        banned = (self.banned[d] for d in factor.dims if d in self.banned)
        return factor.blocked or next(banned, None)

    # -- the decision ----------------------------------------------------------------------------------------------

    def _demands(self, axis: str) -> list[Factor]:
        """The factors that the axis is asked to split: by outputs, then by inputs."""
        found: list[Factor] = []
        for param in [*self.outputs, *(p for p in self.inputs if p not in self.outputs)]:
            dim = self.asked[param].dim_of(axis) if param in self.asked else None
            factor = None if dim is None else self._factor_at(param, dim)
            if factor is not None and self.why_whole(factor) is None and factor not in found:
                found.append(factor)
        return found

    def _factor_at(self, param: str, dim: int) -> Factor | None:
        """The factor that splits a dim, or from which windows of it are read."""
        return self.analysis.factor_of(param, dim) or self.analysis.read_from(param, dim)

    def _is_plain(self, demands: Mapping[str, list[Factor]]) -> bool:
        """Whether nothing is moved if the axes split what is asked, or there is nothing to decide."""
        free = [axis for axis in self.mesh if axis not in self.fixed and demands[axis] and self.mesh.size(axis) > 1]
        return all(
            len(demands[axis]) == 1
            and demands[axis][0] not in self.analysis.lookups.values()
            and self.analysis.reductions[demands[axis][0]].is_plain
            and all(self._stays(param, demands[axis][0], axis) for param in self.asked)
            for axis in free
        )

    def _stays(self, param: str, factor: Factor, axis: str) -> bool:
        """Whether a parameter lies as it is asked to where the axis splits the factor."""
        split = next((d for p, d in factor.dims if p == param), None)
        asked = self.asked[param].dim_of(axis)
        if split is None and asked is not None and self.analysis.read_from(param, asked) is factor:
            return True
        return asked == split if param not in self.outputs or split is not None else self._is_left(param, factor, asked)

    def _is_left(self, param: str, factor: Factor, asked: int | None) -> bool:
        return asked is None and self.partial_op(param, factor) is None

    def _cheapest(self) -> dict[str, Factor | None]:
        """What the axes split in the graph that has this kernel as its only node."""
        factors = [factor for factor in self.analysis.factors if self.why_whole(factor) is None]
        rule = rule_of_analysis(self.analysis, self.inputs, self.outputs, factors, self.sizes)
        rule = replace(rule, windows={**rule.windows, **self._fixed_windows()})
        fixed = [factor for factor in self.fixed.values() if factor is not None]  # of which blocks are looked at later
        in_blocks = {f.name for f in factors if f in fixed or self._tiles.whole(f, self._asking(f)) is not None}
        rule = replace(
            rule,
            blocks={name: block for name, block in rule.blocks.items() if name not in in_blocks},
            first={name: least for name, least in rule.first.items() if name not in in_blocks},
        )
        values = [self._value(param) for param in (*self.inputs, *self.outputs)]
        inputs, outputs = tuple(values[: len(self.inputs)]), tuple(values[len(self.inputs) :])
        operands = [value.variable() for value in inputs]
        call = OpCall("call_tir", operands, tuple(v.type for v in inputs), tuple(v.type for v in outputs))
        node = Node(call, inputs, outputs, (), "kernel", self.analysis.kernel.func, _flops(self.analysis.kernel))
        stated = {v: Annotation(self.asked[v.name]) for v in values if v.name in self.asked}
        graph = Graph("kernel", self.mesh, list(inputs), [node], outputs, stated)
        atoms = find_atoms(graph, {node: rule})
        by_name = {factor.name: factor for factor in factors}
        decider = Decider(
            self.mesh,
            atoms,
            propagate(graph, atoms),
            free=[value for value in values if value not in stated],
            fixed={axis: None if f is None else f.name for axis, f in self.fixed.items()},
            in_place=self.in_place,
            prices=self.prices,
        )
        split = decider.decide(node).split
        return {axis: by_name[split[axis]] if axis in split else None for axis in self.mesh}

    def _fixed_windows(self) -> dict[tuple[int, int], Reaches]:
        """What all devices read alike of operands' dims that lie on several."""
        return {
            (self.inputs.index(param), dim): reaches
            for (param, dim), (factor, reaches) in self.analysis.windows.items()
            if factor is None and param in self.inputs and self._is_spread(param, dim)
        }

    def _value(self, param: str) -> Value:
        buffer = self.analysis.kernel.params[param]
        shape = tuple(typical_size(size, self.sizes) for size in buffer.shape)
        return Value(param, TensorType(shape, buffer.dtype))

    def _reason(self, axis: str, factor: Factor | None, demands: list[Factor]) -> str:
        if axis in self.fixed and factor is not None and factor not in demands:
            return "decided before"
        if not demands:
            asked = any(s.dim_of(axis) is not None for s in self.asked.values())
            return "what it should split is needed whole" if asked else "no annotation uses it"
        if self.over_tiles:
            return "outputs decide"
        return "as annotated" if demands == [factor] else "it costs least"

    # -- layouts ---------------------------------------------------------------------------------------------------

    def partial_op(self, param: str, factor: Factor) -> str | None:
        """The operation that completes an output after `factor` was split, None if it is complete."""
        buffer = self.analysis.kernel.params[param]
        partial = self.analysis.reductions[factor].partial
        return next((op for r, op in partial.items() if r.is_param and r.buffer.same_as(buffer)), None)

    def _respect_blocks(self, assignment: Assignment, demands: Mapping[str, list[Factor]]) -> None:
        """Take axes away from factors whose tiles would not be whole blocks, where the kernel depends on its blocks;
        and say so of those that were asked for."""
        for factor in self.analysis.factors:
            known = [self.blocks[axis] for axis in assignment.axes_of(factor) if axis in self.blocks]
            if known and known[0] > 1:
                assignment.blocks[factor] = known[0]
            elif not known and (block := self._tiles.cheaper(factor, assignment.axes_of(factor))) is not None:
                assignment.blocks[factor] = block
                continue
            while (reason := self._tiles.cut(factor, assignment.axes_of(factor), *known[:1])) is not None:
                block = None if known else self._tiles.whole(factor, assignment.axes_of(factor))
                if block is not None:
                    assignment.blocks[factor] = block
                    break
                last = assignment.axes_of(factor)[-1]
                self._give_up(assignment, last, factor, reason)
                assignment.axes[last] = None
                assignment.blocks.pop(factor, None)
        for axis, asked in demands.items():
            for factor in asked if assignment.axes[axis] is None else []:
                if reason := self._tiles.cut(factor, (*assignment.axes_of(factor), axis)):
                    self._give_up(assignment, axis, factor, reason)

    def _give_up(self, assignment: Assignment, axis: str, factor: Factor, reason: str) -> None:
        assignment.reasons[axis] = reason
        assignment.whole.update(dict.fromkeys(factor.dims, reason))

    def _asking(self, factor: Factor) -> tuple[str, ...]:
        """The axes that are asked to split a factor."""
        return tuple([axis for axis in self.mesh if factor in self._demands(axis)])

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
        layout = Sharding.make(self.mesh, len(buffer.shape), shards, partial=partial, name=param)
        layout = layout.with_blocks([(d, b) for f, b in assignment.blocks.items() for p, d in f.dims if p == param])
        if self.over_tiles or produced:
            return layout
        split = {axis: factor.name for axis, factor in assignment.axes.items() if factor is not None}
        for (name, dim), (factor, reaches) in self.analysis.windows.items():
            if name != param or (name, dim) in self.banned:
                continue
            if factor is not None:
                parts = [self.mesh.size(axis) for axis in assignment.axes_of(factor)]
                layout = with_window(layout, dim, reaches, int(assignment.walked(factor, parts)), split, {})
            elif self._is_spread(param, dim) and not layout.dims[dim]:
                layout = with_window(layout, dim, reaches, 1, split, {})
        return layout

    def _is_spread(self, param: str, dim: int) -> bool:
        """Whether the dim is asked to lie on several devices."""
        return param in self.asked and self.asked[param].num_shards(dim) > 1

    def _whole_dims(self, assignment: Assignment) -> dict[tuple[str, int], str]:
        """The dims that an annotation splits and that the kernel needs (or computes) whole, with the reason."""
        whole = {}
        for param, asked in self.asked.items():
            for axis in self.mesh.axis_names:
                dim = asked.dim_of(axis)
                if dim is None:
                    continue
                factor = self.analysis.factor_of(param, dim)
                if param in assignment.needed and assignment.needed[param].window(dim) is not None:
                    continue
                reason = self.analysis.reason_whole(param, dim) or (factor and self.why_whole(factor))
                reason = reason or assignment.whole.get((param, dim))
                if reason:
                    whole[(param, dim)] = str(reason)
        return whole
