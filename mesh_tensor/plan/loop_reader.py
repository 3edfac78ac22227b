"""LoopReader: the nodes of a call of a function that ends by calling itself: a loop of the graph, planned once, or its
steps one after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.call import op_call, packed

from .ir import GraphLoop, Scope, Scopes, Tree, Value, leaves, map_tree
from .loops import Counter, Recursion, used_in, whole_number
from .manual import Region

if TYPE_CHECKING:
    from .bindings import Bindings
    from .reader import GraphReader

_MOST_STEPS = 4096  # that are unrolled


@dataclass(frozen=True)
class _Rows:
    """`taken`: variables that are a parameter's row at the count, by its number. `put`: the parameters that steps put
    such rows into, with these; what does that (`unread`) is not looked at."""

    taken: Mapping[relax.Var, int]
    put: Mapping[int, relax.Expr]
    unread: frozenset[relax.Var]


_NO_ROWS = _Rows({}, {}, frozenset())


class LoopReader:
    """Reads a call of the function `name`, which stands in the scopes `outer`, as a loop of the scope `scope`; in a
    manual computation, `region` is that.

    There devices may have values of their own. What is carried is so along the same axes before every step and after
    it: the fewest that this takes, found by reading the loop until it does."""

    def __init__(
        self, reader: GraphReader, name: str, found: Recursion, outer: Scopes, scope: Scope, region: Region | None
    ) -> None:
        self._reader, self._name, self._found = reader, name, found
        self._outer, self._scope, self._region = outer, scope, region
        self._own: dict[tuple[int, int], set[str]] = {}  # the axes of what is carried: parameter, which of its tensors

    def read(self, args: Sequence[Tree]) -> Tree:
        """What the call gives. Refused where steps are to be unrolled and data says how many there are, where the next
        step is not for values of the same shapes, and where what says whether there is one is not one bool."""
        found, loops = self._found, self._reader.with_loops
        counter = found.counter([whole_number(arg.data) if isinstance(arg, Value) else None for arg in args])
        steps = _MOST_STEPS + 1 if counter is None else counter.last - counter.first
        if loops and (counter is None or steps > 1):
            while (made := self._reader.tried(lambda: self._looped(args, counter))) is None:
                pass  # with more axes
            return made
        if counter is None or steps > _MOST_STEPS:
            refuse(
                f"function {self._name!r} calls itself {'as long as data says' if counter is None else steps} times",
                why=f"gradients and searches unroll the steps, of which there may be {_MOST_STEPS}",
                fix="count a fixed number of steps, from a constant by 1 to a constant",
            )
        return self._unrolled(args, counter)

    def _looped(self, args: Sequence[Tree], counter: Counter | None) -> Tree | None:
        """A loop of the graph; None if its steps make more values of devices' own than were known of."""
        found, inner = self._found, (*self._outer, self._scope)
        rows = _NO_ROWS if counter is None else self._rows(counter)
        trees = [arg if n in found.kept or n in rows.put else self._entered(n, arg) for n, arg in enumerate(args)]
        entered: dict[Value, Value] = {}
        where = f"{self._name} (call {self._scope.site})"
        count = None if counter is None else counter.last - counter.first
        self._reader.loops[self._scope] = GraphLoop(count, entered, where)
        if counter is None:
            self._test(trees, inner)
        again, put = self._step(trees, inner, rows, counter)
        if self._more_own(trees, again):
            return None
        ends = list(args)
        for n, (before, after) in enumerate(zip(trees, again, strict=True)):
            if n in put:
                value = args[n]
                assert isinstance(value, Value)
                ends[n] = self._mark("stack", put[n], inner, value.name, value.type.shape)
            elif n not in found.kept:
                ends[n] = self._next(n, before, after, inner, entered)
        return self._ending(ends)

    def _more_own(self, before: Sequence[Tree], after: Sequence[Tree]) -> bool:
        """Whether a step hands on what devices have of their own along more axes than they had; these are noted."""
        more = False
        for n, (was, became) in enumerate(zip(before, after, strict=True)):
            for m, (mine, its) in enumerate(zip(leaves(was), leaves(became), strict=False)):
                new = self._axes(its) - self._axes(mine) if n not in self._found.kept else set()
                self._own.setdefault((n, m), self._axes(mine)).update(new)
                more = more or bool(new)
        return more

    def _axes(self, value: Value) -> set[str]:
        return {axis for axis, _ in self._reader.varying.get(value, ())}

    def _apart(self, number: int, tree: Tree, scopes: Scopes, name: str) -> Tree:
        """What is carried in this parameter: along its axes, every device has its own."""
        devices, places = self._reader.devices(self._name, name, scopes), iter(range(len(leaves(tree))))
        return map_tree(tree, lambda value: devices.apart(value, [*self._own.get((number, next(places)), ())]))

    def _entered(self, number: int, arg: Tree) -> Tree:
        """What carried values are in the loop."""
        name = self._found.params[number].name_hint
        arg = self._apart(number, arg, self._outer, name)
        inner = map_tree(arg, lambda value: self._mark("enter", value, self._outer, name))
        if isinstance(inner, Value):
            self._reader.note(self._name, name, inner)
        return inner

    def _next(self, number: int, before: Tree, after: Tree, scopes: Scopes, entered: dict[Value, Value]) -> Tree:
        """What carried values are in the end."""
        mine, its = leaves(before), leaves(after)
        if [value.type for value in mine] != [value.type for value in its]:
            refuse(
                [f"{a!r} is {b.type.dtype}{list(b.type.shape)} the next time" for a, b in zip(mine, its, strict=False)],
                where=f"function {self._name!r}, which calls itself",
                why="a loop is planned once, for all its steps",
                fix="keep shapes and dtypes the same from step to step",
            )
        its = leaves(self._apart(number, after, scopes, self._found.params[number].name_hint))
        ends = [self._mark("next", value, scopes, value.name) for value in its]
        entered.update(zip(ends, mine, strict=True))
        rest = iter(ends)
        return map_tree(before, lambda _: next(rest))

    def _test(self, trees: Sequence[Tree], inner: Scopes) -> None:
        """What says whether there is a next step."""
        found = self._found
        read = self._reader.bindings(self._name, self._env(trees), inner, self._region)
        for binding in found.head:
            read.bind(binding)
        holds = read.expression(found.condition)
        if not isinstance(holds, Value) or holds.type.shape or holds.type.dtype != "bool":
            refuse(
                f"what says whether function {self._name!r} calls itself is {holds!r}, no bool without dims",
                fix="reduce it to one bool: R.any, R.all, or a comparison of numbers",
            )
        if not found.goes_on:
            holds = self._add(relax.op.logical_not(holds.variable()), [holds], inner, "goes_on")
        if (taken := self._reader.taken) is not None:  # it may never end where it is not
            both = relax.op.logical_and(holds.variable(), taken.variable())
            holds = self._add(both, [holds, taken], inner, "goes_on")
        if axes := self._axes(holds):
            refuse(
                [f"devices along {axis!r} may have different values of what says whether it does" for axis in axes],
                where=f"function {self._name!r}, which calls itself in a manual computation",
                why="devices go on together, for their collectives",
                fix='combine them: mt.comm.all_reduce(goes_on, axes, "max"), of an integer',
            )
        self._mark("test", holds, inner, "goes_on")

    def _unrolled(self, args: Sequence[Tree], counter: Counter) -> Tree:
        """The steps one after the other; each has its count as a constant."""
        inner, rows = (*self._outer, self._scope), self._rows(counter)
        trees, made = list(args), list[dict[int, Value]]()
        dtype = leaves(args[counter.at])[0].type.dtype
        for step in range(counter.first, counter.last):
            trees[counter.at] = self._reader.constant(relax.const(step, dtype))
            again, put = self._step(trees, inner, rows, counter)
            trees = [tree if n in put else new for n, (tree, new) in enumerate(zip(trees, again, strict=True))]
            made.append(put)
        trees[counter.at] = self._reader.constant(relax.const(counter.last, dtype))
        for n in rows.put if made else ():
            column = [put[n] for put in made]
            stacked = relax.op.stack([value.variable() for value in column], axis=0)
            trees[n] = self._add(stacked, column, inner, f"{self._found.params[n].name_hint}_rows")
        return self._ending(trees)

    def _rows(self, counter: Counter) -> _Rows:
        found = self._found
        put = found.rows_put(counter)
        return _Rows(found.rows_taken(counter), put, frozenset(found.again[n] for n in put))

    def _step(
        self, trees: Sequence[Tree], scopes: Scopes, rows: _Rows, counter: Counter | None
    ) -> tuple[list[Tree], dict[int, Value]]:
        """The body's nodes: what parameters are the next time, and the rows that are put."""
        found = self._found
        read = self._reading(trees, scopes, [*(binding.value for binding in found.body), *found.again])
        for binding in found.body:
            if counter is not None and (number := rows.taken.get(binding.var)) is not None:
                read.env[binding.var] = self._row(trees[number], trees[counter.at], scopes, binding.var.name_hint)
            elif binding.var not in rows.unread:
                read.bind(binding)
        same = {*found.kept, *rows.put}
        again = [trees[n] if n in same else read.expression(expr) for n, expr in enumerate(found.again)]
        put = {n: read.expression(expr) for n, expr in rows.put.items()}
        return again, {n: value for n, value in put.items() if isinstance(value, Value)}

    def _row(self, table: Tree, at: Tree, scopes: Scopes, name: str) -> Value:
        """The row of a tensor that the count says; where that is a constant, by R.take."""
        assert isinstance(table, Value)
        assert isinstance(at, Value)
        if at.data is not None:
            return self._add(relax.op.take(table.variable(), at.data, axis=0), [table, at], scopes, name)
        info = relax.TensorStructInfo(table.type.shape[1:], table.type.dtype)
        return self._add(packed("loop.row", [table.variable(), at.variable()], info), [table, at], scopes, name)

    def _ending(self, trees: Sequence[Tree]) -> Tree:
        """What the function gives when it doesn't call itself."""
        return self._reading(trees, self._outer, [self._found.ending]).expression(self._found.ending)

    def _reading(self, trees: Sequence[Tree], scopes: Scopes, exprs: Sequence[relax.Expr]) -> Bindings:
        """What reads bindings; those of the head are read, if any of these expressions takes what they make."""
        found = self._found
        read = self._reader.bindings(self._name, self._env(trees), scopes, self._region)
        if any(used_in(found.head, expr) for expr in exprs):
            for binding in found.head:
                read.bind(binding)
        return read

    def _env(self, trees: Sequence[Tree]) -> dict[relax.Var, Tree]:
        return dict(zip(self._found.params, trees, strict=True))

    def _mark(self, mark: str, value: Value, scopes: Scopes, name: str, shape: tuple[int, ...] | None = None) -> Value:
        info = relax.TensorStructInfo(value.type.shape if shape is None else shape, value.type.dtype)
        return self._add(packed(f"loop.{mark}", [value.variable()], info), [value], scopes, name)

    def _add(self, expr: relax.Expr, inputs: list[Value], scopes: Scopes, name: str) -> Value:
        call = op_call(relax.BlockBuilder().normalize(expr))
        (made,) = self._reader.add(call, inputs, self._name, name, scopes)
        return made
