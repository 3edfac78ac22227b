"""Products against TVM and numpy."""

import numpy as np
from tvm import relax

from mesh_tensor.rules.operator.linear_algebra import fft_call, grouped_call, looked_up_call

from .cases import Case, CaseTests, i, t

op = relax.op


def _pairs(numbers):
    """Complex numbers as pairs of floats."""
    return np.stack([numbers.real, numbers.imag], -1).astype("float32")


CASES = {
    "matrices": Case((t(3, 5), t(5, 4)), op.matmul, lambda a, b: np.einsum("ik,kj->ij", a, b)),
    "batches": Case((t(2, 3, 5), t(2, 5, 4)), op.matmul, lambda a, b: np.einsum("bik,bkj->bij", a, b)),
    "broadcast": Case(
        (t(2, 1, 3, 5), t(6, 5, 4)), op.matmul, lambda a, b: np.einsum("bcik,ckj->bcij", a.repeat(6, 1), b)
    ),
    "vector first": Case((t(5), t(2, 5, 4)), op.matmul, lambda a, b: np.einsum("k,bkj->bj", a, b)),
    "vector last": Case((t(2, 3, 5), t(5)), op.matmul, lambda a, b: np.einsum("bik,k->bi", a, b)),
    "vectors": Case((t(5), t(5)), op.matmul, lambda a, b: np.sum(a * b)),
    "int8 in int32": Case(
        (i(3, 9, dtype="int8", low=-128, high=127), i(9, 4, dtype="int8", low=-128, high=127)),
        lambda a, b: op.matmul(a, b, "int32"),
        lambda a, b: np.einsum("ik,kj->ij", a.astype("int32"), b.astype("int32")),
    ),
    "float32 in float64": Case(
        (t(3, 9), t(9, 4)),
        lambda a, b: op.matmul(a, b, "float64"),
        lambda a, b: np.einsum("ik,kj->ij", a.astype("float64"), b.astype("float64")),
        tolerance={"rtol": 1e-12},
    ),
    "float16 in float32": Case(
        (t(3, 9, dtype="float16"), t(9, 4, dtype="float16")),
        lambda a, b: op.matmul(a, b, "float32"),
        lambda a, b: np.einsum("ik,kj->ij", a.astype("float32"), b.astype("float32")),
        tvm=False,
    ),
    "einsum over rows": Case(
        (t(2, 3, 5), t(2, 3, 4)),
        lambda a, b: op.einsum((a, b), "abx,aby->xy"),
        lambda a, b: np.einsum("abx,aby->xy", a, b),
    ),
    "einsum over rows, turned": Case(
        (t(2, 3, 5), t(2, 3, 4, 2)),
        lambda a, b: op.einsum((a, b), "abx,abyz->yzx"),
        lambda a, b: np.einsum("abx,abyz->yzx", a, b),
    ),
    "einsum that keeps a row": Case(
        (t(2, 3, 5), t(2, 3, 4)),
        lambda a, b: op.einsum((a, b), "abx,aby->axy"),
        lambda a, b: np.einsum("abx,aby->axy", a, b),
    ),
    "einsum of diagonals": Case(
        (t(2, 3, 3), t(2, 4)), lambda a, b: op.einsum((a, b), "axx,ay->xy"), lambda a, b: np.einsum("axx,ay->xy", a, b)
    ),
    "einsum of diagonals whose rows stay": Case(
        (t(3, 2), t(3, 2, 3)), lambda a, b: op.einsum((a, b), "ab,aba->a"), lambda a, b: np.einsum("ab,aba->a", a, b)
    ),
    "einsum of other orders": Case(
        (t(2, 3, 5, 4), t(2, 3, 6)),
        lambda a, b: op.einsum((a, b), "abxz,aby->zxy"),
        lambda a, b: np.einsum("abxz,aby->zxy", a, b),
    ),
    "einsum": Case(
        (t(2, 3, 4), t(2, 4, 5)),
        lambda a, b: op.einsum((a, b), "bik,bkj->bji"),
        lambda a, b: np.sum(a[:, None, :, :] * b.transpose(0, 2, 1)[:, :, None], -1),
    ),
    "groups": Case(
        (t(7, 5), t(3, 5, 4), i(3, dtype="int32", values=[2, 2, 6])),
        lambda x, w, ends: grouped_call(x, w, ends, x.struct_info.dtype),
        lambda x, w, ends: np.concatenate([x[:2] @ w[0], x[2:6] @ w[2], np.zeros((1, 4))]).astype("float32"),
        tvm=False,
    ),
    "groups in float16": Case(
        (t(6, 5, dtype="float16"), t(2, 5, 4, dtype="float16"), i(2, values=[4, 6])),
        lambda x, w, ends: grouped_call(x, w, ends, x.struct_info.dtype),
        lambda x, w, ends: np.concatenate([x[:4] @ w[0], x[4:] @ w[1]]),
        tvm=False,
        tolerance={"rtol": 2e-3, "atol": 2e-3},
    ),
    "looked-up matrices": Case(
        (t(7, 5), t(3, 5, 4), i(7, values=[2, 0, 2, 3, 1, -1, 0])),
        lambda x, w, ids: looked_up_call(x, w, ids, x.struct_info.dtype),
        lambda x, w, ids: np.einsum("sk,skn->sn", x, np.concatenate([w, 0 * w])[ids]),
        tvm=False,
    ),
    "looked-up matrices in float16": Case(
        (t(4, 5, dtype="float16"), t(2, 5, 4, dtype="float16"), i(4, dtype="int32", values=[1, 0, 0, 1])),
        lambda x, w, ids: looked_up_call(x, w, ids, x.struct_info.dtype),
        lambda x, w, ids: np.einsum("sk,skn->sn", x, w[ids]),
        tvm=False,
        tolerance={"rtol": 2e-3, "atol": 2e-3},
    ),
    "transform": Case(
        (t(2, 5, 4, 2),),
        lambda x: fft_call(x, "c2c", [1], 0, 1, [2, 5, 4, 2]),
        lambda x: _pairs(np.fft.fft(x[..., 0] + 1j * x[..., 1], axis=1)),
        tvm=False,
    ),
    "half a transform": Case(
        (t(2, 5, 4),),
        lambda x: fft_call(x, "r2c", [2], 0, 1, [2, 5, 3, 2]),
        lambda x: _pairs(np.fft.rfft(x)),
        tvm=False,
    ),
    "back from half a transform": Case(
        (t(5, 3, 2),),
        lambda x: fft_call(x, "c2r", [1], 2, 4, [5, 4]),
        lambda x: np.fft.irfft(x[..., 0] + 1j * x[..., 1], 4),
        tvm=False,
    ),
    "outer": Case((t(3), t(4)), op.outer, lambda a, b: a[:, None] * b[None]),
}


class TestCases(CaseTests):
    cases = CASES
