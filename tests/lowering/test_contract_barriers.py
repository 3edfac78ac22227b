"""What has no effect stops nothing from being split, wherever it stands, and means the same on every target."""

import pytest
import tilelang.language as T
import torch

import mesh_tensor as mt

STATEMENTS = {
    "nothing": lambda: T.evaluate(0),
    "sync_threads": lambda: T.sync_threads(),
    "named barrier": lambda: T.sync_threads(1, 32),
    "sync_warp": lambda: T.sync_warp(),
    "pdl_sync": lambda: T.pdl_sync(),
    "pdl_trigger": lambda: T.pdl_trigger(),
    "fence": lambda: T.fence_proxy_async(),
    "assume": lambda: T.assume(1 > 0),
    "print": lambda: T.print(None, msg="here"),
}


def matmul(statement, M=16, N=16, K=32, block=8):
    """A product with a statement everywhere: at the top, in the loop, under a condition, before and after it all."""
    here = STATEMENTS[statement]

    @T.prim_func
    def kernel(A: T.Tensor((M, K), "float32"), B: T.Tensor((K, N), "float32"), C: T.Tensor((M, N), "float32")):
        with T.Kernel(T.ceildiv(N, block), T.ceildiv(M, block), threads=32) as (bx, by):
            here()
            a, b = T.alloc_shared((block, block), "float32"), T.alloc_shared((block, block), "float32")
            c = T.alloc_fragment((block, block), "float32")
            T.clear(c)
            here()
            for ko in T.serial(T.ceildiv(K, block)):
                here()
                T.copy(A[by * block, ko * block], a)
                T.copy(B[ko * block, bx * block], b)
                if ko > 0:
                    here()
                T.gemm(a, b, c)
                here()
            T.copy(c, C[by * block, bx * block])
            here()

    return kernel


@pytest.mark.parametrize("statement", STATEMENTS)
@pytest.mark.parametrize("target", ["c", "interpret"])
def test_everything_is_split_as_without_it(statement, target, capfd):
    layouts = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
    kernels = [
        mt.compile(mt.annotate(matmul(name), mt.Mesh({"x": 2, "y": 2}), layouts), target=target)
        for name in ("nothing", statement)
    ]
    plain, kernel = kernels
    assert [(c.kind, c.axes) for c in kernel.program.collectives] == [("all_reduce", ("y",))]
    assert kernel.program.values["A"].sharding == plain.program.values["A"].sharding
    a, b = torch.randn(16, 32), torch.randn(32, 16)
    torch.testing.assert_close(kernel(a, b), a @ b, rtol=1e-5, atol=1e-5)
    assert ("here" in capfd.readouterr().out) == (statement == "print")
    assert str(mt.sharding_rule(matmul(statement))).endswith("m, n parallel; k sum")
