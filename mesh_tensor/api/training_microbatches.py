"""A batch of example inputs in microbatches."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse, shown
from mesh_tensor.plan.accumulate import Microbatches


@dataclass(frozen=True, eq=False)
class Parts:
    """`count` microbatches; `first`: the inputs of one; `rows`: per input whether it has rows."""

    count: int
    first: tuple[torch.Tensor, ...]
    rows: tuple[bool, ...]

    def named(self, function: relax.Function) -> Microbatches:
        """By the names that the inputs have as the function's first parameters."""
        names = [param.name_hint for param in function.params[: len(self.rows)]]
        return Microbatches(self.count, tuple(n for n, has in zip(names, self.rows, strict=True) if has))


def microbatches_of(inputs: tuple[torch.Tensor, ...], count: object) -> Parts:
    """The inputs in `count` parts: those as long as the first one are taken apart, all others are the same for all."""
    if not isinstance(count, int) or isinstance(count, bool) or count < 1:
        refuse(f"accumulate={shown(count)}", fix="use a number of microbatches, from 1 on")
    sizes = [tensor.shape[0] if tensor.ndim else None for tensor in inputs]
    batch = next((size for size in sizes if size is not None), None)
    if batch is None or batch % count:
        refuse(
            f"accumulate={count}, but a batch of {batch} rows",
            why="microbatches are equally large",
            fix="use a divisor of the number of rows",
        )
    rows = tuple(size == batch for size in sizes)
    return Parts(count, tuple(t[::count].contiguous() if has else t for t, has in zip(inputs, rows, strict=True)), rows)
