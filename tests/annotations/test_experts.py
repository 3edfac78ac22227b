"""Rows that go to their experts' devices and back, beside torch."""

import math

import pytest
import torch
from torch.nn import functional as F
from tvm import relax, tirx

import mesh_tensor as mt
from tests.plan.test_manual_failures import refused

WIDTH, HIDDEN = 4, 6


def module(rows, count, mesh, **options):
    """main(x, chosen, up, down): an MLP of experts."""
    mesh, builder, many = mt.Mesh(mesh), relax.BlockBuilder(), tirx.Var("r", "int64")
    split = options.get("axes") or [axis for axis in mesh if axis not in options.get("tokens", ())]
    held = count // math.prod(map(mesh.size, split))

    def product(x, w, ends, width):
        return relax.op.call_pure_packed("mesh.grouped_matmul", x, w, ends, sinfo_args=[tensor(many, width)])

    infos = [tensor(many, WIDTH), tensor(held, dtype="int32"), tensor(held, WIDTH, HIDDEN), tensor(held, HIDDEN, WIDTH)]
    params = [relax.Var(f"b{n}", info) for n, info in enumerate(infos)]
    with builder.function("mlp", params, private=True):
        x, ends, up, down = params
        hidden = builder.emit(relax.op.nn.silu(builder.emit(product(x, up, ends, HIDDEN))))
        builder.emit_func_output(builder.emit(product(hidden, down, ends, WIDTH)))
    infos = [
        tensor(rows, WIDTH),
        tensor(rows, dtype="int64"),
        tensor(count, WIDTH, HIDDEN),
        tensor(count, HIDDEN, WIDTH),
    ]
    x, chosen, *weights = [relax.Var(n, info) for n, info in zip(("x", "chosen", "up", "down"), infos, strict=True)]
    with builder.function("main", [x, chosen, *weights]):
        mlp = builder.get().get_global_var("mlp")
        builder.emit_func_output(builder.emit(mt.experts(builder, mlp, x, chosen, weights, mesh, **options)))
    return builder.get()


def tensor(*shape, dtype="float32"):
    return relax.TensorStructInfo(shape, dtype)


def expected(x, chosen, up, down):
    made = torch.zeros_like(x)
    for number in range(len(up)):
        made[chosen == number] = F.silu(x[chosen == number] @ up[number]) @ down[number]
    return made


def inputs(rows, count, chosen):
    torch.manual_seed(0)
    return torch.randn(rows, WIDTH), chosen, torch.randn(count, WIDTH, HIDDEN), torch.randn(count, HIDDEN, WIDTH)


def test_bytes():
    """In a round, what an even spread takes and a quarter more goes there and back; tokens are not gathered."""
    run = mt.distribute_module(module(64, 8, {"e": 4}), {"e": 4}, {"x": {"e": 0}, "up": {"e": 0}, "down": {"e": 0}})
    (loop,), rows, numbers = run.program.loops, 3 * 5 * WIDTH * 4, 3 * 5 * 8
    assert [step.bytes for step in loop.inner if step.collective] == [rows, numbers, rows]
    assert loop.count is None
    assert f"data says how often these loops run, of which one time is counted: {loop.where}" in run.explain()


def test_what_does_not_fit():
    refused(lambda: module(18, 8, {"e": 4}), "dim 0 of operand 0 has 18 elements, for 4 devices", "mt.experts of 'mlp'")
    refused(lambda: module(16, 6, {"e": 4}), "dim 0 of operand 2 has 6 elements, for 4 devices")
    refused(lambda: module(0, 8, {"e": 4}), "dim 0 of operand 0 has 0 elements")
    refused(lambda: module(16, 8, {"d": 2, "e": 2}, axes=("d", "e"), tokens=("d",)), "axis 'd' is one of experts and")
    refused(lambda: module(16, 8, {"e": 4}, tokens=("e",)), "experts are split over no axis")
    refused(lambda: module(16, 8, {"e": 4}, room=0), "room is 0")
    refused(lambda: module(16, 8, {"e": 4}, room=1.5), "room is 1.5")


def shifted(*body, make, dtype="float32", mesh=None):
    """main(x, chosen, shift) on experts that take what `body` says and give what `make` makes of that."""
    builder, mesh = relax.BlockBuilder(), mt.Mesh(mesh or {"e": 2})
    params = [relax.Var(f"b{n}", info) for n, info in enumerate(body)]
    with builder.function("body", params, private=True):
        builder.emit_func_output(builder.emit(make(*params)))
    infos = [tensor(8, 3, dtype=dtype), tensor(8, dtype="int32"), tensor(4, 3, dtype=dtype)]
    x, chosen, shift = [relax.Var(n, info) for n, info in zip(("x", "chosen", "shift"), infos, strict=True)]
    with builder.function("main", [x, chosen, shift]):
        called = builder.get().get_global_var("body")
        made = mt.experts(builder, called, x, chosen, [shift], mesh, axes=("e",))
        builder.emit_func_output(builder.emit(made))
    return builder.get()


