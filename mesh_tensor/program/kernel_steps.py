"""Nodes whose operator is a kernel, in a Program: what the lowering of kernels makes of them, spliced in."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from typing import Any

from tvm import relax, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.lowering.pipeline import lower_kernel
from mesh_tensor.plan.atoms import Atoms, plain_sharding
from mesh_tensor.plan.explicit import Form, Run
from mesh_tensor.plan.tir_atoms import plain_dims, taken_apart
from mesh_tensor.plan.tir_rule import analysed
from mesh_tensor.rules.kernel.factor_derivation import Dim
from mesh_tensor.rules.operator.call import op_call, packed

from .from_kernel import build_program
from .program import Program, ProgramValue
from .steps import CollectiveStep, KernelStep, OpStep, Step, of_kinds


def kernel_program(step: Run, atoms: Atoms) -> Program:
    """The Program of a node's kernel, which splits what the plan says, for operands and results in the layouts of the
    step's forms. Parts of sums that the kernel only carries through are no concern of its."""
    kernel = step.node.kernel
    assert kernel is not None
    carried = any(form.sharding.partial for form in step.inputs)
    rule, plain_places = atoms.rules[step.node], plain_dims(analysed(kernel))
    layouts, sizes = [], []
    split: dict[str, Dim] = {}
    forms = (*step.inputs, *step.outputs)
    walked = zip((*rule.rule.inputs, *rule.rule.outputs), (*rule.inputs, *rule.outputs), strict=True)
    for param, form, (factors, of_atoms) in zip(kernel.params, forms, walked, strict=True):
        name, dims = str(kernel.buffer_map[param].name), atoms.of[form.value]
        # Dims of one factor have the same atoms; of others, that one loop walks, nothing is known.
        apart = [factor is not None and (name, d) in plain_places for d, factor in enumerate(factors)]
        sizes.append(tuple(dim if a else (math.prod(dim),) for a, dim in zip(apart, dims, strict=True)))
        parts = [[(n,) for n in dim] if a else [dim] for a, dim in zip(apart, dims, strict=True)]
        own = atoms.on_device(form.value, form.sharding)
        plain = plain_sharding(own, tuple(part for dim in parts for part in dim))
        assert plain is not None, f"{step.node.where}: the tiles of {form.name} are no contiguous parts"
        layouts.append(plain.complete if carried else plain)
        for axis, factor in step.split.items():
            if factor in of_atoms and (dim := plain.dim_of(axis)) is not None:
                split.setdefault(axis, (name, dim))
    if any(len(dim) > 1 for dims in sizes for dim in dims):
        kernel = taken_apart(kernel, tuple(sizes))
    return _program(kernel, layouts[0].mesh, tuple(layouts), tuple(split.items()))


@lru_cache(maxsize=1024)
def _program(
    kernel: tirx.PrimFunc, mesh: Mesh, layouts: tuple[Sharding, ...], split: tuple[tuple[str, Dim], ...]
) -> Program:
    names = [str(kernel.buffer_map[param].name) for param in kernel.params]
    func = annotate(kernel, mesh, dict(zip(names, layouts, strict=True)))
    return build_program(lower_kernel(func, view="global", split=dict(split)))


def padded_dims(value: ProgramValue) -> tuple[int, ...]:
    """The dims along which tiles of integers have padding. A kernel leaves it as it found it, and what is no number of
    the computation may not be used as an index or to divide by; with floats that does no harm."""
    if is_float(value.dtype):
        return ()
    tile = zip(value.shape, value.tile_shape, strict=True)
    return tuple(d for d, (size, part) in enumerate(tile) if size != part * value.sharding.num_shards(d))


def filled(tile: relax.Expr, value: ProgramValue, dims: tuple[int, ...]) -> relax.Expr:
    """The tile of a value with zeros as padding."""
    args = [tile, relax.ShapeExpr(value.shape), relax.StringImm(value.sharding.text())]
    return packed("mesh.fill_padding", [*args, relax.ShapeExpr(dims), relax.StringImm("sum")], tile.struct_info)


