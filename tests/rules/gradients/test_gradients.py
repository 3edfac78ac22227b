"""Gradients of operators against torch's of their torch functions, in float64; and `mesh.vjp` on tiles."""

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.plan.gradient import gradient_function
from mesh_tensor.rules.gradients import has_gradient, stops_gradients
from mesh_tensor.rules.operator import rule_of
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.rule import _RULES as rules
from mesh_tensor.rules.operator.vjp import VJP
from mesh_tensor.runtime.sequential import run_sequential
from mesh_tensor.targets.torch_ops import torch_function

from ...targets.torch_ops.cases import Case, i, t
from ..operator.cases import CASES
from ..operator.tiles import assert_runs_on_tiles, factor_sizes

# Results of these are integers or bools, or say where something lies.
CONSTANT = (
    "argmax argmin argsort arange bitwise_and bitwise_not bitwise_or bitwise_xor bucketize equal eye eye_like greater"
    " greater_equal hamming_window isfinite isinf isnan left_shift less less_equal logical_and logical_not logical_or"
    " logical_xor not_equal one_hot ones right_shift size zeros quantize dequantize"
    " aten._embedding_bag_forward_only.default aten.heaviside.default aten.histc.default aten.nextafter.default"
    " aten.searchsorted.Tensor nn.dropout mesh.joined_parts mesh.merge_dims mesh.narrowed mesh.update"
)


@dataclass(frozen=True)
class Example:
    """A case in float64, its operands, and random gradients of its results of floats."""

    module: object
    operands: list
    seeds: list
    expected: dict


