"""The coordinates of a kernel: where, in which factors, its statements and its on-chip buffers lie; and loop
variables that are used as values.

Factors whose positions are programs of the grid: `C[bx]` of a kernel in which a program does what it does with its
own row alone, whatever that is.

What nothing is known of, such as barriers between threads, may run in a program: where its axis splits the grid, each
device runs some of the programs as they are. For that nothing on chip may lie along the factor, and all that a program
writes outside of the chip is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from tvm import tirx

from mesh_tensor.tir.effects import pointers, stays_in_program
from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import loads, nodes
from mesh_tensor.tir.tile_position import text_of

from .factor_derivation import Derivation, Dim, Node, derive
from .factors import Factor
from .live_ranges import LiveRanges
from .statements import Access, Kernel, Statement

#: A factor, and a coordinate in it.
Place = tuple[Factor, Linear]


def find_coordinates(kernel: Kernel, ranges: LiveRanges, without: Sequence[Dim] = ()) -> Coordinates:
    """The coordinates of a kernel, whose factors have no names yet, and are none of the dims in `without`."""
    return Coordinates(kernel, ranges, derive(kernel, ranges, without))


@dataclass(frozen=True, eq=False)
class Coordinates:
    """The kernel's `factors`, and what is known of every access and live range in them."""

    kernel: Kernel
    ranges: LiveRanges
    derivation: Derivation

    @property
    def factors(self) -> tuple[Factor, ...]:
        return self.derivation.factors

    @property
    def detached(self) -> Mapping[Dim, str]:
        """Why some parameters' dims have no factor."""
        return self.derivation.detached

    def with_factors(self, new: Mapping[Factor, Factor]) -> Coordinates:
        """The same with other records of the same factors."""
        types = {node: (new[factor], base) for node, (factor, base) in self.derivation.types.items()}
        return Coordinates(self.kernel, self.ranges, Derivation(tuple(new.values()), types, self.detached))

    def of_node(self, node: Node) -> Place | None:
        """The factor and base of a live range's dim, or None where it has none."""
        return self.derivation.types.get(node)

    def of_access(self, access: Access, dim: int) -> Place | None:
        """The factor that an access's index in `dim` walks, and the coordinate; None where it has none."""
        return self._accesses[access][dim]

    def of_statement(self, statement: Statement) -> Mapping[Factor, Linear]:
        """Every factor that the statement has a coordinate in."""
        return self._statements[statement]

    def walks(self, access: Access, factor: Factor) -> bool:
        """Whether one of the access's indices walks the factor."""
        return any(place is not None and place[0] is factor for place in self._accesses[access])

    def lies_in(self, access: Access, factor: Factor) -> bool:
        """Whether what is accessed lies on one device where the factor is split: an index walks it, or data say one."""
        dims = [(access.buffer.name, dim) for dim in range(len(access.indices))]
        return self.walks(access, factor) or (self.ranges.of(access).is_param and not set(dims).isdisjoint(factor.dims))

    def around(self, statement: Statement, factor: Factor) -> Linear | None:
        """The coordinate in the factor that the loops around a statement make, if they are a nest over it."""
        inner = self._loop_forms[factor]
        own = statement.vars
        for loop in statement.loops:
            form = inner.get(loop.var)
            if form is not None and set(form.terms) <= own:
                return form
        return None

    @cached_property
    def forms(self) -> Mapping[Factor, list[Linear]]:
        """The distinct coordinates in each factor."""
        forms: dict[Factor, dict[tuple, Linear]] = {f: {} for f in self.factors}
        for places in self._statements.values():
            for factor, form in places.items():
                forms[factor].setdefault(form.key, form)
        return {factor: list(distinct.values()) for factor, distinct in forms.items()}

    @cached_property
    def _accesses(self) -> Mapping[Access, tuple[Place | None, ...]]:
        return {access: self._places(access) for statement in self.kernel.statements for access in statement.accesses}

    def _places(self, access: Access) -> tuple[Place | None, ...]:
        live_range, types = self.ranges.of(access), self.derivation.types
        found: list[Place | None] = []
        for dim, form in enumerate(access.forms):
            place = types.get((live_range, dim))
            found.append(None if place is None or form is None else (place[0], place[1] + form))
        return tuple(found)

    @cached_property
    def _statements(self) -> Mapping[Statement, Mapping[Factor, Linear]]:
        found: dict[Statement, dict[Factor, Linear]] = {}
        for statement in self.kernel.statements:
            places = found[statement] = {}
            for access in statement.accesses:
                for place in self._accesses[access]:
                    if place is not None:
                        places.setdefault(*place)
        return found

    @cached_property
    def _loop_forms(self) -> Mapping[Factor, Mapping[tirx.Var, Linear]]:
        """The coordinates that are made of the kernel's own loops and nothing else, by their innermost one."""
        own = {var for var, loop in self.kernel.loops.items() if loop.kind != "tile"}
        found: dict[Factor, dict[tirx.Var, Linear]] = {}
        for factor, forms in self.forms.items():
            inner = found[factor] = {}
            for form in forms:
                if form.terms and own.issuperset(form.terms):
                    inner.setdefault(form.ordered[-1][0], form)
        return found


