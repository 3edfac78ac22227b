"""Models in torch, as torch users write them, with random weights, and ways to lay them out on a mesh.

Each file has a frozen `Config` of sizes, the model, `build(config)`, `example_inputs(config)`, and functions that give
shardings for `mesh_tensor.annotate_module`: from names of weights, inputs and submodules (their results are meant) to
layouts. `together` puts several on one mesh.
"""

from __future__ import annotations

from collections.abc import Mapping

Shardings = dict[str, dict[str, int]]


def together(*shardings: Mapping[str, Mapping[str, int]]) -> Shardings:
    """Every name with all the axes that any of the arguments gives it; an axis may be given twice only if it is the
    same.

    >>> together({"x": {"data": 0}}, {"x": {"model": 1}, "w": {"model": 0}})
    {'x': {'data': 0, 'model': 1}, 'w': {'model': 0}}
    """
    result: Shardings = {}
    for one in shardings:
        for name, layout in one.items():
            there = result.setdefault(name, {})
            clash = [axis for axis, dim in layout.items() if there.setdefault(axis, dim) != dim]
            if clash:
                raise ValueError(f"{name!r} is given different dims for {clash}")
    return result
