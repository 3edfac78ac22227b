"""Every redistribution: all pairs of layouts of tensors of 1 to 3 dims on five meshes, even and uneven.

`python -m tests.redistributions` checks that each is exact on the virtual mesh (values are whole numbers, so sums are),
that its plan receives no more bytes than gathering everything, and none more than DTensor's own; and, on the meshes of
2 and 4 devices, that gloo leaves the same bits. `tests/runtime/virtual/test_redistribute.py` and
`tests/runtime/ranks/test_redistribution.py` have a part of it.
"""

from __future__ import annotations

import itertools
import math
import time
from functools import partial

import torch

from mesh_tensor import Mesh
from tests.runtime.reference import assert_holds, layouts, scatter

MESHES = [{"x": 2}, {"x": 4}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 2, "y": 2, "z": 2}]
EVEN = [(24,), (12, 24), (12, 12, 24)]
UNEVEN = [(11,), (7, 5), (3, 5, 7)]


def check(sizes: dict[str, int], shape: tuple[int, ...], step: int = 1) -> int:
    """Redistribute on the virtual mesh, for every `step`th pair of layouts. Returns how many pairs that are."""
    every = layouts(Mesh(sizes), len(shape))
    tensor = torch.randint(-50, 50, shape).float()
    sources = {src: scatter(tensor, src) for src in every}
    pairs = list(itertools.product(every, every))[::step]
    for src, dst in pairs:
        given, expected = sources[src]
        assert_holds(given.redistribute(dst), expected)
    return len(pairs)


def main() -> None:
    """Everything, with what it took."""
    from tests.redistribution.test_plan import check as check_plan
    from tests.runtime.ranks import redistribution_bodies as bodies
    from tests.runtime.ranks.launcher import run

    for sizes, shape in itertools.product(MESHES, EVEN + UNEVEN):
        start = time.perf_counter()
        count = check(sizes, shape)
        for src, dst in itertools.product(layouts(Mesh(sizes), len(shape)), repeat=2):
            check_plan(shape, src, dst)
        done = [f"{count} pairs exact, none moves more than gathering everything"]
        devices = math.prod(sizes.values())
        if shape in EVEN:
            body = partial(bodies.dtensor_never_moves_less, sizes=tuple(sizes.values()), shape=shape, step=1)
            (better,) = run(body, 1, group=False)
            done.append(f"none more than DTensor, {better} less")
        if devices in (2, 4):
            run(partial(bodies.every_pair, sizes=sizes), devices, before=partial(bodies.pairs, sizes, [shape]))
            done.append("gloo has the same bits")
        print(f"{sizes} {shape}: {'; '.join(done)} ({time.perf_counter() - start:.0f} s)", flush=True)


if __name__ == "__main__":
    main()
