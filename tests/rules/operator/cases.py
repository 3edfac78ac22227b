"""Calls of operators that have a rule: those that the torch functions are tested with, and more shapes and dtypes."""

from __future__ import annotations

from tvm import relax

from mesh_tensor.rules.operator import has_rule
from tests.targets.torch_ops import (
    test_aten,
    test_conv,
    test_create,
    test_elementwise,
    test_index,
    test_linear_algebra,
    test_nn,
    test_reduce,
    test_shape,
)
from tests.targets.torch_ops.cases import Case, i, t

op = relax.op
_FAMILIES = (
    test_aten, test_conv, test_create, test_elementwise, test_index, test_linear_algebra, test_nn, test_reduce,
    test_shape,
)  # fmt: skip
_LOOSE = {"rtol": 1e-4, "atol": 1e-5}
_HALF = {"rtol": 4e-3, "atol": 4e-3}
_MORE = {
    "add, a dim of 1": Case((t(1, 5), t(4, 1)), op.add),
    "add of bool": Case((t(5, dtype="bool"), t(5, dtype="bool")), op.add),
    "subtract itself broadcast": Case((t(5), t(3, 5)), op.subtract),
    "multiply by a number": Case((t(3, 5),), lambda x: op.multiply(x, relax.PrimValue(2.0))),
    "divide by a number": Case((t(3, 5),), lambda x: op.divide(x, relax.PrimValue(2.0))),
    "divide a number": Case((t(3, 5, low=1),), lambda x: op.divide(relax.PrimValue(2.0), x)),
    "divide ints": Case((i(3, 5), i(5, low=1)), op.divide),
    "where of scalars": Case((t(4, 5, dtype="bool"), t(), t(5)), op.where),
    "astype to double": Case((t(7),), lambda x: op.astype(x, "float64")),
    "matmul, 1 row": Case((t(1, 5), t(5, 1)), op.matmul),
    "matmul, many batches": Case((t(3, 1, 2, 5), t(4, 5, 3)), op.matmul),
    "matmul, one batch dim": Case((t(3, 2, 5), t(5, 3)), op.matmul),
    "matmul of float16": Case((t(5, 7, dtype="float16"), t(7, 3, dtype="float16")), op.matmul, tolerance=_HALF),
    "matmul, vector and batches": Case((t(3, 4, 5), t(5)), op.matmul),
    "mean of float16": Case((t(5, 7, dtype="float16"),), lambda x: op.mean(x, 1), tolerance=_HALF),
    "mean of ints": Case((i(5, 7, low=-20, high=20),), lambda x: op.mean(x, 0)),
    "sum of float16": Case((t(5, 7, dtype="float16"),), op.sum, tolerance=_HALF),
    "sum of nothing": Case((t(5, 0, 3),), lambda x: op.sum(x, 1)),
    "sum of bool": Case((t(3, 5, dtype="bool"),), lambda x: op.sum(x, 1)),
    "sum of uint8": Case((i(3, 5, dtype="uint8", low=0, high=255),), lambda x: op.sum(x, 1)),
    "sum over no dim": Case((t(3, 5),), lambda x: op.sum(x, [])),
    "max with NaN": Case((t(2, 5, values=[[1, float("nan"), 3, 4, 5], [5, 4, 3, 2, 1]]),), lambda x: op.max(x, 1)),
    "max of lowest": Case((i(2, 3, dtype="int8", values=[[-128] * 3, [-128, 5, 1]]),), lambda x: op.max(x, 1)),
    "min of infinities": Case((t(5, values=[float("inf")] * 5),), op.min),
    "prod of ints": Case((i(5, 3),), lambda x: op.prod(x, 0)),
    "max of bool": Case((t(5, 3, dtype="bool"),), lambda x: op.max(x, 0)),
    "softmax, first dim": Case((t(5, 3, 4),), lambda x: op.nn.softmax(x, -3)),
    "cumsum of one dim": Case((t(5),), op.cumsum),
    "layer_norm of the outer dims": Case((t(3, 5, 4), t(3, 4), t(3, 4)), lambda *x: op.nn.layer_norm(*x, [0, -1])),
    "squeeze, some of size 1": Case((t(1, 5, 1, 1),), lambda x: op.squeeze(x, [0, 2])),
    "expand_dims of a scalar": Case((t(),), lambda x: op.expand_dims(x, 0)),
    "reshape to a scalar": Case((t(1, 1),), lambda x: op.reshape(x, ())),
    "reshape, sizes of 1": Case((t(1, 6, 1, 4),), lambda x: op.reshape(x, (3, 1, 2, 4, 1))),
    "reshape of nothing": Case((t(4, 0, 3),), lambda x: op.reshape(x, (3, 0, 2))),
    "reshape, heads": Case((t(5, 6, 4),), lambda x: op.reshape(x, (5, 3, 2, 4))),
    "reshape, merged and taken apart": Case((t(4, 3, 10),), lambda x: op.reshape(x, (12, 5, 2))),
    "reshape, nothing in common": Case((t(5, 6),), lambda x: op.reshape(x, (6, 5))),
    "broadcast_to more dims": Case((t(1, 5),), lambda x: op.broadcast_to(x, (3, 4, 5))),
    "broadcast_to from a scalar": Case((t(),), lambda x: op.broadcast_to(x, (4, 5))),
    "concat of three": Case((t(5, 2), t(5, 4), t(5, 1)), lambda *x: op.concat(x, 1)),
    "split by one index": Case((t(5, 7),), lambda x: op.split(x, [3], 1)),
    "split unevenly": Case((t(5, 7),), lambda x: op.split(x, 3, 1)),
    "split in parts that meet": Case((t(6, 5),), lambda x: op.split(x, [2, 4], 0)),
    "slice of all": Case((t(7, 8),), lambda x: op.strided_slice(x, [0, 1], [0, 1], [2**63 - 1, 9])),
    "slice of one dim turned around": Case((t(7, 8),), lambda x: op.strided_slice(x, [1], [-1], [-99], [-1])),
    "permute_dims of a scalar": Case((t(),), op.permute_dims),
    "take, a table of ints": Case((i(7, 3), i(5, low=0, high=7)), lambda x, n: op.take(x, n, 0)),
    "take, a table of float16": Case(
        (t(7, 3, dtype="float16"), i(5, low=0, high=7)), lambda x, n: op.take(x, n, 0), tolerance=_HALF
    ),
    "take, a table of bool": Case((t(7, 3, dtype="bool"), i(5, low=0, high=7)), lambda x, n: op.take(x, n, 0)),
    "take a number": Case((t(7, 3),), lambda x: op.take(x, relax.PrimValue(2), 1)),
    "scatter_elements, rows": Case(
        (t(7, 6), i(7, 3, low=0, high=6), t(7, 3)), lambda x, n, v: op.scatter_elements(x, n, v, 1, "add")
    ),
    "scatter_elements, fewer rows": Case(
        (t(7, 6, 5), i(7, 3, 4, low=-6, high=6), t(7, 3, 4)), lambda x, n, v: op.scatter_elements(x, n, v, 1, "mul")
    ),
    "take, the last dim": Case((t(3, 7), i(2, 5, low=0, high=7)), lambda x, n: op.take(x, n, -1)),
    "take, a large table": Case((t(65, 3), i(2, low=0, high=65)), lambda x, n: op.take(x, n, 0)),
    "take one of the rows": Case((t(7, 3), i(values=3)), lambda x, n: op.take(x, n, 0)),
    "take clip": Case((t(7, 3), i(5, low=-9, high=20)), lambda x, n: op.take(x, n, 0, "clip")),
    "take wrap": Case((t(7, 3), i(5, low=-9, high=20)), lambda x, n: op.take(x, n, 0, "wrap")),
    "attention, 6 heads on 3": Case((t(2, 3, 6, 4), t(2, 5, 3, 4), t(2, 5, 3, 4)), op.nn.attention, tolerance=_LOOSE),
    "attention, 6 heads on 3, masked": Case(
        (t(2, 5, 6, 4), t(2, 5, 3, 4), t(2, 5, 3, 2)),
        lambda *x: op.nn.attention(*x, causal_mask="TopLeft"), tolerance=_LOOSE,
    ),
    "attention, one bias for all": Case(
        (t(2, 3, 4, 4), t(2, 5, 4, 4), t(2, 5, 4, 4), t(1, 1, 1, 5)), op.nn.attention, tolerance=_LOOSE
    ),
    "attention, a bias for shared heads": Case(
        (t(2, 3, 4, 4), t(2, 5, 2, 4), t(2, 5, 2, 4), t(1, 4, 3, 5)), op.nn.attention, tolerance=_LOOSE
    ),
    "conv2d of float16": Case(
        (t(3, 5, 4, 4, dtype="float16"), t(3, 5, 2, 2, dtype="float16")), op.nn.conv2d, tolerance=_HALF
    ),
    "conv1d, depthwise": Case((t(3, 5, 6), t(5, 1, 2)), lambda x, w: op.nn.conv1d(x, w, groups=5), tolerance=_LOOSE),
    "conv2d, groups of 2": Case(
        (t(2, 4, 4, 6), t(2, 2, 2, 9)), tolerance=_LOOSE,
        build=lambda x, w: op.nn.conv2d(x, w, groups=3, data_layout="NHWC", kernel_layout="HWIO"),
    ),
    "conv1d_transpose in groups": Case(
        (t(2, 6, 4), t(6, 2, 3)), lambda x, w: op.nn.conv1d_transpose(x, w, groups=3), tolerance=_LOOSE
    ),
    "avg_pool2d out in another layout": Case(
        (t(2, 5, 4, 4),), lambda x: op.nn.avg_pool2d(x, (2, 2), out_layout="NHWC"), tolerance=_LOOSE
    ),
    "group_norm, 3 groups": Case(
        (t(2, 6, 3), t(6), t(6)), lambda *x: op.nn.group_norm(*x, 3, 1, [2]), tolerance=_LOOSE
    ),
    "group_norm, a group each": Case(
        (t(2, 5, 3), t(5), t(5)), lambda *x: op.nn.group_norm(*x, 5, 1, [2]), tolerance=_LOOSE
    ),
    "instance_norm, channels last": Case(
        (t(3, 4, 5), t(5), t(5)), lambda *x: op.nn.instance_norm(*x, -1, [1]), tolerance=_LOOSE
    ),
    "prelu, one slope": Case((t(3, 5), t(1)), lambda x, a: op.nn.prelu(x, a, 1)),
    "einsum, implicit": Case((t(5, 3), t(3, 4)), lambda *x: op.einsum(x, "zb,bc"), tolerance=_LOOSE),
    "einsum of three": Case((t(5, 3), t(3, 4), t(4)), lambda *x: op.einsum(x, "ab, bc, c -> a"), tolerance=_LOOSE),
    "einsum, diagonal": Case((t(5, 5, 3),), lambda x: op.einsum((x,), "iij->ij")),
    "einsum, trace": Case((t(5, 5, 3),), lambda x: op.einsum((x,), "iij->j"), tolerance=_LOOSE),
    "einsum, more dims": Case((t(2, 3, 4), t(4, 5)), lambda *x: op.einsum(x, "...k,kn->...n"), tolerance=_LOOSE),
    "einsum of float16": Case(
        (t(5, 3, dtype="float16"), t(3, 4, dtype="float16")), lambda *x: op.einsum(x, "ij,jk->ik"), tolerance=_HALF
    ),
    "collapse_sum_to of nothing": Case((t(5, 0, 4),), lambda x: op.collapse_sum_to(x, (0, 1))),
    "collapse_sum_to of float16": Case(
        (t(5, 3, 4, dtype="float16"),), lambda x: op.collapse_sum_to(x, (3, 1)), tolerance=_HALF
    ),
    "gather_elements of fewer": Case(
        (t(5, 4, 3), i(5, 2, 2, low=0, high=4)), lambda x, n: op.gather_elements(x, n, -2)
    ),
    "scatter_nd of rows": Case((t(5, 7), i(2, 2, 1, values=[[[0], [4]], [[1], [2]]]), t(2, 2, 7)), op.scatter_nd),
    "one_hot in front": Case(
        (i(5, low=0, high=4),), lambda n: op.one_hot(n, relax.PrimValue(1), relax.PrimValue(0), 4, 0)
    ),
    "repeat in the middle": Case((t(3, 5, 2),), lambda x: op.repeat(x, 3, -2)),
    "tile of more dims": Case((t(5, 3),), lambda x: op.tile(x, (2, 1, 1))),
    "tile of the first": Case((t(5, 3),), lambda x: op.tile(x, (2, 1))),
    "stack at the end": Case((t(5, 3), t(5, 3), t(5, 3)), lambda *x: op.stack(x, -1)),
    "flip a middle dim": Case((t(5, 3, 2),), lambda x: op.flip(x, -2)),
    "meshgrid of three": Case((t(5), t(3), t(2)), lambda *x: op.meshgrid(x)),
    "pad of zeros": Case((t(5, 3),), lambda x: op.nn.pad(x, (0, 0, 1, 2))),
    "triu of batches": Case((t(5, 3, 4),), lambda x: op.triu(x)),
    "sort, several rows": Case((t(5, 3, 2),), lambda x: op.sort(x, -2)),
    "adaptive_avg_pool1d": Case((t(2, 5, 4),), lambda x: op.nn.adaptive_avg_pool1d(x, 2), tolerance=_LOOSE),
    "adaptive_avg_pool3d": Case((t(1, 3, 4, 4, 2),), lambda x: op.nn.adaptive_avg_pool3d(x, 2), tolerance=_LOOSE),
    "avg_pool3d": Case((t(1, 3, 4, 4, 2),), lambda x: op.nn.avg_pool3d(x, 2), tolerance=_LOOSE),
    "max_pool1d": Case((t(2, 5, 4),), lambda x: op.nn.max_pool1d(x, 2)),
    "conv3d_transpose": Case((t(1, 3, 2, 2, 2), t(3, 5, 2, 2, 2)), op.nn.conv3d_transpose, tolerance=_LOOSE),
    "size": Case((t(5, 3),), op.size),
    "wrap_param": Case((t(5, 3, dtype="float16"),), lambda x: op.wrap_param(x, "float32")),
    "stop_lift_params": Case((t(5, 3),), op.builtin.stop_lift_params),
    "no_grad": Case((t(5, 3),), op.grad.no_grad),
    "start_checkpoint": Case((t(5, 3),), op.grad.start_checkpoint),
    "end_checkpoint": Case((t(5, 3),), op.grad.end_checkpoint),
    "cross_entropy of a row": Case((t(4), t(4)), op.nn.cross_entropy_with_logits),
}  # fmt: skip

CASES: dict[str, Case] = {
    f"{module.__name__.rpartition('test_')[2]}: {name}": case
    for module in _FAMILIES
    for name, case in module.CASES.items()
} | {f"more: {name}": case for name, case in _MORE.items()}

CASES = {name: case for name, case in CASES.items() if has_rule(case.call().operator)}
