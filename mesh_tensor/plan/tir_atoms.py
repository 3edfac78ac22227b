"""Kernels on dims that are taken apart into atoms: a loop over such a dim becomes one loop per atom; and kernels that
walk a dim in groups of another's (rules.kernel.granularity), in a Graph."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache

from tvm import tirx
from tvm.tirx.stmt_functor import ir_transform, substitute

from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.window import Reaches
from mesh_tensor.rules.kernel.granularity import Refined, refined
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse
from mesh_tensor.rules.kernel.statements import Statement, body_statements
from mesh_tensor.rules.operator.rule import Dim, OpRule
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import parallel_nest, replace_block, row_by_row, sequence, with_indices

from .tir_nests import compact
from .wiring import Sizes


def plain_dims(analysis: Analysis) -> frozenset[tuple[str, int]]:
    """The dims (parameter, dim) of a kernel that can be taken apart: all that touches them does so at a loop's
    variable, as does what touches the dims that are walked with them."""
    kernel = analysis.kernel
    if kernel.on_chip or kernel.binds or not all(_is_store(s) for s in kernel.statements):
        return frozenset()
    loops = {var for var, loop in kernel.loops.items() if loop.kind in ("grid", "serial")}
    odd = {
        (str(access.buffer.name), dim)
        for statement in kernel.statements
        for access in statement.accesses
        for dim, index in enumerate(access.indices)
        if not (isinstance(index, tirx.Var) and index in loops)
    }
    return frozenset(place for factor in analysis.factors if not odd & set(factor.dims) for place in factor.dims)


def _is_store(statement: Statement) -> bool:
    return isinstance(statement.node, tirx.BufferStore) and not statement.unknown


@lru_cache(maxsize=1024)
def taken_apart(kernel: tirx.PrimFunc, sizes: tuple[tuple[Sizes, ...], ...]) -> tirx.PrimFunc:
    """The kernel over tensors with more dims: `sizes` has, for each dim of each parameter, what it is taken apart into.
    Only plain dims are."""
    buffers = [kernel.buffer_map[param] for param in kernel.params]
    apart = dict(zip(buffers, sizes, strict=True))
    new = {
        buffer: compact(tirx.decl_buffer([n for dim in dims for n in dim], buffer.dtype), str(buffer.name))
        for buffer, dims in apart.items()
    }
    by_var: dict[tirx.Var, Sizes] = {}
    for access in nodes(kernel.body, tirx.BufferLoad, tirx.BufferStore):
        walked = zip(access.indices, apart[access.buffer], strict=True)
        by_var |= {index: dim for index, dim in walked if len(dim) > 1}
    grid, block = _frame(kernel.body)
    firsts = {var: tirx.Var(var.name, "int32") for var in grid if var in by_var}
    body = sequence([_Apart(apart, new, by_var, firsts).run(stmt) for stmt in body_statements(block.body)])
    made = tirx.SBlock([], [], [], block.name_hint, body, annotations=block.annotations)
    outside = replace_block(kernel.body, made, {var: tirx.IntImm("int32", by_var[var][0]) for var in firsts})
    outside = ir_transform(outside, None, lambda loop: _renamed(loop, firsts), ["tirx.For"])
    params = dict(zip(kernel.params, new.values(), strict=True))
    return tirx.PrimFunc(list(params), outside, None, params, kernel.attrs)


def _frame(stmt: tirx.Stmt) -> tuple[list[tirx.Var], tirx.SBlock]:
    """The grid's variables, and the block in it."""
    grid: list[tirx.Var] = []
    while not isinstance(stmt, tirx.SBlockRealize) or stmt.block.name_hint == "root":
        if isinstance(stmt, tirx.For):
            grid.append(stmt.loop_var)
            stmt = stmt.body
        else:
            stmt = stmt.block.body
    return grid, stmt.block


def _renamed(loop: tirx.For, firsts: dict[tirx.Var, tirx.Var]) -> tirx.For | None:
    if loop.loop_var not in firsts:
        return None
    return tirx.For(firsts[loop.loop_var], loop.min, loop.extent, loop.kind, loop.body, loop.thread_binding)


