"""Operators that make tensors, against TVM and numpy."""

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, t

op = relax.op
CASES = {
    "zeros": Case((), lambda: op.zeros((2, 3), "int32"), lambda: np.zeros((2, 3))),
    "ones": Case((), lambda: op.ones((2, 3), "float32"), lambda: np.ones((2, 3))),
    "zeros_like": Case((t(2, 3),), op.zeros_like, np.zeros_like),
    "ones_like": Case((t(2, 3),), lambda x: op.ones_like(x, "int64"), np.ones_like),
    "full of a tensor": Case((t(),), lambda x: op.full((2, 3), x), lambda x: np.full((2, 3), x)),
    "full in another dtype": Case((t(),), lambda x: op.full((2,), x, "float64"), lambda x: np.full(2, x), tvm=False),
    "full_like": Case((t(2, 3), t()), op.full_like, lambda x, v: np.full((2, 3), v)),
    "arange": Case((), lambda: op.arange(2, 11, 3), lambda: np.array([2, 5, 8])),
    "arange of floats": Case((), lambda: op.arange(0.5, 2.2, 0.5), lambda: np.array([0.5, 1, 1.5, 2])),
    "eye": Case((), lambda: op.eye(3, 4, 1), lambda: np.array([[0, 1, 0, 0], [0, 0, 1, 0], [0, 0, 0, 1]])),
    "eye far off": Case((), lambda: op.eye(2, 2, -5, "int64"), lambda: np.zeros((2, 2))),
    "eye_like": Case((t(3, 2),), lambda x: op.eye_like(x, -1), lambda x: np.array([[0, 0], [1, 0], [0, 1]])),
    "tril": Case((t(2, 4, 3),), lambda x: op.tril(x, 1), lambda x: x * (np.arange(3) <= np.arange(4)[:, None] + 1)),
    "triu": Case((t(4, 3),), lambda x: op.triu(x, -1), lambda x: x * (np.arange(3) >= np.arange(4)[:, None] - 1)),
    "hamming_window": Case(
        (),
        lambda: op.hamming_window(8, True, 0.54, 0.46, "float32"),
        lambda: 0.54 - 0.46 * np.cos(2 * np.pi * np.arange(8) / 8),
    ),
}


class TestCases(CaseTests):
    cases = CASES
