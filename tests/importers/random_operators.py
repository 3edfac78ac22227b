"""Random calls of torch's operators, of those samples that torch tests itself with, on random meshes and layouts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import mesh_tensor as mt
from tests.other_machines import machine
from tests.random_kernels.check import Outcome

_MESHES = ({"x": 2}, {"x": 3}, {"x": 2, "y": 2})
_DTYPES = (torch.float32, torch.float32, torch.int64, torch.bool)
_RELATIVE = 1e-3  # of the largest value: TVM's importer makes other operators of some
_ANYTHING = ("empty", "new_empty", "rand", "bernoulli", "multinomial", "normal")  # whose results are not said


class Call(torch.nn.Module):
    """An operator; the sample's tensors are its inputs, all else is constant."""

    def __init__(self, op: Any, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.op, self.args, self.kwargs = op, args, kwargs

    def forward(self, *tensors: torch.Tensor) -> Any:
        rest = iter(tensors)
        args, kwargs = _filled(self.args, rest), _filled(self.kwargs, rest)
        return self.op(*args, **kwargs)


@dataclass(frozen=True)
class OperatorCase:
    """A call and its tensors, a mesh, how tensors lie (by their place among the inputs), and a machine's number."""

    name: str
    model: Call
    tensors: tuple[torch.Tensor, ...]
    mesh: dict[str, int]
    layouts: dict[int, dict[str, int]]
    machine: int

    def __str__(self) -> str:
        shapes = [tuple(tensor.shape) for tensor in self.tensors]
        return f"{self.name} of {shapes}, {self.model.args} {self.model.kwargs} on {self.mesh}, {self.layouts}"


def make_operator_case(number: int) -> OperatorCase:
    """The call of this number, one that torch exports."""
    rng = random.Random(number)
    while True:
        made = _made(rng)
        if made is not None:
            return made


def run(case: OperatorCase) -> Outcome:
    """What becomes of a case."""
    expected = _tensors(case.model(*_copies(case)))
    program = torch.export.export(case.model, _copies(case))
    try:
        imported = mt.from_torch(program)
        names = [param.name_hint for param in imported.mod["main"].params]
        layouts = {names[place]: layout for place, layout in case.layouts.items() if layout and place < len(names)}
        with machine(case.machine):
            made = mt.distribute_module(imported, mt.Mesh(case.mesh), layouts, poison=True)(*_copies(case))
        for ours, theirs in zip(_tensors(made), expected, strict=True):
            _compare(ours, theirs)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception as error:  # whatever it is, it is wrong
        return Outcome("wrong", f"{case}\n{type(error).__name__}: {error}")
    return Outcome("right")


def _made(rng: random.Random) -> OperatorCase | None:
    """A call; None if torch gives no sample of strided real tensors, can't compute it with tensors that have their
    memory to themselves (views by strides), or does not export it."""
    info, dtype = rng.choice(_operators()), rng.choice(_DTYPES)
    torch.manual_seed(rng.randrange(2**31))
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=False)) if dtype in info.dtypes else []
    if not samples:
        return None
    sample = rng.choice(samples)
    args, kwargs = (sample.input, *sample.args), sample.kwargs
    tensors = tuple(_tensors([*args, *kwargs.values()]))
    if any(tensor.layout != torch.strided or tensor.is_complex() for tensor in tensors):
        return None
    mesh = rng.choice(_MESHES)
    layouts = {
        place: {axis: rng.randrange(tensor.dim()) for axis in mesh if rng.random() < 0.7}
        for place, tensor in enumerate(tensors)
        if tensor.dim()
    }
    case = OperatorCase(info.formatted_name, Call(info.op, args, kwargs), tensors, mesh, layouts, rng.randrange(2))
    try:
        case.model(*_copies(case))
        torch.export.export(case.model, _copies(case))
    except Exception:  # torch's own, of many kinds
        return None
    return case


def _compare(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    """Results are as near as the import checks them to be."""
    assert (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype), (
        ours.shape,
        ours.dtype,
        theirs.shape,
        theirs.dtype,
    )
    if not theirs.is_floating_point():
        torch.testing.assert_close(ours, theirs)
        return
    finite = theirs[theirs.isfinite()].abs()
    largest = max(1.0, finite.max().item() if finite.numel() else 0.0)
    torch.testing.assert_close(ours, theirs, rtol=_RELATIVE, atol=_RELATIVE * largest, equal_nan=True)


@cache
def _operators() -> list[Any]:
    from torch.testing._internal.common_methods_invocations import op_db  # takes seconds

    return [info for info in op_db if not any(part in info.name for part in _ANYTHING)]


def _copies(case: OperatorCase) -> tuple[torch.Tensor, ...]:
    return tuple(tensor.clone() for tensor in case.tensors)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value.detach()]
    if isinstance(value, (list, tuple)):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _filled(value: Any, tensors: Iterator[torch.Tensor]) -> Any:
    if isinstance(value, torch.Tensor):
        return next(tensors)
    if isinstance(value, (list, tuple)):
        return type(value)(_filled(item, tensors) for item in value)
    return {name: _filled(item, tensors) for name, item in value.items()} if isinstance(value, dict) else value
