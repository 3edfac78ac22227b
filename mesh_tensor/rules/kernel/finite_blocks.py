"""What may be said of a running maximum: that it is no longer the lowest value after any block, and which sums need
not be scaled to that of the last one.

Where every row has something that counts in every block, nothing but infinite data is ever taken from the lowest value,
and it does not matter which blocks a loop skips.

A state whose sums are scaled to the maximum of one block, whichever was the last, says the same relative to any other
number: devices take theirs to the largest of their maxima. That is no other result if the number cancels in all that is
made of the state: the statements after the loop are followed (`iterations`) with `l = L * 2 ** (-rate * m)`, and what
leaves them has to hold no m.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from tvm import tirx

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.tir.effects import op_name
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import is_const, loads, nodes, same_expression
from mesh_tensor.tir.rewrite import number
from mesh_tensor.tir.tile_ops import Fill, Gemm, Reduce

from .coordinates import Coordinates
from .factors import Factor
from .iterations import Iteration
from .live_ranges import LiveRange
from .state_values import Atom, Level, Part, StateValue, independent, power
from .statements import Access, Kernel, Loop, Statement, without_binds


def reference(live_range: LiveRange) -> StateValue:
    """A number for every row, of which nothing is known."""
    return StateValue({Atom.make(("before", live_range), _dims(live_range)): 1.0})


def relative(of: LiveRange, place: tuple[Linear, ...], rate: float) -> StateValue:
    """Something times `2 ** (-rate * of)`."""
    atom = Atom.make(("before", of), place)
    return StateValue({}, {(power({atom: -rate}), None): Part(Level.FIXED)})


def _dims(live_range: LiveRange) -> list[Linear]:
    return [Linear({dim: 1}) for dim in range(len(live_range.buffer.shape))]


def references_cancel(
    kernel: Kernel, coordinates: Coordinates, factor: Factor, loop: Loop, left: Mapping[LiveRange, StateValue]
) -> bool:
    """Whether no statement makes anything of what the loop left that depends on its references."""
    after = _Aftermath(kernel, coordinates, factor, loop, left=left)
    top = next(s.top for s in kernel.statements if loop.var in s.vars)
    beside = [s for s in kernel.statements if s.top == top and loop.var not in s.vars]
    touched = {coordinates.ranges.of(a) for s in beside for a in s.accesses}
    return not after.shows and not touched & left.keys()


class _Aftermath(Iteration):
    """The statements after a loop. `shows`: whether one may leave what depends on a reference."""

    shows = False

    def _run(self, statement: Statement) -> None:
        target = None if statement.write is None else self.coordinates.ranges.of(statement.write)
        was_free = target is not None and (target not in self.env or self._is_free(target))
        super()._run(statement)
        if statement not in self.uses:
            if target is not None and not target.is_param and was_free:
                self.env[target] = independent(Level.FIXED)
            return
        self.shows |= target is None or not self._passes_on(statement, target)

    def _passes_on(self, statement: Statement, target: LiveRange) -> bool:
        """Whether the statement does nothing with what depends on references but to leave it in its target, where that
        is followed."""
        around = {r for index in statement.target.indices for r in self.loads_in(index)}
        if statement.unknown or statement.may_be_skipped or not self.runs_alike(statement):
            return False
        if around & self.uses[statement].keys():
            return False
        if target.buffer.name in self.kernel.own:
            return True  # what of this kernel is handed on, with its reference
        if target.is_param:
            made = self._operand(statement)
            return made is not None and made.part is not None
        # what one iteration leaves to the next is not followed
        own = [(s, {v for form in write.forms if form is not None for v in form.terms}) for s, write in target.writes]
        return not any(x.var in target.carried - indexed for s, indexed in own if s in self.body for x in s.loops)


_FINITE = (tirx.Var, tirx.BufferLoad, tirx.Cast, tirx.Add, tirx.Sub, tirx.Mul, tirx.Min, tirx.Max, tirx.Select)
_FINITE_OPS = frozenset(f"tirx.{name}" for name in ("if_then_else", "tanh", "sigmoid", "exp", "exp2", "fabs"))


def has_finite_blocks(iteration: Iteration, maximum: LiveRange) -> bool:
    """Whether what a loop's iterations take the maximum of has, in every row, an element that no mask makes the lowest
    value."""
    value = iteration.value(maximum)
    atom = None if value is None else value.atom
    if atom is None or atom.key[0] != "max":
        return False
    blocks = [key[1] for key in atom.key[1] if key[0] == "block"]
    return bool(blocks) and all(_is_finite(iteration, statement) for statement in blocks)


def _is_finite(iteration: Iteration, statement: Statement) -> bool:
    before = iteration.body[: iteration.body.index(statement) + 1]
    made = [s for s in before if isinstance(s.tile_op, Reduce) and s.target.buffer.same_as(statement.target.buffer)]
    if not made:
        return False
    record = made[-1].tile_op
    assert isinstance(record, Reduce)
    source = iteration.coordinates.ranges.of(made[-1].reads[0])
    before = before[: before.index(made[-1])]
    writes = [(s, write) for s, write in source.writes if s in before]
    return bool(writes) and all(_keeps_finite(iteration, s, write, record.dim) for s, write in writes)


def _keeps_finite(iteration: Iteration, statement: Statement, write: Access, dim: int) -> bool:
    """Whether the statement leaves the first element of every row finite, if what it reads is."""
    if isinstance(statement.tile_op, Gemm):
        return True
    if isinstance(statement.tile_op, Fill):
        return _finite(statement.values[:1])
    form = write.forms[dim]
    if (
        statement.tile_op is not None
        or statement.op not in (None, "sum")
        or not isinstance(statement.node, tirx.BufferStore)
    ):
        return False
    var = None if form is None else form.variable
    if var is None or not any(loop.var.same_as(var) and is_const(loop.min, 0) for loop in statement.loops):
        return False
    first = tirx.stmt_functor.substitute(statement.values[0], {var: tirx.IntImm(var.dtype, 0)})
    return all(_finite([part]) for part in _chosen(iteration, first, statement))


def _chosen(iteration: Iteration, expr: tirx.PrimExpr, statement: Statement) -> Iterator[tirx.PrimExpr]:
    """What a choice may come to where the statement runs."""
    if op_name(expr) != "tirx.if_then_else":
        yield expr
        return
    condition, then, otherwise = expr.args
    analyzer = iteration.kernel.analyzer
    known = [c for c in statement.conditions if not loads(c)]
    given, wanted = _without_loads([tirx.all(statement.ranges, *known), condition], iteration.kernel)
    with analyzer.constraint_scope(given):
        certain = analyzer.can_prove(wanted)
        never = not certain and analyzer.can_prove(tirx.Not(wanted))
    if not never:
        yield from _chosen(iteration, then, statement)
    if not certain:
        yield from _chosen(iteration, otherwise, statement)


def _without_loads(exprs: Sequence[tirx.PrimExpr], kernel: Kernel) -> list[tirx.PrimExpr]:
    """The expressions with a variable for each element that they load of parameters that nothing writes, by way of
    what their variables are bound to, too."""
    named = list[tuple[tirx.BufferLoad, tirx.Var]]()

    def name(load: tirx.BufferLoad) -> tirx.Var | None:
        if not kernel.keeps(load.buffer):
            return None
        known = next((var for other, var in named if same_expression(other, load)), None)
        if known is None:
            known = tirx.Var(load.buffer.name, load.dtype)
            named.append((load, known))
        return known

    values = {var: without_binds(var, kernel) for expr in exprs for var in vars_of([expr], {}) if var in kernel.binds}
    kept = {var: e for var, e in values.items() if all(kernel.keeps(load.buffer) for load in loads(e))}
    told = [tirx.Evaluate(tirx.stmt_functor.substitute(expr, kept)) for expr in exprs]
    plain = [tirx.stmt_functor.ir_transform(stmt, None, name, ["tirx.BufferLoad"]) for stmt in told]
    return [stmt.value for stmt in plain]


def _finite(values: Sequence[tirx.PrimExpr]) -> bool:
    """Whether the expressions are finite, if what they load is."""
    return bool(values) and all(
        _keeps(part) for value in values for part in (value, *nodes(tirx.Evaluate(value), tirx.PrimExpr))
    )


def _keeps(expr: tirx.PrimExpr) -> bool:
    """Whether an expression is finite if its operands are, as long as nothing overflows: a logarithm or a quotient is
    not."""
    value = number(expr)
    if value is not None:
        return math.isfinite(value)
    if not is_float(expr.dtype) or isinstance(expr, _FINITE):
        return True
    if isinstance(expr, tirx.Div):
        return bool(number(expr.b))
    return op_name(expr) in _FINITE_OPS
