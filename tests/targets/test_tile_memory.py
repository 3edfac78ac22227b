"""Memory of tiles that are gone serves later ones, and no others."""

import gc
import resource
import sys
import threading

import pytest
import torch

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.targets import tile_memory
from mesh_tensor.targets.tile_memory import empty_tile, keep_heap

CPU = torch.device("cpu")
SHAPE = (768, 1024)  # of float32: 3 MiB


@pytest.fixture(autouse=True, scope="module")
def no_tiles_of_other_tests():
    """Those that only cycles hold would be left in the middle of a test."""
    gc.collect()


@pytest.fixture(autouse=True)
def nothing_left(no_tiles_of_other_tests):
    tile_memory._left.clear()


def tile(shape=SHAPE, dtype=torch.float32):
    return empty_tile(shape, dtype, CPU)


def left():
    """Bytes kept for later."""
    return sum(map(len, tile_memory._left))


@pytest.mark.parametrize("shape", [(), (0,), (5, 0), (7,), (3, 1 << 19), (2, 3, 1 << 18), (1 << 20, 1)], ids=str)
@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.bool, torch.uint16, torch.float8_e4m3fn]
)
def test_tiles_are_like_new_tensors(shape, dtype):
    made, expected = tile(shape, dtype), torch.empty(shape, dtype=dtype)
    assert (made.shape, made.dtype, made.stride()) == (expected.shape, expected.dtype, expected.stride())
    assert made.data_ptr() % 64 == 0
    assert made.is_contiguous()
    values = torch.ones(shape).to(dtype)
    made.copy_(values)
    assert torch.equal(made.to(torch.float64), values.to(torch.float64))


def test_memory_is_used_again_when_its_last_tensor_is_gone():
    first = tile()
    place, part, array = first.data_ptr(), first[3:5], first.numpy()
    del first
    assert tile().data_ptr() != place
    del part
    assert tile().data_ptr() != place, "an array is left"
    del array
    assert place in [t.data_ptr() for t in (tile(), tile())]


def test_memory_serves_tiles_of_its_size_only():
    place = tile().data_ptr()
    assert tile((4 * SHAPE[0], SHAPE[1])).data_ptr() != place
    assert tile((SHAPE[0], SHAPE[1] // 2), torch.float64).data_ptr() == place


def test_tiles_that_live_at_the_same_time_have_memory_of_their_own():
    tiles = [tile().fill_(n) for n in range(5)]
    del tiles[2]
    tiles += [tile().fill_(n) for n in (5, 6)]
    assert [t.unique().item() for t in tiles] == [0, 1, 3, 4, 5, 6]


def test_what_is_kept_is_limited(monkeypatch):
    monkeypatch.setattr(tile_memory, "_KEPT", 7 << 20)
    tiles = [tile() for _ in range(4)]
    places = [t.data_ptr() for t in tiles]
    while tiles:
        del tiles[0]
    assert left() == 6 << 20
    kept = [tile(), tile()]
    assert {t.data_ptr() for t in kept} == set(places[2:]), "those that were left last"
    big = tile((4 * SHAPE[0], SHAPE[1]))
    del kept, big
    assert left() == 6 << 20, "what is larger than the limit is not kept"


def test_small_tiles_are_not_kept():
    small = tile((8, 8))
    del small
    assert left() == 0


def test_threads_never_get_the_same_memory():
    wrong = []

    def work(number):
        for turn in range(60):
            mine = [tile().fill_(number * 100 + turn), tile((256, 1024)).fill_(number)]
            if mine[0].min() != number * 100 + turn or mine[1].max() != number:
                wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_results_keep_their_values_while_a_kernel_runs_again():
    size = 1024
    sharded = mt.annotate(matmul(size, size, size, 256, 256, 256), mt.Mesh({"x": 2}), {"A": {"x": 1}, "B": {"x": 0}})
    kernel = mt.compile(sharded, target="c")
    operands = [torch.randn(2, size, size) for _ in range(3)]
    tiles = [(mt.distribute(a, kernel.mesh, {"x": 1}), mt.distribute(b, kernel.mesh, {"x": 0})) for a, b in operands]
    results = [kernel(*pair) for pair in tiles]
    for (a, b), result in zip(operands, results, strict=True):
        torch.testing.assert_close(result.full(), a @ b, rtol=1e-4, atol=1e-3)
    assert left() > 0, "the partial results' memory was used again"


@pytest.mark.skipif(sys.platform != "linux", reason="another C library")
def test_small_tiles_come_back_without_page_faults():
    """20 MB of tiles that a step leaves serve the next one."""

    def faults():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        tiles = [torch.zeros(1 << 18) for _ in range(20)]
        assert len(tiles) == 20
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before

    keep_heap()
    faults()
    assert faults() < 1000  # 5120 pages
