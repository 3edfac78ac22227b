"""A kernel in every layout: right, or refused."""

import itertools
import math
from itertools import count

import torch

import mesh_tensor as mt

MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}]


def some_layouts(ndims, axes):
    """Every layout of buffers with so many dims that puts each axis on at most one dim, or some 16 of them, which are
    not a multiple of how many layouts a buffer has apart: each buffer is in several."""
    options = {name: list(itertools.product([None, *range(ndim)], repeat=len(axes))) for name, ndim in ndims.items()}
    total = math.prod(map(len, options.values()))
    apart = next(step for step in count(max(1, total // 16)) if math.gcd(step, total) == 1)
    for number in range(0, total, apart):
        layout = {}
        for name, choices in reversed(options.items()):
            number, choice = divmod(number, len(choices))
            layout[name] = dict(zip(axes, choices[choice], strict=True))
        yield {name: layout[name] for name in ndims}


def check(func, inputs, expected, meshes=MESHES):
    """Every layout on every mesh, or some 16 of them, gives the expected outputs, or is refused when it is compiled."""
    params = {func.buffer_map[p].name: func.buffer_map[p] for p in func.params}
    ndims = {name: len(buffer.shape) for name, buffer in params.items()}
    outputs = [
        torch.zeros([int(s) for s in b.shape], dtype=getattr(torch, b.dtype))
        for b in list(params.values())[len(inputs) :]
    ]
    for mesh in meshes:
        for shardings in some_layouts(ndims, list(mesh)):
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