class KernelSteps:
    """The steps of one node. `values` has its forms, and gets what else there is."""

    def __init__(self, step: Run, atoms: Atoms, values: dict[str, ProgramValue]) -> None:
        self._step, self._atoms, self._values = step, atoms, values
        self._program = kernel_program(step, atoms)
        self._check_devices()
        self._prefix = step.outputs[0].name
        self._names: dict[str, str] = {}
        self._storages: dict[str, str] = {}

    def _check_devices(self) -> None:
        """What the kernel takes for the same on devices may not be, in a manual computation: they exchange nothing."""
        step, moves = self._step, self._program.collectives
        forms = [form.value for form in (*step.inputs, *step.outputs) if form.value in self._atoms.devices]
        if forms and moves:
            refuse(
                [f"{move.words} is needed in its middle" for move in moves],
                where=f"{step.node.where}, a kernel in a manual computation",
                fix="replicate its operands over the axes that are not manual, or make these manual, too",
            )

    def steps(self) -> Iterator[Step]:
        """Kernels and collectives; and around them what makes one dim of several atoms, and the dtype of wide parts."""
        program, step = self._program, self._step
        kernel = step.node.kernel
        assert kernel is not None
        by_name = {parameter.name: parameter for parameter in program.parameters}
        names = [str(kernel.buffer_map[param].name) for param in kernel.params]
        for name, form in zip(names, step.inputs, strict=False):
            if name in by_name and (tensor := by_name[name].input) is not None:
                yield from self._take(form, tensor)
        after = []
        for name, form in zip(names[len(step.inputs) :], step.outputs, strict=True):
            tensor = by_name[name].output
            assert tensor is not None
            after += self._give(form, tensor)
        for tensor, value in program.values.items():
            if tensor not in self._names:
                storage = self._storages.setdefault(value.storage, self._named(value.storage))
                self._add(tensor, self._named(tensor), storage)
        renamed: dict[type, Callable[[Any], Step]] = {KernelStep: self._kernel, CollectiveStep: self._collective}
        yield from of_kinds(program.steps, renamed)
        yield from after

    def _kernel(self, step: KernelStep) -> Step:
        names = self._names
        writes = tuple(names[name] for name in step.writes)
        return replace(step, args=tuple(names[name] for name in step.args), writes=writes)

    def _collective(self, step: CollectiveStep) -> Step:
        reason = f"{self._step.node.where} ({self._program.name}): {step.reason}"
        return replace(step, src=self._names[step.src], dst=self._names[step.dst], reason=reason)

    def _take(self, form: Form, tensor: str) -> Iterator[Step]:
        if self._is_same(form, tensor):
            self._names[tensor] = form.name
            self._storages[self._program.values[tensor].storage] = self._values[form.name].storage
            return
        inner = self._named(tensor)
        self._storages[self._program.values[tensor].storage] = inner
        self._add(tensor, inner, inner)
        yield self._converted(form.name, inner)

    def _give(self, form: Form, tensor: str) -> list[Step]:
        storage = self._program.values[tensor].storage
        if self._is_same(form, tensor) and not padded_dims(self._program.values[tensor]):
            self._names[tensor], self._storages[storage] = form.name, self._values[form.name].storage
            return []
        inner = self._named(tensor)
        self._storages[storage] = inner
        self._add(tensor, inner, inner)
        if dims := padded_dims(self._values[inner]):
            return [self._filled(inner, form.name, dims)]
        return [self._converted(inner, form.name)]

    def _filled(self, src: str, dst: str, dims: tuple[int, ...]) -> OpStep:
        value = self._values[src]
        tile = relax.Var(src, relax.TensorStructInfo(value.tile_shape, value.dtype))
        call = op_call(relax.BlockBuilder().normalize(filled(tile, value, dims)))
        return OpStep(call, (src,), (dst,), frozenset((dst,)), 0, self._step.node.where)

    def _is_same(self, form: Form, tensor: str) -> bool:
        mine, its = self._values[form.name], self._program.values[tensor]
        return mine.shape == its.shape and mine.dtype == its.dtype

    def _converted(self, src: str, dst: str) -> OpStep:
        """`dst`: the tiles of `src` in its own shape and dtype."""
        before, after = self._values[src], self._values[dst]
        expr: relax.Expr = relax.Var(src, relax.TensorStructInfo(before.tile_shape, before.dtype))
        if before.dtype == after.dtype:
            expr = relax.op.reshape(expr, after.tile_shape)
        else:
            expr = relax.op.astype(expr, after.dtype)
        call = op_call(relax.BlockBuilder().normalize(expr))
        return OpStep(call, (src,), (dst,), frozenset((dst,)), 0, self._step.node.where)

    def _named(self, tensor: str) -> str:
        return f"{self._prefix}.{tensor}"

    def _add(self, tensor: str, name: str, storage: str) -> None:
        value = self._program.values[tensor]
        self._names[tensor] = name
        self._values[name] = replace(value, name=name, storage=storage)
