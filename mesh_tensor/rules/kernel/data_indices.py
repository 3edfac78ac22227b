"""Parameters' places that are indexed by data, of which a device may have some and not others: `L[b, label[b]]`."""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.base.reductions import REDUCTIONS
from mesh_tensor.tir import tile_ops
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import DIVISIONS, loads, nodes, same_expression

from .reader import known_uses
from .statements import Access, Kernel, Statement, without_binds


def is_loaded(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether an index reads memory; what a variable is bound to was read before, and may have changed since."""
    index = access.indices[dim]
    loaded = bool(loads(index)) and not vars_of([index], {}) & kernel.binds.keys()
    return loaded and dim not in statement.element_dims(access)


def is_bound_to_loads(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether an index is made of what variables are bound to, and that was read of other parameters that nothing
    writes: it is the same since, on all devices."""
    index = access.indices[dim]
    if not vars_of([index], {}) & kernel.binds.keys() or dim in statement.element_dims(access):
        return False
    read = [load.buffer for load in loads(without_binds(index, kernel))]
    return bool(read) and all(kernel.keeps(buffer) and not buffer.same_as(access.buffer) for buffer in read)


def beside_walks(kernel: Kernel, statement: Statement, access: Access, dim: int) -> bool:
    """Whether a dim that loops walk elsewhere is indexed by data here, in a statement that each device can run for what
    its tile has: what is looked up goes into one place; of what is written, nothing is read here."""
    place = kernel, statement, access, dim
    if access.buffer.dtype == "bool" or not (is_loaded(*place) or is_bound_to_loads(*place)):
        return False
    uses = known_uses(kernel, access.buffer)
    if not any(form.terms for _, other in uses if (form := other.forms[dim]) is not None):
        return False
    if any(s.writes(access.buffer) for s in kernel.statements):
        return only_writes(statement, access)
    return takes_one(statement, access, dim)


def only_writes(statement: Statement, access: Access) -> bool:
    """Whether the statement is a store, or an atomic update of one element, and nothing is made of what was there."""
    if access is not statement.write:
        return False
    if statement.tile_op is None:
        return isinstance(statement.node, tirx.BufferStore)
    return isinstance(statement.tile_op, tile_ops.Atomic) and not statement.tile_op.dst.long_dims


def puts_at_constant(statement: Statement, access: Access, dim: int) -> bool:
    """Whether the statement writes to one place of a dim that is the same for all that runs, and reads nothing of what
    was there: a store, or a tile operation that overwrites or combines a block."""
    form = access.forms[dim]
    if access is not statement.write or form is None or form.terms or dim in statement.element_dims(access):
        return False
    if statement.tile_op is None:
        return isinstance(statement.node, tirx.BufferStore)
    return isinstance(statement.tile_op, (tile_ops.Copy, tile_ops.Fill, tile_ops.Atomic))


def takes_one(statement: Statement, access: Access, dim: int) -> bool:
    """Whether what the statement stores is made of one row of the dim, and nothing else in it depends on the table."""
    if statement.write is None or statement.target.buffer.dtype == "bool":
        return False
    if isinstance(statement.tile_op, tile_ops.Copy):
        return access in statement.reads[:1]
    if not isinstance(statement.node, tirx.BufferStore) or statement.op not in (None, *REDUCTIONS):
        return False
    loops = [e for loop in statement.loops for e in (loop.min, loop.extent) if isinstance(e, tirx.PrimExpr)]
    elsewhere = [*statement.conditions, *loops, *statement.target.indices]
    if any(load.buffer.same_as(access.buffer) for expr in elsewhere for load in loads(expr)):
        return False
    mine = [load for load in loads(statement.values[0]) if load.buffer.same_as(access.buffer)]
    nested = [inner for load in loads(statement.values[0]) for index in load.indices for inner in loads(index)]
    if not mine or any(inner.buffer.same_as(access.buffer) for inner in nested):
        return False
    return all(same_expression(load.indices[dim], mine[0].indices[dim]) for load in mine)


def deciding(statement: Statement) -> list[tirx.PrimExpr]:
    """What says where something of a statement is, and what integers are divided by in it."""
    divisions = [d for v in statement.values for d in nodes(v, *DIVISIONS)]
    divisors = [division.b for division in divisions if division.dtype.startswith(("int", "uint"))]
    return [*(index for access in statement.accesses for index in access.indices), *divisors]
