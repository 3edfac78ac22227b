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
    held = count // math.prod(mesh.size(axis) for axis in mesh if axis not in options.get("tokens", ()))

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


def test_what_does_not_fit():
    refused(lambda: module(18, 8, {"e": 4}), "dim 0 of operand 0 has 18 elements, for 4 devices", "mt.experts of 'mlp'")
    refused(lambda: module(16, 6, {"e": 4}), "dim 0 of operand 2 has 6 elements, for 4 devices")
    refused(lambda: module(16, 8, {"e": 4}, room=0), "room is 0")


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
