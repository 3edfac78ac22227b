"""Which parameters come in with content that counts."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.tir.linear import Linear, vars_of
from mesh_tensor.tir.nodes import loads

from .coordinates import Coordinates
from .padding import is_inside
from .statements import Access, Kernel, Statement


def needs_content(kernel: Kernel, coordinates: Coordinates, param: str) -> bool:
    """Whether a parameter's earlier content is read, combined into, or partly kept.

    It is not if some store covers all of it, and whatever else touches it comes later and, in every program of the
    grid, touches only what that program stored."""
    buffer = kernel.params[param]
    uses = _uses(kernel, buffer)
    stores = [s for s in kernel.statements if s.write is not None and s.write.buffer.same_as(buffer) and s.op is None]
    if any(s.unknown and s.writes(buffer) for s in kernel.statements):
        return True
    if not stores:
        return bool(uses)
    covering = next((s for s in stores if _covers(s, kernel, coordinates)), None)
    if covering is None:
        return True
    return any(s.top <= covering.top or not _same_program(a, covering.target, kernel, coordinates) for s, a in uses)


def only_keeps_content(kernel: Kernel, param: str) -> bool:
    """Whether earlier content, if it matters, does so only because it may not all be overwritten: nothing looks at
    it."""
    opaque = any(s.unknown and s.writes(kernel.params[param]) for s in kernel.statements)
    return not opaque and not _uses(kernel, kernel.params[param])


def _uses(kernel: Kernel, buffer: tirx.Buffer) -> list[tuple[Statement, Access]]:
    """Every access to a parameter but plain stores."""
    return [
        (s, a)
        for s in kernel.statements
        for a in s.accesses
        if a.buffer.same_as(buffer) and not (a is s.write and s.op is None and not s.unknown)
    ]


def _covers(statement: Statement, kernel: Kernel, coordinates: Coordinates) -> bool:
    """Whether the store, over all its loops, reaches every element of its buffer whatever the data are."""
    write = statement.target
    if statement.may_be_skipped:
        return False
    if any(kernel.analyzer.can_prove_equal(size, 0) for size in write.buffer.shape):
        return True
    forms = [coordinates.of_access(write, dim) for dim in range(len(write.indices))]
    sizes = [kernel.analyzer.can_prove_equal(size, 1) for size in write.buffer.shape]
    if any(form is None and not one for form, one in zip(forms, sizes, strict=True)):
        return False
    inside = [(entry[1], entry[0].size) for entry in forms if entry is not None]
    if not all(_runs(loop.extent, kernel) for loop in statement.loops):
        return False
    return all(is_inside(condition, inside, kernel) for condition in statement.conditions)


def _runs(extent: tirx.PrimExpr, kernel: Kernel) -> bool:
    """Whether a loop certainly runs: neither data nor other loops nor scalars decide, only the sizes of dims."""
    if isinstance(extent, tirx.IntImm):
        return int(extent) > 0
    sizes = vars_of([size for buffer in kernel.params.values() for size in buffer.shape], {})
    return not loads(extent) and vars_of([extent], kernel.binds) <= sizes


def _same_program(access: Access, stored: Access, kernel: Kernel, coordinates: Coordinates) -> bool:
    """Whether a program of the grid touches, through `access`, only elements that it stored."""
    grid = {loop.var for loop in kernel.grid}
    for dim, size in enumerate(access.buffer.shape):
        if kernel.analyzer.can_prove_equal(size, 1):
            continue
        a, b = coordinates.of_access(access, dim), coordinates.of_access(stored, dim)
        if a is None or b is None or _grid_part(a[1], grid) != _grid_part(b[1], grid):
            return False
    return True


def _grid_part(form: Linear, grid: set[tirx.Var]) -> dict[tirx.Var, int]:
    return {var: c for var, c in form.terms.items() if var in grid}
