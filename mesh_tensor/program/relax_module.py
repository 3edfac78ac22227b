"""The Relax module that one device runs: a Program's steps as calls on tiles, collectives among them as calls of
registered functions.

Functions of the module stay functions: one for each way in which its calls were laid out.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any

import tvm
from tvm import ir, relax, tirx
from tvm.tirx.stmt_functor import substitute

from mesh_tensor.base.errors import refuse
from mesh_tensor.plan.ir import Scope, leaves
from mesh_tensor.rules.operator.call import packed, plain

from .from_graph import ModuleProgram, Piece
from .loop_step import LoopStep
from .program import ProgramValue
from .steps import AllocStep, CollectiveStep, FreeStep, KernelStep, OpStep, WaitStep

Numbered = list[tuple[int, Piece]]


def relax_module(made: ModuleProgram) -> ir.IRModule:
    """The local view of a module's function. It prints and parses as TVMScript."""
    return _ModuleWriter(made).module()


class _ModuleWriter:
    """Writes functions; `functions` are those that there are."""

    def __init__(self, made: ModuleProgram) -> None:
        self.made, self.builder = made, relax.BlockBuilder()
        self.functions: dict[ir.GlobalVar, relax.Function | tirx.PrimFunc] = {}
        self._by_hash: dict[tuple[str, int], list[ir.GlobalVar]] = {}
        last = {name: i for i, piece in enumerate(made.pieces) for name in piece.inputs}
        self._last_use = last | dict.fromkeys(leaves(made.result), len(made.pieces))
        self._shapes: dict[int, tuple[int, ...]] = {}  # by struct info
        self._infos: list[relax.TensorStructInfo] = []  # of those, so that they live

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a value's tile. Values that lie alike share their struct info."""
        info = self.made.tile(name)
        if id(info) not in self._shapes:
            self._infos.append(info)
            self._shapes[id(info)] = plain(info.shape)
        return self._shapes[id(info)]

    def module(self) -> ir.IRModule:
        """The function, and those that it calls."""
        name = self.made.program.name
        main = self._function(self.made.inputs, list(enumerate(self.made.pieces)), self.made.result, depth=0)
        main = main.with_attr("global_symbol", name)
        functions = {var: _named(var.name_hint, function) for var, function in self.functions.items()}
        return ir.IRModule({**functions, ir.GlobalVar(name): main})

    def _function(self, params: Sequence[str], pieces: Numbered, result: Any, depth: int) -> relax.Function:
        """A function on tiles that runs `pieces` and gives the tree of values `result`."""
        variables = [relax.Var(name, self.made.tile(name)) for name in params]
        builder = self.builder
        inner = [(scope, list(group)) for scope, group in groupby(pieces, lambda item: _scope_at(item[1], depth))]
        calls = {id(group): self._callee(scope, group, depth + 1) for scope, group in inner if scope is not None}
        builder._begin_dataflow_block()
        writer = _StepWriter(self, {**self.made.constants, **dict(zip(params, variables, strict=True))})
        for scope, group in inner:
            if scope is None:
                for _, piece in group:
                    writer.piece(piece)
            else:
                writer.call(*calls[id(group)])
        output = builder.emit_output(_tree(result, writer.tiles))
        block = builder._end_block()
        return builder.normalize(relax.Function(variables, relax.SeqExpr([block], output), output.struct_info))

    def _callee(self, scope: Scope, group: Numbered, depth: int) -> tuple[ir.GlobalVar, list[str], list[str]]:
        """The function of one call, with the values that go in and those that come out."""
        made = dict.fromkeys(name for _, piece in group for name in piece.outputs)
        taken = dict.fromkeys(name for _, piece in group for name in piece.inputs)
        params = [name for name in taken if name not in made and name not in self.made.constants]
        last = group[-1][0]
        results = [name for name in made if self._last_use.get(name, -1) > last]
        results = results or list(made)[-1:]  # of nothing: TVM does not parse an empty tuple
        function = self._function(params, group, tuple(results), depth)
        return self.unique(scope.function, function), params, results

    def unique(self, name: str, function: relax.Function | tirx.PrimFunc) -> ir.GlobalVar:
        """The function of the module that is this one, or a new one."""
        same = self._by_hash.setdefault((name, tvm.ir.structural_hash(function)), [])
        for var in same:
            if tvm.ir.structural_equal(self.functions[var], function):
                return var
        count = sum(len(found) for (base, _), found in self._by_hash.items() if base == name)
        var = ir.GlobalVar(name if count == 0 else f"{name}_{count}")
        relax.expr._update_struct_info(var, function.struct_info)
        self.functions[var] = function
        same.append(var)
        return var