def narrow(x):
    return relax.op.broadcast_to(relax.op.sum(x, 1, keepdims=True), (MANY, 3))


MANY = tirx.Var("r", "int64")
BODY = tensor(MANY, 3), tensor(2, dtype="int32"), tensor(2, 3)
WRONG = {
    "more rows": (BODY, lambda x, ends, w: relax.op.concat([x, x], 0), "it gives R.Tensor((r * 2, 3)"),
    "rows of experts": (BODY, lambda x, ends, w: relax.op.add(w, w), "it gives R.Tensor((2, 3)"),
    "no rows": (BODY, lambda x, ends, w: relax.op.sum(x), "it gives R.Tensor(()"),
    "other ends": ((BODY[0], tensor(2, dtype="int64"), BODY[2]), lambda x, *_: x, "of what is int32[2] on a device"),
    "all experts": ((*BODY[:2], tensor(4, 3)), lambda x, *_: x, "of what is float32[2, 3] on a device"),
    "one for both": ((tensor(MANY, MANY), *BODY[1:]), lambda x, *_: narrow(x), "parameter 0 is R.Tensor((r, r)"),
    "fewer": (BODY[:2], lambda x, ends: x, "it has 2 parameters, not 3"),
}


@pytest.mark.parametrize("name", WRONG)
def test_bodies_that_do_not_fit(name):
    body, make, said = WRONG[name]
    refused(lambda: shifted(*body, make=lambda *params: make(*params)), said, "mt.experts of 'body'")


def test_16_bits():
    body = tensor(MANY, 3, dtype="bfloat16"), BODY[1], tensor(2, 3, dtype="bfloat16")
    mod = shifted(*body, make=lambda x, ends, w: relax.op.multiply(x, relax.op.sum(w, 0)), dtype="bfloat16")
    x, shift, chosen = torch.randn(8, 3).bfloat16(), torch.randn(4, 3).bfloat16(), torch.tensor([0, 3, -1, 2] * 2)
    wanted = torch.where(
        chosen[:, None] < 0, 0, x * torch.where(chosen[:, None] < 2, shift[:2].sum(0), shift[2:].sum(0))
    )
    for made in (
        mt.distribute_module(mod, {"e": 2}, {})(x, chosen.int(), shift),
        mt.run_sequential(mod, [x, chosen.int(), shift]),
    ):
        torch.testing.assert_close(torch.as_tensor(made), wanted)


def test_an_axis_that_is_not_manual():
    """What it splits does not reach the devices of the other one: some would have none of the rows."""
    mesh, layout = {"d": 2, "e": 2}, {"chosen": {"d": 0}, "x": {"d": 0}}
    mod, given = module(16, 8, mesh, axes=("e",)), inputs(16, 8, torch.randint(0, 8, (16,)))
    run = mt.distribute_module(mod, mesh, layout, poison=True)
    torch.testing.assert_close(run(*given), expected(*given), rtol=1e-4, atol=1e-5)


CASES = {
    "one axis": ({"e": 2}, {}),
    "four devices": ({"e": 4}, {"room": 2}),
    "tokens over another axis": ({"d": 2, "e": 2}, {"tokens": ("d",)}),
    "experts over two axes": ({"d": 2, "e": 2}, {}),
    "one row at a time": ({"e": 2}, {"room": 1}),
}


