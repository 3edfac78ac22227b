"""Softmax, normalisations, attention and losses against TVM and formulas in numpy."""

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, i, t

op = relax.op


def _softmax(x, axis=-1):
    powers = np.exp(x - x.max(axis, keepdims=True))
    return powers / powers.sum(axis, keepdims=True)


def _normal(x, dims, eps):
    mean = x.mean(dims, keepdims=True)
    return (x - mean) / np.sqrt(((x - mean) ** 2).mean(dims, keepdims=True) + eps)


def _attention(q, k, v, bias=0.0, scale=None, seen=None):
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) * (scale or 1 / np.sqrt(q.shape[-1])) + bias
    if seen is not None:
        rows, columns = np.indices(scores.shape[-2:])
        scores = np.where(seen(rows, columns), scores, -np.inf)
    return np.einsum("bhqk,bkhd->bqhd", _softmax(scores), v)


def _group_norm(x, gamma, beta):
    groups = [_normal(part, (1, 2, 3), 1e-3) for part in np.split(x, 2, 1)]
    return np.concatenate(groups, 1) * gamma[:, None, None] + beta[:, None, None]


def _trained_batch_norm(x, gamma, beta, mean, var):
    own_mean, own_var = x.mean((0, 2)), x.var((0, 2))
    out = (x - own_mean[:, None]) / np.sqrt(own_var[:, None] + 1e-4) * gamma[:, None] + beta[:, None]
    return out, 0.8 * mean + 0.2 * own_mean, 0.8 * var + 0.2 * own_var


