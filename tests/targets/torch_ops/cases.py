"""Calls of Relax operators with random operands, computed by TVM itself and by the table of torch functions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
import tvm
from tvm import relax

from mesh_tensor.rules.operator.call import OpCall, op_call
from mesh_tensor.targets.torch_ops import torch_function


@dataclass(frozen=True)
class Arg:
    """An operand: its shape and dtype, and what its elements are drawn from (`low` to `high`, or `values`)."""

    shape: tuple[int, ...]
    dtype: str = "float32"
    low: float = -2
    high: float = 2
    values: Any = None

    def draw(self, rng: np.random.Generator) -> np.ndarray:
        """Random elements."""
        if self.values is not None:
            return np.asarray(self.values, self.dtype).reshape(self.shape)
        if self.dtype == "bool":
            return rng.random(self.shape) < 0.5
        if np.dtype(self.dtype).kind in "iu":
            return rng.integers(int(self.low), int(self.high), self.shape).astype(self.dtype)
        return rng.uniform(self.low, self.high, self.shape).astype(self.dtype)


def t(*shape: int, dtype: str = "float32", low: float = -2, high: float = 2, values: Any = None) -> Arg:
    """An operand of floats from -2 to 2, unless said otherwise."""
    return Arg(shape, dtype, low, high, values)


def i(*shape: int, dtype: str = "int64", low: float = -8, high: float = 8, values: Any = None) -> Arg:
    """An operand of integers: from -8 to 7, unless said otherwise."""
    return Arg(shape, dtype, low, high, values)


@dataclass(frozen=True)
class Case:
    """`build` makes the call from variables. `expected` computes the result with numpy or torch formulas of its own;
    `tvm` says whether TVM can compute it for a CPU."""

    args: tuple[Arg, ...]
    build: Callable[..., relax.Expr]
    expected: Callable[..., Any] | None = None
    tvm: bool = True
    tolerance: Mapping[str, float] = field(default_factory=lambda: {"rtol": 2e-5, "atol": 2e-6})

    def operands(self) -> list[np.ndarray]:
        """The case's random operands, always the same."""
        rng = np.random.default_rng(7)
        return [arg.draw(rng) for arg in self.args]

    def call(self) -> OpCall:
        """The call as the table sees it."""
        return op_call(relax.BlockBuilder().normalize(self.build(*self._variables())))

    def _variables(self) -> list[relax.Var]:
        return [relax.Var(f"x{n}", relax.TensorStructInfo(a.shape, a.dtype)) for n, a in enumerate(self.args)]

    def function(self) -> relax.Function:
        """A Relax function that makes the call."""
        variables = self._variables()
        builder = relax.BlockBuilder()
        with builder.function("f", variables):
            builder.emit_func_output(builder.emit(self.build(*variables)))
        return builder.get()["f"]


def by_table(case: Case) -> list[np.ndarray]:
    """The case's results by the table, whose shapes and dtypes are checked against what TVM infers."""
    call = case.call()
    results = torch_function(call)(*[torch.from_numpy(a.copy()) for a in case.operands()])
    assert [(tuple(r.shape), str(r.dtype)) for r in results] == [(o.shape, f"torch.{o.dtype}") for o in call.outputs]
    return [r.numpy() for r in results]


def by_tvm(cases: Mapping[str, Case]) -> Callable[[str], list[np.ndarray]]:
    """The cases' results by TVM's virtual machine and C code generator: all are compiled at once."""
    names = {name: f"f{n}" for n, (name, case) in enumerate(cases.items()) if case.tvm}
    functions = {f: cases[name].function().with_attr("global_symbol", f) for name, f in names.items()}
    module = tvm.IRModule({tvm.ir.GlobalVar(f): function for f, function in functions.items()})
    machine = relax.VirtualMachine(relax.build(module, target="c"), tvm.cpu())

    def run(name: str) -> list[np.ndarray]:
        result = machine[names[name]](*[tvm.runtime.tensor(a) for a in cases[name].operands()])
        return [r.numpy() for r in (result if isinstance(result, Sequence) else [result])]

    return run


def assert_same(actual: Sequence[np.ndarray], expected: Any, case: Case) -> None:
    """The results are those expected: integers exactly."""
    expected = expected if isinstance(expected, (list, tuple)) else [expected]
    for ours, theirs in zip(actual, expected, strict=True):
        theirs = theirs.numpy() if isinstance(theirs, torch.Tensor) else np.asarray(theirs)
        assert ours.shape == theirs.shape
        if ours.dtype.kind in "iub":
            np.testing.assert_array_equal(ours, theirs)
        else:
            np.testing.assert_allclose(ours, theirs, **case.tolerance)


class CaseTests:
    """A class of tests that has `cases`: the table computes what the formula does, and what TVM does where it can."""

    cases: ClassVar[Mapping[str, Case]]

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """A test for each case."""
        by_tvm_too = metafunc.function.__name__ == "test_tvm"
        metafunc.parametrize("name", [name for name, case in self.cases.items() if case.tvm or not by_tvm_too])

    @pytest.fixture(scope="class")
    @classmethod
    def tvm_result(cls) -> Callable[[str], list[np.ndarray]]:
        """The cases' results by TVM."""
        return by_tvm(cls.cases)

    def test_formula(self, name):
        """The table's results are those of the formula."""
        case = self.cases[name]
        assert_same(by_table(case), case.expected(*case.operands()), case)

    def test_tvm(self, name, tvm_result):
        """The table's results are TVM's."""
        case = self.cases[name]
        assert_same(by_table(case), tvm_result(name), case)
