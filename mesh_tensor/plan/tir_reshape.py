"""Kernels that only regroup dims: the operator reshape, written with divisions."""

from __future__ import annotations

import math

from tvm import arith, tirx
from tvm.ir import Range

from mesh_tensor.tir.nodes import nodes

from .tir_nests import is_count, loaded


def is_reshape(kernel: tirx.PrimFunc) -> bool:
    """Whether a kernel of one operand and one result leaves each element at its place in row-major order."""
    buffers = [kernel.buffer_map[param] for param in kernel.params]
    stores, around = nodes(kernel.body, tirx.BufferStore), nodes(kernel.body, tirx.For)
    loops = {loop.loop_var: int(loop.extent) for loop in around if is_count(loop.min, loop.extent)}
    if len(buffers) != 2 or len(stores) != 1 or len(loops) < len(around) or nodes(kernel.body, tirx.IfThenElse):
        return False
    (store,), (source, target) = stores, buffers
    load = store.value
    if not isinstance(load, tirx.BufferLoad) or not load.buffer.same_as(source) or not store.buffer.same_as(target):
        return False
    if loaded(load.indices) or not _reaches_all(store, loops) or math.prod(_shape(source)) != math.prod(_shape(target)):
        return False
    analyzer = arith.Analyzer()
    for var, extent in loops.items():
        analyzer.bind(var, Range(0, extent))
    return analyzer.can_prove_equal(_position(source, load.indices), _position(target, store.indices))


def _reaches_all(store: tirx.BufferStore, loops: dict[tirx.Var, int]) -> bool:
    """Whether each index is the variable of a loop over the whole dim, of no other, or 0 in a dim of size 1."""
    walked = [index for index in store.indices if index in loops]
    whole = all(
        loops[index] == size if index in loops else size == 1
        for index, size in zip(store.indices, _shape(store.buffer), strict=True)
    )
    return whole and len(set(walked)) == len(walked)


def _position(buffer: tirx.Buffer, indices: list[tirx.PrimExpr]) -> tirx.PrimExpr:
    position: tirx.PrimExpr = tirx.IntImm("int32", 0)
    for index, size in zip(indices, _shape(buffer), strict=True):
        position = position * size + index
    return position


def _shape(buffer: tirx.Buffer) -> tuple[int, ...]:
    return tuple(int(size) for size in buffer.shape)
