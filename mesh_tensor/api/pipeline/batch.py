"""Batches of a pipeline, split into microbatches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.rules.operator.dropout import SEED_NAME
from mesh_tensor.runtime.module_inputs import ModuleSignature

Tensors = Mapping[str, torch.Tensor]


def split_batch(signature: ModuleSignature, batch: Tensors, count: int) -> list[dict[str, torch.Tensor]]:
    """The batch in `count` microbatches along the first dim: of the rows that the function takes, or evenly. Each drops
    by a seed of its own, as where a training step's gradients are accumulated."""
    if strange := [
        f"input {name!r} is {shown(given)}" for name, given in batch.items() if not isinstance(given, torch.Tensor)
    ]:
        refuse(
            strange, where=f"call of the pipeline of {signature.function!r}", fix="pass torch tensors: whole batches"
        )
    seeds = {name: tensor for name, tensor in batch.items() if name == SEED_NAME}
    batch = {name: tensor for name, tensor in batch.items() if name not in seeds}
    sizes = {name: tensor.shape[0] if tensor.ndim else 0 for name, tensor in batch.items()}
    rows = max(sizes.values(), default=0)
    own = [p.shape[0] for p in signature.params if p.name in batch and p.shape]
    fixed = next((size for size in own if isinstance(size, int)), None)
    each = -(-rows // count) if fixed is None else fixed
    problems = [f"input {name!r} has {size} rows, others {rows}" for name, size in sizes.items() if size != rows]
    fix = "pass more rows, the same for all inputs, or fewer microbatches"
    if not problems and fixed is not None and rows != fixed * count:
        problems = [f"a batch of {rows} rows in {count} microbatches, but the module takes {fixed} rows at a time"]
        fix = f"pass {count} x {fixed} rows, or export the model with an open batch size"
    elif not problems and each * (count - 1) >= rows:
        problems = [f"a batch of {rows} rows in {count} microbatches leaves some without rows"]
    if problems:
        refuse(problems, where=f"call of the pipeline of {signature.function!r}", fix=fix)
    parts = [{name: tensor[i * each : (i + 1) * each] for name, tensor in batch.items()} for i in range(count)]
    return [part | {name: seed * count + i for name, seed in seeds.items()} for i, part in enumerate(parts)]


def rows_of(part: Tensors) -> int:
    """How many rows a microbatch has."""
    return next((tensor.shape[0] for tensor in part.values() if tensor.ndim), 1)
