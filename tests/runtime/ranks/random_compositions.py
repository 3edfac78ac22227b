"""Random compositions of kernels on ranks, as on the virtual mesh, bit for bit: a few for each number."""

from __future__ import annotations

import math
import random
import traceback
from functools import partial

import torch

import mesh_tensor as mt
from tests.other_machines import any_plan
from tests.random_compositions.strategy import make_case
from tests.random_kernels.build import build
from tests.random_kernels.check import RIGHT, Outcome, as_tensor, make_data
from tests.random_kernels.strategy import make_shardings
from tests.sweep_points import AXES

from .kernel_bodies import Point, sample_of_the_sweep
from .launcher import run as on_ranks

#: Compositions of one number, which share the start of their ranks.
EACH = 4
_MESHES = ((3,), (2,), (2, 2), (4,), (3,), (5,))
_NOT_SENT = (torch.float8_e4m3fn, torch.float8_e5m2, torch.int16, torch.uint16)  # by gloo, where torch distributes


def run(number: int) -> Outcome:
    """Compare the compositions of a number."""
    sizes = _MESHES[number % len(_MESHES)]
    before = partial(compositions, sizes, range(EACH * number, EACH * number + EACH))
    try:
        on_ranks(partial(sample_of_the_sweep, sizes=sizes), math.prod(sizes), before=before)
    except BaseException as error:  # pytest's failures are no Exceptions
        if isinstance(error, KeyboardInterrupt):
            raise
        return Outcome("wrong", traceback.format_exc())
    return RIGHT


def compositions(sizes: tuple[int, ...], numbers: range) -> list[Point]:
    """On a mesh of these sizes, by any plan, in slabs now and then: each with its arguments, and what they are on one
    process."""
    made = []
    for number in numbers:
        case, overlap = make_case(number), ("auto", 2, 3)[number % 3]
        mesh = dict(zip(AXES, sizes, strict=False))
        shardings = make_shardings(random.Random(number), case.params, mesh)
        arguments = {name: as_tensor(array) for name, array in make_data(case).items()}
        if any(tensor.dtype in _NOT_SENT for tensor in arguments.values()):
            continue
        try:
            with any_plan(number):
                annotated = mt.annotate(build(case.source), mt.Mesh(mesh), shardings)
                kern = mt.compile(annotated, target="interpret", poison=True, overlap=overlap)
        except mt.MeshTensorError:
            continue  # refused everywhere
        expected = {key: tensor.clone() for key, tensor in arguments.items()}
        kern(*expected.values())
        made.append((f"composition {number} with {shardings}", number, kern, arguments, expected))
    return made
