"""annotate on @tilelang.jit functions: the kernel for the sizes that are said."""

import pytest
import tilelang
import tilelang.language as T
import torch
import tvm

import mesh_tensor as mt
from mesh_tensor.annotations.annotate import read_annotations

ROWS = {"A": {"x": 0}, "B": {"x": 0}}


@tilelang.jit(out_idx=[-1])
def lazy(M, N, block=16):
    @T.prim_func
    def twice(A: T.Tensor((M, N), "float32"), B: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(M, block)) as bx:
            for i, j in T.Parallel(block, N):
                B[bx * block + i, j] = A[bx * block + i, j] * 2.0

    return twice


def twice(M):
    @T.prim_func
    def main(A: T.Tensor((M,), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, 16)) as bx:
            for i in T.Parallel(16):
                B[bx * 16 + i] = A[bx * 16 + i] * 2.0

    return main


@tilelang.jit
def indirect(M):
    return twice(M)


@tilelang.jit
def eager(A, block=16):
    M, N = T.const("M, N")
    A: T.Tensor[[M, N], T.float32]
    B = T.empty((M, N), "float32")
    with T.Kernel(T.ceildiv(M, block)) as bx:
        for i, j in T.Parallel(block, N):
            B[bx * block + i, j] = A[bx * block + i, j] * 2.0
    return B


@tilelang.jit
def fixed(A: T.Tensor((32, 8), "float32"), B: T.Tensor((32, 8), "float32")):
    with T.Kernel(2) as bx:
        for i, j in T.Parallel(16, 8):
            B[bx * 16 + i, j] = A[bx * 16 + i, j] * 2.0


def refusal(function, sizes, shardings=None):
    with pytest.raises(mt.MeshTensorError) as caught:
        mt.annotate(function, {"x": 2}, ROWS if shardings is None else shardings, sizes=sizes)
    assert max(map(len, str(caught.value).splitlines())) < 300
    return str(caught.value)


@pytest.mark.parametrize(
    ("function", "sizes", "shape"),
    [
        (lazy, {"M": 37, "N": 8}, (37, 8)),
        (lazy, {"M": 37, "N": 8, "block": 4}, (37, 8)),
        (indirect, {"M": 37}, (37,)),
        (eager, {"M": 37, "N": 8}, (37, 8)),
        (eager, {"M": 37, "N": 8, "block": 32}, (37, 8)),
        (fixed, None, (32, 8)),
        (fixed, {}, (32, 8)),
    ],
    ids=["lazy", "lazy-block", "indirect", "eager", "eager-block", "fixed", "fixed-empty"],
)
@pytest.mark.parametrize("target", ["interpret", "c"])
def test_it_runs(function, sizes, shape, target):
    func = mt.annotate(function, {"x": 2}, ROWS, sizes=sizes)
    a = torch.randn(shape)
    kernel = mt.compile(func, target=target)
    torch.testing.assert_close(kernel(a), a * 2)
    assert str(read_annotations(func)[1]["A"].sharding) == "S[0]"


@tilelang.autotune(configs=[{"block": 8}, {"block": 16}])
@tilelang.jit(out_idx=[-1])
def tuned(M, block=None):
    return twice(M) if block == 16 else twice(M + 0 * block)


def test_what_is_tuned_is_a_size():
    func = mt.annotate(tuned, {"x": 2}, ROWS, sizes={"M": 20, "block": 8})
    a = torch.randn(20)
    torch.testing.assert_close(mt.compile(func, target="interpret")(a), a * 2)
    assert "no size is given for 'M'" in refusal(tuned, {"block": 8})
    with pytest.raises(mt.MeshTensorError, match="'tuned' is no kernel .* but a @tilelang.jit function"):
        mt.compile(tuned)


