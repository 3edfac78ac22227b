"""Programs of the grid that one device has all looked-up data of: `C[bx] = act(A[bx] @ W[expert_of[bx]])`.

Where all that a program looks up of a dim is at one place, the device that has it can make all of what the program
writes, whatever is made of it on the way. The others run the program on nothing, and write 0: what is written is
partial, by sums. It is written and not left out, as a later program may write there, too. So nothing that decides where
or whether something is done may be made of what is looked up.

Products of blocks that are looked up, `total += A @ B[group]`, where one device has what is looked up.

A product is linear in each of its factors, and the other devices have zeros. They leave the product out, as zeros would
make NaN of what is infinite in the other factor. For that, which device has the block is the same in all of a program.

Products over rows at loaded places, as weights' gradients of packed sequences and experts' tokens have them:

    for k in range(blocks[g]): x = X[starts[g] + k * 32 : ...]; d = D[starts[g] + k * 32 : ...]; total += x.T @ d

Both blocks are of the same rows, and the product sums over them. A device that has a row has it of both tables, and
zeros stand in for the rows of others, in both: zero times zero is zero, whatever these hold. So the sum is partial,
though each of its factors is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from tvm import tirx

from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads, same_expression
from mesh_tensor.tir.tile_ops import Atomic, Copy, Gemm

from .bounded_indices import deciding, only_writes, takes_one
from .coordinates import Coordinates
from .factor_derivation import Dim
from .live_ranges import LiveRange
from .partial_values import PartialValues
from .reader import known_uses
from .statements import Access, Kernel, Statement, without_binds
from .verdicts import Reduction

#: A statement, and what it looks up of a table's dim.
Use = tuple[Statement, Access, int]


class LookedUpProducts:
    """The products of blocks that copies look up, each with its copy (`copies`) and the access to the block
    (`blocks`)."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, uses: Sequence[Use]) -> None:
        self._kernel, self._ranges = kernel, coordinates.ranges
        self.copies: dict[Statement, Statement] = {}
        self.blocks: dict[Statement, Access] = {}
        for copy, looked_up, dim in uses:
            if isinstance(copy.tile_op, Copy) and self._is_of_program(copy, looked_up.indices[dim]):
                for product, block in self._of(copy):
                    self.copies[product], self.blocks[product] = copy, block

    def are_linear(self, partial: PartialValues) -> bool:
        """Whether every product is of one block that is partial, and of one that is not."""
        return all(
            partial.op_of(self._ranges.of(access)) is None
            for product, block in self.blocks.items()
            for access in product.reads
            if access is not block
        )

    def used(self, partial: PartialValues) -> Mapping[Statement, Statement]:
        """The products that what was followed comes through."""
        return {product: copy for product, copy in self.copies.items() if partial.contributes(product)}

    def _is_of_program(self, copy: Statement, index: tirx.PrimExpr) -> bool:
        """Whether an index is the same wherever a program computes it, from the copy on."""
        value = without_binds(index, self._kernel)
        known = {*(loop.var for loop in self._kernel.grid), *self._kernel.func.params}
        if not vars_of([value], {}) <= known:
            return False
        return all(self._is_settled(load.buffer, copy.top) for load in loads(value))

    def _is_settled(self, buffer: tirx.Buffer, top: int) -> bool:
        """Whether nothing writes a buffer from a top-level statement on."""
        return not any(statement.writes(buffer) and statement.top >= top for statement in self._kernel.statements)

    def _of(self, copy: Statement) -> Iterator[tuple[Statement, Access]]:
        """Products of what a copy alone writes, in the loop in which it does, or in one in there."""
        block = self._ranges.of(copy.target)
        if {statement for statement, _ in block.writes} != {copy}:
            return
        for product, _ in block.reads:
            of_block = [access for access in product.reads if self._ranges.of(access) is block]
            if len(of_block) == 1 and _adds_product(product) and _is_within(product, copy):
                yield product, of_block[0]


def _adds_product(statement: Statement) -> bool:
    record = statement.tile_op
    return isinstance(record, Gemm) and not record.clears and statement.op == "sum"


