"""Every schedule, with what is hard for it all at once: a last microbatch that is smaller, a value that goes over
several stages, a weight that two of them have, gradients clipped by the norm of all, weights that stay."""

import pytest
import torch
from tvm import relax, tirx

import mesh_tensor as mt
from mesh_tensor.pipelining import SCHEDULES

TRAINING = [name for name in SCHEDULES if name != "forward"]
WIDTH = 6


def skipping() -> tuple[object, dict[str, torch.Tensor]]:
    """Four layers; the last one's weight is the first one's, and it gets the first one's result as well."""
    builder, rows = relax.BlockBuilder(), tirx.Var("rows", "int64")
    params = {name: relax.Var(name, relax.TensorStructInfo((rows, WIDTH), "float32")) for name in ("x", "y")}
    params |= {f"w{i}": relax.Var(f"w{i}", relax.TensorStructInfo((WIDTH, WIDTH), "float32")) for i in range(3)}
    with builder.function("main", list(params.values())):
        with builder.dataflow():
            first = value = params["x"]
            for i in range(4):
                value = relax.op.add(value, first) if i == 3 else value
                value = builder.emit(relax.op.tanh(relax.op.matmul(value, params[f"w{i % 3}"])), f"layer{i}")
                first = value if i == 0 else first
            error = relax.op.subtract(value, params["y"])
            loss = builder.emit_output(relax.op.mean(relax.op.multiply(error, error)), "loss")
        builder.emit_func_output(loss)
    return builder.get(), {f"w{i}": torch.randn(WIDTH, WIDTH) / 2 for i in range(3)}


def by_torch(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    first = value = torch.tanh(x @ weights["w0"])
    for name in ("w1", "w2"):
        value = torch.tanh(value @ weights[name])
    return ((torch.tanh((value + first) @ weights["w0"]) - y) ** 2).mean()


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("schedule", TRAINING)
def test_every_schedule_with_all_that_is_hard(schedule, recompute):
    order = SCHEDULES[schedule]
    chunks = 2 if order.any_chunks else order.chunks
    cuts = ["layer0", "layer1", "layer2"] if chunks == 2 else ["layer1"]
    mod, weights = skipping()
    run = mt.pipeline(
        mod,
        {"m0": {"d": 2, "m": 2}, "m1": {"d": 3}},
        cuts,
        {"x": {"d": 0}, "y": {"d": 0}, "w1": {"m": 0}},
        microbatches=4,
        schedule=schedule,
        train=["w0", "w2"],
        weights=weights,
        recompute=recompute,
    )
    if chunks == 2:
        assert set(run.stages[3].takes.values()) == {0, 2}
    for rows in (7, 8):
        inputs = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
        leaves = {name: weight.clone().requires_grad_() for name, weight in run.weights().items()}
        loss = by_torch(leaves, *inputs)
        torch.testing.assert_close(run(*inputs), loss.detach())
        wanted = torch.autograd.grad(loss, [leaves["w0"], leaves["w2"]])
        found = run.gradients()
        assert list(found) == ["w0", "w2"]
        for name, gradient in zip(found, wanted, strict=True):
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6, msg=name)
        norm = float(torch.stack([gradient.square().sum() for gradient in wanted]).sum().sqrt())
        run.update(lambda weight, gradient, state: weight - gradient, max_norm=norm / 2)
        updated = run.weights()
        assert torch.equal(updated["w1"], weights["w1"])
        for name, gradient in zip(found, wanted, strict=True):
            step = updated[name] - leaves[name].detach()
            torch.testing.assert_close(step, -gradient / 2, rtol=1e-3, atol=1e-5, msg=name)


def test_microbatches_that_enter_at_different_meshes():
    """Shardy's ParallelPipelinesWithWrapAround: each goes round all meshes from one of its own."""
    builder, count = relax.BlockBuilder(), 3
    params = [relax.Var(f"x{i}", relax.TensorStructInfo((4, WIDTH), "float32")) for i in range(count)]
    weights = [relax.Var(f"w{i}", relax.TensorStructInfo((WIDTH, WIDTH), "float32")) for i in range(count)]
    values, stages = list(params), {}
    with builder.function("main", [*params, *weights]):
        with builder.dataflow():
            for step in range(count):
                for i in range(count):
                    mesh = (i + step) % count
                    value = relax.op.tanh(relax.op.matmul(values[i], weights[mesh]))
                    values[i] = builder.emit(value, f"v{i}_{step}")
                    stages[f"v{i}_{step}"] = f"m{mesh}", step * count + i
            results = [builder.emit_output(value) for value in values]
        builder.emit_func_output(relax.Tuple(results))
    given = {f"w{i}": torch.randn(WIDTH, WIDTH) / 2 for i in range(count)}
    run = mt.pipeline(builder.get(), {"m0": {"d": 2}, "m1": {"d": 1}, "m2": {"d": 3}}, stages, weights=given)
    entered = {stage: i for i in range(count) for stage in range(i, count * count, count)}
    assert [[entered[action.stage] for action in row] for row in run.schedule.rows] == [[0, 2, 1], [1, 0, 2], [2, 1, 0]]
    inputs = [torch.randn(4, WIDTH) for _ in range(count)]
    for i, (found, value) in enumerate(zip(run(*inputs), inputs, strict=True)):
        for step in range(count):
            value = torch.tanh(value @ given[f"w{(i + step) % count}"])
        torch.testing.assert_close(found, value)
