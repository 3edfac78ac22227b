"""Which loops are joined, which may not be, and that results stay what they were."""

import pytest
import tilelang.language as T
import torch
from tvm import tirx

from kernels.softmax import softmax
from mesh_tensor.targets.cpu.fuse import accesses, fuse_loops, walk
from mesh_tensor.targets.cpu.kernel import compile_for_cpu
from mesh_tensor.targets.cpu.retarget import retarget_for_cpu
from mesh_tensor.tir.rewrite import statements

N = 96


def pair(first, second):
    """Two loops, one after the other, over parameters X, Y and Z and blocks x and y."""

    @T.prim_func
    def pair_kernel(X: T.Tensor((N, N)), Y: T.Tensor((N, N)), Z: T.Tensor((N,))):
        with T.Kernel(1, threads=128):
            x = T.alloc_fragment((N, N), "float32")
            y = T.alloc_fragment((N, N), "float32")
            T.copy(X, x)
            T.copy(Y, y)
            for i, j in T.Parallel(N, N):
                first(X, Y, Z, x, y, i, j)
            for i, j in T.Parallel(N, N):
                second(X, Y, Z, x, y, i, j)
            T.copy(x, X)
            T.copy(y, Y)

    return pair_kernel


def bodies():
    """Per case: what the first loop does, what the second does, and the same in torch."""

    @T.macro
    def doubles(X, Y, Z, x, y, i, j):
        x[i, j] = x[i, j] * 2

    @T.macro
    def same_element(X, Y, Z, x, y, i, j):
        y[i, j] = y[i, j] + x[i, j]

    @T.macro
    def turned(X, Y, Z, x, y, i, j):
        y[i, j] = y[i, j] + x[j, i]

    @T.macro
    def next_row(X, Y, Z, x, y, i, j):
        y[i, j] = y[i, j] + x[(i + 1) % N, j]

    @T.macro
    def last_row(X, Y, Z, x, y, i, j):
        y[i, j] = y[i, j] + x[N - 1, j]

    return {
        "same": (doubles, same_element, lambda x: 2 * x),
        "turned": (doubles, turned, lambda x: 2 * x.T),
        "next": (doubles, next_row, lambda x: 2 * x.roll(-1, 0)),
        "last": (doubles, last_row, lambda x: 2 * x[-1:].expand(N, N)),
    }


@pytest.mark.parametrize("case", ["same", "turned", "next", "last"])
def test_loops_that_depend_on_each_other(case):
    first, second, read = bodies()[case]
    x, y = torch.randn(N, N), torch.randn(N, N)
    wanted = 2 * x, y + read(x)
    func = pair(first, second)
    compile_for_cpu(func)(x, y, torch.zeros(N))
    torch.testing.assert_close((x, y), wanted, rtol=1e-6, atol=1e-6)
    assert joined(func, "x", "y") == (case == "same")


def joined(func, *written):
    """Whether one innermost loop writes all these buffers, and reads none of the kernel's parameters."""
    found = False
    for loop in walk(retarget_for_cpu(func).body):
        if isinstance(loop, tirx.For) and not any(isinstance(p, tirx.For) for p in walk(loop.body)):
            stores = [part for part in statements(loop.body) if isinstance(part, tirx.BufferStore)]
            last = {store.buffer.name for store in stores if isinstance(store.value, tirx.Add | tirx.Mul)}
            found = found or last >= set(written)
    return found


@pytest.mark.parametrize("block_M", [1, 8, 32])
@pytest.mark.parametrize("shape", [(64, 256), (37, 256), (64, 4096), (5, 100), (8, 33)])
def test_softmax(shape, block_M):
    x = torch.randn(shape) * 5
    x[0, 3], x[1, 7] = torch.nan, torch.inf
    y = torch.empty(shape)
    compile_for_cpu(softmax(*shape, block_M=block_M))(x, y)
    torch.testing.assert_close(y, torch.softmax(x.double(), -1).float(), rtol=2e-6, atol=1e-9, equal_nan=True)


def test_softmax_walks_every_row_once_per_pass():
    inner = [
        part
        for part in walk(retarget_for_cpu(softmax(64, 4096, block_M=8)).body)
        if isinstance(part, tirx.For) and getattr(part.extent, "value", 0) in (128, 4096)
    ]
    assert len(inner) == 3


def test_a_result_in_the_memory_of_the_input():
    x = torch.randn(64, 256)
    wanted = torch.softmax(x, -1)
    compile_for_cpu(softmax(64, 256, block_M=8))(x, x)
    torch.testing.assert_close(x, wanted, rtol=2e-6, atol=1e-9)


def loops(n, first, second):
    """Two loops over `n` by hand, with these bodies."""
    nests = []
    for body in (first, second):
        var = tirx.Var("v", "int32")
        nests.append(tirx.For(var, 0, n, tirx.ForKind.SERIAL, body(var)))
    return tirx.SeqStmt(nests)


def buffer(name, shape=(N,)):
    return tirx.decl_buffer(shape, "float32", name)


def store(target, index, source, source_index):
    return tirx.BufferStore(target, source[source_index], [index])


@pytest.mark.parametrize(
    ("shift", "same_shape", "params", "one"),
    [
        (0, True, True, True),
        (1, True, True, False),
        (0, False, True, False),
        (1, True, False, True),
        (0, False, False, True),
    ],
)
def test_parameters_may_be_the_same_memory(shift, same_shape, params, one):
    """`b[v] = a[v]`, then `d[v] = c[v + shift]`, where b and c may be the same."""
    a, b, d = buffer("a"), buffer("b"), buffer("d")
    c = buffer("c", (N,) if same_shape else (N + 1,))
    nest = loops(N, lambda v: store(b, v, a, v), lambda v: store(d, v, c, v + shift))
    known = frozenset(x.data for x in (b, c)) if params else frozenset()
    assert (len(statements(fuse_loops(nest, known))) == 1) == one


def test_what_is_no_plain_loop_is_left_alone():
    a, b = buffer("a"), buffer("b")
    call = tirx.Evaluate(tirx.call_extern("void", "f", tirx.address_of(a[0])))
    nest = loops(N, lambda v: store(b, v, a, v), lambda v: store(a, v, b, v))
    parts = [nest.seq[0], call, nest.seq[1]]
    assert accesses(call) is None
    assert len(statements(fuse_loops(tirx.SeqStmt(parts), frozenset()))) == 3


def test_loops_of_different_lengths_stay_apart():
    a, b = buffer("a"), buffer("b")
    nests = [
        tirx.For(v, 0, size, tirx.ForKind.SERIAL, store(b, v, a, v))
        for v, size in ((tirx.Var("v", "int32"), N), (tirx.Var("w", "int32"), N - 1))
    ]
    assert len(statements(fuse_loops(tirx.SeqStmt(nests), frozenset()))) == 2
