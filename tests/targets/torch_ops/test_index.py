"""Operators that read, write and sort by index, against TVM and numpy."""

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, i, t

op = relax.op


def _written(x, places, values, combine=lambda old, new: new):
    out = x.copy()
    for place, value in zip(places, values, strict=True):
        out[place] = combine(out[place], value)
    return out


def _scattered(combine):
    def expected(x, index, updates):
        places = [(index[a, b], b) for a in range(2) for b in range(3)]
        return _written(x, places, updates.ravel(), combine)

    return expected


_OPERATIONS = {
    "update": lambda old, new: new,
    "add": lambda old, new: old + new,
    "mul": lambda old, new: old * new,
    "min": min,
    "max": max,
}
_PLACES = i(2, 3, values=[[0, 3, -1], [2, 1, 0]])
CASES = {
    "take": Case(
        (t(5, 4), i(2, 3, low=0, high=4)), lambda x, n: op.take(x, n, 1), lambda x, n: np.array([r[n] for r in x])
    ),
    "take without a dim": Case((t(20), i(3, low=0, high=20)), op.take, lambda x, n: x[n]),
    "take one": Case((t(5, 4), i(values=3)), lambda x, n: op.take(x, n, 0), lambda x, n: x[3]),
    "take from the end": Case((t(5, 4), i(values=-1)), lambda x, n: op.take(x, n, 1), lambda x, n: x[:, 3], tvm=False),
    "take clip": Case(
        (t(5, 4), i(4, values=[-2, 1, 4, 99])), lambda x, n: op.take(x, n, 0, "clip"), lambda x, n: x[[0, 1, 4, 4]]
    ),
    "take wrap": Case(
        (t(5, 4), i(4, values=[-2, 1, 5, 11])),
        lambda x, n: op.take(x, n, 0, "wrap"),
        lambda x, n: x[[3, 1, 0, 1]],
        tvm=False,
    ),
    "gather_elements": Case(
        (t(5, 4), i(5, 2, low=0, high=4)),
        lambda x, n: op.gather_elements(x, n, 1),
        lambda x, n: np.array([row[at] for row, at in zip(x, n, strict=True)]),
    ),
    "gather_nd": Case(
        (t(5, 4, 3), i(6, 2, low=0, high=4)), op.gather_nd, lambda x, n: np.array([x[a, b] for a, b in n])
    ),
    "gather_nd in batches": Case(
        (t(2, 4, 3), i(2, 5, 1, low=0, high=4)),
        lambda x, n: op.gather_nd(x, n, 1),
        lambda x, n: np.array([x[b][n[b, :, 0]] for b in range(2)]),
    ),
    "index_tensor": Case(
        (t(5, 4, 3), i(2, 1, low=0, high=5), i(3, low=0, high=4)),
        lambda x, a, b: op.index_tensor(x, [a, b]),
        lambda x, a, b: np.array([[x[p, q] for q in b] for (p,) in a]),
        tvm=False,
    ),
    "index_put": Case(
        (t(5, 4), i(2, values=[1, -1]), i(2, values=[0, 3]), t(2)),
        lambda x, a, b, v: op.index_put(x, (a, b), v),
        lambda x, a, b, v: _written(x, [(1, 0), (4, 3)], v),
    ),
    "index_put adds": Case(
        (t(5, 4), i(3, values=[1, 1, 2]), i(3, values=[0, 0, 3]), t(3)),
        lambda x, a, b, v: op.index_put(x, (a, b), v, accumulate=True),
        lambda x, a, b, v: _written(x, [(1, 0), (1, 0), (2, 3)], v, lambda old, new: old + new),
    ),
    "scatter_nd": Case(
        (t(5, 4, 3), i(2, 2, values=[[1, 2], [4, 0]]), t(2, 3)),
        op.scatter_nd,
        lambda x, n, v: _written(x, [(1, 2), (4, 0)], v),
    ),
    "scatter_nd adds": Case(
        (t(5, 3), i(3, 1, values=[1, 4, 1]), t(3, 3)),
        lambda x, n, v: op.scatter_nd(x, n, v, "add"),
        lambda x, n, v: _written(x, [1, 4, 1], v, lambda old, new: old + new),
    ),
    "one_hot": Case(
        (i(2, 3, low=-1, high=5),),
        lambda n: op.one_hot(n, relax.PrimValue(2), relax.PrimValue(-1), 5, 1),
        lambda n: np.where(np.moveaxis(np.eye(7)[n], 2, 1)[:, :5] > 0, 2, -1),
    ),
    "sort": Case((t(3, 9),), lambda x: op.sort(x, 0, True), lambda x: np.sort(x, 0)[::-1], tvm=False),
    "argsort": Case(
        (i(20, high=-5),), lambda x: op.argsort(x, 0, dtype="int64"), lambda x: np.argsort(x, kind="stable"), tvm=False
    ),
    "topk": Case(
        (t(3, 9),),
        lambda x: op.topk(x, 2, 1, dtype="int64"),
        lambda x: [np.sort(x)[:, :-3:-1], np.argsort(x)[:, :-3:-1]],
        tvm=False,
    ),
    "topk of the smallest": Case(
        (t(9, 3),),
        lambda x: op.topk(x, 4, 0, "indices", largest=False),
        lambda x: np.argsort(x, 0)[:4],
        tvm=False,
    ),
    "bucketize": Case(
        (t(3, 4), t(5, values=[-1.5, -1, 0, 0.5, 1])),
        lambda x, b: op.bucketize(x, b, out_int32=True),
        lambda x, b: (x[..., None] > b).sum(-1),
        tvm=False,
    ),
    "bucketize right": Case(
        (i(9, values=[1, 2, 3, 0, 1, 5, 4, 3, 2]), i(3, values=[1, 2, 4])),
        lambda x, b: op.bucketize(x, b, right=True),
        lambda x, b: (x[..., None] >= b).sum(-1),
        tvm=False,
    ),
} | {
    f"scatter_elements {name}": Case(
        (t(5, 3), _PLACES, t(2, 3)),
        lambda x, n, v, name=name: op.scatter_elements(x, n, v, 0, name),
        _scattered(combine),
    )
    for name, combine in _OPERATIONS.items()
}


class TestCases(CaseTests):
    cases = CASES