def test_what_tilelang_compiled_says_what_it_was_made_of():
    @T.prim_func
    def on_a_cpu(A: T.Tensor((16,), "float32"), B: T.Tensor((16,), "float32")):
        with T.Kernel(1):
            for i in T.serial(16):
                B[i] = A[i] * 2.0

    compiled = tilelang.compile(on_a_cpu, target="c", execution_backend="cython")
    message = refusal(compiled, None)
    assert "a JITKernel is no kernel (PrimFunc)" in message
    assert "fix: give the PrimFunc that it was compiled from: its .prim_func" in message
    a = torch.randn(16)
    kernel = mt.compile(mt.annotate(compiled.prim_func, {"x": 2}, ROWS), target="interpret")
    torch.testing.assert_close(kernel(a), a * 2)


def test_it_is_what_get_tir_gives():
    made = mt.annotate(lazy, {"x": 2}, ROWS, sizes={"M": 64, "N": 8})
    by_hand = mt.annotate(lazy.get_tir(64, 8), {"x": 2}, ROWS)
    tvm.ir.assert_structural_equal(made.without_attr("tilelang_out_idx"), by_hand)


def test_the_out_idx_of_the_function_is_the_kernels():
    kernel = mt.compile(mt.annotate(lazy, {"x": 2}, ROWS, sizes={"M": 64, "N": 8}), target="interpret")
    with pytest.raises(mt.MeshTensorError, match="2 arguments, but expected 1"):
        kernel(torch.zeros(64, 8), torch.zeros(64, 8))


@pytest.mark.parametrize("function", [lazy, eager])
def test_no_sizes(function):
    message = refusal(function, None)
    assert "no size is given for 'M'" in message
    assert "no size is given for 'N'" in message
    assert f"where: the @tilelang.jit function '{'lazy' if function is lazy else 'eager'}'" in message
    assert 'fix: annotate(f, mesh, shardings, sizes={"M": ..., "N": ..., "block": ...})' in message


@pytest.mark.parametrize("function", [lazy, eager, indirect, fixed])
def test_a_size_that_there_is_not(function):
    """TileLang ignores names that an eager function has no use for."""
    sizes = {} if function is fixed else {"M": 32} if function is indirect else {"M": 32, "N": 8}
    message = refusal(function, {**sizes, "blok": 4})
    assert "there is no size 'blok'" in message
    if function in (lazy, eager):
        assert "did you mean 'block'?" in message


@pytest.mark.parametrize("function", [lazy, eager])
def test_a_size_that_is_missing(function):
    message = refusal(function, {"M": 32})
    assert "no size is given for 'N'" in message
    assert "for 'M'" not in message


@pytest.mark.parametrize("function", [lazy, eager])
def test_a_size_that_is_missing_since_it_is_misspelt(function):
    message = refusal(function, {"M": 8, "n": 3})
    assert "no size is given for 'N'" in message
    assert "there is no size 'n'" in message
    assert "did you mean 'N'?" in message


@pytest.mark.parametrize("sizes", [32, [1, 2], {0: 3}])
def test_sizes_that_are_no_dict(sizes):
    assert f"`sizes` is {sizes!r}, which is not a dict from names" in refusal(lazy, sizes)


def test_sizes_for_a_kernel_that_has_them():
    message = refusal(twice(32), {"M": 32})
    assert "sizes={'M': 32} for a PrimFunc" in message
    assert "why: its sizes are in it" in message


@pytest.mark.parametrize("call", [mt.compile, mt.lower, mt.sharding_rule])
def test_elsewhere_the_way_there_is_told(call):
    for function, name in ((lazy, "lazy"), (eager, "eager")):
        with pytest.raises(mt.MeshTensorError) as caught:
            call(function)
        message = str(caught.value)
        assert (
            f"{name!r} is no kernel (PrimFunc), but a @tilelang.jit function, which makes one for every size" in message
        )
        assert "fix: pass .get_tir(" in message
        assert 'annotate(f, mesh, shardings, sizes={"M": 128, ...})' in message
        assert len(message) < 400


def test_what_a_function_itself_raises_comes_through():
    @tilelang.jit
    def picky(M):
        if M % 2:
            raise ValueError("M has to be even")
        return twice(M)

    with pytest.raises(ValueError, match="M has to be even"):
        mt.annotate(picky, {"x": 2}, ROWS, sizes={"M": 3})