def _is_within(inner: Statement, outer: Statement) -> bool:
    """Whether all that encloses one statement encloses the other one, too."""
    loops = [[loop.node for loop in s.loops if loop.kind != "tile"] for s in (inner, outer)]
    around, conditions = loops[1], outer.conditions
    same = all(a is not None and a.same_as(b) for a, b in zip(loops[0], around, strict=False))
    alike = all(a.same_as(b) for a, b in zip(inner.conditions, conditions, strict=False))
    enough = len(loops[0]) >= len(around) and len(inner.conditions) >= len(conditions)
    return inner.top == outer.top and enough and same and alike


def owned_programs(kernel: Kernel, coordinates: Coordinates, uses: Sequence[Use]) -> Reduction | None:
    """What splitting the dims that are looked up leaves partial, if each program is one device's; else None."""
    if not uses or not all(takes_one(*use) for use in uses):
        return None
    (first, access, dim), *more = uses
    place = access.indices[dim]
    if not all(same_expression(other.indices[at], place) for _, other, at in more):
        return None
    found = _Programs(kernel, coordinates, [statement for statement, *_ in uses])
    written = found.written()
    if not written or not found.are_apart() or not all(map(found.is_sum, written)):
        return None
    known = [*(statement for statement, *_ in uses), *written]
    if not _is_of_program(kernel, place, min(statement.top for statement in known)):
        return None
    partial: dict[LiveRange, str] = {coordinates.ranges.of(statement.target): "sum" for statement in written}
    owners = {statement: first for statement in written if statement not in found.lookups}
    return Reduction(partial, products=found.products(), owners=owners)


def _is_of_program(kernel: Kernel, place: tirx.PrimExpr, top: int) -> bool:
    """Whether an index is known before a top-level statement runs, and the same from then on in all of a program."""
    bound = {s.node.var for s in kernel.statements if isinstance(s.node, tirx.Bind) and s.top < top and _is_outer(s)}
    known = {*(loop.var for loop in kernel.grid), *kernel.func.params, *bound}
    if not vars_of([place], {}) <= known:
        return False
    return all(
        kernel.keeps(load.buffer)
        or not (kernel.is_param(load.buffer) or any(s.writes(load.buffer) and s.top >= top for s in kernel.statements))
        for load in loads(place)
    )


def _is_outer(statement: Statement) -> bool:
    return not statement.conditions and all(loop.kind == "grid" for loop in statement.loops)


class _Programs:
    """What programs make of what the statements `lookups` look up."""

    def __init__(self, kernel: Kernel, coordinates: Coordinates, lookups: Sequence[Statement]) -> None:
        self._kernel, self._ranges, self.lookups = kernel, coordinates.ranges, lookups
        self._made: set[LiveRange] = set()  # of what is looked up
        known = -1
        while known < len(self._made):
            known = len(self._made)
            made = (s for s in kernel.statements if s.write is not None and (s in self.lookups or self._reads(s)))
            self._made |= {self._ranges.of(statement.target) for statement in made}

    def _is_made(self, access: Access) -> bool:
        return self._ranges.of(access) in self._made

    def _reads(self, statement: Statement) -> bool:
        return any(map(self._is_made, statement.reads))

    def written(self) -> list[Statement]:
        """All that writes the parameters into which something goes of what is looked up."""
        stores = [s for s in self._kernel.statements if s.write is not None and self._kernel.is_param(s.write.buffer)]
        return [statement for statement in stores if self._is_made(statement.target)]

    def are_apart(self) -> bool:
        """Whether nothing but values is made of what is looked up, and it leaves a program by what is written alone."""
        if any(buffer.scope() == "global" for buffer in self._kernel.on_chip):
            return False
        return not any(self._decides(s) for s in self._kernel.statements if s in self.lookups or self._reads(s))

    def _decides(self, statement: Statement) -> bool:
        """Whether a statement is not understood, or says by what is looked up where something is, whether or how often
        it is done, what integers are divided by, or what users are told."""
        if statement.unknown or (statement.write is None and not isinstance(statement.node, tirx.Bind)):
            return True
        return self._mentions([*deciding(statement), *statement.bounds, *statement.conditions])

    def _mentions(self, exprs: Sequence[tirx.PrimExpr]) -> bool:
        """Whether something is in the expressions of what is looked up, or a variable that is bound to it."""
        made = {live_range.buffer for live_range in self._made}
        plain = (without_binds(expr, self._kernel) for expr in exprs if not isinstance(expr, int))
        return any(load.buffer in made for expr in plain for load in loads(expr))

    def is_sum(self, statement: Statement) -> bool:
        """Whether zeros from all devices but one leave what a statement writes as it is; nothing reads that again."""
        target, record = statement.target, statement.tile_op
        uses = known_uses(self._kernel, target.buffer)
        if target.buffer.dtype == "bool" or not uses or any(access is not user.write for user, access in uses):
            return False
        if isinstance(record, Copy):
            source = statement.reads[0]
            return statement in self.lookups or (self._is_made(source) and not self._kernel.is_param(source.buffer))
        if isinstance(record, Atomic):
            return statement.op == "sum"
        return only_writes(statement, target) and statement.op in (None, "sum")

    def products(self) -> Mapping[Statement, Statement]:
        """What takes long of what is made of what is looked up: the others leave it out."""
        added = (s for s in self._kernel.statements if isinstance(s.tile_op, Gemm) and not s.tile_op.clears)
        return {statement: self.lookups[0] for statement in added if self._reads(statement)}


