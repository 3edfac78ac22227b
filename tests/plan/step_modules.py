"""Modules for tests: made step by step, and what is asked of them."""

from __future__ import annotations

import torch
from tvm import relax


def module(shapes, steps, *, dtype="float32", dtypes=None):
    """A module whose main binds each step's name to what the step makes; the last one is the result."""
    builder = relax.BlockBuilder()
    kinds = dtypes or {}
    params = {n: relax.Var(n, relax.TensorStructInfo(s, kinds.get(n, dtype))) for n, s in shapes.items()}
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            env: dict = dict(params)
            for name, make in steps:
                env[name] = builder.emit(make(builder, env), name)
            result = builder.emit_output(env[steps[-1][0]])
        builder.emit_func_output(result)
    return builder.get()


def call(kernel, *args, shape, dtype="float32"):
    """A step that calls a kernel."""
    name = str(kernel.attrs["global_symbol"])

    def make(builder, env):
        info = relax.TensorStructInfo(shape, dtype)
        return relax.op.call_tir(builder.add_func(kernel, name), [env[arg] for arg in args], info)

    return make


def collectives(made) -> list[str]:
    """The kinds of a module's collectives that send something, in order."""
    return [step.kind for step in made.program.steps if hasattr(step, "kind") and step.bytes]


def legalized(mod):
    """The module with TE's functions in place of operators."""
    return relax.transform.LegalizeOps()(mod)


def operands(mod) -> list[torch.Tensor]:
    """Random operands."""
    torch.manual_seed(3)
    return [torch.randn([int(size) for size in param.struct_info.shape]) for param in mod["main"].params]


def moves(made) -> list[tuple]:
    """A module's collectives: kind, axes, bytes."""
    steps = made.program.steps
    return [(step.kind, step.axes, step.bytes) for step in steps if hasattr(step, "kind")]
