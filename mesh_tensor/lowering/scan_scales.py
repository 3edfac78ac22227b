"""What a loop multiplies a state with that it carries in order, and the dims in which that differs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tvm import tirx

from mesh_tensor.rules.kernel.factors import Blocked
from mesh_tensor.rules.kernel.scans import Carried
from mesh_tensor.rules.kernel.sharding_rule import Analysis
from mesh_tensor.rules.kernel.statements import Statement
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import parallel_nest

from .cut import Workspace


@dataclass(frozen=True, eq=False)
class Scale:
    """What a state is multiplied with, which differs in `dims` of it only."""

    part: Carried
    dims: tuple[int, ...]
    buffer: tirx.Buffer

    def load(self, at: Sequence[tirx.PrimExpr]) -> tirx.PrimExpr:
        """That of the state's element at the indices."""
        return tirx.BufferLoad(self.buffer, [at[d] for d in self.dims] or [tirx.IntImm("int32", 0)])

    def multiplied(self, statement: Statement, by: tirx.PrimExpr) -> tirx.Stmt:
        """What a statement multiplies the state with is multiplied up."""
        at = [tirx.Var(f"i{d}", "int32") for d in self.dims]
        indices = statement.target.indices
        if not all(isinstance(indices[d], tirx.Var) for d in self.dims):
            raise Blocked(f"{self.part.held.buffer.name} is scaled at places that are computed")
        renamed = {indices[d]: var for d, var in zip(self.dims, at, strict=True)}
        place = list(at) or [tirx.IntImm("int32", 0)]
        value = tirx.BufferLoad(self.buffer, place) * tirx.stmt_functor.substitute(by, renamed)
        return parallel_nest(
            at, [self.buffer.shape[n] for n in range(len(at))], tirx.BufferStore(self.buffer, value, place)
        )

    def of_workspace(self, made: Workspace) -> Workspace:
        """A workspace for it, like one for the state."""
        more = len(made.buffer.shape) - len(self.part.held.buffer.shape)
        kept = [*range(more), *(more + d for d in self.dims)]
        return made.of_dims(kept, self.buffer)


def scale_of(analysis: Analysis, part: Carried) -> Scale:
    """The dims of a state in which what it is scaled with differs."""
    held, kept = part.held.buffer, set[int]()
    for statement, scale in part.scaled.items():
        used = _depends_on(analysis, scale, statement)
        for dim, form in enumerate(statement.target.forms):
            place = analysis.coordinates.of_access(statement.target, dim)
            walked = {v for f in (form, place and place[1]) if f is not None for v in f.terms}
            if walked & used:
                kept.add(dim)
    dims = tuple(sorted(kept))
    shape = [held.shape[d] for d in dims] or [tirx.IntImm("int32", 1)]
    return Scale(part, dims, tirx.decl_buffer(shape, held.dtype, f"{held.name}_scale", scope=held.scope()))


def _depends_on(analysis: Analysis, scale: tirx.PrimExpr, statement: Statement) -> set[tirx.Var]:
    """The loops on which what a statement scales with may depend, and how often it does, by way of what it loads,
    too."""
    often = [*statement.conditions, *statement.bounds]
    used = vars_of([scale, *often], analysis.kernel.binds)
    bound = {var for expr in (scale, *often) for var in tirx.analysis.undefined_vars(expr)} & set(analysis.kernel.binds)
    if bound or any(nodes(tirx.Evaluate(expr), tirx.BufferLoad) for expr in often):
        used |= {loop.var for loop in analysis.kernel.grid}
    loaded = {load.buffer for load in nodes(tirx.Evaluate(scale), tirx.BufferLoad)}
    for access in statement.reads:
        if access.buffer in loaded:
            used |= analysis.taints[analysis.coordinates.ranges.of(access)]
    return used
