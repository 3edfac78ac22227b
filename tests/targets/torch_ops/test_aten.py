"""Operators of torch's that Relax has none for: against torch's public functions, or formulas in numpy."""

import math
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tvm import relax

from mesh_tensor.rules.operator.aten import ATEN, arguments_text

from .cases import Case, assert_same, by_table, i, t

X = {"tensor": 0}


def call(name, *args, outs, **kwargs):
    """A function from operands to a call of the operator, whose results have these shapes and dtypes."""
    infos = [relax.TensorStructInfo(shape, dtype) for shape, dtype in outs]
    info = infos[0] if len(infos) == 1 else relax.TupleStructInfo(infos)
    text = relax.StringImm(arguments_text(list(args), kwargs))
    return lambda *operands: relax.op.call_pure_packed(f"aten.{name}", *operands, text, sinfo_args=[info])


def case(args, name, *given, outs, expected, **kwargs):
    """A case whose operands come first among the arguments."""
    tensors = [{"tensor": n} for n in range(len(args))]
    return Case(args, call(name, *tensors, *given, outs=outs, **kwargs), expected, tvm=False)


def of_torch(function):
    """A formula in torch."""
    return lambda *operands: function(*map(torch.from_numpy, operands))


def like(*shape, dtype="float32"):
    """One result."""
    return ((shape, dtype),)


def both(*shape):
    """Values and where they were."""
    return ((shape, "float32"), (shape, "int64"))


