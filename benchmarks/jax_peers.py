"""What the benchmarks run with JAX on two host devices, in a process of its own (`Elsewhere`)."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from typing import Any

INSTALLED = importlib.util.find_spec("jax") is not None
DEVICES = 2
ENVIRONMENT = {"XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}", "JAX_PLATFORMS": "cpu"}


def matmul(size: int) -> Callable[[], Any]:
    """A product that contracts a split dim."""
    import jax
    from jax.sharding import PartitionSpec as P

    split = (P(None, "x"), P("x", None))
    return _run(lambda a, b: jax.lax.psum(a @ b, "x"), [(size, size)] * 2, split)


def mlp(tokens: int, model: int, hidden: int) -> Callable[[], Any]:
    """gelu(x @ w1) @ w2 with the hidden features split."""
    import jax
    from jax.sharding import PartitionSpec as P

    def local(x: Any, w1: Any, w2: Any) -> Any:
        return jax.lax.psum(jax.nn.gelu(x @ w1, approximate=True) @ w2, "x")

    shapes = [(tokens, model), (model, hidden), (hidden, model)]
    return _run(local, shapes, (P(), P(None, "x"), P("x", None)))


def _run(local: Callable[..., Any], shapes: list[tuple[int, int]], split: tuple) -> Callable[[], Any]:
    """`local` on every device's tiles of random operands, compiled. Its result is replicated."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = jax.make_mesh((DEVICES,), ("x",))
    compiled = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=split, out_specs=PartitionSpec()))
    keys = jax.random.split(jax.random.key(0), len(shapes))
    tensors = [jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=True)]
    placed = [jax.device_put(t, NamedSharding(mesh, spec)) for t, spec in zip(tensors, split, strict=True)]
    return lambda: compiled(*placed).block_until_ready()


def partition_shardy(layers: int, width: int) -> Callable[[], Any]:
    """Shardy's propagation of an MLP of so many layers, on the module that JAX traced."""
    from jaxlib.mlir.passmanager import PassManager

    module = _traced_mlp(layers, width).compiler_ir("stablehlo")
    context = module.context

    def run() -> None:
        with context:
            copy = module.operation.clone()
            PassManager.parse("builtin.module(sdy-propagation-pipeline)").run(copy)

    return run


def partition_xla(layers: int, width: int) -> Callable[[], Any]:
    """XLA's compilation of the same: partitioning, optimisation and code."""
    import jax

    def run() -> None:
        jax.clear_caches()
        _traced_mlp(layers, width).compile()

    return run


def _traced_mlp(layers: int, width: int) -> Any:
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    mesh = Mesh(np.array(jax.devices()), ("x",))  # its axes are left to the compiler

    def whole(x: Any, weights: list) -> Any:
        for weight in weights:
            x = jax.nn.gelu(x @ weight)
        return x

    def shaped(*axes: str | None) -> Any:
        spec = NamedSharding(mesh, PartitionSpec(*axes))
        return jax.ShapeDtypeStruct((width, width), jax.numpy.float32, sharding=spec)

    weights = [shaped("x", None) if layer % 2 else shaped(None, "x") for layer in range(layers)]
    return jax.jit(whole).lower(shaped(), weights)
