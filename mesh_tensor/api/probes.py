"""Small programs that are timed to know a machine: chains of one operator, a block of a model, two kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import tilelang.language as T  # type: ignore[import-untyped]
import torch
from tvm import ir, relax, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.vjp import VJP, vjp_call

from .compile import compile
from .module import distribute_module

Shapes = Sequence[tuple[int, ...]]
Emit = Callable[..., relax.Expr]

_SHORT, _LONG = 2, 10  # steps of a chain
_ops = relax.op


@dataclass(frozen=True)
class Probe:
    """An operator on its own result, and on other operands; `shapes` of all, by the length of a side. `flops`: of what
    is bound by them."""

    name: str
    emit: Emit
    shapes: Callable[[int], Shapes] = lambda side: [(side, side)]
    flops: Callable[[int], int] | None = None


def _row(side: int) -> Shapes:
    return [(side, side), (side,), (side,)]


def _two(side: int) -> Shapes:
    return [(side, side), (side, side)]


def _heads(side: int) -> Shapes:
    return [(2, side, 4, side // 4)] * 3


def _image(side: int) -> Shapes:
    return [(1, 16, side, side), (16, 16, 3, 3)]


def _channels(side: int) -> Shapes:
    return [(1, 16, side // 4, side // 4), (16,), (16,)]


def _gradient(x: relax.Expr, seed: relax.Expr) -> relax.Expr:
    """Of relu, which costs little itself."""
    call = relax.BlockBuilder().normalize(_ops.nn.relu(x))
    return vjp_call(op_call(call), [x], {0: seed}, [0])


PROBES = (
    Probe("elementwise", lambda x: _ops.nn.relu(x)),
    Probe("add", lambda x, y: _ops.add(x, y), _two),
    Probe("multiply", lambda x, y: _ops.multiply(x, y), _two),
    Probe("exp", lambda x: _ops.exp(x)),
    Probe("tanh", lambda x: _ops.tanh(x)),
    Probe("sigmoid", lambda x: _ops.sigmoid(x)),
    Probe("power", lambda x, y: _ops.power(x, y), _two),
    Probe("divide", lambda x, y: _ops.divide(x, y), _two),
    Probe("nn.gelu", lambda x: _ops.nn.gelu(x)),
    Probe("nn.gelu_tanh", lambda x: _ops.nn.gelu_tanh(x)),
    Probe("nn.silu", lambda x: _ops.nn.silu(x)),
    Probe("reduce", lambda x: _ops.nn.softmax(x, -1)),
    Probe("nn.layer_norm", lambda x, g, b: _ops.nn.layer_norm(x, g, b, [1]), _row),
    Probe("nn.rms_norm", lambda x, g, b: _ops.nn.rms_norm(x, g, [1]), _row),
    Probe("move", lambda x: _ops.flip(x, 0)),
    Probe(VJP, lambda x, y: _gradient(x, y), _two),
    Probe("nn.attention", lambda q, k, v: _ops.nn.attention(q, k, v), _heads, lambda side: 8 * side**3),
    Probe("nn.conv2d", lambda x, w: _ops.nn.conv2d(x, w, padding=1), _image, lambda side: 18 * side * side * 256),
    Probe("nn.group_norm", lambda x, g, b: _ops.nn.group_norm(x, g, b, 4, 1, [2, 3]), _channels),
    Probe("nn.max_pool2d", lambda x: _ops.nn.max_pool2d(x, (3, 3), padding=1), lambda side: _channels(side)[:1]),
    Probe("take", lambda x: _ops.take(x, relax.const(list(range(8)) * 8, "int64"), 0), lambda side: [(64, side * 4)]),
)
SIDES = (16, 128, 512)  # 1 KiB, 64 KiB and 1 MiB of float32


def step_time(probe: Probe, side: int, dtype: str = "float32") -> tuple[float, float]:
    """Seconds of a step, and of a call beside its steps."""
    shapes = probe.shapes(side)
    tensors = [torch.rand(shape).to(getattr(torch, dtype)) * 0.5 + 0.5 for shape in shapes]
    times = []
    for count in (_SHORT, _LONG):
        run = distribute_module(_chain(probe, shapes, dtype, count), {"x": 1}, target="c")
        times.append(least(partial(run, *tensors)))
    step = max(1e-9, (times[1] - times[0]) / (_LONG - _SHORT))
    return step, max(0.0, times[0] - _SHORT * step)


def _chain(probe: Probe, shapes: Shapes, dtype: str, count: int) -> ir.IRModule:
    """A function that applies the operator `count` times."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{i}", relax.TensorStructInfo(shape, dtype)) for i, shape in enumerate(shapes)]
    with builder.function("main", params):
        with builder.dataflow():
            value = params[0]
            for _ in range(count):
                value = builder.emit(probe.emit(value, *params[1:]))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def least(run: Callable[[], object], budget: float = 0.06) -> float:
    """The least CPU time of several runs."""
    run()
    least, spent, runs = math.inf, 0.0, 0
    while runs < 5 or (spent < budget and runs < 200):
        start = time.process_time()
        run()
        took = time.process_time() - start
        least, spent, runs = min(least, took), spent + took, runs + 1
    return least


