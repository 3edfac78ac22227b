"""Loop variables that are used as values, and not only as indices.

Where only the coordinate counts (`bx * 64 + i` in a mask), a device adds its tile's offset to it. Where it counts how
coordinates are grouped into blocks (`bx` alone), tiles have to be whole blocks.
"""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import loads
from mesh_tensor.tir.tile_position import text_of

from .coordinates import Coordinates
from .factors import Factor
from .statements import Kernel, Statement


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
