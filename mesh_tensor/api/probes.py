"""Chains of one operator that are timed to know a machine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain

import torch
from tvm import ir, relax

from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import gradient_class
from mesh_tensor.rules.operator.vjp import VJP, vjp_call
from mesh_tensor.targets.dtypes import torch_dtype

from .module import distribute_module

Shapes = Sequence[tuple[int, ...]]
Emit = Callable[..., relax.Expr]

_SHORT, _LONG = 2, 10  # steps of a chain
SIDES = (16, 128, 512)  # 1 KiB, 64 KiB and 1 MiB of float32
_ops = relax.op


@dataclass(frozen=True)
class Probe:
    """An operator on its own result, and on other operands; `shapes` of all, by the length of a side.

    flops    of what is bound by them
    beside   the probes of the operators that it takes to have one, and that are no part of it
    times    how often its operands and result count
    indices  whether the last operand is places along the first dim
    reduced  elements that a reduction goes through between its products
    own      how many operands, the last ones, every step has of its own, as layers have their weights
    copied   bytes that it copies beside its operations
    sides    what `shapes`, `flops`, `reduced` and `copied` are asked for
    """

    name: str
    emit: Emit
    shapes: Callable[[int], Shapes] = lambda side: [(side, side)]
    flops: Callable[[int], int] | None = None
    beside: tuple[str, ...] = ()
    times: int = 1
    indices: bool = False
    reduced: Callable[[int], int] | None = None
    own: int = 0
    copied: Callable[[int], int] | None = None
    sides: Sequence[int] = SIDES


def _row(side: int) -> Shapes:
    return [(side, side), (side,), (side,)]


def _two(side: int) -> Shapes:
    return [(side, side), (side, side)]


def _heads(side: int) -> Shapes:
    return [(2, side, 4, side // 4)] * 3


_IMAGES = ((16, 8, 3), (16, 64, 3), (64, 56, 1), (64, 32, 3))  # channels, side, and the window's side


def _image(number: int) -> Shapes:
    channels, side, window = _IMAGES[number]
    return [(1, channels, side, side), (channels, channels, window, window)]


def _convolved(number: int) -> int:
    channels, side, window = _IMAGES[number]
    return 2 * (channels * side * window) ** 2


def _in_blocks(number: int) -> int:
    image, weights = map(math.prod, _image(number))
    return 4 * (2 * image + weights)


def _padded(x: relax.Expr, w: relax.Expr) -> relax.Expr:
    return _ops.nn.conv2d(x, w, padding=int(w.struct_info.shape.values[-1]) // 2)


def _channels(side: int) -> Shapes:
    return [(1, 16, side // 4, side // 4), (16,), (16,)]


def _rows_of(side: int) -> Shapes:
    return [(64, side * 4), (64,)]


def _emitted(x: relax.Expr) -> relax.Var:
    return relax.BlockBuilder.current().emit(x)


def _gradient(of: Emit) -> Emit:
    """Of an operator that costs little itself."""
    return lambda x, seed: vjp_call(op_call(relax.BlockBuilder().normalize(of(x))), [x], {0: seed}, [0])


def _moved(x: relax.Expr) -> relax.Expr:
    halves = _emitted(_ops.split(x, 2, 0))
    return _ops.concat([relax.TupleGetItem(halves, 1), relax.TupleGetItem(halves, 0)], 0)


def _attended(q: relax.Expr, k: relax.Expr, v: relax.Expr) -> relax.Expr:
    return _ops.nn.attention(q, k, v, causal_mask="TopLeft")


def _multiply_adds(side: int) -> int:
    return 8 * side**3


def _scored(side: int) -> int:
    return 8 * side**2


def _over_rows(x: relax.Expr, y: relax.Expr) -> relax.Expr:
    """As gradients of weights are: libraries may copy what they read in columns."""
    return _ops.einsum((x, y), "ab,ac->bc")


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
    yield Probe("sum", lambda x: _ops.add(x, _emitted(_ops.sum(x, 0))), beside=("add",))
    yield Probe("nn.layer_norm", lambda x, g, b: _ops.nn.layer_norm(x, g, b, [1]), _row)
    yield Probe("nn.rms_norm", lambda x, g, b: _ops.nn.rms_norm(x, g, [1]), _row)
    yield Probe("move", _moved, beside=("view", "view"))
    yield Probe(VJP, _gradient(_ops.abs), _two, times=2)  # by torch.autograd, as all that have no class
    yield Probe(gradient_class("nn.relu"), _gradient(_ops.nn.relu), _two, times=2)
    yield Probe("nn.attention", _attended, _heads, _multiply_adds, reduced=_scored)
    yield Probe("einsum", _over_rows, _two, lambda side: 2 * side**3)
    yield Probe("nn.conv2d", _padded, _image, _convolved, copied=_in_blocks, sides=range(len(_IMAGES)))
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

    name, beside = gradient_class(forward.name), (forward.name,)
    if forward.copied:  # a convolution as well
        return replace(forward, name=name, emit=emit, beside=beside)
    flops, reduced = _thrice(forward.flops), _thrice(forward.reduced)
    return Probe(name, emit, forward.shapes, flops, beside, 3, forward.indices, reduced)


def _thrice(count: Callable[[int], int] | None) -> Callable[[int], int] | None:
    return None if count is None else lambda side: 3 * count(side)


_FORWARD = {probe.name: probe for probe in _forward()}
_GRADIENTS = {"nn.gelu": 1, "nn.gelu_tanh": 1, "nn.silu": 1, "nn.layer_norm": 3, "nn.rms_norm": 2, "nn.attention": 3}
_GRADIENTS |= {"take": 1, "gather_elements": 1, "nn.conv2d": 1}
PROBES = (*_FORWARD.values(), *(_backward(_FORWARD[name], count) for name, count in _GRADIENTS.items()))


class Chain:
    """A probe's operator, applied to tensors of a side, in two chains of different lengths: the least that these took
    so far."""

    def __init__(self, probe: Probe, side: int, dtype: str = "float32") -> None:
        shapes = probe.shapes(side)
        dtypes = [dtype] * (len(shapes) - probe.indices) + ["int64"] * probe.indices
        self._runs = [_ready(_chain(probe, shapes, dtypes, count), count * probe.own) for count in (_SHORT, _LONG)]
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


def _ready(mod: ir.IRModule, own: int) -> Callable[[], object]:
    """A run of a module on one device, for tensors of numbers from 0.5 to 1; the last `own` are its weights."""
    infos = {param.name_hint: param.struct_info for param in mod["main"].params}
    tensors = {
        name: (torch.rand(tuple(map(int, info.shape))) * 0.5 + 0.5).to(torch_dtype(info.dtype))
        for name, info in infos.items()
    }
    given = list(tensors)[: len(tensors) - own]
    weights = {name: tensor for name, tensor in tensors.items() if name not in given}
    run = distribute_module(mod, {"x": 1}, weights=weights, target="c")
    return partial(run, *[tensors[name] for name in given])


def _chain(probe: Probe, shapes: Shapes, dtypes: Sequence[str], count: int) -> ir.IRModule:
    """A function that applies the operator `count` times."""
    builder = relax.BlockBuilder()
    infos = [relax.TensorStructInfo(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    shared = len(infos) - probe.own
    params = [relax.Var(f"x{number}", info) for number, info in enumerate(infos[:shared])]
    own = [[relax.Var(f"w{step}_{n}", info) for n, info in enumerate(infos[shared:])] for step in range(count)]
    with builder.function("main", [*params, *chain.from_iterable(own)]):
        with builder.dataflow():
            value = params[0]
            for each in own:
                value = builder.emit(probe.emit(value, *params[1:], *each))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return builder.get()


def least(run: Callable[[], object], budget: float = 0.06, before: Callable[[], object] | None = None) -> float:
    """The least CPU time of several runs, each after `before`, which doesn't count."""
    run()
    least, spent, runs = math.inf, 0.0, 0
    while runs < 5 or (spent < budget and runs < 200):
        if before is not None:
            before()
        start = time.process_time()
        run()
        took = time.process_time() - start
        least, spent, runs = min(least, took), spent + took, runs + 1
    return least


PRODUCT = Probe("matmul", lambda x, y: _ops.matmul(x, y), _two)  # of square matrices


def _layer(x: relax.Expr, weight: relax.Expr, bias: relax.Expr) -> relax.Expr:
    return _ops.add(_emitted(_ops.matmul(x, _emitted(_ops.permute_dims(weight)))), bias)


LINEAR = Probe("linear", _layer, lambda side: [(side, side), (side, side), (side,)], own=2)  # as models have products
