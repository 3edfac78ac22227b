"""Microbatches of modules with manual computations: losses and gradients are those of the module of a whole batch."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from tests.plan.test_manual import manual_module
from tests.plan.test_manual_failures import refused

op, comm = relax.op, mt.comm
X, ROWS = {"x": 4}, 16


def _hidden(emit, x, up):
    return emit(op.tanh(emit(op.matmul(x, up))))


def _tensor(emit, x, up, down):
    """As Megatron splits two layers."""
    return emit(comm.all_reduce(emit(op.matmul(_hidden(emit, x, up), down)), X))


def _sequence(emit, x, up, down):
    """The same on rows that lie on devices between."""
    part = emit(op.matmul(_hidden(emit, emit(comm.all_gather(x, X, 0)), up), down))
    return emit(comm.reduce_scatter(part, X, 0))


def _data(emit, x, up, down):
    """Every device's own rows."""
    return emit(op.matmul(_hidden(emit, x, up), down))


def _loss(reduce, kind):
    def body(emit, x, up, down):
        return emit(comm.all_reduce(emit(reduce(_data(emit, x, up, down))), X, kind))

    return body


def _squares(emit, y):
    return emit(op.mean(emit(op.multiply(y, y))))


def _same(emit, y):
    return y


# name: what devices do, how x, up and down lie, and the result; what follows; what numbers are
CASES = {
    "tensor parallel": (_tensor, [{}, {"x": 1}, {"x": 0}], {}, _squares, "mean"),
    "sequence parallel": (_sequence, [{"x": 0}, {"x": 1}, {"x": 0}], {"x": 0}, _squares, "mean"),
    "data parallel": (_data, [{"x": 0}, {}, {}], {"x": 0}, _squares, "mean"),
    "loss by devices": (_loss(op.sum, "sum"), [{"x": 0}, {}, {}], {}, _same, "sum"),
    "mean by devices": (_loss(op.mean, "avg"), [{"x": 0}, {}, {}], {}, _same, "mean"),
}


def _module(name, rows):
    body, layouts, out, more, _ = CASES[name]
    return manual_module(body, [(rows, 6), (6, 8), (8, 4)], X, layouts, out, more=more)


def _expected(name):
    """x, the weights, and the loss and the gradients of the module of all rows."""
    torch.manual_seed(0)
    x, weights = torch.randn(ROWS, 6), {"x1": torch.randn(6, 8), "x2": torch.randn(8, 4)}
    gradient = mt.gradient(_module(name, ROWS), wrt=list(weights))
    loss, gradients = mt.run_sequential(gradient, [x, *weights.values()])
    return x, weights, loss, dict(zip(weights, gradients, strict=True))


@pytest.mark.parametrize("recompute", [None, "auto"])
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_training_steps(name, rows, recompute):
    x, weights, loss, gradients = _expected(name)
    module = mt.ImportedModule(_module(name, rows), weights)
    step = mt.training_step(module, None, optimizer="sgd", lr=0.1, accumulate=ROWS // rows, recompute=recompute)
    run = mt.distribute_module(step, X | {"y": 2}, {"x0": {"y": 0}}, poison=True)
    torch.testing.assert_close(run(x), loss, rtol=1e-5, atol=1e-5)
    state = run.state_dict()
    for name, weight in weights.items():
        torch.testing.assert_close(state[name], weight - 0.1 * gradients[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("rows", [4, 8])
@pytest.mark.parametrize("name", CASES)
def test_pipelines(name, rows, schedule):
    x, weights, loss, gradients = _expected(name)
    module, reduction = mt.ImportedModule(_module(name, rows), weights), CASES[name][-1]
    options = {"microbatches": ROWS // rows, "train": True, "schedule": schedule, "reduction": reduction}
    run = mt.pipeline(module, {"m0": X}, {"m0": ["lv"]}, **options)
    torch.testing.assert_close(run(x), loss, rtol=1e-5, atol=1e-5)
    found = run.gradients()
    for name in weights:
        torch.testing.assert_close(found[name], gradients[name], rtol=1e-4, atol=1e-5)


def _largest(emit, x, up, down):
    return emit(comm.all_reduce(emit(op.sum(_data(emit, x, up, down))), X, "max"))


def _by_place(emit, x, up, down):
    return emit(op.multiply(_data(emit, x, up, down), emit(op.astype(emit(comm.axis_index(X)), "float32"))))


def _handed_on(emit, x, up, down):
    return emit(comm.permute(_data(emit, x, up, down), X, [(n, (n + 1) % 4) for n in range(4)]))


def _added(emit, x, up, down):
    return emit(comm.all_reduce(_data(emit, x, up, down), X))


def _quotient(emit, x, up, down):
    return emit(comm.all_reduce(emit(op.sum(emit(op.divide(_data(emit, x, up, down), relax.const(2.0))))), X))


@pytest.mark.parametrize(
    ("body", "out", "up", "fact"),
    [
        (_largest, {}, {}, "(max) is not linear in"),
        (_by_place, {"x": 0}, {}, "takes rows of several devices with gv4, of which every device has its own"),
        (_data, {"x": 0}, {"x": 0}, "takes rows of several devices with lv_3, of which every device has its own"),
        (_handed_on, {"x": 0}, {}, "takes rows that are on devices in several ways"),
        (_added, {}, {}, "(sum) needs the rows of all devices together"),
        (_quotient, {}, {}, "divides a sum by 2, which may be a constant, or the number of elements in a part"),
    ],
)
def test_what_devices_make_of_other_rows(body, out, up, fact):
    """A microbatch has other rows on a device than the batch has there."""
    shapes = [(8, 6), (24, 8) if up else (6, 8), (8, 4)]
    more = _same if body in (_largest, _quotient) else lambda emit, y: emit(op.sum(y))
    module = manual_module(body, shapes, X, [{"x": 0}, up, {}], out, more=more)
    weights = {"x1": torch.randn(shapes[1]), "x2": torch.randn(8, 4)}
    made = mt.ImportedModule(module, weights)
    refused(lambda: mt.training_step(made, None, accumulate=2), fact, "with accumulate=")
    if body is not _quotient:
        options = {"microbatches": 2, "train": True, "reduction": "sum"}
        refused(lambda: mt.pipeline(made, {"m0": X}, {"m0": ["lv"]}, **options), fact)
