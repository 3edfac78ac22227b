"""A GPT-2-like model with tensor parallelism on 2 gloo ranks, beside torch's parallelize_module on the same ranks.

python -m benchmarks.bench_modules
"""

from __future__ import annotations

import torch
import torch.distributed as dist

import mesh_tensor as mt
from kernels.models import gpt2

from ._ranks import on_ranks
from ._timing import Row, header, interleaved, row, verdicts

CONFIG = gpt2.Config(vocabulary=1024, width=512, heads=8, layers=2, batch=4, positions=128)
ROUNDS = 15


def measure() -> dict[str, list[float]]:
    """Seconds of a forward pass per round, on this rank."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    device_mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("model",))
    model, (tokens,) = gpt2.build(CONFIG), gpt2.example_inputs(CONFIG)
    module = mt.from_torch(torch.export.export(model, (tokens,)))
    shardings = gpt2.tensor_parallel(CONFIG, "model")
    mod = mt.annotate_module(module.mod, {"model": 2}, shardings)
    run = mt.distribute_module(mod, device_mesh, weights=module.params)
    with torch.no_grad():
        expected = model(tokens)
    by_columns, by_rows = ("attn.q", "attn.k", "attn.v", "fc"), ("attn.proj", "proj")
    for block in model.blocks:
        block.attn.heads //= 2  # of this rank
        plan = {name: ColwiseParallel() for name in by_columns} | {name: RowwiseParallel() for name in by_rows}
        parallelize_module(block, device_mesh, plan)

    def with_dtensors() -> torch.Tensor:
        with torch.no_grad():
            return model(tokens)

    def together(call):
        def both() -> None:
            dist.barrier()
            call()

        return both

    torch.testing.assert_close(run(tokens), expected, rtol=1e-4, atol=1e-4)
    runs = {"module": lambda: run(tokens), "parallelize_module": with_dtensors}
    return interleaved({name: together(call) for name, call in runs.items()}, rounds=ROUNDS)


def rows() -> list[Row]:
    """The model's forward pass."""
    what = f"GPT-2, {CONFIG.layers} layers of width {CONFIG.width}, {CONFIG.batch} x {CONFIG.positions} tokens"
    return [row(what, on_ranks(measure), "module", "parallelize_module", must=1.0)]


if __name__ == "__main__":
    print(header("Modules on two ranks"))
    print(verdicts(rows()))
