"""What becomes of a random module: right, refused or wrong, measured against the module on one device."""

from __future__ import annotations

import traceback
from dataclasses import dataclass, replace
from typing import Any

import torch
import tvm
from tvm import ir, relax

import mesh_tensor as mt
from mesh_tensor.targets.dtypes import torch_dtype
from tests.other_machines import any_plan

from .build import build, typed
from .spec import Case, Param

#: `|actual - expected| <= tolerance * (|expected| + the largest |expected|, at least 1)`, by the results' dtype.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 4e-3}


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "right", "refused" or "wrong"; `reason` says why it is not right."""

    verdict: str
    reason: str = ""


RIGHT = Outcome("right")


def run(case: Case, *, look: bool = True) -> Outcome:
    """Distribute `case`, run it with poison in its padding and compare; with `look`, check its local module, too."""
    try:
        outcome = _run(case, look)
        if outcome.verdict == "wrong" and outcome.reason.startswith("result") and not case.whole:
            return _in_float64(case, outcome)
        return outcome
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())


def _run(case: Case, look: bool) -> Outcome:
    module, data = build(case.source), make_data(case)
    expected = mt.run_sequential(module, list(data.values()))
    try:
        distributed = distribute(case, module, data)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    given = {name: _spread(case, name, tensor) for name, tensor in data.items() if name not in case.weights}
    before = {name: tensor.clone() for name, tensor in data.items()}
    actual = distributed(*given.values())
    if not all(torch.equal(before[name], tensor) for name, tensor in data.items()):
        return Outcome("wrong", "an input was modified")
    problem = _differs(case, flat(actual), flat(expected)) or (look and _looks_wrong(case, module, distributed))
    return Outcome("wrong", problem) if problem else RIGHT


def distribute(case: Case, module: ir.IRModule, data: dict[str, torch.Tensor]) -> mt.MeshModule:
    """The module on the case's mesh, with its weights, by any plan; mostly poisoned. Without, devices share what they
    make alike."""
    with any_plan(case.seed):
        return _distribute(case, module, data)


def _distribute(case: Case, module: ir.IRModule, data: dict[str, torch.Tensor]) -> mt.MeshModule:
    weights = {name: data[name] for name in case.weights}
    shardings, poison = case.shardings, case.seed % 4 != 1
    stated = typed(case) if case.typed and not _more_said(case) else None
    if stated is not None:
        return mt.distribute_module(stated, case.mesh, weights=weights, poison=poison)
    said = {"open": case.open, "priority": case.priority, "groups": case.groups, "barriers": case.barriers}
    module = mt.annotate_module(module, case.mesh, shardings, **said)
    return mt.distribute_module(module, case.mesh, weights=weights, poison=poison)


def _more_said(case: Case) -> bool:
    return bool(case.open or case.priority or case.groups or case.barriers)


def make_data(case: Case) -> dict[str, torch.Tensor]:
    """The arguments of main."""
    generator = torch.Generator().manual_seed(case.seed)
    return {param.name: _random(param, case.whole, generator) for param in case.params}


def _random(param: Param, whole: bool, generator: torch.Generator) -> torch.Tensor:
    dtype = torch_dtype(param.dtype)
    if param.below is not None:
        return torch.randint(0, param.below, param.shape, generator=generator).to(dtype)
    if dtype == torch.bool:
        return torch.randint(0, 2, param.shape, generator=generator).bool()
    if whole or not dtype.is_floating_point:
        return torch.randint(-3, 4, param.shape, generator=generator).to(dtype)
    return torch.randn(param.shape, generator=generator).clamp(-3, 3).to(dtype)


def _spread(case: Case, name: str, tensor: torch.Tensor) -> torch.Tensor | mt.MeshTensor:
    return mt.distribute(tensor, mt.Mesh(case.mesh), case.spread[name]) if name in case.spread else tensor


def flat(tree: Any) -> list[torch.Tensor]:
    """The tensors of a result, global."""
    if isinstance(tree, tuple):
        return [leaf for item in tree for leaf in flat(item)]
    return [tree.full() if isinstance(tree, mt.MeshTensor) else tree]


def _differs(case: Case, actual: list[torch.Tensor], expected: list[torch.Tensor]) -> str:
    if len(actual) != len(expected):
        return f"{len(actual)} results, expected {len(expected)}"
    for index, (have, want) in enumerate(zip(actual, expected, strict=True)):
        if (have.shape, have.dtype) != (want.shape, want.dtype):
            return f"result {index} is {have.dtype}{tuple(have.shape)}, expected {want.dtype}{tuple(want.shape)}"
        if not torch.isfinite(want).all():
            return f"the module itself gives {want}"
        exact = case.whole and index in case.exact or not want.dtype.is_floating_point
        bad = have != want if exact else _far(have, want)
        if bad.any():
            return f"result {index}: {int(bad.sum())} of {bad.numel()} elements differ\n{have}\nexpected\n{want}"
    return ""


def _far(have: torch.Tensor, want: torch.Tensor) -> torch.Tensor:
    size = want.double().abs()
    largest = size.max().clamp(min=1) if size.numel() else 1
    return ~((have.double() - want.double()).abs() <= TOLERANCE[want.dtype] * (size + largest))


def _in_float64(case: Case, outcome: Outcome) -> Outcome:
    """Where float32 differs in the last digits of a result that cancels, float64 does not."""
    source = case.source.replace("float16", "float64").replace("float32", "float64")
    params = tuple(
        replace(p, dtype=p.dtype.replace("float16", "float64").replace("float32", "float64")) for p in case.params
    )
    again = _run(replace(case, source=source, params=params), look=False)
    return RIGHT if again.verdict == "right" else outcome


def _looks_wrong(case: Case, module: ir.IRModule, distributed: mt.MeshModule) -> str:
    """What is wrong with the local module or with what is told about it."""
    local = distributed.local_module
    if not relax.analysis.well_formed(local):
        return f"the local module is not well-formed:\n{local.script()}"
    text = local.script(show_meta=True)
    if not tvm.ir.structural_equal(tvm.script.from_source(text), local):
        return f"the local module is read as another one:\n{text}"
    told = distributed.explain()
    if "steps of each device" not in told:
        return f"explain() gives {told}"
    again = distribute(case, module, make_data(case))
    if again.explain() != told or not tvm.ir.structural_equal(again.local_module, local):
        return f"planned differently the second time:\n{again.explain()}\n{told}"
    return ""