class _Apart:
    """One of the statements in the grid. Programs of the grid don't see each other, so that what is left of a grid's
    dim may be walked in each statement by itself."""

    def __init__(self, apart: dict, new: dict, by_var: dict[tirx.Var, Sizes], firsts: dict[tirx.Var, tirx.Var]) -> None:
        self._apart, self._new, self._by_var, self._firsts = apart, new, by_var, firsts
        self._vars = {
            var: [
                firsts[var] if var in firsts and position == 0 else tirx.Var(f"{var.name}_{position}", "int32")
                for position in range(len(dim))
            ]
            for var, dim in by_var.items()
        }

    def run(self, stmt: tirx.Stmt) -> tirx.Stmt:
        """The statement over the new buffers."""
        stmt = ir_transform(stmt, None, self._access, ["tirx.BufferLoad", "tirx.BufferStore"])
        stmt = ir_transform(stmt, None, self._loop, ["tirx.For"])
        for var in self._firsts:
            stmt = parallel_nest(self._vars[var][1:], self._by_var[var][1:], stmt, tirx.ForKind.SERIAL)
        return substitute(stmt, {var: row_by_row(self._vars[var], sizes) for var, sizes in self._by_var.items()})

    def _access(self, node: tirx.BufferLoad | tirx.BufferStore) -> object:
        indices: list[tirx.PrimExpr] = []
        for index, dim in zip(node.indices, self._apart[node.buffer], strict=True):
            indices += self._vars[index] if len(dim) > 1 else [index]
        return with_indices(node, indices, self._new[node.buffer])

    def _loop(self, loop: tirx.For) -> tirx.Stmt | None:
        var = loop.loop_var
        if var not in self._by_var:
            return None
        return parallel_nest(self._vars[var], self._by_var[var], loop.body, tirx.ForKind.SERIAL)


@lru_cache(maxsize=1024)
def in_groups(analysis: Analysis) -> tuple[Refined, Analysis] | None:
    """The kernel with dims taken apart, and what its analysis finds; None where that lets axes split nothing more."""
    dims = [(name, dim) for name, buffer in analysis.kernel.params.items() for dim in range(len(buffer.shape))]
    whole = {dim for dim in dims if analysis.reason_whole(*dim)}
    for made in refined(analysis.kernel.func, [dim for dim in dims if dim in whole]) if whole else ():
        after = analyse(made.func)
        if {(name, dim) for name, dim in dims if after.reason_whole(name, made.outer(name, dim))} < whole:
            return made, after
    return None


def divides_groups(mesh: Mesh, made: Refined) -> bool:
    """Whether every axis divides the groups."""
    shapes = made.shapes()
    counts = [int(shapes[param][made.outer(param, dim)]) for param, dim in made.groups]
    return all(count % mesh.size(axis) == 0 for axis in mesh for count in counts)


def with_compound_dims(rule: OpRule, made: Refined, inputs: Sequence[str], outputs: Sequence[str]) -> OpRule:
    """The rule of the kernel with dims taken apart, as that of the kernel with its own dims."""
    sizes: dict[str, int] = {}
    unsplit: set[str] = set()

    def dims(param: str, found: Sequence[Dim]) -> tuple[Dim, ...]:
        merged: list[Dim] = []
        for parts in made.by_dim(param, list(enumerate(found))):
            if len(parts) == 1:
                merged.append(parts[0][1])
                continue
            names = [factor if isinstance(factor, str) else f"{param}_{at}" for at, factor in parts]
            unsplit.update(name for name, (_, factor) in zip(names, parts, strict=True) if factor is None)
            unsplit.update(names[1:])
            shape = made.shapes()[param]
            sizes.update({name: int(shape[at]) for name, (at, _) in zip(names, parts, strict=True)})
            merged.append(tuple(names))
        return tuple(merged)

    new_inputs = tuple(dims(name, found) for name, found in zip(inputs, rule.inputs, strict=True))
    new_outputs = tuple(dims(name, found) for name, found in zip(outputs, rule.outputs, strict=True))
    none: dict[tuple[int, int], Reaches] = {}
    return replace(rule, inputs=new_inputs, outputs=new_outputs, sizes=sizes, unsplit=frozenset(unsplit), windows=none)
