"""What callers pass may overlap in memory, and is written where torch doesn't see it."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt
from tests.refusals import refusal


@T.prim_func
def doubled_plus(A: T.Tensor((10, 16), "float32"), B: T.Tensor((10, 16), "float32"), C: T.Tensor((10, 16), "float32")):
    with T.Kernel(T.ceildiv(10, 4), threads=32) as bx:
        for i, j in T.Parallel(4, 16):
            C[bx * 4 + i, j] = A[bx * 4 + i, j] * 2.0 + B[bx * 4 + i, j]


@T.prim_func
def centred(A: T.Tensor((8, 16), "float32"), S: T.Tensor((8,), "float32")):
    with T.Kernel(2, threads=32) as bx:
        x, total = T.alloc_fragment((4, 16), "float32"), T.alloc_fragment((4,), "float32")
        T.copy(A[bx * 4, 0], x)
        T.reduce_sum(x, total, dim=1)
        for i, j in T.Parallel(4, 16):
            x[i, j] = x[i, j] - total[i]
        T.copy(x, A[bx * 4, 0])
        T.copy(total, S[bx * 4])


def compiled(func, devices):
    names = [str(buffer.name) for buffer in func.buffer_map.values()]
    return mt.compile(mt.annotate(func, {"x": devices}, {name: {"x": 0} for name in names}), target="c")


def aligned(count):
    """So many numbers of numpy, which start where kernels can work on them."""
    flat = torch.randn(count + 16).numpy()
    start = -flat.ctypes.data // 4 % 16
    return flat[start : start + count]


@pytest.mark.parametrize("devices", [1, 2])
def test_two_storages_of_one_memory(devices):
    """Torch has a storage for each of two arrays that overlap."""
    flat = aligned(176)
    a, c = torch.from_numpy(flat[:160]).view(10, 16), torch.from_numpy(flat[16:]).view(10, 16)
    b = torch.randn(10, 16)
    expected = 2 * a + b
    assert compiled(doubled_plus, devices)(a, b, c) is c
    torch.testing.assert_close(c, expected)


@pytest.mark.parametrize("devices", [1, 2])
def test_torch_hears_of_what_is_written(devices):
    x, weight = torch.randn(10, 16), torch.randn(10, 16, requires_grad=True)
    loss = (weight * x).sum()
    compiled(doubled_plus, devices)(torch.ones(10, 16), torch.ones(10, 16), x)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with torch.inference_mode():
        without_versions = torch.zeros(10, 16)
    compiled(doubled_plus, devices)(torch.ones(10, 16), torch.ones(10, 16), without_versions)
    assert (without_versions == 3).all()


def test_two_results_in_one_place():
    memory = torch.randn(8 * 16)
    text = refusal(lambda: compiled(centred, 2)(memory.view(8, 16), memory[16:24]))
    assert "parameters 'A' and 'S' are written, and share memory" in text
    assert "where: call of kernel 'centred'" in text
    assert "pass tensors with memory of their own" in text


HEIGHT = WIDTH = 1024  # tiles so large that they lie side by side, and windows are views of them


@T.prim_func
def row_and_next(
    A: T.Tensor((HEIGHT, WIDTH), "float32"),
    B: T.Tensor((HEIGHT, WIDTH), "float32"),
    C: T.Tensor((HEIGHT, WIDTH), "float32"),
):
    with T.Kernel(T.ceildiv(HEIGHT, 32), threads=32) as by:
        for i, j in T.Parallel(32, WIDTH):
            after = T.if_then_else(by * 32 + i + 1 < HEIGHT, A[T.min(by * 32 + i + 1, HEIGHT - 1), j], 0.0)
            B[by * 32 + i, j] = A[by * 32 + i, j] + after
    with T.Kernel(T.ceildiv(HEIGHT, 32), threads=32) as by:
        for i, j in T.Parallel(32, WIDTH):
            C[by * 32 + i, j] = B[by * 32 + i, j] + 1.0


@pytest.mark.parametrize("given", ["apart", "in place", "one row on", "mesh tensors in place"])
def test_results_in_the_memory_of_what_windows_are_of(given):
    a, mesh = torch.randn(HEIGHT, WIDTH), mt.Mesh({"x": 2})
    expected = a + torch.cat([a[1:], torch.zeros(1, WIDTH)])
    run = mt.compile(mt.annotate(row_and_next, mesh, {name: {"x": 0} for name in "ABC"}))
    memory, c = torch.cat([a, torch.zeros(1, WIDTH)]), torch.empty(HEIGHT, WIDTH)
    b = {"apart": torch.empty(HEIGHT, WIDTH), "in place": memory[:HEIGHT], "one row on": memory[1:]}.get(given)
    if b is not None:
        run(memory[:HEIGHT], b, c)
    else:
        laid, other = mt.distribute(a, mesh, "S[0]"), mt.distribute(c, mesh, "S[0]")
        run(laid, laid, other)
        b, c = laid.full(), other.full()
    assert torch.equal(b, expected)
    assert torch.equal(c, expected + 1.0)


@T.prim_func
def added_sums(A: T.Tensor((12, 12), "float32"), S: T.Tensor((12,), "float32")):
    with T.Kernel(3, threads=32) as bx:
        x, total = T.alloc_fragment((4, 12), "float32"), T.alloc_fragment((4,), "float32")
        T.copy(A[bx * 4, 0], x)
        T.reduce_sum(x, total, dim=1)
        for i in T.Parallel(4):
            S[bx * 4 + i] = S[bx * 4 + i] + total[i]


@pytest.mark.parametrize(
    ("mesh", "of_a", "of_s"),
    [
        ({"x": 3}, {"x": 1}, [mt.Partial("sum")]),
        ({"x": 2, "y": 2}, {"x": 1, "y": 0}, [mt.Partial("sum"), mt.Shard(0)]),
        ({"x": 2, "y": 2}, {"x": 1, "y": 1}, [mt.Partial("sum"), mt.Partial("sum")]),
    ],
)
@pytest.mark.parametrize("made_by", ["distribute", "redistribute"])
def test_contributions_to_a_tensor_whose_devices_share_zeros(mesh, of_a, of_s, made_by):
    """Before the call all devices but the first have one memory of zeros; each leaves another contribution."""
    run = mt.compile(mt.annotate(added_sums, mt.Mesh(mesh), {"A": of_a, "S": of_s}), target="interpret", poison=True)
    a, start = torch.randn(12, 12), torch.randn(12)
    laid = mt.distribute(start, mesh, of_s if made_by == "distribute" else {})
    laid = laid.redistribute(of_s)
    assert run(a, laid) is laid
    torch.testing.assert_close(laid.full(), start + a.sum(1))


@pytest.mark.parametrize("starts", [(0, 0), (0, 3)])
def test_tiles_of_one_memory(starts):
    """What is read may be the same on several devices; what is written there isn't."""
    memory = torch.randn(8, 16)
    tiles = mt.MeshTensor([memory[at : at + 4] for at in starts], (8, 16), mt.Sharding.make({"x": 2}, 2, {"x": 0}))
    before = tiles.full()
    _, totals = compiled(centred, 2)(tiles, torch.empty(8))
    torch.testing.assert_close(totals.full(), before.sum(1))
    torch.testing.assert_close(tiles.full(), before - before.sum(1, keepdim=True))