def product(side: int) -> Probe:
    """Square matrices."""
    return Probe("matmul", lambda x, y: _ops.matmul(x, y), _two)


def block(rows: int, width: int, count: int) -> ir.IRModule:
    """A model of blocks: attention of one head and a perceptron, each on its normed input and added to it."""
    shapes = {"x": (rows, width), "g": (width,), "b": (width,), "q": (width, width), "k": (width, width)}
    shapes |= {"v": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = {name: relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in shapes.items()}
    builder = relax.BlockBuilder()
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            value = params["x"]
            for _ in range(count):
                value = _one_block(builder.emit, value, params)
            result = builder.emit_output(builder.emit(_ops.reshape(value, (width, rows))))
        builder.emit_func_output(result)
    return builder.get()


def _one_block(emit: Callable[[relax.Expr], relax.Var], x: relax.Var, params: dict[str, relax.Var]) -> relax.Var:
    """As models from torch have them: weights are transposed, and biases added."""

    def linear(y: relax.Var, name: str, bias: relax.Var | None = None) -> relax.Var:
        made = emit(_ops.matmul(y, emit(_ops.permute_dims(emit(_ops.permute_dims(params[name]))))))
        return made if bias is None else emit(_ops.add(made, bias))

    n = emit(_ops.nn.layer_norm(x, params["g"], params["b"], [1]))
    q, k, v = (linear(n, name, params["b"]) for name in ("q", "k", "v"))
    weights = emit(_ops.nn.softmax(emit(_ops.matmul(q, emit(_ops.permute_dims(k)))), -1))
    y = emit(_ops.add(x, emit(_ops.matmul(weights, v))))
    n = emit(_ops.nn.layer_norm(y, params["g"], params["b"], [1]))
    hidden = emit(_ops.nn.gelu(linear(n, "up")))
    z = emit(_ops.add(y, linear(hidden, "down", params["b"])))
    return emit(_ops.multiply(z, emit(_ops.divide(emit(_ops.exp(emit(_ops.sigmoid(z)))), emit(_ops.sigmoid(y))))))


def kernel_seconds(func: tirx.PrimFunc, *tensors: torch.Tensor) -> float:
    """A run of a kernel on one device."""
    run = compile(annotate(func, {"x": 1}, {}), target="c")
    return least(partial(run, *tensors))


def product_kernel(size: int) -> tirx.PrimFunc:
    """A square product in float32."""

    @T.prim_func
    def product_of_blocks(
        A: T.Tensor((size, size), "float32"),  # type: ignore[valid-type]
        B: T.Tensor((size, size), "float32"),  # type: ignore[valid-type]
        C: T.Tensor((size, size), "float32"),  # type: ignore[valid-type]
    ):
        with T.Kernel(T.ceildiv(size, 64), T.ceildiv(size, 64), threads=128) as (bx, by):
            a = T.alloc_shared((64, 64), "float32")
            b = T.alloc_shared((64, 64), "float32")
            c = T.alloc_fragment((64, 64), "float32")
            T.clear(c)
            for ko in T.Pipelined(T.ceildiv(size, 64), num_stages=2):
                T.copy(A[by * 64, ko * 64], a)
                T.copy(B[ko * 64, bx * 64], b)
                T.gemm(a, b, c)
            T.copy(c, C[by * 64, bx * 64])

    return product_of_blocks


def row_kernel(size: int) -> tirx.PrimFunc:
    """Rows, each of which becomes its softmax."""

    @T.prim_func
    def rows(
        X: T.Tensor((size, size), "float32"),  # type: ignore[valid-type]
        Y: T.Tensor((size, size), "float32"),  # type: ignore[valid-type]
    ):
        with T.Kernel(T.ceildiv(size, 16), threads=128) as by:
            x = T.alloc_fragment((16, size), "float32")
            largest = T.alloc_fragment((16,), "float32")
            total = T.alloc_fragment((16,), "float32")
            T.copy(X[by * 16, 0], x)
            T.reduce_max(x, largest, dim=1)
            for i, j in T.Parallel(16, size):
                x[i, j] = T.exp(x[i, j] - largest[i])
            T.reduce_sum(x, total, dim=1)
            for i, j in T.Parallel(16, size):
                x[i, j] = x[i, j] / total[i]
            T.copy(x, Y[by * 16, 0])

    return rows
