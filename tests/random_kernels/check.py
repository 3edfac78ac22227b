"""What becomes of a random kernel: right, refused or wrong, measured against the unsharded kernel."""

from __future__ import annotations

import traceback
import zlib
from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
import torch

import mesh_tensor as mt
from mesh_tensor.targets.interpreter import interpret
from mesh_tensor.targets.kernels import as_numpy
from mesh_tensor.tir.reducers import without_reducers
from tests.other_machines import any_plan, machine

from .build import build
from .reference import run_as_python
from .spec import Case, Param, without_barriers

#: `|actual - expected| <= tolerance * (|expected| + the largest |expected|)`, by the results' dtype.
TOLERANCE = {"float32": 1e-4, "float16": 4e-3}
_OVERLAPS: tuple[str | int, ...] = ("auto", "auto", 2, 3, 5)


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "right", "refused" or "wrong"; `reason` says why it is not right."""

    verdict: str
    reason: str = ""


RIGHT = Outcome("right")


def run(case: Case, target: str = "interpret") -> Outcome:
    """Lower `case`, run it (poisoned, if interpreted) and compare with the unsharded kernel."""
    try:
        annotated = mt.annotate(build(case.source), mt.Mesh(case.mesh), case.shardings)
        draw = zlib.crc32(repr(case.shardings).encode())
        with any_plan(draw) if case.machine is None else machine(case.machine):
            overlap = _OVERLAPS[draw % len(_OVERLAPS)]
            kernel = mt.compile(annotated, target=target, poison=target == "interpret", overlap=overlap)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    left_out = _made(kernel) if case.blank else frozenset()
    data = make_data(case, left_out)
    try:
        expected = unsharded(case, data)
        if case.as_python and (by_python := _compare(case, as_python(case, data), expected)) != RIGHT:
            return Outcome("wrong", f"the interpreter differs from Python on the kernel itself\n{by_python.reason}")
        actual = _call(case, kernel, {name: array for name, array in data.items() if name not in left_out})
    except Exception:  # what was not refused has to run
        return Outcome("wrong", traceback.format_exc())
    return _compare(case, actual, expected)


def _made(kernel: mt.MeshKernel) -> frozenset[str]:
    """The parameters that a call may leave out."""
    return frozenset(p.name for p in kernel.program.parameters if p.output is not None and (p.input is None or p.kept))


def make_data(case: Case, left_out: Collection[str] = ()) -> dict[str, np.ndarray]:
    """The parameters' content before the call. Outputs hold data, too: what a kernel doesn't write stays. Those that
    the call leaves out start at 0."""
    rng = np.random.default_rng(case.seed)
    data = {param.name: _random(param, case.integers, rng) for param in case.params}
    return {name: np.zeros_like(array) if name in left_out else array for name, array in data.items()}


def _random(param: Param, integers: bool, rng: np.random.Generator) -> np.ndarray:
    if param.below is not None:
        return rng.integers(0, param.below, param.shape).astype(param.dtype)
    if integers or param.dtype == "int32":
        return rng.integers(-3, 4, param.shape).astype(param.dtype)
    return rng.standard_normal(param.shape).astype(param.dtype)


def unsharded(case: Case, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What the kernel itself makes of `data`."""
    arrays = {name: array.copy() for name, array in data.items()}
    interpret(without_reducers(build(without_barriers(case.source))), list(arrays.values()))
    return {param.name: arrays[param.name] for param in case.params if param.role != "in"}


def as_python(case: Case, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same, told by Python."""
    arrays = {name: array.copy() for name, array in data.items()}
    run_as_python(without_barriers(case.source), arrays)
    return arrays


def _call(case: Case, kernel: mt.MeshKernel, data: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    tensors = {name: as_tensor(array.copy()) for name, array in data.items()}
    result = kernel(*tensors.values())
    results = result if isinstance(result, tuple) else (result,)
    names = [param.name for param in kernel.program.parameters if param.output is not None]
    for param in case.params:
        if param.role == "in" and not np.array_equal(as_numpy(tensors[param.name]), data[param.name]):
            raise AssertionError(f"the input {param.name} was modified")
    return {**data, **{name: tensor.numpy() for name, tensor in zip(names, results, strict=True)}}


def as_tensor(array: np.ndarray) -> torch.Tensor:
    """On the same memory; also of what numpy has no dtypes of its own for."""
    known = np.issubdtype(array.dtype, np.number)
    bits = array if known else array.view(f"uint{8 * array.dtype.itemsize}")
    tensor = torch.from_numpy(bits)
    return tensor if known else tensor.view(getattr(torch, str(array.dtype)))


def _compare(case: Case, actual: dict[str, np.ndarray], expected: dict[str, np.ndarray]) -> Outcome:
    for name, want in expected.items():
        have = actual[name]
        if have.shape != want.shape or have.dtype != want.dtype:
            return Outcome("wrong", f"{name} is {have.dtype}{have.shape}, expected {want.dtype}{want.shape}")
        bad = ~_close(have, want, case.exact and case.integers)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            report = f"{name}: {bad.sum()} of {bad.size} elements differ, first {at}: {have[at]}, expected {want[at]}"
            return Outcome("wrong", f"{report}\nactual:\n{have}\nexpected:\n{want}")
    return RIGHT


def _close(have: np.ndarray, want: np.ndarray, exact: bool) -> np.ndarray:
    same = (have == want) | (np.isnan(have) & np.isnan(want)) if want.dtype.kind == "f" else have == want
    if exact or want.dtype.kind != "f":
        return same
    with np.errstate(all="ignore"):
        size = np.abs(want.astype(np.float64))
        largest = np.max(size, initial=0.0, where=np.isfinite(size))
        near = np.abs(have.astype(np.float64) - want) <= TOLERANCE[str(want.dtype)] * (size + largest)
    return same | near
