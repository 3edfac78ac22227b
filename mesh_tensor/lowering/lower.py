"""lower, and the same as a TVM pass: the local view as one function, kernels and collectives one after the other, as a
person reads it. Collectives are registered operators in the `mesh.` namespace, each in a block named for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import tvm_ffi
from tvm import ir, s_tir, tirx, transform

from mesh_tensor.annotations.annotate import INFO_ATTR
from mesh_tensor.base.collectives import COLLECTIVES
from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.plan import Move
from mesh_tensor.tir.nodes import nodes
from mesh_tensor.tir.rewrite import exchange_buffers, region_call, sequence
from mesh_tensor.tir.tile_position import register_op
from mesh_tensor.tir.views import declared

from .cut import make_param
from .grids import LoweredGrids
from .local_view import Collective, LocalKernel, Tensor
from .pipeline import Lowered, lower_kernel
from .splits import coordinate_var

# A pass is called through TVM's C++: what it raises comes out as the class that is registered under its name.
tvm_ffi.register_error("MeshTensorError", MeshTensorError)


def lower(func: tirx.PrimFunc, *, strict: bool = False, view: str = "auto") -> ir.IRModule:
    """Lower an annotated TileLang kernel in global view to local view.

    Args:
        func: the kernel, annotated by `annotate` or `annotate_mesh_tensor_info`.
        strict: refuse what would have to be gathered or exchanged instead of moving it.
        view: `global` for a kernel over whole tensors, `local` for one that sizes its loops with `get_tile_shape` and
            so is over tiles already, `auto` to see it from the loops.

    Returns:
        A module with one function over tiles. Collectives are `mesh.*` calls in blocks named for them. After the
        kernel's own parameters come the sizes that no tile tells, then the device's coordinates that the kernel uses.

    Raises:
        MeshTensorError: no or invalid annotations, not one TileLang kernel, or refused by `strict`.
    """
    lowered = lower_kernel(func, strict=strict, view=view)
    return ir.IRModule({lowered.name: assemble(lowered)})


def LowerToLocalView(*, strict: bool = False) -> transform.Pass:
    """`lower` as a pass: every annotated function of a module is lowered, the others stay as they are."""

    @transform.module_pass(opt_level=0, name="mesh_tensor.LowerToLocalView")
    def run(mod: ir.IRModule, _: transform.PassContext) -> ir.IRModule:
        functions = {}
        for name, func in mod.functions.items():
            annotated = isinstance(func, tirx.PrimFunc) and func.attrs is not None and INFO_ATTR in func.attrs
            functions[name] = assemble(lower_kernel(func, strict=strict)) if annotated else func
        return ir.IRModule(functions, attrs=mod.attrs)

    return run


def assemble(lowered: Lowered | LoweredGrids) -> tirx.PrimFunc:
    """One PrimFunc over tiles: the kernel's parameters, its scalars, then the device's coordinates that its kernels
    use.

    Workspaces are allocated in its root block; every collective is a block named for it."""
    return _Assembler(lowered).run()


class _Assembler:
    def __init__(self, lowered: Lowered | LoweredGrids):
        self.lowered = lowered
        self.buffers: dict[str, tirx.Buffer] = {}
        self.handles: dict[str, tirx.Var] = {}
        self.axes = {
            axis: coordinate_var(axis)
            for axis in lowered.mesh.axis_names
            if any(axis in kernel.axes for kernel in lowered.kernels)
        }

    def run(self) -> tirx.PrimFunc:
        lowered = self.lowered
        params, owned = [], set()
        for name, given, left in lowered.parameters:
            tensor = lowered.tensors[str(left or given)]
            handle = self._declare(tensor, name)
            params.append(handle)
            owned.add(tensor.storage)
            if given is not None and lowered.tensors[given].storage != tensor.storage:
                params.append(self._declare(lowered.tensors[given], f"{name}_in"))
                owned.add(lowered.tensors[given].storage)
        workspaces = []
        for tensor in lowered.tensors.values():
            if tensor.storage not in owned and tensor.storage not in self.buffers:
                self._declare(tensor, tensor.storage.replace(".", "_"))
                workspaces.append(self.buffers[tensor.storage])
        kinds: dict[type, Callable[[Any], tirx.Stmt]] = {LocalKernel: self._kernel, Collective: self._collective}
        body = sequence([kinds[type(step)](step) for step in lowered.steps])
        root = tirx.SBlock([], [], [], "root", body, None, workspaces)
        realize = tirx.SBlockRealize([], tirx.const(True, "bool"), root)
        sizes = self._sizes()
        buffer_map = {h: self.buffers[s] for s, h in self.handles.items() if h in params}
        func = tirx.PrimFunc([*params, *lowered.scalars, *sizes, *self.axes.values()], realize, None, buffer_map)
        return func.with_attr("global_symbol", lowered.name)

    def _declare(self, tensor: Tensor, name: str) -> tirx.Var:
        handle, buffer = make_param(name, list(tensor.sharding.tile_shape(tensor.shape)), tensor.dtype)
        self.buffers[tensor.storage] = buffer
        self.handles[tensor.storage] = handle
        return handle

    def _buffer(self, tensor: str) -> tirx.Buffer:
        return self.buffers[self.lowered.tensors[tensor].storage]

    def _collective(self, step: Collective) -> tirx.Stmt:
        before = self.lowered.tensors[step.src].sharding
        return collective_block(step.move, self._buffer(step.src), self._buffer(step.dst), before)

    def _kernel(self, step: LocalKernel) -> tirx.Stmt:
        func = s_tir.renew_defs(declared(step.func))  # kernels share variables, one function may not
        kernel = func.body.block.body if isinstance(func.body, tirx.SBlockRealize) else func.body
        tensors = [p for p in func.params if p in func.buffer_map]
        mapping = {func.buffer_map[p]: self._buffer(arg) for p, arg in zip(tensors, step.args, strict=True)}
        values = _renamed_sizes(func, step.func)
        values.update(
            zip(func.params[len(func.params) - len(step.axes) :], (self.axes[a] for a in step.axes), strict=True)
        )
        return _with_buffers(tirx.stmt_functor.substitute(kernel, values), mapping)

    def _sizes(self) -> list[tirx.Var]:
        told = {d for b in self.buffers.values() for d in b.shape if isinstance(d, tirx.Var)}
        told |= {*self.lowered.scalars, *self.axes.values()}
        sizes = [size for tensor in self.lowered.tensors.values() for size in tensor.shape]
        return list(dict.fromkeys(var for size in sizes for var in nodes(size, tirx.Var) if var not in told))


def _renamed_sizes(renewed: tirx.PrimFunc, func: tirx.PrimFunc) -> dict[tirx.Var, tirx.Var]:
    """From the renewed function's scalars and symbolic sizes back to those of `func`, which all kernels share."""
    pairs = list(zip(renewed.params, func.params, strict=True))
    sizes = [
        size
        for new, old in pairs
        if old in func.buffer_map
        for size in zip(renewed.buffer_map[new].shape, func.buffer_map[old].shape, strict=True)
    ]
    return {new: old for new, old in (*pairs, *sizes) if isinstance(old, tirx.Var) and old.dtype != "handle"}


