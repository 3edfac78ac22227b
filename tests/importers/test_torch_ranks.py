"""Programs that one rank exported, with torch's collectives, beside what all ranks compute together."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

import mesh_tensor as mt
from tests.plan.test_manual_failures import refused

c10d = torch.ops._c10d_functional


@pytest.fixture(autouse=True, scope="module")
def ranks():
    """Two ranks as far as exports know."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()


def group():
    return dist.group.WORLD.group_name


class Megatron(nn.Module):
    """Sequences are gathered, columns and rows of two layers are split, and the sum is scattered over the sequence."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.norm = nn.Linear(4, 3), nn.Linear(3, 4, bias=False), nn.LayerNorm(4)

    def forward(self, x):
        whole = c10d.wait_tensor(c10d.all_gather_into_tensor(self.norm(x), 2, group()))
        made = self.down(torch.relu(self.up(whole)))
        return c10d.wait_tensor(c10d.reduce_scatter_tensor(made, "sum", 2, group()))


def test_a_layer_of_megatron():
    torch.manual_seed(0)
    program = torch.export.export(Megatron(), (torch.randn(5, 4),))
    whole = {"up.weight": torch.randn(6, 4), "up.bias": torch.randn(6), "down.weight": torch.randn(4, 6)}
    layouts = {"x": {"t": 0}, "up.weight": {"t": 0}, "up.bias": {"t": 0}, "down.weight": {"t": 1}}
    made = mt.from_torch_rank(program, {"t": 2}, {group(): "t"}, layouts, {"t": 0}, weights=whole)
    x = torch.randn(10, 4)
    normed = nn.functional.layer_norm(x, (4,), *(made.params[f"norm_{name}"] for name in ("weight", "bias")))
    hidden = torch.relu(nn.functional.linear(normed, whole["up.weight"], whole["up.bias"]))
    run = mt.distribute_module(made, {"t": 2}, layouts, poison=True)
    torch.testing.assert_close(run(x), hidden @ whole["down.weight"].T, rtol=1e-4, atol=1e-5)
    assert {step.kind for step in run.program.collectives} <= {"all_gather", "reduce_scatter", "all_to_all"}


def test_a_group_of_some_ranks():
    """Rows are split by another axis than the group's, too; gradients go through; what all have alike is the rank's."""

    class Loss(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(3, 4))

        def forward(self, x):
            return c10d.wait_tensor(c10d.all_reduce(torch.sin(x @ self.w), "sum", group()))

    program, mesh = torch.export.export(Loss(), (torch.randn(2, 3),)), {"d": 2, "t": 2}
    w, x = torch.randn(6, 4), torch.randn(4, 6)
    layouts = {"x": {"d": 0, "t": 1}, "w": {"t": 0}}
    made = mt.from_torch_rank(program, mesh, {group(): "t"}, layouts, {"d": 0}, weights={"w": w})
    run = mt.distribute_module(made, mesh, layouts)
    given = x.clone().requires_grad_()
    wanted = torch.sin(given[:, :3] @ w[:3]) + torch.sin(given[:, 3:] @ w[3:])
    torch.testing.assert_close(run(x), wanted.detach())
    (gradient,) = torch.autograd.grad(run(given).square().sum(), given)
    torch.testing.assert_close(gradient, torch.autograd.grad(wanted.square().sum(), given)[0])


class Each(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.call = call

    def forward(self, x):
        return c10d.wait_tensor(self.call(x * 2)) + 1


KINDS = {
    "sum": (lambda x: c10d.all_reduce(x, "sum", group()), {}, lambda a, b: a + b),
    "max": (lambda x: c10d.all_reduce(x, "max", group()), {}, lambda a, b: torch.maximum(a, b)),
    "product": (lambda x: c10d.all_reduce(x, "product", group()), {}, lambda a, b: a * b),
    "avg": (lambda x: c10d.all_reduce(x, "avg", group()), {}, lambda a, b: (a + b) / 2),
    "gather": (lambda x: c10d.all_gather_into_tensor(x, 2, group()), {}, lambda a, b: torch.cat([a, b])),
    "scatter": (lambda x: c10d.reduce_scatter_tensor(x, "avg", 2, group()), {"t": 0}, lambda a, b: (a + b) / 2),
    "all_to_all": (
        lambda x: c10d.all_to_all_single(x, [2, 2], [2, 2], group()),
        {"t": 0},
        lambda a, b: torch.cat([a[:2], b[:2], a[2:], b[2:]]),
    ),
}


@pytest.mark.parametrize("name", KINDS)
def test_collectives(name):
    call, out, meant = KINDS[name]
    program = torch.export.export(Each(call), (torch.randn(4, 3),))
    made = mt.from_torch_rank(program, {"t": 2}, {group(): ("t",)}, {"x": {"t": 0}}, out)
    x = torch.randn(8, 3)
    wanted = meant(*(x * 2).chunk(2)) + 1
    torch.testing.assert_close(mt.distribute_module(made, {"t": 2}, {}, poison=True)(x), wanted)
    torch.testing.assert_close(mt.run_sequential(made.mod, [x]), wanted)


def test_refused():
    program = torch.export.export(Each(KINDS["gather"][0]), (torch.randn(4, 3),))
    x = {"x": {"t": 0}}
    refused(lambda: mt.from_torch(program), "all_gather_into_tensor.default is not known", "mt.from_torch_rank")
    refused(lambda: mt.from_torch_rank(program, {"t": 4}, {group(): "t"}, x, {}), "2 ranks, but", "has 4 devices")
    refused(lambda: mt.from_torch_rank(program, {"t": 2}, {"other": "t"}, x, {}), f"group '{group()}' has no axes")
    refused(lambda: mt.from_torch_rank(program, {"t": 2}, {group(): "u"}, x, {}), "axis 'u' of group", "is none of")
    refused(lambda: mt.from_torch_rank(program, {"t": 2}, {group(): "t"}, {"y": {}}, {}), "no input or parameter 'y'")
    uneven = torch.export.export(
        Each(lambda x: c10d.all_to_all_single(x, [1, 3], [1, 3], group())), (torch.randn(4, 3),)
    )
    refused(lambda: mt.from_torch_rank(uneven, {"t": 2}, {group(): "t"}, x, x["x"]), "are no even parts of 4")
    cast = torch.export.export(Each(lambda x: c10d.broadcast(x, 0, group())), (torch.randn(4, 3),))
    refused(lambda: mt.from_torch_rank(cast, {"t": 2}, {group(): "t"}, x, {}), "broadcast.default is not known")
    split = torch.export.export(nn.Linear(3, 3), (torch.randn(4, 3),))
    layouts = {"weight": {"t": 0}, "input": {"t": 0}}
    refused(
        lambda: mt.from_torch_rank(split, {"t": 2}, {group(): "t"}, layouts, {"t": 0}),
        "'weight' of [6, 3] torch.float32 is split, and not among `weights`: [3, 3]",
    )
