"""From a re-targeted kernel to what TileLang's C code generator prints right.

That generator knows flat buffers only, has no bfloat16, prints six digits of a float, evaluates the operands of min and
max twice, computes small integers in C's int, and moves `if_then_else` out of the expression that it is part of. So:
indices become flat and 64 bits wide; 16-bit and 8-bit floats are stored as bit patterns and computed in float32,
rounded after every operation; bools are stored as bytes; math, min, max and integer division are calls into the headers
in `csrc`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tvm import ir, tirx

from mesh_tensor.base.dtypes import itemsize
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine_presets import CPU
from mesh_tensor.tir.nodes import function_name
from mesh_tensor.tir.rewrite import sequence

from .dtypes import LegalExpr, c_name, pointer_type, storage_dtype
from .exprs import const

_STACK_BYTES = CPU.tuning.stack


@dataclass(frozen=True)
class Scratch:
    """A buffer of the kernel's own that is large, or shared by all programs: it becomes a parameter."""

    name: str
    dtype: str
    size: int


@dataclass(frozen=True)
class CKernel:
    """A function for the C code generator: `func` takes the data pointers and scalars of `params` in order, then the
    values of `sizes`, then `workspaces`. `reports` are what it prints
    and asserts."""

    func: tirx.PrimFunc
    params: tuple[tirx.Var, ...]
    sizes: tuple[tirx.Var, ...]
    workspaces: tuple[Scratch, ...]
    gemms: tuple[str, ...]
    reports: tuple[str, ...]


def legalize_for_c(func: tirx.PrimFunc, symbol: str) -> CKernel:
    """`func`, a re-targeted kernel, as a function named `symbol` that TileLang's C code generator prints right."""
    return _Legalize(func).run(symbol)