@pytest.mark.parametrize("name", CASES)
def test_no_row_is_dropped(name):
    mesh, options = CASES[name]
    mod = module(16, 8, mesh, **options)
    layout = {"x": dict.fromkeys(mesh, 0), "up": {"e": 0}, "down": {"e": 0}}
    ways = [
        torch.randint(0, 8, (16,)),  # as they come
        torch.full((16,), 5),  # all to one
        torch.arange(16) % 8,  # evenly
        torch.tensor([-1, 8, 3, 99] * 4),  # some to none
    ]
    for poison in (True, False):
        run = mt.distribute_module(mod, mesh, layout, poison=poison)
        for chosen in ways:
            given = inputs(16, 8, chosen)
            torch.testing.assert_close(run(*given), expected(*given), rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(mt.run_sequential(mod, list(given)), expected(*given), rtol=1e-4, atol=1e-5)


def with_loss(mod):
    """loss(x, chosen, up, down, target): of what main gives."""
    builder, func = relax.BlockBuilder(mod), mod["main"]
    params = [relax.Var(param.name_hint, param.struct_info) for param in func.params]
    target = relax.Var("target", func.ret_struct_info)
    with builder.function("loss", [*params, target]):
        made = builder.emit(relax.Call(mod.get_global_var("main"), params))
        apart = builder.emit(relax.op.subtract(builder.emit(relax.op.sin(made)), target))
        builder.emit_func_output(builder.emit(relax.op.mean(builder.emit(relax.op.square(apart)))))
    return builder.get()


def moved(run):
    """The tensors of a run's collectives, with how many elements each has."""
    steps = [*run.program.collectives, *(step for loop in run.program.loops for step in loop.inner if step.collective)]
    return {step.src for step in steps}


@pytest.mark.parametrize("name", CASES)
def test_gradients(name):
    """Those of rows go the way of rows; those of experts are made where these are, and no weight moves."""
    mesh, options = CASES[name]
    mod = with_loss(module(16, 8, mesh, **options))
    split = {axis: 0 for axis in mesh if axis not in options.get("tokens", ())}
    layout = {"x": dict.fromkeys(mesh, 0), "up": split, "down": split}
    made = mt.gradient(mod, ["down", "x", "up"], function="loss")
    run = mt.distribute_module(made, mesh, layout, function="loss", poison=True)
    assert not {"up", "down"} & moved(run)
    for chosen in (torch.randint(0, 8, (16,)), torch.full((16,), 5), torch.tensor([-1, 8, 3, 99] * 4)):
        x, _, up, down = [one.requires_grad_() if one.is_floating_point() else one for one in inputs(16, 8, chosen)]
        target = torch.randn(16, WIDTH)
        loss = (expected(x, chosen, up, down).sin() - target).square().mean()
        wanted = torch.autograd.grad(loss, [down, x, up])
        found, gradients = run(x.detach(), chosen, up.detach(), down.detach(), target)
        torch.testing.assert_close(found, loss.detach())
        torch.testing.assert_close(list(gradients), list(wanted), rtol=1e-4, atol=1e-6)
    given = [x.detach(), chosen, up.detach(), down.detach(), target]
    found, gradients = mt.run_sequential(made, given, "loss")
    torch.testing.assert_close(list(gradients), list(wanted), rtol=1e-4, atol=1e-6)


def test_a_gate_is_trained():
    """A call that torch records, of experts that a gate chooses; tokens split by an axis that is not theirs, too."""
    mesh, torch_inputs = {"d": 2, "e": 2}, inputs(16, 8, torch.zeros(16))
    mod = module(16, 8, mesh, tokens=("d",))
    builder, func = relax.BlockBuilder(mod), mod["main"]
    gate = relax.Var("gate", tensor(WIDTH, 8))
    x, up, down = [relax.Var(func.params[n].name_hint, func.params[n].struct_info) for n in (0, 2, 3)]
    with builder.function("gated", [x, gate, up, down]):
        shares = builder.emit(relax.op.nn.softmax(builder.emit(relax.op.matmul(x, gate)), -1))
        chosen = builder.emit(relax.op.argmax(shares, 1))
        made = builder.emit(relax.Call(mod.get_global_var("main"), [x, chosen, up, down]))
        best = builder.emit(relax.op.max(shares, 1, keepdims=True))
        builder.emit_func_output(builder.emit(relax.op.multiply(made, best)))
    run = mt.distribute_module(builder.get(), mesh, {"up": {"e": 0}, "down": {"e": 0}}, function="gated")
    given = [one.requires_grad_() for one in (torch_inputs[0], torch.randn(WIDTH, 8), *torch_inputs[2:])]
    shares = (given[0] @ given[1]).softmax(-1)
    made = expected(given[0], shares.argmax(1), *given[2:]) * shares.amax(1, keepdim=True)
    mine = torch.autograd.grad(run(*given).square().sum(), given)
    torch.testing.assert_close(list(mine), list(torch.autograd.grad(made.square().sum(), given)), rtol=1e-4, atol=1e-4)


def test_gradients_in_16_bits():
    """Of the weights of experts whose rows go in many rounds: summed in float32."""
    body = tensor(MANY, 3, dtype="bfloat16"), BODY[1], tensor(2, 3, dtype="bfloat16")

    def scaled(x, ends, w):
        return relax.op.multiply(x, relax.op.sum(w, 0))

    mod = with_loss(shifted(*body, make=scaled, dtype="bfloat16"))
    x, shift, target = torch.randn(8, 3).bfloat16(), torch.randn(4, 3).bfloat16(), torch.zeros(8, 3).bfloat16()
    chosen = torch.tensor([0, 3, 1, 2] * 2)
    run = mt.distribute_module(mt.gradient(mod, ["shift"], function="loss"), {"e": 2}, {}, function="loss")
    _, (found,) = run(x, chosen.int(), shift, target)
    wide = shift.float().requires_grad_()
    made = x.float() * torch.where(chosen[:, None] < 2, wide[:2].sum(0), wide[2:].sum(0))
    (wanted,) = torch.autograd.grad(made.sin().square().mean(), wide)
    torch.testing.assert_close(found.float(), wanted, rtol=5e-2, atol=5e-2 * float(wanted.abs().max()))
