"""Convolutions and pooling against TVM and sums over windows in numpy."""

import itertools

import numpy as np
from tvm import relax

from .cases import Case, CaseTests, i, t

op = relax.op


def _conv(x, w, stride=1, before=0, after=0, dilation=1, groups=1):
    """Every output element as the sum that defines it; NC*, OI*."""
    n = x.ndim - 2
    x = np.pad(x, [(0, 0), (0, 0), *[(before, after)] * n])
    reach = [(k - 1) * dilation + 1 for k in w.shape[2:]]
    out = [(size - r) // stride + 1 for size, r in zip(x.shape[2:], reach, strict=True)]
    result = np.zeros((x.shape[0], w.shape[0], *out), np.result_type(x, w))
    per_in, per_out = w.shape[1], w.shape[0] // groups
    for o, at in itertools.product(range(w.shape[0]), itertools.product(*map(range, out))):
        window = tuple(slice(p * stride, p * stride + r, dilation) for p, r in zip(at, reach, strict=True))
        channels = slice(o // per_out * per_in, (o // per_out + 1) * per_in)
        result[(slice(None), o, *at)] = (x[(slice(None), channels, *window)] * w[o]).sum(tuple(range(1, n + 2)))
    return result


def _spread(x, w, stride, before, after, more):
    """A transposed convolution: every input element adds its kernel to the output; NCHW, IOHW."""
    n, _, h, width = x.shape
    sizes = [(size - 1) * stride + k + more for size, k in zip((h, width), w.shape[2:], strict=True)]
    out = np.zeros((n, w.shape[1], *sizes), x.dtype)
    for a, b in itertools.product(range(h), range(width)):
        rows, columns = slice(a * stride, a * stride + w.shape[2]), slice(b * stride, b * stride + w.shape[3])
        out[:, :, rows, columns] += np.einsum("ni,iohw->nohw", x[:, :, a, b], w)
    return out[:, :, before : sizes[0] - after, before : sizes[1] - after]


def _pool(x, size, stride, before, after, combine, outside, ceil=False, dilation=1):
    """Every window of two dims, combined; what is outside the data is `outside`."""
    reach = (size - 1) * dilation + 1
    rounded = stride - 1 if ceil else 0
    out = [(n + before + after - reach + rounded) // stride + 1 for n in x.shape[2:]]
    x = np.pad(x, [(0, 0), (0, 0), *[(before, after + reach)] * 2], constant_values=outside)
    result = np.zeros((*x.shape[:2], *out), x.dtype)
    for a, b in itertools.product(*map(range, out)):
        window = x[:, :, a * stride : a * stride + reach : dilation, b * stride : b * stride + reach : dilation]
        result[:, :, a, b] = combine(window.reshape(*x.shape[:2], -1), -1)
    return result


_LOOSE = {"rtol": 1e-4, "atol": 1e-5}


def _case(args, build, expected, **options):
    return Case(args, build, expected, tolerance=_LOOSE, **options)


CASES = {
    "conv1d": _case((t(2, 4, 9), t(6, 4, 3)), lambda x, w: op.nn.conv1d(x, w, 2, 1), lambda x, w: _conv(x, w, 2, 1, 1)),
    "conv2d": _case((t(2, 4, 7, 8), t(6, 4, 3, 3)), op.nn.conv2d, _conv),
    "conv2d in groups": _case(
        (t(2, 4, 7, 8), t(6, 2, 3, 3)),
        lambda x, w: op.nn.conv2d(x, w, 2, 1, 2, groups=2),
        lambda x, w: _conv(x, w, 2, 1, 1, 2, 2),
    ),
    "conv2d, uneven padding": _case(
        (t(2, 3, 6, 6), t(4, 3, 3, 3)),
        lambda x, w: op.nn.conv2d(x, w, padding=(0, 0, 2, 2)),
        lambda x, w: _conv(x, w, 1, 0, 2),
    ),
    "conv2d, channels last": _case(
        (t(2, 6, 7, 3), t(3, 3, 3, 4)),
        lambda x, w: op.nn.conv2d(x, w, data_layout="NHWC", kernel_layout="HWIO"),
        lambda x, w: _conv(x.transpose(0, 3, 1, 2), w.transpose(3, 2, 0, 1)).transpose(0, 2, 3, 1),
    ),
    "conv2d, another layout out": _case(
        (t(2, 3, 6, 7), t(4, 3, 3, 3)),
        lambda x, w: op.nn.conv2d(x, w, out_layout="NHWC"),
        lambda x, w: _conv(x, w).transpose(0, 2, 3, 1),
        tvm=False,
    ),
    "conv2d of int8": _case(
        (i(1, 4, 5, 5, dtype="int8", low=-128, high=127), i(2, 4, 3, 3, dtype="int8", low=-128, high=127)),
        lambda x, w: op.nn.conv2d(x, w, out_dtype="int32"),
        lambda x, w: _conv(x.astype("int32"), w.astype("int32")),
    ),
    "conv3d": _case(
        (t(1, 2, 4, 5, 5), t(3, 2, 2, 2, 2)),
        lambda x, w: op.nn.conv3d(x, w, padding=1),
        lambda x, w: _conv(x, w, 1, 1, 1),
    ),
    "conv2d_transpose": _case(
        (t(2, 3, 4, 5), t(3, 4, 3, 3)),
        lambda x, w: op.nn.conv2d_transpose(x, w, 2, (1, 1, 2, 2), (1, 1)),
        lambda x, w: _spread(x, w, 2, 1, 2, 1),
    ),
    "conv1d_transpose": _case(
        (t(2, 3, 5), t(3, 4, 3)),
        lambda x, w: op.nn.conv1d_transpose(x, w, 2, 1, 1),
        lambda x, w: _spread(x[:, :, None].repeat(1, 2), w[:, :, None], 2, 0, 0, 1)[:, :, 0, 1:-1],
    ),
    "max_pool2d": _case(
        (t(2, 3, 7, 7),),
        lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), (1, 1)),
        lambda x: _pool(x, 3, 2, 1, 1, np.max, -np.inf),
    ),
    "max_pool2d, ceil": _case(
        (t(2, 3, 7, 7),),
        lambda x: op.nn.max_pool2d(x, (2, 2), (2, 2), ceil_mode=True),
        lambda x: _pool(x, 2, 2, 0, 0, np.max, -np.inf, ceil=True),
    ),
    "max_pool2d, dilated": _case(
        (t(2, 3, 9, 9),),
        lambda x: op.nn.max_pool2d(x, (2, 2), (1, 1), dilation=(3, 3)),
        lambda x: _pool(x, 2, 1, 0, 0, np.max, -np.inf, dilation=3),
    ),
    "max_pool2d of int": _case(
        (i(1, 2, 6, 6, dtype="int32"),),
        lambda x: op.nn.max_pool2d(x, (2, 2), (2, 2)),
        lambda x: _pool(x, 2, 2, 0, 0, np.max, -99),
    ),
    "max_pool2d, channels last": _case(
        (t(2, 7, 7, 3),),
        lambda x: op.nn.max_pool2d(x, (3, 3), (2, 2), layout="NHWC"),
        lambda x: _pool(x.transpose(0, 3, 1, 2), 3, 2, 0, 0, np.max, 0).transpose(0, 2, 3, 1),
    ),
    "avg_pool2d": _case(
        (t(2, 3, 7, 7),),
        lambda x: op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1)),
        lambda x: _pool(x, 3, 2, 1, 1, np.nanmean, np.nan),
    ),
    "avg_pool2d with padding": _case(
        (t(2, 3, 7, 7),),
        lambda x: op.nn.avg_pool2d(x, (3, 3), (2, 2), (1, 1), count_include_pad=True),
        lambda x: _pool(x, 3, 2, 1, 1, np.mean, 0),
    ),
    "avg_pool2d, ceil": _case(
        (t(2, 3, 7, 7),),
        lambda x: op.nn.avg_pool2d(x, (2, 2), (2, 2), ceil_mode=True),
        lambda x: _pool(x, 2, 2, 0, 0, np.nanmean, np.nan, ceil=True),
    ),
    "avg_pool1d": _case(
        (t(2, 3, 9),), lambda x: op.nn.avg_pool1d(x, (3,), (3,)), lambda x: x.reshape(2, 3, 3, 3).mean(-1)
    ),
    "max_pool3d": _case(
        (t(1, 2, 4, 4, 4),),
        lambda x: op.nn.max_pool3d(x, (2, 2, 2), (2, 2, 2)),
        lambda x: x.reshape(1, 2, 2, 2, 2, 2, 2, 2).max((3, 5, 7)),
    ),
    "adaptive_avg_pool2d": _case(
        (t(2, 3, 7, 6),),
        lambda x: op.nn.adaptive_avg_pool2d(x, (1, 2)),
        lambda x: x.reshape(2, 3, 7, 2, 3).mean((2, 4))[:, :, None],
    ),
    "adaptive_avg_pool2d, overlapping": _case(
        (t(1, 1, 5, 4),),
        lambda x: op.nn.adaptive_avg_pool2d(x, (2, 4)),
        lambda x: np.stack([x[:, :, :3].mean(2), x[:, :, 2:].mean(2)], 2),
    ),
}


