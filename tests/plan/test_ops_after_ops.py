"""Operators on operands that other operators left in unusual layouts: split in strides by a reshape, or as parts of a
sum or maximum that is still pending."""

import numpy as np
import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.operator import rule_of
from tests.rules.operator.cases import CASES as ALL

op = relax.op
_PARTS = (1.5, -0.75, 0.5, -0.25)  # of a sum, whose order is not that of the whole
CASES = {name: case for name, case in ALL.items() if case.call().name != "nn.dropout"}


def _module(case, before):
    """main(x0, x1, ...) gives the case's operator on its operands, of which those in `before` (position -> (shape that
    comes in, operator that makes the operand of it)) are made first."""
    shapes = [before[n][0] if n in before else arg.shape for n, arg in enumerate(case.args)]
    variables = [
        relax.Var(f"x{n}", relax.TensorStructInfo(shape, arg.dtype))
        for n, (shape, arg) in enumerate(zip(shapes, case.args, strict=True))
    ]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            operands = [builder.emit(before[n][1](v)) if n in before else v for n, v in enumerate(variables)]
            result = builder.emit_output(case.build(*operands))
        builder.emit_func_output(result)
    return builder.get()


def _assert_runs(case, module, layouts, operands):
    expected = mt.run_sequential(module, operands)
    for mesh, shardings in layouts:
        found = mt.distribute_module(module, mesh, shardings)(*operands)
        torch.testing.assert_close(found, expected, equal_nan=True, **{"rtol": 0, "atol": 2e-5} | case.tolerance)


def _operands(case):
    return [torch.from_numpy(np.asarray(a).copy()) for a in case.operands()]


def _composite(case):
    """The operands' dims that can be taken apart: operand, dim, sizes."""
    for position, arg in enumerate(case.args):
        for dim, size in enumerate(arg.shape):
            factor = next((f for f in (2, 3) if size % f == 0 and size > f), None)
            if factor and 0 not in arg.shape:
                yield position, dim, (factor, size // factor)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if any(_composite(case))])
def test_in_strides(name):
    """The minor part of a dim is split: a device's tile is no contiguous part of the operand."""
    case = CASES[name]
    for position, dim, sizes in _composite(case):
        whole = case.args[position].shape
        apart = (*whole[:dim], *sizes, *whole[dim + 1 :])
        module = _module(case, {position: (apart, lambda x, whole=whole: op.reshape(x, whole))})
        operands = _operands(case)
        operands[position] = operands[position].reshape(apart)
        name = f"x{position}"
        layouts = [({"x": 2}, {name: {"x": dim + 1}}), ({"x": 2, "y": 3}, {name: {"x": dim, "y": dim + 1}})]
        _assert_runs(case, module, layouts, operands)


def _sums(case):
    """Sets of operands that may be sums: each of the floats, and all of them."""
    floats = [n for n, arg in enumerate(case.args) if "float" in arg.dtype]
    yield from ({n} for n in floats)
    if len(floats) > 1:
        yield set(floats)


def _pending_cases():
    """The cases that may take operands as parts, by what their rules say; the others are given no parts."""
    for name, case in CASES.items():
        rule = rule_of(case.call())
        if rule.linear and any(_sums(case)):
            yield pytest.param(name, op.sum, id=f"sum: {name}")
        if rule.moves and any(_sums(case)):
            yield pytest.param(name, op.max, id=f"max: {name}")


@pytest.mark.parametrize(("name", "reduce"), list(_pending_cases()))
def test_pending(name, reduce):
    """Operands are sums, or maxima, of which every device has a part."""
    case = CASES[name]
    for chosen in _sums(case):
        before = {n: ((len(_PARTS), *case.args[n].shape), lambda x: reduce(x, 0)) for n in chosen}
        operands = [
            torch.stack([x * part for part in _PARTS]) if n in chosen else x for n, x in enumerate(_operands(case))
        ]
        layouts = [({"x": parts}, {f"x{n}": {"x": 0} for n in chosen}) for parts in (2, 3)]
        _assert_runs(case, _module(case, before), layouts, operands)
