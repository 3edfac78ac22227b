"""Rules of operators: on tiles that are cut as a rule allows, the operator gives its result's tiles or parts."""

import itertools

import numpy as np
import pytest
import torch
from tvm import relax

from mesh_tensor.rules.operator import OpRule, rule_of
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.rule import _RULES as rules
from mesh_tensor.targets.torch_ops import torch_function
from mesh_tensor.targets.torch_ops.table import _MAKERS as torch_functions

from .cases import CASES
from .tiles import assert_runs_on_tiles, factor_sizes


def _operands(case, seed=7):
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(np.asarray(arg.draw(rng)).copy()) for arg in case.args]


def _splits(call, rule):
    """Every factor over 2 and 3 devices, and every two of them together."""
    factors = [f for f in factor_sizes(call, rule) if f not in rule.unsplit]
    for factor in factors:
        yield {factor: 2}
        yield {factor: 3}
    for a, b in itertools.combinations(factors, 2):
        if len({rule.reduced[f] for f in (a, b) if f in rule.reduced}) < 2:
            yield {a: 2, b: 3}


@pytest.mark.parametrize("name", CASES)
def test_tiles(name):
    case = CASES[name]
    call = case.call()
    rule = rule_of(call)
    operands = _operands(case)
    for split in _splits(call, rule):
        assert_runs_on_tiles(call, rule, split, operands, **_tolerance(case, call))


@pytest.mark.parametrize("name", CASES)
def test_nothing_split(name):
    """Where no axis splits an operator, it is called as it is."""
    case = CASES[name]
    call = case.call()
    assert_runs_on_tiles(call, rule_of(call), {}, _operands(case), rtol=0, atol=0)


LINEAR = [name for name, case in CASES.items() if rule_of(case.call()).linear]
MOVES = [name for name, case in CASES.items() if rule_of(case.call()).moves]


@pytest.mark.parametrize("name", LINEAR)
def test_linear(name):
    case = CASES[name]
    call = case.call()
    function, first, second = torch_function(call), _operands(case, 1), _operands(case, 2)
    for together in rule_of(call).linear:
        other = [b if n in together else a for n, (a, b) in enumerate(zip(first, second, strict=True))]
        both = [a + b if n in together else a for n, (a, b) in enumerate(zip(first, second, strict=True))]
        zero = [torch.zeros_like(a) if n in together else a for n, a in enumerate(first)]
        for whole, a, b, none in zip(function(*both), function(*first), function(*other), function(*zero), strict=True):
            torch.testing.assert_close(whole, a + b, **_tolerance(case, call))
            assert not none.any()


@pytest.mark.parametrize("name", MOVES)
def test_moves(name):
    case = CASES[name]
    function, first, second = torch_function(case.call()), _operands(case, 1), _operands(case, 2)
    larger = [torch.maximum(a, b) for a, b in zip(first, second, strict=True)]
    for whole, a, b in zip(function(*larger), function(*first), function(*second), strict=True):
        assert torch.equal(whole, torch.maximum(a, b))


def test_what_moves_elements_is_linear():
    """Sums pass through it, too."""
    assert len(LINEAR) > 40
    assert len(MOVES) > 20
    assert set(MOVES) <= set(LINEAR)


def test_every_operator_with_a_torch_function_has_a_rule_and_a_case():
    """All but those of one device, those that say where a tensor lies, those that plans are fused into, and those that
    graphs are rewritten into, which no device runs (tests/plan/test_shifts, test_loops, test_manual)."""
    placing = {"dist.annotate_sharding", "dist.redistribute", "hint_on_device", "to_vdevice"}
    placing |= {name for name in torch_functions if name.startswith(("mesh.", "fused.")) and name not in rules}
    # those whose sizes the module states are other operators in plans (test_known_sizes)
    sized = {"nonzero", "unique", "dynamic_strided_slice"}
    # tests/importers/test_torch_general; random; tests/rules/gradients; tests/api; tests/plan/test_loops, test_manual
    elsewhere = {
        "aten",
        "nn.dropout",
        "mesh.vjp",
        "mesh.update",
        "mesh.narrowed",
        "mesh.dropout",
        "loop.row",
        "mesh.of_device",
    }
    assert set(torch_functions) - set(rules) == placing | sized
    rewritten = {"mesh.joined_parts", "mesh.merge_dims", "mesh.per_device", "mesh.all_devices"}
    rewritten |= {name for name in rules if name.startswith("loop.")} - set(torch_functions)
    assert set(rules) - set(torch_functions) == rewritten
    assert set(rules) - {case.call().operator for case in CASES.values()} == elsewhere | rewritten | {
        f"mesh.{name}" for name in sized
    }


@pytest.mark.parametrize(
    ("build", "rule", "factor"),
    [
        (relax.op.nn.softmax, OpRule((("a", "b"),), (("a", "b"),)), "b"),
        (lambda x: relax.op.sum(x, 1), OpRule((("a", "b"),), (("a",),), {"b": "max"}), "b"),
        (lambda x: relax.op.sum(x, 1), OpRule((("a", "b"),), (("a",),)), "b"),
    ],
    ids=["softmax along a split dim", "sums by maximum", "sums of which each device has its own"],
)
def test_wrong_rules_are_caught(build, rule, factor):
    call = op_call(relax.BlockBuilder().normalize(build(relax.Var("x", relax.TensorStructInfo((4, 6), "float32")))))
    with pytest.raises(AssertionError):
        assert_runs_on_tiles(call, rule, {factor: 2}, [torch.randn(4, 6)])


def _tolerance(case, call):
    """Integers are exact, and sums of parts as close as the case itself."""
    if all("float" not in out.dtype for out in call.outputs):
        return {"rtol": 0, "atol": 0}
    return {"rtol": 0, "atol": 1e-5} | case.tolerance