ERF = np.vectorize(math.erf)
CASES = {
    "exp2": case((t(4, 5),), "exp2.default", outs=like(4, 5), expected=np.exp2),
    "erfc": case((t(4, 5),), "erfc.default", outs=like(4, 5), expected=lambda x: 1 - ERF(x)),
    "lgamma": case((t(5, low=0.5, high=4),), "lgamma.default", outs=like(5), expected=np.vectorize(math.lgamma)),
    "round to decimals": case((t(7),), "round.decimals", outs=like(7), expected=lambda x: np.round(x, 1), decimals=1),
    "hypot, a dim of 1": case((t(4, 1), t(1, 5)), "hypot.default", outs=like(4, 5), expected=np.hypot),
    "copysign": case((t(4, 5), t(5)), "copysign.Tensor", outs=like(4, 5), expected=np.copysign),
    "cummax": case((t(3, 5),), "cummax.default", 1, outs=both(3, 5), expected=of_torch(lambda x: torch.cummax(x, 1))),
    "logcumsumexp": case(
        (t(3, 5),), "logcumsumexp.default", 0, outs=like(3, 5), expected=lambda x: np.log(np.cumsum(np.exp(x), 0))
    ),
    "safe softmax": case(
        (t(3, 5),), "_safe_softmax.default", 1, outs=like(3, 5),
        expected=lambda x: np.exp(x) / np.exp(x).sum(1, keepdims=True),
    ),
    "kthvalue": case((t(4, 5),), "kthvalue.default", 2, outs=both(4), expected=of_torch(lambda x: x.kthvalue(2))),
    "kthvalue, kept": case(
        (t(4, 5),), "kthvalue.default", 2, 0, True, outs=both(1, 5), expected=of_torch(lambda x: x.kthvalue(2, 0, True))
    ),
    "topk, unsorted": case(
        (t(4, 5),), "topk.default", 5, -1, True, False, outs=both(4, 5),
        expected=of_torch(lambda x: torch.topk(x, 5, -1, True, False)),
    ),
    "stable sort": case(
        (i(4, 6, low=0, high=3),), "sort.stable", stable=True, dim=0, descending=False,
        outs=(((4, 6), "int64"), ((4, 6), "int64")),
        expected=lambda x: (np.sort(x, 0), np.argsort(x, 0, kind="stable")),
    ),
    "diagonal": case((t(4, 3, 5),), "diagonal.default", 1, 0, 2, outs=like(3, 4),
        expected=lambda x: np.diagonal(x, 1, 0, 2)),
    "unfold": case((t(3, 7),), "unfold.default", 1, 3, 2, outs=like(3, 3, 3),
        expected=lambda x: np.stack([x[:, s : s + 3] for s in (0, 2, 4)], 1)),
    "unfold, overlapping": case((t(3, 11),), "unfold.default", -1, 4, 1, outs=like(3, 8, 4),
        expected=lambda x: np.stack([x[:, s : s + 4] for s in range(8)], 1)),
    "roll": case((t(7, 5),), "roll.default", [2, -1], [0, 1], outs=like(7, 5),
        expected=lambda x: np.roll(x, (2, -1), (0, 1))),
    "roll far": case((t(3, 8),), "roll.default", [-13], [-1], outs=like(3, 8), expected=lambda x: np.roll(x, -13, 1)),
    "roll of all": case((t(3, 4),), "roll.default", [5], outs=like(3, 4), expected=lambda x: np.roll(x, 5)),
    "distances": case((t(2, 4, 3), t(2, 5, 3)), "_cdist_forward.default", 2.0, None, outs=like(2, 4, 5),
        expected=lambda a, b: np.sqrt(((a[:, :, None] - b[:, None]) ** 2).sum(-1))),
    "searchsorted": case((t(5, values=[-2, -1, 0, 1, 2]), t(3, 4)), "searchsorted.Tensor",
        outs=like(3, 4, dtype="int64"), expected=np.searchsorted),
    "searchsorted in rows": case((t(3, 4, values=[[-1, 0, 1, 2]] * 3), t(3, 5)), "searchsorted.Tensor",
        outs=like(3, 5, dtype="int64"),
        expected=lambda a, b: np.stack(list(map(np.searchsorted, a, b)))),
    "bilinear": case((t(2, 3, 4, 5),), "upsample_bilinear2d.vec", [7, 8], False, None, outs=like(2, 3, 7, 8),
        expected=of_torch(lambda x: F.interpolate(x, (7, 8), mode="bilinear"))),
    "nearest": case((t(2, 3, 4),), "upsample_nearest1d.vec", [8], None, outs=like(2, 3, 8),
        expected=lambda x: np.repeat(x, 2, 2)),
    "pooling with indices": case((t(2, 3, 4, 6),), "max_pool2d_with_indices.default", [2, 2],
        outs=both(2, 3, 2, 3), expected=of_torch(lambda x: F.max_pool2d(x, 2, return_indices=True))),
    "grid_sample": case((t(2, 3, 4, 5), t(2, 3, 2, 2, low=-1, high=1)), "grid_sampler_2d.default", 0, 0, False,
        outs=like(2, 3, 3, 2), expected=of_torch(lambda x, g: F.grid_sample(x, g, align_corners=False))),
    "embedding_bag": case(
        (t(6, 5), i(7, low=0, high=6), i(3, values=[0, 2, 5])), "_embedding_bag_forward_only.default",
        outs=(((3, 5), "float32"), ((0,), "int64"), ((3,), "int64"), ((3,), "int64")),
        expected=of_torch(torch.ops.aten._embedding_bag_forward_only.default),
    ),
    "embedding_bag, maxima": case(
        (t(6, 5), i(7, low=0, high=6), i(3, values=[0, 2, 5])), "_embedding_bag_forward_only.default", False, 2,
        outs=(((3, 5), "float32"), ((7,), "int64"), ((3,), "int64"), ((3, 5), "int64")),
        expected=of_torch(lambda *x: torch.ops.aten._embedding_bag_forward_only.default(*x, False, 2)),
    ),
    "masked_scatter": case((t(3, 4), t(3, 4, dtype="bool"), t(12)), "masked_scatter.default", outs=like(3, 4),
        expected=of_torch(lambda x, mask, source: x.masked_scatter(mask, source))),
    "scatter_reduce": Case((t(3, 4), i(3, 4, low=0, high=3), t(3, 4)),
        call("scatter_reduce.two", X, 0, {"tensor": 1}, {"tensor": 2}, "amax", outs=like(3, 4)),
        of_torch(lambda x, where, source: x.scatter_reduce(0, where, source, "amax")), tvm=False),
}  # fmt: skip
_POINTWISE = {
    "digamma.default": torch.digamma,
    "erfinv.default": torch.erfinv,
    "i0.default": torch.i0,
    "sinc.default": torch.sinc,
    "special_log_ndtr.default": torch.special.log_ndtr,
    "special_ndtr.default": torch.special.ndtr,
}
_OF_TWO = {"heaviside.default": np.heaviside, "nextafter.default": np.nextafter}
CASES |= {
    name: case((t(3, 5, low=0.1, high=0.9),), name, outs=like(3, 5), expected=of_torch(function))
    for name, function in _POINTWISE.items()
}
CASES |= {name: case((t(3, 5), t(5)), name, outs=like(3, 5), expected=f) for name, f in _OF_TWO.items()}
CASES |= {
    "xlogy": case(
        (t(3, 5), t(5, low=0.1)), "xlogy.Tensor", outs=like(3, 5), expected=lambda x, y: x * np.log(y)
    ),
    "cummin": case((t(3, 5),), "cummin.default", 1, outs=both(3, 5), expected=of_torch(lambda x: torch.cummin(x, 1))),
    "mode": case(
        (t(3, 4, values=[[1, 2, 2, 0], [3, 3, 3, 1], [0, 5, 5, 5]]),), "mode.default", outs=both(3),
        expected=of_torch(torch.mode),
    ),
    "grid_sample of volumes": case(
        (t(2, 3, 2, 4, 5), t(2, 3, 2, 1, 3, low=-1, high=1)), "grid_sampler_3d.default", 0, 0, True,
        outs=like(2, 3, 3, 2, 1), expected=of_torch(lambda x, g: F.grid_sample(x, g, align_corners=True)),
    ),
    "pooling of volumes with indices": case(
        (t(2, 3, 4, 2, 6),), "max_pool3d_with_indices.default", [2, 2, 2], outs=both(2, 3, 2, 1, 3),
        expected=of_torch(lambda x: F.max_pool3d(x, 2, return_indices=True)),
    ),
    "adaptive pooling": case(
        (t(2, 3, 4, 6),), "adaptive_max_pool2d.default", [3, 2], outs=both(2, 3, 3, 2),
        expected=of_torch(lambda x: F.adaptive_max_pool2d(x, (3, 2), return_indices=True)),
    ),
    "adaptive pooling of volumes": case(
        (t(2, 3, 4, 2, 6),), "adaptive_max_pool3d.default", [3, 2, 2], outs=both(2, 3, 3, 2, 2),
        expected=of_torch(lambda x: F.adaptive_max_pool3d(x, (3, 2, 2), return_indices=True)),
    ),
    "grouped product": case(
        (t(6, 16), t(2, 16, 8), i(2, dtype="int32", values=[2, 6])), "_grouped_mm.default", outs=like(6, 8),
        expected=lambda a, b, ends: np.concatenate([a[:2] @ b[0], a[2:] @ b[1]]),
    ),
    "dist": case((t(3, 5), t(3, 5)), "dist.default", outs=like(), expected=lambda a, b: np.linalg.norm(a - b)),
    "histogram": case(
        (t(40, low=0, high=4),), "histc.default", 4, 0, 3, outs=like(4),
        expected=lambda x: np.histogram(x, 4, (0, 3))[0].astype("float32"),
    ),
    "put": case(
        (t(3, 5), i(2, values=[1, 7]), t(2)), "put.default", outs=like(3, 5),
        expected=of_torch(lambda x, where, values: x.put(where, values)),
    ),
}  # fmt: skip
# From an operator that makes images larger or smaller to F.interpolate's mode, and what else it is told.
_RESIZES = {
    "_upsample_bicubic2d_aa.vec": ("bicubic", [False], {"antialias": True}),
    "_upsample_bilinear2d_aa.vec": ("bilinear", [False], {"antialias": True}),
    "_upsample_nearest_exact1d.vec": ("nearest-exact", [], {}),
    "_upsample_nearest_exact2d.vec": ("nearest-exact", [], {}),
    "_upsample_nearest_exact3d.vec": ("nearest-exact", [], {}),
    "upsample_bicubic2d.vec": ("bicubic", [True], {"align_corners": True}),
    "upsample_linear1d.vec": ("linear", [False], {}),
    "upsample_nearest2d.vec": ("nearest", [], {}),
    "upsample_nearest3d.vec": ("nearest", [], {}),
    "upsample_trilinear3d.vec": ("trilinear", [False], {}),
}
for _name, (_mode, _given, _told) in _RESIZES.items():
    _size = (7, 3, 5)[: next(n for n in (1, 2, 3) if f"{n}d" in _name)]
    CASES[_name] = case(
        (t(2, 3, *(4, 5, 6)[: len(_size)]),), _name, list(_size), *_given, None, outs=like(2, 3, *_size),
        expected=of_torch(partial(F.interpolate, size=_size, mode=_mode, **_told)),
    )  # fmt: skip
CASES |= {
    f"_upsample_{mode}2d_aa.default": case(
        (t(2, 3, 4, 5),), f"_upsample_{mode}2d_aa.default", [7, 3], False, outs=like(2, 3, 7, 3),
        expected=of_torch(partial(F.interpolate, size=(7, 3), mode=mode, antialias=True)),
    )
    for mode in ("bilinear", "bicubic")
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_formula(name):
    made = CASES[name]
    assert_same(by_table(made), made.expected(*made.operands()), made)


def test_every_operator_is_one_of_torchs():
    for name in ATEN:
        _, base, overload = name.split(".")
        assert isinstance(getattr(getattr(torch.ops.aten, base), overload), torch._ops.OpOverload), name