class _StepWriter:
    """What steps mean in one function: calls that are bound. `tiles`: values' names -> expressions."""

    def __init__(self, module: _ModuleWriter, tiles: dict[str, relax.Expr]) -> None:
        self.tiles = tiles
        self._module, self._builder, self._values = module, module.builder, module.made.program.values
        self._shapes = {name: module.shape(name) for name in tiles}
        self._held: dict[str, relax.Expr] = {}  # what is in which storage
        self._places: dict[str, tirx.Var] = {}
        self._name = ""

    def piece(self, piece: Piece) -> None:
        """The calls of a piece; what it makes has the tensors' own dims."""
        self._name = piece.outputs[0]
        self._held = {self._values[name].storage: self.tiles[name] for name in piece.inputs}
        for step in piece.steps:
            step.mean(self)
        for name in piece.outputs:
            shape = self._module.shape(name)
            self.tiles[name], self._shapes[name] = self._shaped(name, shape), shape

    def call(self, callee: ir.GlobalVar, params: list[str], results: list[str]) -> None:
        """A call of a function of the module."""
        call = relax.Call(callee, [self.tiles[name] for name in params])
        made = self._builder.emit(call, f"{callee.name_hint}_result")
        self._bind(made, results, [self._module.shape(name) for name in results])

    def op(self, step: OpStep) -> None:
        """Nothing is left to infer: BlockBuilder.emit would take several times as long."""
        operands = zip(step.args, step.call.inputs, strict=True)
        expr = step.call.on([self._shaped(name, tensor.shape) for name, tensor in operands])
        var = relax.DataflowVar(self._builder.get_unique_name(step.results[0]), expr.struct_info)
        self._builder.emit_normalized(relax.VarBinding(var, expr))
        self._bind(var, step.results, [tensor.shape for tensor in step.call.outputs])

    def collective(self, step: CollectiveStep) -> None:
        """A call of a registered function."""
        src, dst = self._values[step.src], self._values[step.dst]
        layouts = [relax.StringImm(src.sharding.text()), relax.StringImm(dst.sharding.text())]
        args = [self._read(step.src), relax.ShapeExpr(src.shape), *layouts, relax.StringImm(", ".join(step.axes))]
        call = packed(f"mesh.{step.kind}", args, self._module.made.tile(step.dst))
        self._bind(self._builder.emit(call, self._name), [step.dst], [self._module.shape(step.dst)])

    def kernel(self, step: KernelStep) -> None:
        """A call of a local kernel: new tensors for what it writes, but for memory that holds something already."""
        values = self._values
        changed = [name for name in step.writes if values[name].storage in self._held]
        fresh = [name for name in step.writes if name not in changed]
        taken = [name for name in step.args if name not in fresh]
        tiles = [self._kept(values[name]) if name in changed else self._apart(name) for name in taken]
        callee = self._module.unique(f"{step.name}_local", _in_order(step, [*taken, *fresh]))
        infos = [relax.TensorStructInfo(values[name].tile_shape, values[name].dtype) for name in (*changed, *fresh)]
        numbers = relax.ShapeExpr([self._coordinates()[axis] for axis in step.axes]) if step.axes else None
        out = infos if len(infos) > 1 else infos[0]
        if changed:
            indices = [taken.index(name) for name in changed] + [-1] * len(fresh)
            call = relax.op.call_tir_inplace(callee, relax.Tuple(tiles), indices, out, numbers)
        else:
            call = relax.op.call_tir(callee, relax.Tuple(tiles), out, numbers)
        written = [*changed, *fresh]
        self._bind(self._builder.emit(call, self._name), written, [values[name].tile_shape for name in written])

    def loop(self, step: LoopStep) -> None:
        """Refused."""
        refuse(
            f"a loop ({step.where}, {step.times}) has no local view in Relax yet",
            fix="unroll it: write its steps one after the other in the module",
        )

    def wait(self, step: WaitStep) -> None:
        """A module's calls run one after the other."""

    def alloc(self, step: AllocStep) -> None:
        """Tensors come with their memory."""

    def free(self, step: FreeStep) -> None:
        """Tensors go with their memory."""

    def _read(self, name: str) -> relax.Expr:
        """A tile; one that nothing made has no content that counts."""
        if name not in self.tiles:
            value = self._values[name]
            zeros = relax.op.zeros(value.tile_shape, value.dtype)
            self._bind(self._builder.emit(zeros, name.split(".")[0]), [name], [value.tile_shape])
        return self.tiles[name]

    def _apart(self, name: str) -> relax.Expr:
        """A tile over its atoms."""
        self._read(name)
        return self._shaped(name, self._values[name].tile_shape)

    def _kept(self, value: ProgramValue) -> relax.Expr:
        """What is in a value's memory, over its atoms."""
        tile = self._held[value.storage]
        known = plain(tile.struct_info.shape)
        return tile if known == value.tile_shape else self._builder.emit(relax.op.reshape(tile, value.tile_shape))

    def _shaped(self, name: str, shape: tuple[int, ...]) -> relax.Expr:
        """A tile with the dims that are wanted: values may have their dims taken apart."""
        tile = self.tiles[name]
        return tile if self._shapes[name] == shape else self._builder.emit(relax.op.reshape(tile, shape))

    def _bind(self, var: relax.Var, names: Sequence[str], shapes: Sequence[tuple[int, ...]]) -> None:
        """The variable, or its fields, are these values, of these shapes."""
        is_tuple = isinstance(var.struct_info, relax.TupleStructInfo)
        for index, (name, shape) in enumerate(zip(names, shapes, strict=True)):
            tile = self._builder.emit(relax.TupleGetItem(var, index), name) if is_tuple else var
            self.tiles[name] = self._held[self._values[name].storage] = tile
            self._shapes[name] = shape

    def _coordinates(self) -> dict[str, tirx.Var]:
        """Where the device stands on each axis: known in each function from where it is asked for first."""
        mesh = self._module.made.program.mesh
        if not self._places:
            call = packed("mesh.coordinates", [relax.StringImm(", ".join(mesh))], relax.ShapeStructInfo(ndim=len(mesh)))
            self._places = {axis: tirx.Var(axis, "int64") for axis in mesh}
            self._builder.match_cast(self._builder.emit(call), relax.ShapeStructInfo(list(self._places.values())))
        return self._places


def _named(name: str, function: relax.Function | tirx.PrimFunc) -> relax.Function | tirx.PrimFunc:
    """A kernel is known by the name that it has in the module; the module's own functions are private."""
    return function.with_attr("global_symbol", name) if isinstance(function, tirx.PrimFunc) else function


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


def _tree(tree: Any, tiles: dict[str, relax.Expr]) -> relax.Expr:
    """A tree of names as an expression; a tuple of one is a tuple."""
    return tiles[tree] if isinstance(tree, str) else relax.Tuple([_tree(item, tiles) for item in tree])


def _scope_at(piece: Piece, depth: int) -> Scope | None:
    return piece.scopes[depth] if len(piece.scopes) > depth else None
