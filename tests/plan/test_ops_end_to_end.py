"""Every operator as a module, on devices: whatever dim of its operands or results is split, it gives what one device
gives."""

import numpy as np
import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep
from mesh_tensor.rules.operator import TensorType
from tests.rules.operator.cases import CASES


def _module(case):
    """main(x0, x1, ...) gives `result`."""
    variables = [relax.Var(f"x{n}", relax.TensorStructInfo(a.shape, a.dtype)) for n, a in enumerate(case.args)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(case.build(*variables), name_hint="result")
        builder.emit_func_output(result)
    return builder.get()


def _operands(case):
    return [torch.from_numpy(np.asarray(a).copy()) for a in case.operands()]


def _layouts(case):
    """Every dim of every operand, and of a result that is one tensor, over the axis x; and the first dim, or the first
    and the last one, of all of them over both axes of a mesh."""
    outputs = case.call().outputs
    types = {f"x{n}": TensorType(arg.shape, arg.dtype) for n, arg in enumerate(case.args)}
    if len(outputs) == 1 and not isinstance(case.call().expr.struct_info, relax.TupleStructInfo):
        types["result"] = outputs[0]
    for name, tensor in types.items():
        for dim in range(tensor.ndim):
            yield {"x": 2}, {name: {"x": dim}}
    for other in (0, -1):
        layouts = {name: {"x": 0, "y": other % tensor.ndim} for name, tensor in types.items() if tensor.ndim}
        if layouts:
            yield {"x": 2, "y": 2}, layouts


def _equal(found, expected, **tolerance):
    if isinstance(expected, tuple):
        assert len(found) == len(expected)
        for pair in zip(found, expected, strict=True):
            _equal(*pair, **tolerance)
    else:
        torch.testing.assert_close(found, expected, equal_nan=True, **tolerance)


@pytest.mark.parametrize("name", CASES)
def test_on_devices(name):
    case = CASES[name]
    module, operands = _module(case), _operands(case)
    expected = mt.run_sequential(module, operands)
    for mesh, layouts in _layouts(case):
        run = mt.distribute_module(module, mesh, layouts)
        _equal(run(*operands), expected, **{"rtol": 0, "atol": 1e-5} | case.tolerance)


_COLLECTIVES = {
    ("linear_algebra: matrices", "x0", 0): [],
    ("linear_algebra: matrices", "x0", 1): ["all_reduce"],
    ("linear_algebra: batches", "x1", 0): [],
    ("more: einsum of three", "x1", 1): ["all_reduce"],
    ("more: softmax, first dim", "x0", 1): [],
    ("more: softmax, first dim", "x0", 0): ["all_gather"],
    ("reduce: sum 1 True", "x0", 1): ["all_reduce"],
    ("reduce: max 1 True", "x0", 1): ["all_reduce"],
    ("reduce: argmax", "x0", 0): [],
    ("more: reshape, heads", "x0", 1): [],
    ("shape: split in sections", "x0", 0): [],
    ("more: concat of three", "x0", 0): [],
    ("more: slice of one dim turned around", "x0", 0): [],
    ("more: repeat in the middle", "x0", 1): [],
    ("more: take, a large table", "x0", 0): ["all_reduce"],
    ("more: take, a table of float16", "x0", 1): [],
    ("index: gather_elements", "x0", 0): [],
    ("index: scatter_nd adds", "x0", 1): [],
    ("conv: conv2d", "x0", 0): [],
    ("conv: conv2d", "x0", 1): ["all_reduce"],
    ("conv: conv2d", "x1", 0): [],
    ("more: conv1d, depthwise", "x0", 1): [],
    ("conv: max_pool2d", "x0", 1): [],
    ("more: group_norm, 3 groups", "x0", 0): [],
    ("more: group_norm, a group each", "x0", 1): [],
    ("nn: batch_norm for inference", "x0", 1): [],
    ("nn: attention", "x0", 2): [],
    ("nn: attention", "x0", 1): [],
    ("more: attention, 6 heads on 3", "x1", 2): [],
}


@pytest.mark.parametrize(("name", "value", "dim"), _COLLECTIVES)
def test_collectives(name, value, dim):
    """What is parallel sends nothing, and what is summed is summed once."""
    run = mt.distribute_module(_module(CASES[name]), {"x": 2}, {value: {"x": dim}})
    kinds = [step.kind for step in run.program.steps if isinstance(step, CollectiveStep)]
    assert [kind for kind in kinds if kind != "slice"] == _COLLECTIVES[name, value, dim]


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_group_norm_without_channels(dim):
    operands = torch.randn(2, 0, 3), torch.randn(0), torch.randn(0)
    variables = [relax.Var(f"x{n}", relax.TensorStructInfo(t.shape, "float32")) for n, t in enumerate(operands)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        builder.emit_func_output(builder.emit(relax.op.nn.group_norm(*variables, 2, 1, [2])))
    run = mt.distribute_module(builder.get(), {"x": 2}, {"x0": {"x": dim}}, poison=True)
    assert run(*operands).shape == (2, 0, 3)
