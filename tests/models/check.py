"""One architecture on its way: torch.export, import, and layouts on virtual meshes, against torch."""

from __future__ import annotations

import random
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils import _pytree as pytree

import mesh_tensor as mt

from .architecture import Architecture
from .collectives import Counted, counted

Layout = tuple[dict[str, int], dict[str, dict[str, int]]]

#: Of the largest value of a result: what sums in another order change in float32, through some layers.
TOLERANCE = 2e-4


@dataclass
class Outcome:
    """What became of an architecture. `stopped`: the first thing that did not go, with its reason; `layouts` were tried
    once it was imported, of which `right` gave torch's results, and `refused` and `wrong` say what the others did.
    `counted`: the collectives of plans, beside the hand's."""

    title: str
    stopped: str = ""
    operators: int = 0
    layouts: int = 0
    right: int = 0
    refused: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    dtype: str = "float32"
    counted: Counted = field(default_factory=Counted)

    @property
    def imported(self) -> bool:
        """Whether the model came in as written."""
        return not self.stopped


def check(
    architecture: Architecture, count: int, dtype: torch.dtype = torch.float32, collectives: bool = False
) -> Outcome:
    """Record, import and run the architecture under `count` layouts, and count `collectives`. In a dtype of less
    precision than float32, a result is right if it is as near to float64's as torch's own is."""
    outcome = Outcome(architecture.title, dtype=str(dtype).removeprefix("torch."))
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, given = architecture.make()
        model, given = model.eval().to(dtype), pytree.tree_map(lambda value: _cast(value, dtype), given)
        model.requires_grad_(False)
        exact = _exact(architecture, model, given) if dtype.itemsize < 4 and count else []
        try:
            program = torch.export.export(model, (), given)
        except Exception as error:  # torch's own
            outcome.stopped = f"torch.export: {_line(error)}"
            return outcome
    with torch.no_grad():
        expected = _tensors(program.module()(**given)) if count else []
    try:
        module = mt.from_torch(program)
    except Exception as error:  # a refusal, or what should have been one
        outcome.stopped = _line(error)
        return outcome
    outcome.operators = sum(len(block.bindings) for block in module.mod["main"].body.blocks)
    inputs = _tensors(given)
    if collectives:
        try:
            with torch.no_grad():
                outcome.counted = counted(model, architecture.name, module, given)
        except mt.MeshTensorError as error:
            outcome.refused.append(f"collectives: {_line(error)}")
    meant = Meant(expected, exact)
    for layout in layouts(module, inputs, count) if count else ():
        _run(outcome, module, inputs, layout, meant)
    return outcome


@dataclass(frozen=True)
class Meant:
    """What torch gives, and what it would give in float64, where that is the measure."""

    results: list[torch.Tensor]
    exact: list[torch.Tensor]

    def error(self, results: list[torch.Tensor]) -> float:
        """By how much results are worse than may be: above 1 is too much."""
        if not self.exact:
            return max((difference(a, b) / TOLERANCE for a, b in zip(results, self.results, strict=True)), default=0.0)
        worst = 0.0
        for found, torchs, exact in zip(results, self.results, self.exact, strict=True):
            if found.dtype != torchs.dtype or not exact.is_floating_point():
                worst = max(worst, difference(found, torchs) / TOLERANCE)
            else:
                own = difference(torchs.double(), exact)
                worst = max(worst, difference(found.double(), exact) / (2 * own + torch.finfo(found.dtype).eps))
        return worst


def _exact(architecture: Architecture, model: torch.nn.Module, given: Any) -> list[torch.Tensor]:
    """The model's results in float64, of the same numbers; in float32 where torch can't run it in float64."""
    for dtype in (torch.float64, torch.float32):
        try:
            with torch.no_grad():
                wide = architecture.make()[0].eval().to(dtype)  # copies of some models can't be made
                wide.load_state_dict(model.state_dict())
                made = _tensors(wide(**pytree.tree_map(lambda value, to=dtype: _cast(value, to), given)))
            return [result.double() if result.is_floating_point() else result for result in made]
        except RuntimeError:
            continue
    return []


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def layouts(module: Any, inputs: list[torch.Tensor], count: int) -> Iterator[Layout]:
    """The batch over two devices; some of the weights over two; then anything over some meshes."""
    choice = random.Random(len(module.params))
    params = list(module.mod["main"].params)
    batch = inputs[0].shape[0]
    first = params[: len(inputs)]
    sizes = {param.name_hint: [int(size) for size in param.struct_info.shape] for param in params}
    yield {"x": 2}, {param.name_hint: {"x": 0} for param in first if sizes[param.name_hint][:1] == [batch]}
    for number in range(1, count):
        mesh = {"x": 2} if number == 1 else choice.choice([{"x": 2}, {"x": 3}, {"x": 4}, {"x": 2, "y": 2}])
        names = [name for name, shape in sizes.items() if shape and choice.random() < 0.5]
        yield mesh, {name: _split(choice, mesh, sizes[name]) for name in names}


def _split(choice: random.Random, mesh: dict[str, int], shape: list[int]) -> dict[str, int]:
    return {axis: choice.randrange(len(shape)) for axis in mesh if choice.random() < 0.8}


def _run(outcome: Outcome, module: Any, inputs: list[torch.Tensor], layout: Layout, meant: Meant) -> None:
    mesh, shardings = layout
    outcome.layouts += 1
    try:
        run = mt.distribute_module(module.mod, mesh, shardings, weights=module.params, poison=True)
        results = run(*inputs)
    except mt.MeshTensorError as error:
        outcome.refused.append(f"{mesh}: {_line(error)}")
        return
    except Exception as error:
        outcome.wrong.append(f"{mesh}: {type(error).__name__}: {_line(error)}")
        return
    results = _tensors(results)
    if len(results) != len(meant.results):
        outcome.wrong.append(f"{mesh}: {len(results)} results instead of {len(meant.results)}")
        return
    worst = meant.error(results)
    if worst <= 1:
        outcome.right += 1
    else:
        outcome.wrong.append(f"{mesh}: off by {worst:.2g} of what may be under {shardings}")


def difference(result: torch.Tensor, meant: torch.Tensor) -> float:
    """The largest difference by the largest value; infinite where shapes, dtypes or infinities differ."""
    if result.shape != meant.shape or result.dtype != meant.dtype:
        return float("inf")
    wide, other = result.double(), meant.double()
    finite = other.isfinite()
    if (
        not torch.equal(wide.nan_to_num(7.0)[~finite], other.nan_to_num(7.0)[~finite])
        or not wide.isfinite()[finite].all()
    ):
        return float("inf")
    if not finite.any():
        return 0.0
    return float((wide - other)[finite].abs().max() / other[finite].abs().max().clamp_min(1e-3))


def _cast(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, torch.Tensor) and value.is_floating_point() else value


def _line(error: Exception) -> str:
    """A refusal's facts in one line."""
    return " | ".join(line.strip() for line in str(error).strip().splitlines()[:4]) or type(error).__name__
