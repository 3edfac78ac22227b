"""run_sequential of modules that it has run before: as if it had not."""

import pytest
import torch
from tvm import relax, tirx

import mesh_tensor as mt
from mesh_tensor.runtime import sequential, sequential_lines
from tests.refusals import refusal

op = relax.op


def module(body, *types, dtype="float32"):
    """A module whose function `main` gives what `body` makes of a builder and its parameters."""
    builder = relax.BlockBuilder()
    params = [relax.Var(f"x{number}", relax.TensorStructInfo(shape, dtype)) for number, shape in enumerate(types)]
    with builder.function("main", params):
        builder.emit_func_output(body(builder, *params))
    return builder.get()


@pytest.fixture
def interpreted(monkeypatch):
    """How many calls were interpreted."""
    counts = []
    call = sequential.Runner.call
    monkeypatch.setattr(sequential.Runner, "call", lambda *args: counts.append(args[1]) or call(*args))
    return counts


def both(mod, *calls):
    """The results of calls of one module, and of modules that were never called."""
    for inputs in calls:
        found = mt.run_sequential(mod, inputs)
        torch.testing.assert_close(found, mt.run_sequential(mod.clone(), inputs), rtol=0, atol=0)
    return found


def test_what_was_run_is_run_again_as_one_function(interpreted):
    mod = module(lambda b, x, y: b.emit(op.matmul(b.emit(op.exp(x)), y)), (3, 4), (4, 2))
    for _ in range(3):
        x, y = torch.randn(3, 4), torch.randn(4, 2)
        torch.testing.assert_close(mt.run_sequential(mod, {"x1": y, "x0": x}), x.exp() @ y)
    assert len(interpreted) == 1


def test_one_tensor_as_several_operands():
    mod = module(lambda b, x, y: b.emit(op.subtract(x, b.emit(op.negative(y)))), (3,), (3,))
    x, y = torch.ones(3), torch.full((3,), 5.0)
    assert both(mod, [x, x], [x, y], [y, x], [y, y]).tolist() == [10.0] * 3


def test_transposes_are_left_out_where_products_take_them_or_others_undo_them(monkeypatch):
    def body(builder, x, w, square):
        turned = builder.emit(op.permute_dims(w))
        product = builder.emit(op.matmul(x, turned))
        there = builder.emit(op.permute_dims(x, [1, 2, 0]))
        back = builder.emit(op.permute_dims(there, [2, 0, 1]))
        twice = builder.emit(op.permute_dims(there, [1, 2, 0]))  # no way back, though the shapes agree
        other = builder.emit(op.matmul(square, builder.emit(op.permute_dims(square, [0, 1]))))
        return builder.emit(relax.Tuple([product, turned, back, twice, other, square]))

    written = []
    make = sequential_lines.StraightLine
    monkeypatch.setattr(sequential_lines, "StraightLine", lambda lines: written.extend(lines) or make(lines))
    mod = module(body, (4, 4, 4), (5, 4), (3, 3))
    for _ in range(3):
        x, w, square = torch.randn(4, 4, 4), torch.randn(5, 4), torch.randn(3, 3)
        expected = x @ w.T, w.T, x, x.permute(2, 0, 1), square @ square, square
        for found, wanted in zip(both(mod, [x, w, square]), expected, strict=True):
            torch.testing.assert_close(found, wanted)
            assert found.data_ptr() not in (x.data_ptr(), w.data_ptr(), square.data_ptr())
    assert [line.args for line in written[:2]] == [("t2",), ("t1", "t2")]


def test_results_are_their_own_memory():
    def body(builder, x):
        at = builder.emit(op.arange(0, 4, 1, "float32"))
        constant = relax.const(torch.ones(2, 2).numpy())
        return builder.emit(relax.Tuple([x, builder.emit(op.reshape(x, (2, 2))), at, constant]))

    mod, x = module(body, (4,)), torch.zeros(4)
    for _ in range(3):
        made = mt.run_sequential(mod, [x])
        assert [tensor.flatten().tolist() for tensor in made] == [[0] * 4, [0] * 4, [0, 1, 2, 3], [1] * 4]
        for tensor in made:
            tensor.fill_(9)
    assert x.tolist() == [0] * 4


def test_a_module_that_changes():
    mod = module(lambda b, x: b.emit(op.exp(x)), (3,))
    other = module(lambda b, x: b.emit(op.negative(x)), (3,))
    x = torch.randn(3)
    torch.testing.assert_close(mt.run_sequential(mod, [x]), x.exp())
    mod.update_func(mod.get_global_var("main"), other["main"])
    torch.testing.assert_close(mt.run_sequential(mod, [x]), -x)


def test_what_depends_on_data(interpreted):
    builder = relax.BlockBuilder()
    info = relax.TensorStructInfo((3,), "float32")
    x, which = relax.Var("x", info), relax.Var("which", relax.TensorStructInfo((), "bool"))

    def branch(made):
        var = relax.Var("made", info)
        return relax.SeqExpr([relax.BindingBlock([relax.VarBinding(var, made)])], var)

    with builder.function("main", [x, which]):
        builder.emit_func_output(builder.emit(relax.If(which, branch(op.exp(x)), branch(op.negative(x)))))
    mod, x = builder.get(), torch.ones(3)
    assert mt.run_sequential(mod, [x, torch.tensor(False)]).tolist() == [-1.0] * 3
    torch.testing.assert_close(mt.run_sequential(mod, [x, torch.tensor(True)]), x.exp())
    assert len(interpreted) == 2


def test_what_does_not_fit_is_refused_after_calls_that_did():
    mod = module(lambda b, x: b.emit(op.exp(x)), (2, 3))
    mt.run_sequential(mod, [torch.ones(2, 3)])
    wrong = {
        "but expected (2, 3) float32": torch.ones(3, 3),
        "float64, but expected": torch.ones(2, 3, dtype=torch.float64),
        "layout torch.sparse_coo": torch.ones(2, 3).to_sparse(),
        "a list, but expected a tensor": [1.0],
    }
    for said, tensor in wrong.items():
        message = refusal(mt.run_sequential, mod, {"x0": tensor})
        assert said in message


def test_symbolic_sizes(interpreted):
    rows = tirx.SizeVar("rows", "int64")
    mod = module(lambda b, x: b.emit(op.sum(x, [0])), (rows, 3))
    for count in (2, 5, 2, 5):
        assert mt.run_sequential(mod, [torch.ones(count, 3)]).tolist() == [count] * 3
    assert len(interpreted) == 2


def test_what_fails_is_named_as_when_it_is_interpreted():
    mod = module(lambda b, x: b.emit(op.take(relax.const(torch.ones(4).numpy()), x, 0), "found"), (2,), dtype="int64")
    assert mt.run_sequential(mod, [torch.tensor([0, 3])]).tolist() == [1.0, 1.0]
    message = refusal(lambda: mt.run_sequential(mod, [torch.tensor([0, 4])]))
    assert "binding: main.found" in message
    assert mt.run_sequential(mod, [torch.tensor([1, 2])]).tolist() == [1.0, 1.0]
