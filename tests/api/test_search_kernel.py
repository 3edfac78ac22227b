"""mt.search of a kernel: how its buffers lie best."""

from itertools import product

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.softmax import softmax

SLOW = mt.Machine.preset("cpu")


@pytest.mark.parametrize(("sizes", "objective"), [((64, 64, 512), "time"), ((64, 64, 512), "memory")])
def test_all_layouts_of_a_product(sizes, objective):
    """Nothing that can be said of one axis is better than what is found."""
    func, ways = matmul(*sizes, 32), [{}, {"x": 0}, {"x": 1}]
    found = mt.search(func, 2, SLOW, objective=objective)
    made = [
        mt.simulate(mt.annotate(func, {"x": 2}, dict(zip("ABC", way, strict=True))), SLOW)
        for way in product(ways, repeat=3)
    ]
    ranks = {"time": lambda s: (s.time, s.peak_bytes), "memory": lambda s: (s.peak_bytes, s.time)}
    best = min(made, key=ranks[objective])
    assert (found.best.time, found.best.memory) == pytest.approx((best.time, best.peak_bytes))


def test_what_is_found_runs_as_it_was_simulated():
    found = mt.search(matmul(64, 96, 32, 32), 4, "h100x4", meshes=[{"x": 2, "y": 2}], width=2)
    a, b = torch.randn(64, 32), torch.randn(32, 96)
    run = found.compile(target="interpret")
    torch.testing.assert_close(run(a, b), a @ b, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.run(a, b, target="interpret"), a @ b, rtol=1e-4, atol=1e-4)
    assert found.simulation().time == pytest.approx(found.best.time)
    assert run.peak_bytes == found.best.memory
    assert min(found.pareto(), key=lambda each: each.time).time == found.best.time
    names = {"mt": mt, "kernel": found.kernel}
    exec(found.code(), names)
    assert mt.simulate(names["kernel"], "h100x4").time == pytest.approx(found.best.time)
    assert str(found).startswith(f"{len(found.strategies)} strategies on h100x4\n")


def test_rows_are_split_rather_than_what_is_reduced():
    found = mt.search(softmax(64, 64), 2, SLOW)
    assert found.best.shardings == {"X": {"x": 0}, "Y": {"x": 0}}
    dims = [(("X", 0), ("Y", 0)), (("X", 1), ("Y", 1)), (("Y", 0),), (("Y", 1),)]
    assert [dim.dims for dim in found.dims] == dims


def test_what_cannot_be_searched():
    func = matmul(64, 64, 64, 32)
    with pytest.raises(mt.MeshTensorError, match=r"batch of a search over a kernel[\s\S]*search a module"):
        mt.search(func, 2, batch=4)
    with pytest.raises(mt.MeshTensorError, match=r"no strategy fits into 100 bytes[\s\S]*the smallest that was found"):
        mt.search(func, 2, memory_limit=100, meshes=[{"x": 2}], width=1)
