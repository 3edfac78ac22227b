"""Work on large tensors in parts."""

import threading

import pytest
import torch

from mesh_tensor import Mesh, Sharding
from mesh_tensor.runtime.elementwise import _ALONE, _CHUNK, clone, copy, elementwise, fill
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

SHAPES = [(), (0,), (7,), (_ALONE + 1,), (5 * _CHUNK // 2,), (3, _CHUNK), (1, 3 * _CHUNK), (2 * _CHUNK // 8 + 3, 8)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_every_position_is_done_once(shape):
    counts, source = torch.zeros(shape, dtype=torch.int32), torch.ones(shape, dtype=torch.int32)
    elementwise(lambda out, other: out.add_(other), counts, source)
    assert bool((counts == 1).all())


def test_tensors_that_are_not_contiguous():
    source = torch.arange(4 * _CHUNK).reshape(2048, -1)
    out = torch.zeros(2048, 1500, dtype=torch.int64)
    copy(out[:, 3:1400], source[:, 500:1897])
    assert torch.equal(out[:, 3:1400], source[:, 500:1897])
    assert out[:, :3].sum() == out[:, 1400:].sum() == 0


def test_fill_and_clone():
    assert (fill(torch.empty(3 * _CHUNK), 2.5) == 2.5).all()
    source = torch.randn(64, 1024).t()
    assert torch.equal(clone(source), source)
    assert clone(source).is_contiguous()


def test_torch_keeps_its_threads():
    before = torch.get_num_threads()
    fill(torch.empty(3 * _CHUNK), 1.0)
    assert torch.get_num_threads() == before
    seen = []
    thread = threading.Thread(target=lambda: seen.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert seen == [before]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint32])
@pytest.mark.parametrize("devices", [2, 3])
def test_large_reductions(dtype, devices):
    shape = (3, _CHUNK)
    tiles = [torch.randint(0, 100, shape, dtype=torch.int32).to(dtype) for _ in range(devices)]
    expected = sum(tile.to(torch.float64) for tile in tiles).to(torch.float32).to(dtype)
    layout = Sharding.make(Mesh({"x": devices}), 2, {}, partial={"x": "sum"})
    assert torch.equal(MeshTensor(tiles, shape, layout).full(), expected)