def _with_buffers(stmt: tirx.Stmt, mapping: dict[tirx.Buffer, tirx.Buffer]) -> tirx.Stmt:
    """The statement with other buffers in place of a kernel's parameters, and of their data."""
    return tirx.stmt_functor.substitute(exchange_buffers(stmt, mapping), {a.data: b.data for a, b in mapping.items()})


#: Every collective that the language has; a broadcast is there for kernels' authors and for runtimes.
NAMES = (*COLLECTIVES, "broadcast")


def register() -> None:
    """Make the operators known to TVM; doing so again changes nothing."""
    for name in NAMES:
        register_op(f"mesh.{name}", f"mesh collective {name}", tirx.CallEffectKind.Opaque)


def collective_block(move: Move, src: tirx.Buffer, dst: tirx.Buffer, before: Sharding | None = None) -> tirx.Stmt:
    """The block that turns `src` into `dst`. Of a permute or an exchange, `before` says how `src` lies."""
    args: list[object] = [_whole(src, 1), _whole(dst, 2)]
    if COLLECTIVES[move.kind].is_direct:
        args += [tirx.StringImm(str(before)), tirx.StringImm(str(move.after))]
    if move.op is not None:
        args.append(tirx.StringImm(move.op))
    args += [dim for dim in (move.src_dim, move.dst_dim) if dim is not None]
    args += [tirx.StringImm(axis) for axis in move.axes]
    call = tirx.Call(
        "handle", ir.Op.get(f"mesh.{move.kind}"), [tirx.convert(a) if isinstance(a, int) else a for a in args]
    )
    block = tirx.SBlock([], [], [], move.kind, tirx.Evaluate(call))
    return tirx.SBlockRealize([], tirx.const(True, "bool"), block)


def _whole(buffer: tirx.Buffer, mode: int) -> tirx.Call:
    return region_call(buffer, [tirx.IntImm("int32", 0)] * len(buffer.shape), buffer.shape, mode)


register()