_QKV = (t(2, 4, 3, 8), t(2, 6, 3, 8), t(2, 6, 3, 8))
_LOOSE = {"rtol": 1e-4, "atol": 1e-5}
CASES = {
    "softmax": Case((t(2, 3, 4),), lambda x: op.nn.softmax(x, 1), lambda x: _softmax(x, 1)),
    "log_softmax": Case((t(2, 3),), lambda x: op.nn.log_softmax(x), lambda x: np.log(_softmax(x))),
    "layer_norm": Case(
        (t(2, 3, 4), t(4), t(4)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, -1, epsilon=1e-3),
        lambda x, g, b: _normal(x, (2,), 1e-3) * g + b,
        tolerance=_LOOSE,
    ),
    "layer_norm of two dims": Case(
        (t(2, 3, 4), t(3, 4), t(3, 4)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [1, 2]),
        lambda x, g, b: _normal(x, (1, 2), 1e-5) * g + b,
        tolerance=_LOOSE,
    ),
    "layer_norm of a middle dim": Case(
        (t(2, 5, 4), t(5), t(5)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, [1]),
        lambda x, g, b: _normal(x, (1,), 1e-5) * g[:, None] + b[:, None],
        tolerance=_LOOSE,
    ),
    "layer_norm without scale": Case(
        (t(2, 4), t(4), t(4)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, -1, scale=False),
        lambda x, g, b: _normal(x, (1,), 1e-5) + b,
        tvm=False,  # it scales all the same
        tolerance=_LOOSE,
    ),
    "layer_norm without center": Case(
        (t(2, 4), t(4), t(4)),
        lambda x, g, b: op.nn.layer_norm(x, g, b, -1, center=False),
        lambda x, g, b: _normal(x, (1,), 1e-5) * g,
        tvm=False,
        tolerance=_LOOSE,
    ),
    "rms_norm": Case(
        (t(2, 3, 4), t(4)),
        lambda x, w: op.nn.rms_norm(x, w, [-1], epsilon=1e-3),
        lambda x, w: x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-3) * w,
    ),
    "rms_norm of float16": Case(
        (t(2, 9, dtype="float16"), t(9, dtype="float16")),
        lambda x, w: op.nn.rms_norm(x, w, [-1]),
        lambda x, w: x.astype("f4") / np.sqrt((x.astype("f4") ** 2).mean(-1, keepdims=True) + 1e-5) * w.astype("f4"),
        tvm=False,
        tolerance={"rtol": 1e-3, "atol": 1e-4},
    ),
    "group_norm": Case(
        (t(2, 4, 3, 3), t(4), t(4)),
        lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2, 3], epsilon=1e-3),
        _group_norm,
        tolerance=_LOOSE,
    ),
    "group_norm of one element": Case(
        (t(1, 2, 1), t(2), t(2)),
        lambda x, g, b: op.nn.group_norm(x, g, b, 2, 1, [2], epsilon=1e-3),
        lambda x, g, b: np.broadcast_to(b[:, None], x.shape),
    ),
    "group_norm channels last": Case(
        (t(2, 3, 3, 4), t(4), t(4)),
        lambda x, g, b: op.nn.group_norm(x, g, b, 2, -1, [1, 2], epsilon=1e-3),
        lambda x, g, b: _group_norm(x.transpose(0, 3, 1, 2), g, b).transpose(0, 2, 3, 1),
        tolerance=_LOOSE,
    ),
    "instance_norm": Case(
        (t(2, 4, 5), t(4), t(4)),
        lambda x, g, b: op.nn.instance_norm(x, g, b, 1, [2]),
        lambda x, g, b: _normal(x, (2,), 1e-5) * g[:, None] + b[:, None],
        tolerance=_LOOSE,
    ),
    "batch_norm for inference": Case(
        (t(2, 3, 4), t(3), t(3), t(3), t(3, low=0.5)),
        lambda *x: op.nn.batch_norm(*x, axis=1, epsilon=1e-4, training=False),
        lambda x, g, b, m, v: [(x - m[:, None]) / np.sqrt(v[:, None] + 1e-4) * g[:, None] + b[:, None], m, v],
        tolerance=_LOOSE,
    ),
    "batch_norm in training": Case(
        (t(2, 3, 4), t(3), t(3), t(3), t(3, low=0.5)),
        lambda *x: op.nn.batch_norm(*x, axis=1, epsilon=1e-4, momentum=0.2, training=True),
        _trained_batch_norm,
        tolerance=_LOOSE,
    ),
    "attention": Case(_QKV, op.nn.attention, _attention),
    "attention, shared key heads": Case(
        (t(2, 4, 6, 8), t(2, 5, 3, 8), t(2, 5, 3, 8)),
        op.nn.attention,
        lambda q, k, v: _attention(q, k.repeat(2, 2), v.repeat(2, 2)),
        tvm=False,
    ),
    "attention with a scale": Case(
        _QKV, lambda *x: op.nn.attention(*x, scale=0.3), lambda *x: _attention(*x, scale=0.3)
    ),
    "attention with a bias": Case((*_QKV, t(2, 3, 4, 6)), op.nn.attention, _attention),
    "attention from the top left": Case(
        _QKV,
        lambda *x: op.nn.attention(*x, causal_mask="TopLeft"),
        lambda *x: _attention(*x, seen=lambda row, column: column <= row),
    ),
    "attention from the bottom right": Case(
        _QKV,
        lambda *x: op.nn.attention(*x, causal_mask="BottomRight"),
        lambda *x: _attention(*x, seen=lambda row, column: column <= row + 2),
    ),
    "attention with a window": Case(
        _QKV,
        lambda *x: op.nn.attention(*x, causal_mask="BottomRight", window_size=2),
        lambda *x: _attention(*x, seen=lambda row, column: (column == row + 2) | (column == row + 1)),
        tvm=False,
    ),
    "cross_entropy_with_logits": Case(
        (t(3, 4), t(3, 4)), op.nn.cross_entropy_with_logits, lambda p, q: -np.einsum("ij,ij->", p, q) / 3
    ),
    "nll_loss": Case(
        (t(5, 4), i(5, low=0, high=4), t(4, low=0.5)),
        lambda p, q, w: op.nn.nll_loss(p, q, w),
        lambda p, q, w: -sum(p[row, k] * w[k] for row, k in enumerate(q)) / w[q].sum(),
    ),
    "nll_loss that ignores": Case(
        (t(3, 4), i(3, values=[1, 3, 2])),
        lambda p, q: op.nn.nll_loss(p, q, reduction="sum", ignore_index=3),
        lambda p, q: -p[0, 1] - p[2, 2],
    ),
}


class TestCases(CaseTests):
    cases = CASES