def _module(case, dtype="float64"):
    infos = [relax.TensorStructInfo(a.shape, dtype if "float" in a.dtype else a.dtype) for a in case.args]
    variables = [relax.Var(f"x{n}", info) for n, info in enumerate(infos)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        builder.emit_func_output(builder.emit(case.build(*variables)))
    return builder.get()


def _example(case):
    """With the gradients by torch, of those operands that have one."""
    module, rng = _module(case), np.random.default_rng(7)
    call = op_call(module["main"].body.blocks[0].bindings[0].value)
    operands = [torch.from_numpy(np.asarray(arg.draw(rng)).copy()) for arg in case.args]
    operands = [x.double() if x.is_floating_point() else x for x in operands]
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    results = [y for y in torch_function(call)(*leaves) if y.is_floating_point()]
    generator = torch.Generator().manual_seed(3)
    seeds = [torch.randn(y.shape, dtype=y.dtype, generator=generator) for y in results]
    pairs = [(y, seed) for y, seed in zip(results, seeds, strict=True) if y.requires_grad]
    wrt = {f"x{n}": x for n, x in enumerate(leaves) if x.requires_grad}
    made = torch.autograd.grad([y for y, _ in pairs], list(wrt.values()), [s for _, s in pairs], allow_unused=True)
    return Example(module, operands, seeds, {n: d for n, d in zip(wrt, made, strict=True) if d is not None})


def _is_differentiable(case):
    call = case.call()
    floats = [any("float" in tensor.dtype for tensor in tensors) for tensors in (call.inputs, call.outputs)]
    return all(floats) and has_gradient(call.operator)


MORE = {
    "layer_norm without epsilon": Case((t(5, 7), t(7), t(7)), lambda *x: relax.op.nn.layer_norm(*x, [-1], 0.0)),
    "power of a broadcast base": Case((t(5, low=1), t(4, 5)), relax.op.power),
    "take of repeated rows": Case((t(7, 3), i(5, values=[1, 1, 6, 1, 0])), lambda x, n: relax.op.take(x, n, 0)),
    "maximum, ties": Case((t(4, 5, values=[[1.0] * 5] * 4), t(5, values=[1, 2, 0, 1, 1])), relax.op.maximum),
    "max, ties": Case((t(4, 5, values=[[1, 2, 2, 0, 2]] * 4),), lambda x: relax.op.max(x, 1)),
    "split, of which a part is left": Case((t(7, 3),), lambda x: relax.op.split(x, [2, 5], 0)),
    "sum of all": Case((t(5, 3),), relax.op.sum),
    "squeeze of nothing": Case((t(1, 0, 5),), lambda x: relax.op.squeeze(x, [0])),
    "stack of nothing": Case((t(0, 5), t(0, 5)), lambda *x: relax.op.stack(relax.Tuple(x), 1)),
    "sum of rows of nothing": Case((t(3, 0),), lambda x: relax.op.sum(x, 0)),
}
# In float64 TVM does not take them: their numbers are float32, or their kernels are.
_NOT_IN_FLOAT64 = {
    name
    for name in CASES
    if name.split(": ")[1]
    in ("add a number", "a number minus", "quantize", "dequantize", "multiply by a number", "divide by a number")
    or name in ("more: divide a number", "aten: grouped product", "nn: nll_loss", "create: zeros_like")
}
EXAMPLES = {name: c for name, c in CASES.items() if _is_differentiable(c) and name not in _NOT_IN_FLOAT64} | {
    f"gradients: {name}": case for name, case in MORE.items()
}
_CLOSE = {"rtol": 1e-6, "atol": 2e-7}


@pytest.mark.parametrize("name", EXAMPLES)
def test_gradient(name):
    example = _example(EXAMPLES[name])
    module = gradient_function(example.module, "main", list(example.expected), seeded=True)
    _, found = run_sequential(module, [*example.operands, *example.seeds])
    for gradient, expected in zip(found, example.expected.values(), strict=True):
        torch.testing.assert_close(gradient, expected, equal_nan=True, **_CLOSE)


def _vjps(module, tensors):
    """The calls of `mesh.vjp` in a module with gradients, with what they are called on."""
    values = dict(zip(module["main"].params, tensors, strict=True))
    for binding in module["main"].body.blocks[0].bindings:
        if isinstance(binding.value, relax.Call):
            call = op_call(binding.value)
            operands = [x for arg in binding.value.args for x in _tensors(arg, values)]
            results = torch_function(call)(*operands)
            values[binding.var] = results if len(results) > 1 else results[0]
            if call.operator == VJP:
                yield call, operands
        elif isinstance(binding.value, relax.TupleGetItem):
            values[binding.var] = values[binding.value.tuple_value][binding.value.index]


def _tensors(arg, values):
    if isinstance(arg, relax.Tuple):
        return [x for field in arg.fields for x in _tensors(field, values)]
    if isinstance(arg, relax.Constant):
        return [torch.from_numpy(arg.data.numpy().copy())]
    return [values[arg]] if isinstance(arg.struct_info, relax.TensorStructInfo) else []


@pytest.mark.parametrize("name", EXAMPLES)
def test_vjp_on_tiles(name):
    """Along every factor, over 2 and 3 devices, with poison as padding; and along every two of them."""
    example = _example(EXAMPLES[name])
    module = gradient_function(example.module, "main", list(example.expected), seeded=True)
    if any(
        isinstance(arg, relax.Tuple)
        for b in module["main"].body.blocks[0].bindings
        for arg in getattr(b.value, "args", ())
    ):
        return
    for call, operands in _vjps(module, [*example.operands, *example.seeds]):
        rule = rule_of(call)
        factors = [f for f in factor_sizes(call, rule) if f not in rule.unsplit]
        splits = [{f: n} for f in factors for n in (2, 3)] + [
            {a: 2, b: 3} for a, b in itertools.combinations(factors, 2)
        ]
        for split in splits:
            assert_runs_on_tiles(call, rule, split, operands, **_CLOSE)


@pytest.mark.parametrize(
    "name",
    [
        "linear_algebra:", "nn: layer_norm", "nn: rms_norm", "nn: attention", "conv: conv2d",
        "index: take", "elementwise: where", "reduce: mean 1 True", "more: matmul, one batch dim",
    ],
)  # fmt: skip
def test_in_16_bits(name):
    """Parts of sums are added in float32, and rounded once."""
    name = name if name in EXAMPLES else next(known for known in EXAMPLES if known.startswith(name))
    example, narrow = _example(EXAMPLES[name]), _module(EXAMPLES[name], "bfloat16")
    made = gradient_function(narrow, "main", list(example.expected), seeded=True)
    tensors = [x.bfloat16() if x.is_floating_point() else x for x in (*example.operands, *example.seeds)]
    params = [p.name_hint for p in made["main"].params if len(p.struct_info.shape)]
    for param in params:
        run = mt.distribute_module(made, {"a": 3}, {param: {"a": 0}}, poison=True)
        _, found = run(*tensors)
        for gradient, expected in zip(found, example.expected.values(), strict=True):
            assert gradient.dtype == torch.bfloat16
            scale = float(expected.abs().max())
            torch.testing.assert_close(gradient.double(), expected, rtol=3e-2, atol=3e-2 * scale)


def test_every_operator_has_a_gradient_or_is_known_to_have_none():
    without = {name for name in rules if not has_gradient(name) and not stops_gradients(name) and name != VJP}
    unrolled = {name for name in rules if name.startswith("loop.")}  # tests/plan/test_loops.py

    sized_by_data = {"mesh.nonzero", "mesh.unique", "mesh.dynamic_strided_slice"}
    assert without - unrolled == set(CONSTANT.split()) | sized_by_data
