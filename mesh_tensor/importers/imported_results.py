"""Whether an imported module computes what the model computed where it comes from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from mesh_tensor.base.errors import refuse

# What is smaller is compared as if it were this: sums of values around one that are zero but for rounding, as the mean
# of what comes after a batch norm.
_NOTHING = 1e-4


def refuse_differences(
    results: Any,
    expected: Sequence[torch.Tensor],
    origin: str,
    where: str,
    fix: str,
    computed_in: Iterable[torch.dtype] = (),
) -> None:
    """Refuse results (a tensor or a tuple of them) that are not those that `origin` ("torch") gave. `computed_in`: what
    values they are made of have for dtypes."""
    inside = max(map(_tolerance, computed_in), default=0.0)
    results = list(results) if isinstance(results, tuple) else [results]
    problems = [
        f"result {index} differs from {origin}'s by {error:.2g} of its largest value"
        for index, (result, meant) in enumerate(zip(results, expected, strict=True))
        if (error := _error(result, meant.detach()))
        > (_tolerance(meant.dtype) and max(_tolerance(meant.dtype), inside))
    ]
    if problems:
        refuse(
            problems,
            where=where,
            why="TVM's importer reads some operator in it differently",
            fix=f"{fix}; `check=False` leaves this check out",
        )


def _error(result: torch.Tensor, meant: torch.Tensor) -> float:
    """The largest difference, by the largest value; what is not finite has to be equal."""
    if result.shape != meant.shape or result.dtype != meant.dtype:
        return float("inf")
    wide, other = result.to(torch.float64), meant.to(torch.float64)
    finite = other.isfinite()
    if (
        not torch.equal(wide.nan_to_num(7.0)[~finite], other.nan_to_num(7.0)[~finite])
        or not wide[finite].isfinite().all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((wide - other)[finite].abs().max() / other[finite].abs().max().clamp_min(_NOTHING))


def _tolerance(dtype: torch.dtype) -> float:
    """What sums in another order may change; nothing in whole numbers."""
    return torch.finfo(dtype).eps ** 0.5 if dtype.is_floating_point else 0.0
