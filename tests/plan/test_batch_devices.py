"""Parts of a batch in manual computations: what follows from them is what the devices make of the whole batch, one
after the other."""

import random
from collections import Counter

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.plan.batch_kinds import Fixed, Mean, Mixed, Rows, Sum
from mesh_tensor.plan.batch_parts import batch_parts

from .test_manual import manual_module

op, comm, c = relax.op, mt.comm, relax.const
MESH = {"x": 2, "y": 2}
X, Y = {"x": 2}, {"y": 2}
WEIGHT = (4, 4)


def parts_made(build, rows, more, weights, what):
    """What `build(rows)` makes of a batch of twice as many rows by its halves and by its every other row, and the kind
    that is told; all by `run_sequential`. It is asserted that these are the batch's results."""
    found = batch_parts(build(rows), "main", ["x0"])
    (kind,) = found.kinds
    if isinstance(kind, Mixed) or found.totals or found.shares:
        return kind
    x = torch.randn(2 * rows, *more)
    whole = mt.run_sequential(build(2 * rows), [x, *weights])
    order = torch.arange(2 * rows)
    for halves in ((order[:rows], order[rows:]), (order[::2], order[1::2])):
        one, other = (mt.run_sequential(build(rows), [x[half], *weights]) for half in halves)
        expected = whole
        if isinstance(kind, Rows):
            assert kind.dim == 0
            one, other = (half.reshape(kind.outer, kind.count, -1) for half in (one, other))
            made = torch.cat([one, other], 1)
            expected = whole.reshape(kind.outer, 2 * kind.count, -1)[:, torch.cat(halves)]
        else:
            made = {Sum: one + other, Mean: (one + other) / 2, Fixed: one}[type(kind)]
        torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4, msg=lambda text: f"{what}: {kind}: {text}")
    return kind


def shape(x):
    """The sizes of a tile."""
    return [int(size) for size in x.struct_info.shape]


class Drawn:
    """A random function on tiles of (rows, 4), the same for any number of rows; `layout`: how its rows lie."""

    def __init__(self, number):
        draw = random.Random(number)
        self.rows = draw.choice([{"x": 0}, {"y": 0}, {"x": 0, "y": 0}, {}, {"x": 1}])
        self.weights = [draw.choice([{}, {}, {"x": 1}, {"y": 0}]) for _ in range(2)]
        kinds = ["product", "product", "tanh", "gather", "scatter", "reduce", "index", "permute", "exchange", "local"]
        self.steps = [
            (draw.choice(kinds), draw.choice(["x", "y"]), draw.randrange(2)) for _ in range(draw.randint(1, 4))
        ]
        self.kind = draw.choice(["sum", "mean", "sum of rows", "as they lie", "max"])
        self.op, self.out = draw.choice(["sum", "avg"]), draw.choice([self.rows, {"x": 0, "y": 0}, {"x": 0}, {}])

    def body(self, emit, x, *weights):
        for kind, axis, number in self.steps:
            x = getattr(self, f"_{kind}")(emit, x, {axis: 2}, weights[number])
        if self.kind == "as they lie":
            return x
        reduce = {"sum": op.sum, "mean": op.mean, "max": op.max}.get(self.kind)
        made = emit(reduce(x)) if reduce else emit(op.sum(x, [0]))
        return emit(comm.all_reduce(made, MESH, self.op))

    def _product(self, emit, x, _, w):
        width, (rows, columns) = shape(x)[1], shape(w)
        if width not in (rows, columns):
            return x
        return emit(op.matmul(x, w if width == rows else emit(op.permute_dims(w))))

    def _tanh(self, emit, x, *_):
        return emit(op.tanh(x))

    def _gather(self, emit, x, axis, _):
        return emit(comm.all_gather(x, axis, 0))

    def _scatter(self, emit, x, axis, _):
        return emit(comm.reduce_scatter(x, axis, 0)) if shape(x)[0] % 2 == 0 else x

    def _reduce(self, emit, x, axis, _):
        return emit(comm.all_reduce(x, axis))

    def _index(self, emit, x, axis, _):
        return emit(op.multiply(x, emit(op.astype(emit(comm.axis_index(axis)), "float32"))))

    def _permute(self, emit, x, axis, _):
        return emit(comm.permute(x, axis, [(0, 1), (1, 0)]))

    def _exchange(self, emit, x, axis, _):
        return emit(comm.all_to_all(x, axis, 1, 0)) if shape(x)[1] % 2 == 0 else x

    def _local(self, emit, x, *_):
        return emit(op.subtract(x, emit(op.mean(x, [1], True))))

    def module(self, rows):
        """The module for so many rows."""
        layouts, out = [self.rows, *self.weights], self.out if self.kind == "as they lie" else {}
        return manual_module(self.body, [(rows, 4), WEIGHT, WEIGHT], MESH, layouts, out)


@pytest.mark.parametrize("start", range(0, 300, 100))
def test_random_functions(start):
    """Those that can be written: what is told of them holds."""
    found = Counter()
    for number in range(start, start + 100):
        torch.manual_seed(number)
        drawn, weights = Drawn(number), [torch.randn(WEIGHT) for _ in range(2)]
        try:
            batch_parts(drawn.module(8), "main", ["x0"])
        except mt.MeshTensorError:  # devices may have different values of a result
            continue
        kind = parts_made(drawn.module, 8, (4,), weights, f"{number}: {vars(drawn)}")
        found[type(kind)] += 1
    assert min(found[kind] for kind in (Rows, Sum, Mean, Mixed)) >= 3, found
