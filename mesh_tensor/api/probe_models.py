"""Small programs that are timed to know a machine: a block of a model, layers of perceptrons, two kernels; and what
share of a machine's rates a kernel of the user's reaches."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

import tilelang.language as T  # type: ignore[import-untyped]
import torch
from tvm import ir, relax, tirx

from mesh_tensor.annotations.annotate import annotate
from mesh_tensor.annotations.kernel_source import check_kernel
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine, Roofline
from mesh_tensor.simulation import Simulation
from mesh_tensor.simulation.simulate import check_sizes_known
from mesh_tensor.targets.dtypes import torch_dtype

from .compile import MeshKernel, compile
from .probes import least

_SECONDS = 0.3  # for which a kernel is run
_FAST = 1e9  # a share of the rates at which work takes nothing


def with_kernel(machine: Machine, func: tirx.PrimFunc) -> Machine:
    """The machine, as `Machine.with_kernel` says."""
    if machine.processor != this_processor():
        refuse(
            f"a kernel that is measured on {this_processor()!r} says nothing of {machine.processor or 'another one'!r}",
            where=f"machine {machine.name!r}",
            why="its class would be a share of rates that nothing here has",
            fix="take mt.Machine.measure(), which is this one; a class of another one is stated: "
            "dataclasses.replace(machine, classes={**machine.classes, 'kernel NAME': Roofline(flops=...)})",
        )
    func = check_kernel(func)
    check_sizes_known(func)
    run = compile(annotate(func, {"x": 1}, {}), target="c")
    (step,) = run.program.kernels
    name = f"kernel {step.name}"
    if name in machine.classes:
        return machine
    if not any(run.program.values[each].tile_bytes for each in step.args):
        refuse(f"kernel {step.name!r} has no elements", fix="measure it at sizes that it is used at")

    def taking(each: Roofline) -> Machine:
        return replace(machine, classes={**machine.classes, name: each})

    took = least(partial(run, *_arguments(run)), _SECONDS)
    nothing, by = Roofline(flops=_FAST, memory=_FAST), "flops" if step.flops else "memory"
    beside, whole = (Simulation(run.program, taking(each)).time for each in (nothing, replace(nothing, **{by: 1.0})))
    return taking(replace(nothing, **{by: (whole - beside) / max(1e-9, took - beside)}))


@lru_cache(maxsize=1)
def this_processor() -> str:
    """What the processor is called that this runs on."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # no Linux
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, "") or platform.processor() or platform.machine()


def _arguments(run: MeshKernel) -> list[torch.Tensor]:
    """Numbers from 0 to 1 for what a kernel takes; zeros where these are whole."""
    values = run.program.values
    taken = [values[each.input] for each in run.program.parameters if each.input is not None]
    dtypes = [(value, torch_dtype(value.dtype)) for value in taken]
    return [
        torch.rand(value.shape).to(dtype) if dtype.is_floating_point else torch.zeros(value.shape, dtype=dtype)
        for value, dtype in dtypes
    ]


_ops = relax.op


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


def activations(rows: int, width: int, count: int, results: int, inputs: int = 1) -> ir.IRModule:
    """So many activations, the first ones of an input each, others one of the other, of which the last ones are
    results."""
    builder = relax.BlockBuilder()
    names = ["x", *(f"x{number}" for number in range(1, inputs))]
    params = [relax.Var(name, relax.TensorStructInfo((rows, width), "float32")) for name in names]
    made: list[relax.Var] = []
    with builder.function("main", params):
        with builder.dataflow():
            for number in range(count):
                emit = builder.emit_output if number >= count - results else builder.emit
                made.append(emit(_ops.nn.relu(params[number] if number < inputs else made[-1])))
        builder.emit_func_output(relax.Tuple(made[count - results :]))
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
    run, took = timed_kernel(func, {}, *tensors)
    flops = sum(step.flops for step in run.program.kernels)
    return flops / max(1e-9, took - call)


def timed_kernel(
    func: tirx.PrimFunc, layouts: Mapping[str, Mapping[str, int]], *tensors: torch.Tensor, devices: int = 1
) -> tuple[MeshKernel, float]:
    """A kernel on so many devices, and the least CPU time of a call."""
    run = compile(annotate(func, {"x": devices}, layouts), target="c")
    return run, least(partial(run, *tensors), 0.15)


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
