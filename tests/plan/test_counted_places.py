"""Look-ups at the places of a range: slices, whose dims are split."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from tests.plan.modules import function

X, Y = torch.randn(12, 6, 5), torch.randn(12, 6)
N = torch.arange

SLICES = {
    "a mask of rows and columns": lambda x, y: y[N(12)[:, None, None], N(6)],
    "rows": lambda x, y: y[N(12)],
    "some columns": lambda x, y: y[:, N(3) + 2],
    "every other column": lambda x, y: y.index_select(1, N(1, 6, 2)),
    "columns before rows": lambda x, y: y[N(12), N(6)[:, None]],
    "one column": lambda x, y: x[N(12), N(4, 5)],
    "rows beside a whole dim": lambda x, y: x[N(6)[:, None], N(2, 5)],
    "of an index that is returned": lambda x, y: (y[N(12)], N(12)),
}
OWN_ROWS = {
    "one of each row": lambda x, y: x[N(12), y.argmax(1)],
    "two of each row, from the end": lambda x, y: x[N(12)[:, None], y.topk(2)[1] - 6],
    "of rows and columns": lambda x, y: x[N(12)[:, None], N(6), x.argmax(2)],
}
OTHERS = {
    "of some rows": lambda x, y: x[N(8), y.argmax(1)[:8]],
    "of columns": lambda x, y: x[y.argmax(1), N(12) % 6],
    "turned rows": lambda x, y: x[N(12).reshape(3, 4).T, y.argmax(1)[:3]],
    "a diagonal": lambda x, y: y[N(6), N(6)],
    "backwards": lambda x, y: y[N(12).flip(0)],
    "from the end": lambda x, y: y[N(12) - 12],
    "doubled": lambda x, y: y[N(6) * 2],
    "turned": lambda x, y: y[N(12).reshape(3, 4).T],
}


def _run(what, mesh, layouts):
    class Model(torch.nn.Module):
        def forward(self, x, y):
            return what(x, y)

    run = mt.distribute_module(mt.from_torch(torch.export.export(Model(), (X, Y))), mesh, layouts)
    return run, {step.call.operator for step in run.program.steps if hasattr(step, "call")}


@pytest.mark.parametrize("what", [*SLICES.values(), *OTHERS.values()], ids=[*SLICES, *OTHERS])
@pytest.mark.parametrize("layouts", [{"x": {"m": 0}, "y": {"m": 0}}, {"x": {"m": 1}, "y": {"m": 1}}])
def test_what_is_taken_is_the_same(what, layouts):
    expected = what(X, Y)
    for size in (2, 5):
        run, calls = _run(what, {"m": size}, layouts)
        torch.testing.assert_close(run(X, Y), expected, rtol=0, atol=0)
        if what in SLICES.values():
            assert calls.isdisjoint({"take", "gather_nd", "index_tensor"})
        else:
            assert calls & {"take", "gather_nd", "mesh.local_take"}


def test_nothing_moves_of_what_is_split_along_the_range():
    run, calls = _run(SLICES["a mask of rows and columns"], {"m": 3}, {"y": {"m": 0}})
    assert [step for step in run.program.steps if step.bytes] == []
    assert "arange" not in calls


@pytest.mark.parametrize("what", OWN_ROWS.values(), ids=OWN_ROWS)
def test_what_rows_take_of_themselves_stays_where_they_are(what):
    for size in (2, 5):
        run, _ = _run(what, {"m": size}, {"x": {"m": 0}, "y": {"m": 0}})
        torch.testing.assert_close(run(X, Y), what(X, Y), rtol=0, atol=0)
        assert [step for step in run.program.steps if step.bytes] == []
    run, _ = _run(what, {"m": 2, "n": 2}, {"x": {"m": 1, "n": 2}, "y": {"m": 1}})
    torch.testing.assert_close(run(X, Y), what(X, Y), rtol=0, atol=0)


def test_an_index_past_the_end_is_left_to_its_operator():
    def shifted(emit, y):
        index = emit(relax.op.add(emit(relax.op.arange(12, dtype="int64")), relax.const(5, "int64")))
        return relax.op.take(y, index, 0, "clip")

    run = mt.distribute_module(function(shifted, y=(12, 6)), {"m": 2}, {"y": {"m": 0}})
    torch.testing.assert_close(run(Y), Y[(N(12) + 5).clamp(max=11)])


def test_a_step_has_the_same_gradients():
    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = torch.nn.Parameter(torch.randn(12, 6))

        def forward(self, x):
            return self.table[N(12)[:, None], N(1, 4)] * x

    x, target, model = torch.randn(12, 3), torch.randn(12, 3), Model()
    step = mt.training_step(model, torch.nn.functional.mse_loss, (x, target), optimizer="sgd", lr=1.0)
    run = mt.distribute_module(step, {"m": 2}, {"table": {"m": 0}, "x": {"m": 0}})
    run(x, target)
    torch.nn.functional.mse_loss(model(x), target).backward()
    torch.testing.assert_close(run.state_dict()["table"], model.table.detach() - model.table.grad)


@pytest.mark.parametrize("layouts", [{}, {"x": {"m": 0}}, {"x": {"m": 1}}, {"y_0": {"m": 1}}, {"y": {"m": 0}}])
def test_what_a_slice_is_made_of_has_names_of_its_own(layouts):
    """In the place of `y` are two operators, the first of which might be called as a value that is there."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorStructInfo((12, 6), "float32"))

    def emit(expr, name=""):
        return builder.emit(expr, name_hint=name)

    with builder.function("main", [x]):
        with builder.dataflow():
            rows = emit(relax.op.reshape(emit(relax.op.arange(0, 12, 1, dtype="int64")), (12, 1)))
            other = emit(relax.op.multiply(x, relax.const(3.0, "float32")), "y_0")
            taken = emit(relax.op.index_tensor(x, [rows, emit(relax.op.arange(2, 5, 1, dtype="int64"))]), "y")
            made = emit(relax.op.add(emit(relax.op.sum(taken, 1)), emit(relax.op.sum(other, 1))))
            result = builder.emit_output(made)
        builder.emit_func_output(result)
    run = mt.distribute_module(builder.get(), {"m": 3}, layouts)
    calls = {step.call.operator for step in run.program.steps if hasattr(step, "call")}
    assert calls.isdisjoint({"take", "gather_nd", "index_tensor"})
    torch.testing.assert_close(run(X[:, :, 0]), X[:, 2:5, 0].sum(1) + (3 * X[:, :, 0]).sum(1))