class _Legalize:
    def __init__(self, func: tirx.PrimFunc) -> None:
        self._func = func
        self._expr = LegalExpr(self._flat, function_name(func))
        self._pointers: dict[tirx.Var, tirx.Var] = {}
        self._flat_buffers: dict[tirx.Buffer, tirx.Buffer] = {}
        self._workspaces: list[tuple[tirx.Var, Scratch]] = []
        self._table: dict[type, Callable[..., tirx.Stmt | None]] = {
            tirx.SeqStmt: self._sequence,
            tirx.For: self._for,
            tirx.While: lambda s: tirx.While(self._expr(s.condition), self._body(s.body)),
            tirx.IfThenElse: self._if,
            tirx.Bind: lambda s: tirx.Bind(*self._expr.bind(s.var, s.value)),
            tirx.BufferStore: self._store,
            tirx.Evaluate: self._evaluate,
            tirx.AllocBuffer: self._alloc,
        }

    def run(self, symbol: str) -> CKernel:
        func = self._func
        params: list[tirx.Var] = []
        for param in func.params:
            buffer = func.buffer_map.get(param)
            params.append(self._expr.fresh(param) if buffer is None else self._pointer(buffer.data, buffer.dtype))
        sizes = size_variables(func)
        size_params = [self._expr.fresh(size) for size in sizes]
        body = self._body(func.body)
        all_params = [*params, *size_params, *(var for var, _ in self._workspaces)]
        flat = tirx.PrimFunc(all_params, body, ir.PrimType("void"), {}, None).with_attr({"global_symbol": symbol})
        workspaces = tuple(workspace for _, workspace in self._workspaces)
        return CKernel(
            flat, tuple(func.params), sizes, workspaces, tuple(sorted(self._expr.gemms)), tuple(self._expr.reports)
        )

    def _stmt(self, stmt: tirx.Stmt) -> tirx.Stmt | None:
        return self._table[type(stmt)](stmt)

    def _body(self, stmt: tirx.Stmt) -> tirx.Stmt:
        return self._stmt(stmt) or tirx.Evaluate(const(0, "int32"))

    def _sequence(self, stmts: tirx.SeqStmt) -> tirx.Stmt | None:
        kept = [stmt for stmt in map(self._stmt, stmts.seq) if stmt is not None]
        return sequence(kept) if kept else None

    def _for(self, loop: tirx.For) -> tirx.Stmt:
        begin, extent = self._expr(loop.min), self._expr(loop.extent)
        step = None if loop.step is None else self._expr(loop.step)
        var = self._expr.fresh(loop.loop_var)
        return tirx.For(var, begin, extent, tirx.ForKind.SERIAL, self._body(loop.body), step=step)

    def _if(self, branch: tirx.IfThenElse) -> tirx.Stmt:
        else_case = None if branch.else_case is None else self._stmt(branch.else_case)
        return tirx.IfThenElse(self._expr(branch.condition), self._body(branch.then_case), else_case)

    def _store(self, store: tirx.BufferStore) -> tirx.Stmt:
        flat, index = self._flat(store.buffer, list(store.indices))
        return tirx.BufferStore(flat, self._expr.stored(store.value, store.buffer.dtype), [index])

    def _evaluate(self, stmt: tirx.Evaluate) -> tirx.Stmt:
        return tirx.Evaluate(self._expr(stmt.value))

    def _alloc(self, alloc: tirx.AllocBuffer) -> tirx.Stmt | None:
        buffer = alloc.buffer
        size = 1
        for extent in buffer.shape:
            if not isinstance(extent, tirx.IntImm):
                refuse(
                    f"buffer '{buffer.name}' has no constant size: {', '.join(map(str, buffer.shape))}",
                    where=f"kernel '{self._func.attrs['global_symbol']}', target 'c'",
                    fix="give buffers inside a kernel constant shapes",
                )
            size *= int(extent)
        dtype = storage_dtype(buffer.dtype)
        if size * itemsize(dtype) <= _STACK_BYTES and buffer.scope() != "global":
            return tirx.AllocBuffer(
                tirx.decl_buffer([size], dtype, buffer.name, self._pointer(buffer.data, buffer.dtype))
            )
        workspace = Scratch(f"mt_block{len(self._workspaces)}_{buffer.name}", dtype, size)
        pointer = tirx.Var(workspace.name, pointer_type(dtype))
        self._pointers[buffer.data] = pointer
        self._workspaces.append((pointer, workspace))
        return None

    def _pointer(self, data: tirx.Var, dtype: str) -> tirx.Var:
        if data not in self._pointers:
            self._pointers[data] = tirx.Var(c_name(data.name), pointer_type(dtype))
        return self._pointers[data]

    def _flat(self, buffer: tirx.Buffer, indices: list[tirx.PrimExpr]) -> tuple[tirx.Buffer, tirx.PrimExpr]:
        if buffer not in self._flat_buffers:
            pointer = self._pointer(buffer.data, buffer.dtype)
            dtype = storage_dtype(buffer.dtype)
            self._flat_buffers[buffer] = tirx.decl_buffer([const(1, "int64")], dtype, buffer.name, pointer)
        strides = list(buffer.strides)
        if not strides and len(buffer.shape):
            strides = [const(1, "int64")]
            for size in reversed(list(buffer.shape)[1:]):
                strides.insert(0, strides[0] * self._wide(size))
        offset = const(0, "int64") if buffer.elem_offset is None else self._wide(buffer.elem_offset)
        for index, stride in zip(indices, strides, strict=True):
            offset = offset + self._wide(index) * self._wide(stride)
        return self._flat_buffers[buffer], offset

    def _wide(self, expr: tirx.PrimExpr) -> tirx.PrimExpr:
        """An index in 64 bits: no product of sizes overflows, and compilers see how addresses grow with a loop."""
        if isinstance(expr, tirx.IntImm):
            return const(expr.value, "int64")
        if isinstance(expr, tirx.Add | tirx.Sub | tirx.Mul) and expr.dtype == "int32":
            a, b = self._wide(expr.a), self._wide(expr.b)
            return {tirx.Add: a + b, tirx.Sub: a - b, tirx.Mul: a * b}[type(expr)]
        legal = self._expr(expr)
        return legal if legal.dtype == "int64" else tirx.Cast("int64", legal)


def size_variables(func: tirx.PrimFunc) -> tuple[tirx.Var, ...]:
    """The sizes and strides of parameters that are no parameters themselves, in the order of their first use."""
    buffers = [func.buffer_map[param] for param in func.params if param in func.buffer_map]
    exprs = [size for buffer in buffers for size in [*buffer.shape, *buffer.strides]]
    found = dict.fromkeys(var for expr in exprs for var in tirx.analysis.undefined_vars(expr))
    return tuple(var for var in found if var not in set(func.params))
