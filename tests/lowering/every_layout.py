"""A kernel in every layout: right, or refused."""

import itertools
import math
from itertools import count

import torch

import mesh_tensor as mt

MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]


def layouts(ndims, axes):
    """Every layout of buffers with so many dims that puts each axis on at most one dim."""
    options = [list(itertools.product(*[[None, *range(ndim)]] * len(axes))) for ndim in ndims.values()]
    for choice in itertools.product(*options):
        yield {name: dict(zip(axes, dims, strict=True)) for name, dims in zip(ndims, choice, strict=True)}


def check(func, inputs, expected, meshes=MESHES):
    """Every layout on every mesh, or some 16 of them, gives the expected outputs, or is refused when it is compiled.
    The 16 are not a multiple of how many layouts a buffer has apart: each buffer is in several."""
    params = {func.buffer_map[p].name: func.buffer_map[p] for p in func.params}
    ndims = {name: len(buffer.shape) for name, buffer in params.items()}
    outputs = [
        torch.zeros([int(s) for s in b.shape], dtype=getattr(torch, b.dtype))
        for b in list(params.values())[len(inputs) :]
    ]
    for mesh in meshes:
        points = list(layouts(ndims, list(mesh)))
        apart = next(step for step in count(max(1, len(points) // 16)) if math.gcd(step, len(points)) == 1)
        for shardings in points[::apart]:
            try:
                compiled = mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="interpret", poison=True)
            except mt.MeshTensorError:
                continue
            result = compiled(*(t.clone() for t in (*inputs, *outputs)))
            torch.testing.assert_close(result, expected, rtol=1e-5, atol=1e-5, msg=lambda m, s=shardings: f"{s}\n{m}")


def accepted(func, mesh, shardings):
    """The factor kinds of a kernel that compiles."""
    mt.compile(mt.annotate(func, mt.Mesh(mesh), shardings), target="interpret")
    return mt.sharding_rule(func).factors
