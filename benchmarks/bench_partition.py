"""Partitioning an MLP of L layers: our plan and local view beside TVM's own passes, Shardy's propagation and XLA.

python -m benchmarks.bench_partition
"""

from __future__ import annotations

import tilelang  # noqa: F401  (brings TVM)
from tvm import ir, relax

import mesh_tensor as mt
from mesh_tensor.program.plan_module import plan_module

from . import jax_peers
from ._elsewhere import Elsewhere
from ._timing import Row, header, interleaved, verdicts

LAYERS = (10, 100, 1000)
WIDTH = 64
MESH = mt.Mesh({"x": 2})


def mlp(layers: int) -> ir.IRModule:
    """gelu(... gelu(x @ w0) ... @ w[layers - 1]), its weights split over columns and rows in turn."""
    info = relax.TensorStructInfo((WIDTH, WIDTH), "float32")
    x, *weights = (relax.Var(name, info) for name in ("x", *(f"w{i}" for i in range(layers))))
    builder = relax.BlockBuilder()
    with builder.function("main", [x, *weights]):
        with builder.dataflow():
            value: relax.Expr = x
            for weight in weights:
                value = builder.emit(relax.op.nn.gelu(builder.emit(relax.op.matmul(value, weight))))
            result = builder.emit_output(value)
        builder.emit_func_output(result)
    return mt.annotate_module(builder.get(), MESH, {f"w{i}": {"x": 1 - i % 2} for i in range(layers)})


def ours(mod: ir.IRModule) -> ir.IRModule:
    """The local module, and the Program on the way."""
    stated = mt.read_module_annotations(mod, "main", MESH)
    return plan_module(stated.module, "main", MESH, stated.annotations).local_module


def tvm_passes(mod: ir.IRModule) -> ir.IRModule:
    """TVM's propagation, and its local view of what LegalizeOps makes of it."""
    passes = relax.distributed.transform
    mod = relax.transform.LegalizeOps()(passes.PropagateSharding()(mod))
    return passes.LowerGlobalViewToLocalView()(mod)


def of_layers(layers: int) -> list[Row]:
    """The rows of one size. Where JAX isn't installed, its rows say so."""
    mod, rounds = mlp(layers), 3 if layers == LAYERS[-1] else 5
    runs = {"ours": lambda: ours(mod)}
    if layers < LAYERS[-1]:
        runs["TVM"] = lambda: tvm_passes(mod)
    elsewhere = {}
    if jax_peers.INSTALLED:
        peers = ("partition_shardy", "partition_xla") if layers < LAYERS[-1] else ("partition_shardy",)
        for name in peers:
            elsewhere[name] = runs[name] = Elsewhere(
                "benchmarks.jax_peers", name, layers, WIDTH, environment=jax_peers.ENVIRONMENT
            )
    times = interleaved(runs, rounds=rounds)
    for name, peer in elsewhere.items():
        peer.close()
        times[name] = peer.times[-rounds:]
    what, musts = f"MLP of {layers} layers", {"TVM": None, "partition_shardy": 3.0, "partition_xla": 0.2}
    made = [Row(what, "ours", name, times["ours"], times[name], must=musts[name]) for name in musts if name in times]
    if not jax_peers.INSTALLED:
        made.append(Row(what, "ours", "Shardy, XLA", note="jax is not installed"))
    return made


def rows() -> list[Row]:
    """All sizes. TVM and XLA take too long at the largest."""
    return [made for layers in LAYERS for made in of_layers(layers)]


if __name__ == "__main__":
    print(header("Partitioning modules"))
    print(verdicts(rows()))
