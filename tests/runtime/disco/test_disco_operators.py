"""The operators that TVM computes on Disco's workers: what torch computes, and that with NaN and infinities, too."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import tvm
import tvm_ffi
from tvm import ir, relax

import mesh_tensor as mt
from mesh_tensor.runtime.disco.disco_module import BY_TVM, _low_precision
from mesh_tensor.runtime.disco.peers import as_torch, as_tvm
from tests.rules.operator.cases import CASES

_CHOSEN = {case.call().name: case for case in CASES.values() if not _low_precision(case.call().expr)}
_CHOSEN = {name: case for name, case in _CHOSEN.items() if name in BY_TVM}
_SPECIAL = [float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 1e30, -1.5, 2.5, 100.0, -88.9, 1e-40]
_SPECIAL_UNARY = """
    acos acosh asin asinh atan atanh ceil cos erf exp floor isnan log negative round rsqrt sigmoid sign sin sqrt square
    tan tanh trunc nn.gelu_tanh nn.silu nn.softplus nn.softmax nn.log_softmax sum mean prod variance std
"""
_SPECIAL_BINARY = "add subtract multiply atan2 power equal not_equal greater greater_equal less less_equal matmul"


def _machine(functions, folder):
    """A virtual machine with these functions, by name."""
    named = {ir.GlobalVar(name): func.with_attr("global_symbol", name) for name, func in functions.items()}
    path = str(folder / "module.so")
    relax.build(ir.IRModule(named), target="c").export_library(path)
    return relax.VirtualMachine(tvm.runtime.load_module(path), tvm.cpu())


def _as_torch(value):
    return as_torch(value) if isinstance(value, tvm_ffi.Tensor) else tuple(map(_as_torch, value))


def _module(types, build):
    variables = [relax.Var(f"x{n}", relax.TensorStructInfo(*kind)) for n, kind in enumerate(types)]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        builder.emit_func_output(builder.emit(build(*variables)))
    return builder.get()


def test_every_operator_has_a_case():
    assert set(_CHOSEN) == BY_TVM


def test_operators(tmp_path):
    modules = {name: _module([(a.shape, a.dtype) for a in case.args], case.build) for name, case in _CHOSEN.items()}
    machine = _machine({name.replace(".", "_"): mod["main"] for name, mod in modules.items()}, tmp_path)
    for name, case in _CHOSEN.items():
        data = [torch.from_numpy(np.asarray(operand).copy()) for operand in case.operands()]
        found = _as_torch(machine[name.replace(".", "_")](*map(as_tvm, data)))
        _check(name, found, mt.run_sequential(modules[name], data))


def test_special_values(tmp_path):
    values = torch.tensor(_SPECIAL)
    a, b = values.repeat_interleave(len(values)).reshape(-1, len(values)), values.repeat(len(values), 1)
    kinds = [(tuple(a.shape), "float32")] * 2

    def op(name):
        function = relax.op
        for part in name.split("."):
            function = getattr(function, part)
        return function

    modules = {name: _module(kinds, lambda x, y, name=name: op(name)(x)) for name in _SPECIAL_UNARY.split()}
    modules |= {name: _module(kinds, lambda x, y, name=name: op(name)(x, y)) for name in _SPECIAL_BINARY.split()}
    machine = _machine({name.replace(".", "_"): mod["main"] for name, mod in modules.items()}, tmp_path)
    for name, mod in modules.items():
        found = _as_torch(machine[name.replace(".", "_")](as_tvm(a), as_tvm(b)))
        _check(name, found, mt.run_sequential(mod, [a, b]))


def _check(name, found, expected):
    try:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5, equal_nan=True)
    except AssertionError as error:
        pytest.fail(f"{name}: {error}")
