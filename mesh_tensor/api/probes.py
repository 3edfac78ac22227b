"""Small programs that are timed to know a machine: chains of one operator, a block of a model, two kernels."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import tilelang.language as T  # type: ignore[import-untyped]
import torch
from tvm import ir, relax, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.program.steps import KernelStep
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import SMALL_CONVOLUTION, gradient_class
from mesh_tensor.rules.operator.vjp import VJP, vjp_call

from .compile import compile
from .module import distribute_module

Shapes = Sequence[tuple[int, ...]]
Emit = Callable[..., relax.Expr]

_SHORT, _LONG = 2, 10  # steps of a chain
_ops = relax.op


@dataclass(frozen=True)
class Probe:
    """An operator on its own result, and on other operands; `shapes` of all, by the length of a side.

    flops    of what is bound by them
    beside   the probes of the operators that it takes to have one, and that are no part of it
    times    how often its operands and result count
    indices  whether the last operand is places along the first dim
    """

    name: str
    emit: Emit
    shapes: Callable[[int], Shapes] = lambda side: [(side, side)]
    flops: Callable[[int], int] | None = None
    beside: tuple[str, ...] = ()
    times: int = 1
    indices: bool = False


def _row(side: int) -> Shapes:
    return [(side, side), (side,), (side,)]


def _two(side: int) -> Shapes:
    return [(side, side), (side, side)]


def _heads(side: int) -> Shapes:
    return [(2, side, 4, side // 4)] * 3


def _image(side: int) -> Shapes:
    return [(1, 16, side // 2, side // 2), (16, 16, 3, 3)]


def _convolved(side: int) -> int:
    return 18 * 256 * (side // 2) ** 2


def _small_image(side: int) -> Shapes:
    return [(1, 4, side // 8, side // 8), (4, 4, 3, 3)]


def _convolved_little(side: int) -> int:
    return 18 * 16 * (side // 8) ** 2


def _channels(side: int) -> Shapes:
    return [(1, 16, side // 4, side // 4), (16,), (16,)]


def _rows_of(side: int) -> Shapes:
    return [(64, side * 4), (64,)]


def _emitted(x: relax.Expr) -> relax.Var:
    """A step of the function that is being made."""
    return relax.BlockBuilder.current().emit(x)


def _gradient(x: relax.Expr, seed: relax.Expr) -> relax.Expr:
    """Of relu, which costs little itself."""
    return vjp_call(op_call(relax.BlockBuilder().normalize(_ops.nn.relu(x))), [x], {0: seed}, [0])


def _moved(x: relax.Expr) -> relax.Expr:
    halves = _emitted(_ops.split(x, 2, 0))
    return _ops.concat([relax.TupleGetItem(halves, 1), relax.TupleGetItem(halves, 0)], 0)


def _attended(q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    return _ops.nn.attention(q, k, v, causal_mask="TopLeft")


def _multiply_adds(side: int) -> int:
    return 8 * side**3


def _forward() -> Iterator[Probe]:
    yield Probe("elementwise", lambda x: _ops.nn.relu(x))
    yield Probe("view", lambda x: _ops.nn.relu(_emitted(_ops.permute_dims(x))), beside=("elementwise",))
    yield Probe("add", lambda x, y: _ops.add(x, y), _two)
    yield Probe("multiply", lambda x, y: _ops.multiply(x, y), _two)
    yield Probe("exp", lambda x: _ops.exp(x))
    yield Probe("tanh", lambda x: _ops.tanh(x))
    yield Probe("sigmoid", lambda x: _ops.sigmoid(x))
    yield Probe("power", lambda x, y: _ops.power(x, y), _two)
    yield Probe("divide", lambda x, y: _ops.divide(x, y), _two)
    yield Probe("nn.gelu", lambda x: _ops.nn.gelu(x))
    yield Probe("nn.gelu_tanh", lambda x: _ops.nn.gelu_tanh(x))
    yield Probe("nn.silu", lambda x: _ops.nn.silu(x))
    yield Probe("reduce", lambda x: _ops.nn.softmax(x, -1))
    yield Probe("sum", lambda x: _ops.add(x, _emitted(_ops.sum(x, 1, keepdims=True))), beside=("add",))
    yield Probe("nn.layer_norm", lambda x, g, b: _ops.nn.layer_norm(x, g, b, [1]), _row)
    yield Probe("nn.rms_norm", lambda x, g, b: _ops.nn.rms_norm(x, g, [1]), _row)
    yield Probe("move", _moved, beside=("view", "view"))
    yield Probe(VJP, _gradient, _two, times=2)
    yield Probe("nn.attention", _attended, _heads, _multiply_adds)
    yield Probe("nn.conv2d", lambda x, w: _ops.nn.conv2d(x, w, padding=1), _image, _convolved)
    small = _small_image, _convolved_little
    yield Probe(SMALL_CONVOLUTION, lambda x, w: _ops.nn.conv2d(x, w, padding=1), *small)
    yield Probe("nn.group_norm", lambda x, g, b: _ops.nn.group_norm(x, g, b, 4, 1, [2, 3]), _channels)
    yield Probe("nn.max_pool2d", lambda x: _ops.nn.max_pool2d(x, (3, 3), padding=1), lambda side: _channels(side)[:1])
    yield Probe("take", lambda x, at: _ops.take(x, at, 0), _rows_of, indices=True)
    yield Probe("gather_elements", lambda x, at: _ops.gather_elements(x, at, 0), _two, indices=True)


def _backward(forward: Probe, count: int) -> Probe:
    """The gradients of the first `count` operands of what a probe applies, which runs before, as in training: its
    result is the gradient of itself."""

    def emit(*operands: relax.Expr) -> relax.Expr:
        result = _emitted(forward.emit(*operands))
        call = op_call(relax.BlockBuilder.current().lookup_binding(result))
        found = _emitted(vjp_call(call, operands[: len(call.inputs)], {0: result}, range(count)))
        return found if count == 1 else relax.TupleGetItem(found, 0)

    flops = None if forward.flops is None else lambda side: 3 * forward.flops(side)  # type: ignore[misc]
    return Probe(gradient_class(forward.name), emit, forward.shapes, flops, (forward.name,), 3, forward.indices)


_FORWARD = {probe.name: probe for probe in _forward()}
_GRADIENTS = {"nn.gelu": 1, "nn.gelu_tanh": 1, "nn.silu": 1, "nn.layer_norm": 3, "nn.rms_norm": 2, "nn.attention": 3}
_GRADIENTS |= {"take": 1, "gather_elements": 1}
PROBES = (*_FORWARD.values(), *(_backward(_FORWARD[name], count) for name, count in _GRADIENTS.items()))
SIDES = (16, 128, 512)  # 1 KiB, 64 KiB and 1 MiB of float32


class Chain:
    """A probe's operator, applied to tensors of a side, in two chains of different lengths: the least that these took
    so far."""

    def __init__(self, probe: Probe, side: int, dtype: str = "float32") -> None:
        shapes = probe.shapes(side)
        dtypes = [dtype] * (len(shapes) - probe.indices) + ["int64"] * probe.indices
        pairs = zip(shapes, dtypes, strict=True)
        tensors = [(torch.rand(shape) * 0.5 + 0.5).to(getattr(torch, each)) for shape, each in pairs]
        modules = [_chain(probe, shapes, dtypes, count) for count in (_SHORT, _LONG)]
        self._runs = [partial(distribute_module(mod, {"x": 1}, target="c"), *tensors) for mod in modules]
        self._times = [math.inf, math.inf]

    def run(self, budget: float = 0.06) -> Chain:
        """Run them again for so many seconds."""
        self._times = [min(took, least(run, budget)) for took, run in zip(self._times, self._runs, strict=True)]
        return self

    @property
    def step(self) -> float:
        """Seconds of a step."""
        short, long = self._times
        return max(1e-9, (long - short) / (_LONG - _SHORT))

    @property
    def call(self) -> float:
        """Seconds of a call beside its steps."""
        return max(0.0, self._times[0] - _SHORT * self.step)


def step_time(probe: Probe, side: int, dtype: str = "float32") -> tuple[float, float]:
    """Seconds of a step, and of a call beside its steps."""
    made = Chain(probe, side, dtype).run()
    return made.step, made.call


def _chain(probe: Probe, shapes: Shapes, dtypes: Sequence[str], count: int) -> ir.IRModule:
    """A function that applies the operator `count` times."""
    builder = relax.BlockBuilder()
    infos = [relax.TensorStructInfo(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    params = [relax.Var(f"x{number}", info) for number, info in enumerate(infos)]
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


def perceptrons(rows: int, width: int, count: int) -> tuple[ir.IRModule, dict[str, torch.Tensor]]:
    """The sum of what so many layers make of `x`, each a product and its activation; and their weights."""
    builder = relax.BlockBuilder()
    names = [f"w{number}" for number in range(count)]
    x = relax.Var("x", relax.TensorStructInfo((rows, width), "float32"))
    params = [relax.Var(name, relax.TensorStructInfo((width, width), "float32")) for name in names]
    with builder.function("main", [x, *params]):
        with builder.dataflow():
            value = x
            for weight in params:
                value = builder.emit(_ops.nn.relu(builder.emit(_ops.matmul(value, weight))))
            result = builder.emit_output(builder.emit(_ops.sum(value)))
        builder.emit_func_output(result)
    return builder.get(), {name: torch.rand(width, width) / width for name in names}


def kernel_rate(func: tirx.PrimFunc, call: float, *tensors: torch.Tensor) -> float:
    """Operations per second of a kernel on one device, beside what a call takes."""
    run = compile(annotate(func, {"x": 1}, {}), target="c")
    flops = sum(step.flops for step in run.program.steps if isinstance(step, KernelStep))
    return flops / max(1e-9, least(partial(run, *tensors)) - call)


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
