"""Operators that move elements, against TVM and numpy."""

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, i, t

op = relax.op


def _slice(axes, begin, end, strides=None):
    return lambda x: op.strided_slice(x, axes, begin, end, strides)


def _shuffled(x):
    n, c, h, w = x.shape
    return x.reshape(n, c // 4, 2, 2, h, w).transpose(0, 1, 4, 2, 5, 3).reshape(n, c // 4, h * 2, w * 2)


CASES = {
    "reshape": Case((t(2, 6),), lambda x: op.reshape(x, (3, 4)), lambda x: x.reshape(3, 4)),
    "reshape with -1": Case((t(2, 6),), lambda x: op.reshape(x, (-1, 4)), lambda x: x.reshape(3, 4)),
    "expand_dims": Case((t(2, 6),), lambda x: op.expand_dims(x, [0, -1]), lambda x: x[None, :, :, None]),
    "squeeze": Case((t(1, 2, 1),), lambda x: op.squeeze(x, [-1]), lambda x: x[:, :, 0]),
    "squeeze all": Case((t(1, 2, 1),), op.squeeze, lambda x: x[0, :, 0]),
    "flatten": Case((t(2, 6),), op.flatten, np.ravel),
    "batch_flatten": Case((t(2, 3, 4),), op.nn.batch_flatten, lambda x: x.reshape(2, 12)),
    "permute_dims": Case((t(2, 3, 4),), lambda x: op.permute_dims(x, [1, -1, 0]), lambda x: np.moveaxis(x, 0, 2)),
    "permute_dims reversed": Case((t(2, 3, 4),), op.permute_dims, lambda x: x.T),
    "broadcast_to": Case((t(3, 1),), lambda x: op.broadcast_to(x, (2, 3, 4)), lambda x: np.broadcast_to(x, (2, 3, 4))),
    "collapse_sum_to": Case((t(2, 3, 4),), lambda x: op.collapse_sum_to(x, (3, 1)), lambda x: x.sum((0, 2))[:, None]),
    "collapse_sum_like": Case((t(2, 3, 4), t(3, 1)), op.collapse_sum_like, lambda x, _: x.sum((0, 2))[:, None]),
    "concat": Case((t(2, 3), t(2, 1)), lambda *x: op.concat(x, -1), lambda *x: np.hstack(x)),
    "concat flat": Case((t(4), t(3)), lambda *x: op.concat(x, None), lambda *x: np.hstack(x), tvm=False),
    "stack": Case((t(2, 3), t(2, 3)), lambda *x: op.stack(x, 1), lambda a, b: np.array([a, b]).swapaxes(0, 1)),
    "split in sections": Case((t(2, 6),), lambda x: op.split(x, 3, 1), lambda x: [x[:, :2], x[:, 2:4], x[:, 4:]]),
    "split at indices": Case((t(2, 7),), lambda x: op.split(x, [1, 5], -1), lambda x: [x[:, :1], x[:, 1:5], x[:, 5:]]),
    "repeat": Case((t(2, 3),), lambda x: op.repeat(x, 2, 1), lambda x: x[:, [0, 0, 1, 1, 2, 2]]),
    "repeat flat": Case((t(2, 2),), lambda x: op.repeat(x, 2), lambda x: x.ravel()[[0, 0, 1, 1, 2, 2, 3, 3]]),
    "tile": Case((t(2, 3),), lambda x: op.tile(x, (2, 1, 2)), lambda x: np.array([np.hstack([x, x])] * 2)),
    "tile fewer dims": Case((t(2, 3),), lambda x: op.tile(x, (2,)), lambda x: np.hstack([x, x])),
    "flip": Case((t(2, 3),), lambda x: op.flip(x, 1), lambda x: x[:, ::-1]),
    "meshgrid": Case(
        (t(2), t(3)), lambda *x: op.meshgrid(x), lambda a, b: [a[:, None].repeat(3, 1), b[None].repeat(2, 0)]
    ),
    "slice": Case((t(7, 8),), _slice([0, 1], [1, 2], [5, 8], [1, 3]), lambda x: x[1:5, 2:8:3]),
    "slice from end": Case((t(7, 8),), _slice([-1], [-3], [-1]), lambda x: x[:, -3:-1]),
    "slice beyond": Case((t(7, 8),), _slice([0], [4], [99]), lambda x: x[4:]),
    "slice backwards": Case((t(7, 8),), _slice([0, 1], [-1, 6], [-99, 1], [-1, -2]), lambda x: x[::-1, 6:1:-2]),
    "slice far back": Case((t(9),), _slice([0], [7], [1], [-3]), lambda x: x[7:1:-3]),
    "slice by steps": Case((t(11, 2),), _slice([0], [1], [11], [4]), lambda x: x[1::4]),
    "slice_scatter of neighbours": Case(
        (t(7, 3), t(4, 3)),
        lambda x, s: op.slice_scatter(x, s, 2, 6, 1, axis=0),
        lambda x, s: np.concatenate([x[:2], s, x[6:]]),
    ),
    "concat of three": Case((t(2, 1), t(2, 6), t(2, 2)), lambda *x: op.concat(x, 1), lambda *x: np.hstack(x)),
    "pad zeros": Case((t(5, 3),), lambda x: op.nn.pad(x, (3, 2, 0, 0)), lambda x: np.pad(x, ((3, 2), (0, 0)))),
    "slice_scatter": Case(
        (t(7, 3), t(2, 3)),
        lambda x, s: op.slice_scatter(x, s, 1, 5, 2, axis=0),
        lambda x, s: np.array([x[0], s[0], x[2], s[1], *x[4:]]),
    ),
    "pad": Case(
        (t(2, 3),),
        lambda x: op.nn.pad(x, (1, 0, 2, 1), pad_value=0.5),
        lambda x: np.pad(x, ((1, 0), (2, 1)), constant_values=0.5),
    ),
    "pad int": Case((i(3),), lambda x: op.nn.pad(x, (1, 2), pad_value=0), lambda x: np.pad(x, (1, 2))),
    "pad reflect": Case(
        (t(1, 2, 4, 5),),
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 2, 1, 3, 1), "reflect"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (2, 1), (3, 1)), "reflect"),
    ),
    "pad replicate": Case(
        (t(1, 2, 4),),
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 2, 3), "replicate"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (2, 3)), "edge"),
    ),
    "pad circular": Case(
        (t(1, 2, 4),),
        lambda x: op.nn.pad(x, (0, 0, 0, 0, 2, 3), "circular"),
        lambda x: np.pad(x, ((0, 0), (0, 0), (2, 3)), "wrap"),
    ),
    "pixel_shuffle": Case((t(2, 8, 3, 3),), lambda x: op.nn.pixel_shuffle(x, 2), _shuffled, tvm=False),
}


class TestCases(CaseTests):
    cases = CASES
