"""Nodes whose operator is a kernel, in the local module: calls of the local kernels, collectives between them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tvm import ir, relax, tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.lowering.local_calls import packed, tile_shape
from mesh_tensor.plan.atoms import Atoms
from mesh_tensor.plan.explicit import Form, Run

from .kernel_steps import filled, kernel_program, padded_dims
from .steps import CollectiveStep, KernelStep, Program, Value, of_kinds

# The function of the module that is this one, under that name or a numbered one.
AddKernel = Callable[[str, tirx.PrimFunc], ir.GlobalVar]
Coordinates = Callable[[], Mapping[str, tirx.Var]]


class KernelCalls:
    """Emits one node's calls. `coordinates` gives the variables that hold this device's coordinates, by axis."""

    def __init__(
        self, step: Run, atoms: Atoms, builder: relax.BlockBuilder, add_kernel: AddKernel, coordinates: Coordinates
    ) -> None:
        self._step, self._builder, self._add_kernel, self._coordinates = step, builder, add_kernel, coordinates
        self._atoms = atoms
        self._program: Program = kernel_program(step, atoms)
        self._made: dict[str, relax.Expr] = {}
        self._by_storage: dict[str, relax.Expr] = {}

    def emit(self, tiles: Sequence[relax.Expr]) -> list[relax.Expr]:
        """Bind what the node makes of its operands' tiles."""
        step, program = self._step, self._program
        kernel = step.node.kernel
        assert kernel is not None
        names = [str(kernel.buffer_map[param].name) for param in kernel.params]
        by_name = {parameter.name: parameter for parameter in program.parameters}
        for name, tile in zip(names, tiles, strict=False):
            if name in by_name and (tensor := by_name[name].input) is not None:
                self._bind(tensor, self._shaped(tile, program.values[tensor].tile_shape))
        emitted: dict[type, Callable[[Any], None]] = {KernelStep: self._kernel, CollectiveStep: self._collective}
        of_kinds(program.steps, emitted)
        outputs = [by_name[name].output for name in names[len(step.inputs) :]]
        results = zip(step.outputs, outputs, strict=True)
        return [self._shaped(self._result(f, str(n)), tile_shape(f, self._atoms)) for f, n in results]

    def _shaped(self, tile: relax.Expr, shape: tuple[int, ...]) -> relax.Expr:
        """The tile with the dims that are wanted: kernels may know them taken apart."""
        known = tuple(int(size) for size in tile.struct_info.shape)
        return tile if known == shape else self._builder.emit(relax.op.reshape(tile, shape))

    def _bind(self, tensor: str, expr: relax.Expr) -> None:
        self._made[tensor] = self._by_storage[self._program.values[tensor].storage] = expr

    def _kernel(self, step: KernelStep) -> None:
        """A call of a local kernel: new tensors for what it writes, but for memory that holds something already."""
        values = self._program.values
        changed = [name for name in step.writes if values[name].storage in self._by_storage]
        fresh = [name for name in step.writes if name not in changed]
        taken = [name for name in step.args if name not in fresh]
        tiles = [self._by_storage[values[name].storage] if name in changed else self._read(name) for name in taken]
        callee = self._add_kernel(f"{step.name}_local", _in_order(step, [*taken, *fresh]))
        infos = [_tile_info(values[name]) for name in (*changed, *fresh)]
        where = self._coordinates() if step.axes else {}
        numbers = relax.ShapeExpr([where[axis] for axis in step.axes]) if step.axes else None
        out = infos if len(infos) > 1 else infos[0]
        if changed:
            indices = [taken.index(name) for name in changed] + [-1] * len(fresh)
            call = relax.op.call_tir_inplace(callee, relax.Tuple(tiles), indices, out, numbers)
        else:
            call = relax.op.call_tir(callee, relax.Tuple(tiles), out, numbers)
        made = self._builder.emit(call, self._step.outputs[0].name)
        for index, name in enumerate((*changed, *fresh)):
            self._bind(name, self._builder.emit(relax.TupleGetItem(made, index)) if len(infos) > 1 else made)

    def _read(self, name: str) -> relax.Expr:
        """A tile that a kernel takes; one that nothing made has no content that counts."""
        if name not in self._made:
            value = self._program.values[name]
            self._bind(name, self._builder.emit(relax.op.zeros(value.tile_shape, value.dtype), name.split(".")[0]))
        return self._made[name]

    def _collective(self, step: CollectiveStep) -> None:
        src, dst = self._program.values[step.src], self._program.values[step.dst]
        layouts = [relax.StringImm(src.sharding.text()), relax.StringImm(dst.sharding.text())]
        args = [self._read(step.src), relax.ShapeExpr(src.shape), *layouts, relax.StringImm(", ".join(step.axes))]
        call = packed(f"mesh.{step.kind}", args, _tile_info(dst))
        self._bind(step.dst, self._builder.emit(call, self._step.outputs[0].name))

    def _result(self, form: Form, tensor: str) -> relax.Expr:
        expr, value = self._made[tensor], self._program.values[tensor]
        if dims := padded_dims(value):
            return self._builder.emit(filled(expr, value, dims), form.name)
        if expr.struct_info.dtype == form.dtype:
            return expr
        return self._builder.emit(relax.op.astype(expr, form.dtype), form.name)


def _tile_info(value: Value) -> relax.TensorStructInfo:
    return relax.TensorStructInfo(value.tile_shape, value.dtype)


def _in_order(step: KernelStep, args: Sequence[str]) -> tirx.PrimFunc:
    """The kernel with its tensors in this order, and coordinates as Relax has numbers: int64."""
    func = step.func
    tensors = [param for param in func.params if param in func.buffer_map]
    by_name = dict(zip(step.args, tensors, strict=True))
    wide = {param: tirx.Var(param.name, "int64") for param in func.params if param not in func.buffer_map}
    body = substitute(func.body, {param: tirx.Cast(param.dtype, var) for param, var in wide.items()})
    params = [*(by_name[name] for name in args), *wide.values()]
    made = tirx.PrimFunc(params, body, func.ret_type, func.buffer_map, func.attrs)
    return made.without_attr("global_symbol")
