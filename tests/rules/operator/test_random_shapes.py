"""Operators of random shapes on tiles: what a rule says holds whatever the sizes are."""

import math

import torch
from hypothesis import given
from hypothesis import strategies as st
from tvm import relax

from mesh_tensor.rules.operator import rule_of
from mesh_tensor.rules.operator.call import op_call

from .tiles import assert_runs_on_tiles, factor_sizes

op = relax.op


def _var(shape, dtype="float32"):
    return relax.Var("x", relax.TensorStructInfo(shape, dtype))


def _check(data, build, *shapes, **tolerance):
    """The operator is right with up to two of its factors over 2 to 4 devices each."""
    call = op_call(relax.BlockBuilder().normalize(build(*map(_var, shapes))))
    rule = rule_of(call)
    factors = sorted(set(factor_sizes(call, rule)) - rule.unsplit)
    chosen = data.draw(st.lists(st.sampled_from(factors), unique=True, max_size=2)) if factors else []
    split = {factor: data.draw(st.integers(2, 4)) for factor in chosen}
    assert_runs_on_tiles(call, rule, split, [torch.randn(shape) for shape in shapes], **tolerance)


_EXACT = {"rtol": 0, "atol": 0}
_SUMS = {"rtol": 1e-5, "atol": 1e-5}


@st.composite
def _regrouped(draw):
    """Two shapes of the same elements: the primes of each group of dims are dealt to dims anew, in any order."""
    source, target = [], []
    for _ in range(draw(st.integers(0, 3))):
        primes = draw(st.lists(st.sampled_from((2, 2, 3, 5)), max_size=4))
        for shape in (source, target):
            order = draw(st.permutations(primes))
            cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=3)))
            shape += [math.prod(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]
    return tuple(source), tuple(target)


@given(_regrouped(), st.data())
def test_reshape(shapes, data):
    source, target = shapes
    _check(data, lambda x: op.reshape(x, target), source, **_EXACT)


@st.composite
def _broadcast(draw):
    """Two shapes that broadcast with each other."""
    full = draw(st.lists(st.integers(1, 5), max_size=3))
    starts = draw(st.tuples(st.integers(0, len(full)), st.integers(0, len(full))))
    return [tuple(draw(st.sampled_from((size, 1))) for size in full[start:]) for start in starts]


@given(_broadcast(), st.data())
def test_elementwise(shapes, data):
    _check(data, op.subtract, *shapes, **_EXACT)


@given(_broadcast(), st.integers(1, 5), st.integers(1, 5), st.integers(1, 5), st.data())
def test_matmul(batches, m, k, n, data):
    left, right = batches
    left = data.draw(st.sampled_from(((*left, m, k), (k,))))
    right = data.draw(st.sampled_from(((*right, k, n), (k,))))
    _check(data, op.matmul, left, right, **_SUMS)


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.data())
def test_reductions(shape, data):
    dims = data.draw(st.lists(st.integers(-len(shape), len(shape) - 1), unique_by=lambda d: d % len(shape)))
    name = data.draw(st.sampled_from(("sum", "mean", "max", "min", "prod")))
    if name != "sum" and 0 in shape:
        name = "sum"
    keep = data.draw(st.booleans())
    _check(data, lambda x: getattr(op, name)(x, dims, keep), tuple(shape), **_SUMS)


@given(st.lists(st.integers(1, 6), min_size=1, max_size=3), st.data())
def test_slices(shape, data):
    """Also slices of all of a dim, and ends far outside."""
    dims = data.draw(st.lists(st.integers(0, len(shape) - 1), unique=True, min_size=1))
    begins = [data.draw(st.sampled_from((0, -shape[d], shape[d] // 2))) for d in dims]
    ends = [data.draw(st.sampled_from((shape[d], 2**31 - 1))) for d in dims]
    inbound = all(begin >= 0 for begin in begins) and all(end == shape[d] for d, end in zip(dims, ends, strict=True))
    _check(data, lambda x: op.strided_slice(x, dims, begins, ends, assume_inbound=inbound), tuple(shape), **_EXACT)


def test_products_in_low_precision_are_whole():
    """Of float16 1000 * 1000 * 1000 * .001 * .001, the first half alone is no float16."""
    for dtype, split in (("float16", {}), ("bfloat16", {}), ("float32", {"d0": "prod"})):
        call = op_call(relax.BlockBuilder().normalize(op.prod(_var((6, 2), dtype), 0)))
        assert rule_of(call).reduced == split