def why_whole_blocks(
    statement: Statement, form: Linear | None, factor: Factor, kernel: Kernel, coordinates: Coordinates
) -> str | None:
    """Why tiles of the factor have to be whole blocks for what the statement computes, None if they need not.

    `form` is the statement's coordinate in the factor, None if it has none."""
    for expr in [*statement.values, *statement.bounds, *detached_indices(statement, coordinates)]:
        used = vars_of([expr], kernel.binds) & factor.roles.keys()
        if used and not (form is not None and _depends_on_coordinate_only(expr, used, form, kernel)):
            names = ", ".join(sorted(v.name for v in used))
            return f"{names} is used as a value in {text_of(expr)}"
    return None


def detached_indices(statement: Statement, coordinates: Coordinates) -> list[tirx.PrimExpr]:
    """The indices into parameters' dims that are needed whole: a device's are those of the whole tensor."""
    return [
        index
        for access in statement.accesses
        if coordinates.ranges.of(access).is_param
        for dim, index in enumerate(access.indices)
        if coordinates.of_access(access, dim) is None
    ]


def _depends_on_coordinate_only(expr: tirx.PrimExpr, used: set[tirx.Var], form: Linear, kernel: Kernel) -> bool:
    """expr(v + 1, i - coefficient) == expr(v, i) for every outer loop v and the innermost loop i."""
    *outer, (inner, coefficient) = form.ordered
    if coefficient != 1 or not used <= set(form.terms) or inner not in used:
        return False
    skeleton = without_loads(expr)
    for var, step in outer:
        shifted = tirx.stmt_functor.substitute(skeleton, {var: var + 1, inner: inner - step})
        if not kernel.analyzer.can_prove_equal(shifted, skeleton):
            return False
    return True


def without_loads(expr: tirx.PrimExpr) -> tirx.PrimExpr:
    """The expression with every load replaced by a fresh variable: their indices are looked at as accesses."""
    if not loads(expr):
        return expr

    def replace(node: object) -> object:
        return tirx.Var("loaded", node.dtype) if isinstance(node, tirx.BufferLoad) else None

    body = tirx.stmt_functor.ir_transform(tirx.Evaluate(expr), None, replace, ["tirx.BufferLoad"])
    return body.value


def is_of_programs(kernel: Kernel, coordinates: Coordinates, factor: Factor) -> bool:
    """Whether the factor's positions are programs of the grid, and one program sees nothing that another one writes:
    what is not understood in them then doesn't matter."""
    (program, step), *more = factor.roles.items() or [(None, 0)]
    if more or step != 1 or program not in {loop.var for loop in kernel.grid}:
        return False
    types = coordinates.derivation.types.items()
    if any(of is factor and not live_range.is_param for (live_range, _), (of, _) in types):
        return False
    if any(buffer.scope() == "global" for buffer in kernel.on_chip):
        return False
    return all(
        _stays(statement, kernel, program)
        if statement.unknown
        else statement.write is None
        or not kernel.is_param(statement.write.buffer)
        or coordinates.walks(statement.write, factor)
        for statement in kernel.statements
    )


def _stays(statement: Statement, kernel: Kernel, program: tirx.Var) -> bool:
    """Whether a statement that is not understood is the same in all programs, and of nothing but what is on their
    chip."""
    of_params = {buffer.data for buffer in kernel.params.values()}
    named = {access.buffer.data for access in nodes(statement.node, tirx.BufferLoad, tirx.BufferStore)}
    if of_params & (named | pointers(statement.node)):
        return False
    return stays_in_program(statement.node) and program not in vars_of(nodes(statement.node, tirx.Var), kernel.binds)
