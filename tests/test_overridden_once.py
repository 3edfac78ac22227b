"""What tests have in place of torch's way to override operators that are made of others does what that does."""

import pytest
import torch
from torch._export import utils
from torch._subclasses import fake_impls
from torch.export import exported_program

from tests import overridden_once

OVERRIDES = [overridden_once.overridden, overridden_once._override]


def kept(*args, **kwargs):
    return NotImplemented


def table():
    """One in which an operator is kept, and another is made of others in a way of one's own."""
    made = torch.export.default_decompositions().materialize()
    del made[torch.ops.aten.linear.default]
    return {**made, torch.ops.aten.relu6.default: torch.relu}


def callables():
    """What torch overrides then."""
    return exported_program._split_decomp_table_to_cia_and_python_decomp(table())[0]


def state(ops):
    """What operators have: by key, the function itself, or where it came from when each override makes its own."""
    rules = fake_impls.op_implementations_dict
    return {
        op: ({key: _known(kernel) for key, kernel in op.py_kernels.items()}, op in rules, _known(rules.get(op)))
        for op in ops
    }


def _known(function):
    if hasattr(function, "keywords"):
        return function.func.__qualname__, function.keywords.keys(), function.args
    return function.__qualname__ if "<locals>" in getattr(function, "__qualname__", "") else function


def test_operators_are_overridden_alike_and_are_as_before_afterwards():
    made_of = callables()
    assert len(made_of) > 300
    with overridden_once._override(made_of):  # leaves rules of fake tensors out that there were
        pass
    before, during = state(made_of), []
    for override in (*OVERRIDES, overridden_once.overridden):
        with override(made_of):
            during.append(state(made_of))
            assert not any(op._dispatch_cache for op in made_of)
        assert state(made_of) == before
    assert during[0] == during[1] == during[2]
    assert during[0] != before


def test_another_way_to_make_an_operator_is_taken():
    op = torch.ops.aten.relu6.default
    key = torch._C.DispatchKey.CompositeImplicitAutograd
    for how in (kept, torch.nn.functional.relu, kept):
        with overridden_once.overridden({op: how}):
            assert op.py_kernels[key] is how


@pytest.mark.parametrize("error", [KeyError, KeyboardInterrupt])
def test_operators_are_as_before_after_an_error(error):
    op = torch.ops.aten.linear.default
    before = state([op])
    with pytest.raises(error), overridden_once.overridden({op: kept}):
        raise error
    assert state([op]) == before


@pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec")  # torch's own
def test_programs_are_taken_apart_alike(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout(), torch.nn.ReLU6())
    program = torch.export.export(model.train(), (torch.ones(2, 3),))
    graphs = []
    for override, materialize in zip(
        OVERRIDES, (overridden_once.materialized, overridden_once._materialize), strict=True
    ):
        monkeypatch.setattr(exported_program, "_override_composite_implicit_decomp", override)
        monkeypatch.setattr(utils, "_materialize_cpp_cia_ops", materialize)
        graphs.append(program.run_decompositions(table()).graph_module.code)
    assert graphs[0] == graphs[1]


def test_operators_that_are_new_are_looked_up():
    overridden_once.materialized()
    library = torch.library.Library("mesh_tensor_looked_up", "DEF")
    library.define("new(Tensor x) -> Tensor")
    library.impl("new", lambda x: x + 1, "CompositeImplicitAutograd")
    overridden_once.materialized()
    assert "new" in dir(torch.ops.mesh_tensor_looked_up)
