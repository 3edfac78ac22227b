"""Factors whose positions are programs of the grid: `C[bx]` of a kernel in which a program does what it does with its
own row alone, whatever that is.

What nothing is known of, such as barriers between threads, may run in a program: where its axis splits the grid, each
device runs some of the programs as they are. For that nothing on chip may lie along the factor, and all that a program
writes outside of the chip is its own.
"""

from __future__ import annotations

from tvm import tirx

from mesh_tensor.tir.effects import pointers, stays_in_program
from mesh_tensor.tir.linear import vars_of
from mesh_tensor.tir.nodes import nodes

from .coordinates import Coordinates
from .factors import Factor
from .statements import Kernel, Statement


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