#: A product of blocks, and the accesses to these.
Products = dict[Statement, tuple[Access, ...]]


def dims_of_rows(kernel: Kernel, dims: Sequence[Dim]) -> list[tuple[Dim, Dim]]:
    """Pairs of the dims, of two tables of one length, of which a product takes the same rows."""
    found = []
    for pair in combinations(dims, 2):
        (one, at), (other, of) = pair
        sizes = kernel.params[one].shape[at], kernel.params[other].shape[of]
        uses = [statement for name in (one, other) for statement, _ in known_uses(kernel, kernel.params[name])]
        if one != other and same_expression(*sizes) and len(uses) == 2 and _may_meet(kernel, uses):
            found.append(pair)
    return found


def _may_meet(kernel: Kernel, statements: Sequence[Statement]) -> bool:
    """Whether a product reads what all of the statements write."""
    targets = [statement.target.buffer for statement in statements if statement.write is not None]
    products = (s for s in kernel.statements if isinstance(s.tile_op, Gemm))
    return any(all(any(a.buffer.same_as(t) for a in s.reads) for t in targets) for s in products)


def row_products(kernel: Kernel, coordinates: Coordinates, uses: Sequence[Use]) -> Products:
    """The products over rows that the `uses` look up."""
    return dict(_row_products(kernel, coordinates, uses))


def _row_products(
    kernel: Kernel, coordinates: Coordinates, uses: Sequence[Use]
) -> Iterator[tuple[Statement, tuple[Access, ...]]]:
    for product in kernel.statements:
        record = product.tile_op
        if not isinstance(record, Gemm) or record.clears or product.op != "sum":
            continue
        blocks = [access for access in product.reads if any(s.writes(access.buffer) for s, *_ in uses)]
        if len(blocks) != 2:
            continue
        rows = [_row(kernel, coordinates, product, block, uses) for block in blocks]
        if rows[0] is not None and rows[1] is not None and same_expression(rows[0], rows[1]):
            yield product, tuple(blocks)


def _row(
    kernel: Kernel, coordinates: Coordinates, product: Statement, block: Access, uses: Sequence[Use]
) -> tirx.PrimExpr | None:
    """Which row of its table lies at a place that the product sums over, as an expression of the product's own loops;
    None if that isn't certain."""
    live_range = coordinates.ranges.of(block)
    writers = {statement for statement, _ in live_range.writes}
    found = [use for use in uses if use[0] in writers]
    if len(writers) != 1 or len(found) != 1 or live_range.is_param or found[0][0].conditions:
        return None
    statement, looked_up, dim = found[0]
    summed = {form.variable for form in block.forms if form is not None} - _walked(product.target)
    at = [d for d, form in enumerate(block.forms) if form is not None and form.variable in summed]
    if len(summed) != 1 or len(at) != 1 or None in summed:
        return None
    form = statement.target.forms[at[0]]
    row = without_binds(looked_up.indices[dim], kernel)
    if form is None or form.variable is None or not all(kernel.keeps(load.buffer) for load in loads(row)):
        return None
    (place,) = summed
    row = tirx.stmt_functor.substitute(row, {form.variable: place})
    scope = {loop.var for loop in live_range.scope}
    known = {place, *kernel.func.params, *scope}
    return row if vars_of([row], {}) <= known and scope <= {loop.var for loop in product.loops} else None


def _walked(target: Access) -> set[tirx.Var]:
    """The variables that walk what a statement writes."""
    return set().union(*(form.terms.keys() for form in target.forms if form is not None))
