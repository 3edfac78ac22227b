"""Reductions and scans against TVM and numpy."""

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, i, t

op = relax.op


def _shifted(x, axis, neutral):
    first = np.full_like(np.take(x, [0], axis), neutral)
    return np.concatenate([first, np.delete(x, -1, axis)], axis)


_REDUCTIONS = {
    "sum": (op.sum, np.sum),
    "prod": (op.prod, np.prod),
    "mean": (op.mean, np.mean),
    "variance": (
        op.variance,
        lambda x, axis, keepdims: np.mean((x - np.mean(x, axis, keepdims=True)) ** 2, axis, keepdims=keepdims),
    ),
    "std": (op.std, np.std),
    "max": (op.max, np.max),
    "min": (op.min, np.min),
}
CASES = {
    f"{name} {axis} {keep}": Case(
        (t(2, 3, 4),),
        lambda x, build=build, axis=axis, keep=keep: build(x, axis, keep),
        lambda x, formula=formula, axis=axis, keep=keep: formula(
            x, axis=tuple(axis) if isinstance(axis, list) else axis, keepdims=keep
        ),
    )
    for name, (build, formula) in _REDUCTIONS.items()
    for axis, keep in ((None, False), (None, True), (1, True), ([0, -1], False), ([-1], True))
} | {
    "sum int32": Case((i(3, 4, dtype="int32"),), lambda x: op.sum(x, 1), lambda x: x.sum(1)),
    "sum int8 wraps": Case(
        (i(99, dtype="int8", low=100, high=127),), op.sum, lambda x: x.astype("int64").sum().astype("int8")
    ),
    "mean int": Case((i(3, 4, low=-9),), lambda x: op.mean(x, 1), lambda x: np.trunc(x.sum(1) / 4)),
    "max int": Case((i(3, 4),), lambda x: op.max(x, 0), lambda x: np.sort(x, 0)[-1]),
    "argmax": Case((t(3, 4),), lambda x: op.argmax(x, 1), lambda x: np.argsort(x, 1)[:, -1]),
    "argmax keeps dims": Case((t(3, 4),), lambda x: op.argmax(x, 0, True), lambda x: np.argsort(x, 0)[-1:]),
    "argmax flat": Case((t(3, 4),), op.argmax, lambda x: np.argsort(x.ravel())[-1]),
    "argmax of equals": Case((i(20, high=-6),), lambda x: op.argmax(x, 0), lambda x: np.nonzero(x == x.max())[0][0]),
    "argmin": Case((t(3, 4),), lambda x: op.argmin(x, -1), lambda x: np.argsort(x, 1)[:, 0]),
    "cumsum": Case((t(3, 4),), lambda x: op.cumsum(x, 1), lambda x: np.cumsum(x, 1)),
    "cumsum flat": Case((t(3, 4),), op.cumsum, np.cumsum),
    "cumsum exclusive": Case(
        (t(3, 4),), lambda x: op.cumsum(x, 0, exclusive=True), lambda x: np.cumsum(_shifted(x, 0, 0), 0)
    ),
    "cumsum in int64": Case(
        (i(9, dtype="int32"),), lambda x: op.cumsum(x, 0, dtype="int64"), lambda x: np.cumsum(x, dtype="int64")
    ),
    "cumprod": Case((t(3, 4),), lambda x: op.cumprod(x, 1), lambda x: np.cumprod(x, 1)),
    "cumprod exclusive": Case(
        (t(3, 4),), lambda x: op.cumprod(x, 1, exclusive=True), lambda x: np.cumprod(_shifted(x, 1, 1), 1)
    ),
    "median": Case(
        (t(3, 4),),
        lambda x: op.median(x, [1]),
        lambda x: [np.sort(x, 1)[:, 1], np.argsort(x, 1)[:, 1]],
        tvm=False,
    ),
    "median keeps dims": Case(
        (t(3, 5),),
        lambda x: op.median(x, [0], True),
        lambda x: [np.sort(x, 0)[1:2], np.argsort(x, 0)[1:2]],
        tvm=False,
    ),
}


class TestCases(CaseTests):
    cases = CASES
