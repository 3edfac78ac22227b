"""Small kernels for the tests of the analysis, and what is found in them."""

import tilelang.language as T
from tvm import tirx

from mesh_tensor.rules.kernel.normalize import normalize
from mesh_tensor.rules.kernel.reader import read_kernel
from mesh_tensor.rules.kernel.sharding_rule import Analysis, analyse
from mesh_tensor.rules.kernel.statements import Kernel, Statement


def statements(func: tirx.PrimFunc) -> list[Statement]:
    """The kernel's statements."""
    return read_kernel(normalize(func)).statements


def kernel(func: tirx.PrimFunc) -> Kernel:
    """The flattened kernel."""
    return read_kernel(normalize(func))


def analysis(func: tirx.PrimFunc) -> Analysis:
    """The whole analysis."""
    return analyse(normalize(func))


def factor(found: Analysis, param: str, dim: int = 0):
    """The factor of a parameter's dim."""
    made = found.factor_of(param, dim)
    assert made is not None, f"{param} dim {dim} is needed whole: {found.reason_whole(param, dim)}"
    return made


def reduction(found: Analysis, param: str, dim: int = 0):
    """The reduction over the factor of a parameter's dim."""
    return found.reductions[factor(found, param, dim)]


def on_rows(body, M=32, N=48, block=8):
    """A kernel over blocks of rows: `body(A, B, a, b, bx)`, a T.macro, makes `b` of `a`."""

    @T.prim_func
    def rows(A: T.Tensor((M, N), "float32"), B: T.Tensor((M,), "float32")):
        with T.Kernel(T.ceildiv(M, block), threads=32) as bx:
            a = T.alloc_fragment((block, N), "float32")
            b = T.alloc_fragment((block,), "float32")
            T.copy(A[bx * block, 0], a)
            body(A, B, a, b, bx)
            T.copy(b, B[bx * block])

    return rows


def why_blocked(body) -> str | None:
    """Why the columns of a kernel over blocks of rows can't be split."""
    return factor(analysis(on_rows(body)), "A", 1).blocked
