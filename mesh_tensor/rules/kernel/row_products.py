"""Products over rows at loaded places, as weights' gradients of packed sequences and experts' tokens have them:

    for k in range(blocks[g]): x = X[starts[g] + k * 32 : ...]; d = D[starts[g] + k * 32 : ...]; total += x.T @ d

Both blocks are of the same rows, and the product sums over them. A device that has a row has it of both tables, and
zeros stand in for the rows of others, in both: zero times zero is zero, whatever these hold. So the sum is partial,
though each of its factors is, too.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import combinations

from tvm import tirx

from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import loads, same_expression
from mesh_tensor.tir.tile_ops import Gemm

from .coordinates import Coordinates
from .factor_derivation import Dim
from .owned_programs import Use
from .reader import known_uses
from .statements import Access, Kernel, Statement, without_binds

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