def _weights(size, steps):
    """What each of `steps` new elements takes of `size` elements, by half pixels."""
    places = (np.arange(steps) + 0.5) * size / steps - 0.5
    return np.stack([np.interp(places, np.arange(size), row) for row in np.eye(size)], -1).astype("float32")


CASES |= {
    "resize2d, linear": _case(
        (t(2, 3, 4, 5),),
        lambda x: op.image.resize2d(x, (7, 3), layout="NCHW", method="linear"),
        lambda x: np.einsum("ncij,hi,wj->nchw", x, _weights(4, 7), _weights(5, 3)),
    ),
    "resize2d, nearest": _case(
        (t(2, 3, 4, 6),),
        lambda x: op.image.resize2d(
            x, (8, 3), layout="NCHW", method="nearest_neighbor", coordinate_transformation_mode="asymmetric",
            rounding_method="floor",
        ),
        lambda x: x.repeat(2, 2)[:, :, :, ::2],
    ),
    "resize2d, nearest of half pixels": Case(
        (t(1, 2, 4, 4),),
        lambda x: op.image.resize2d(
            x, (2, 8), layout="NCHW", method="nearest_neighbor", rounding_method="round_prefer_floor"
        ),
        lambda x: x[:, :, ::2].repeat(2, 3),
        tvm=False,
    ),
}  # fmt: skip


class TestCases(CaseTests):
    cases = CASES
