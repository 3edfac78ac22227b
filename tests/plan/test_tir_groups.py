"""Modules whose kernels walk a dim in groups of another's: axes that divide the groups split both."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from tests.rules.kernel.test_granularity import B, D, H, S, attended, block_scaled_product, grouped_attention, tensors

from .modules import kinds, layouts, planned
from .step_modules import call, module, operands

KERNEL = grouped_attention().with_attr("global_symbol", "attention")
SHAPES = {"q": (B, H, S, D), "k": (B, H // 2, S, D), "v": (B, H // 2, S, D)}


def attention():
    """A kernel that is given heads, and that an operator follows."""
    return module(
        SHAPES,
        [
            ("o", call(KERNEL, "q", "k", "v", shape=(B, H, S, D))),
            ("r", lambda builder, env: relax.op.nn.relu(env["o"])),
        ],
    )


@pytest.mark.parametrize(
    ("mesh", "sharding", "expected"),
    [
        ({"x": 2}, {"q": {"x": 1}}, []),
        ({"x": 4}, {"k": {"x": 1}}, []),
        ({"x": 2, "y": 2}, {"q": {"x": 1, "y": 0}}, []),
        ({"x": 2, "y": 2}, {"q": {"x": 1, "y": 1}}, []),
        ({"x": 2}, {"r": {"x": 2}}, []),
        ({"x": 8}, {"q": {"x": 1}, "k": {"x": 0}}, ["all_to_all", "halo", "halo"]),
        ({"x": 3}, {"q": {"x": 1}, "r": {"x": 1}}, ["halo", "halo"]),  # of k and v, which all have: nothing moves
    ],
    ids=str,
)
def test_heads_in_groups(mesh, sharding, expected):
    mod, given = attention(), tensors()
    made = mt.distribute_module(mod, mesh, sharding)
    torch.testing.assert_close(made(*given), attended(*given).relu(), rtol=1e-4, atol=1e-5)
    plan = planned(mod, mesh, sharding)
    assert kinds(plan) == expected
    if "k" not in sharding:
        assert sum(step.bytes for step in plan.made.program.collectives) == 0


def test_axes_that_divide_the_groups_split_key_heads_with_query_heads():
    plan = planned(attention(), {"x": 2}, {"q": {"x": 1}})
    found = layouts(plan)
    assert {name: found[name] for name in "qkvor"} == {"q": "S[1]", "k": "S[1]", "v": "S[1]", "o": "S[1]", "r": "S[1]"}


def test_axes_that_do_not_divide_the_groups_split_query_heads_alone():
    plan = planned(attention(), {"x": 3}, {"q": {"x": 1}})
    found = layouts(plan)
    assert {name: found[name] for name in "qkvor"} == {"q": "S[1]", "k": "R", "v": "R", "o": "S[1]", "r": "S[1]"}


@pytest.mark.parametrize("sharding", [{"x": 0}, {"x": 1}, {"x": 0, "y": 1}], ids=str)
def test_heads_that_are_taken_apart_before(sharding):
    """q comes as (batch, heads * head size), as a projection gives it."""
    mod = module(
        {"flat": (B, S, H * D), "k": SHAPES["k"], "v": SHAPES["v"]},
        [
            ("heads", lambda builder, env: relax.op.reshape(env["flat"], (B, S, H, D))),
            ("q", lambda builder, env: relax.op.permute_dims(env["heads"], [0, 2, 1, 3])),
            ("o", call(KERNEL, "q", "k", "v", shape=(B, H, S, D))),
        ],
    )
    data = operands(mod)
    made = mt.distribute_module(mod, {"x": 2, "y": 2}, {"k": sharding})
    query = data[0].reshape(B, S, H, D).permute(0, 2, 1, 3)
    torch.testing.assert_close(made(*data), attended(query, *data[1:]), rtol=1e-4, atol=1e-5)
    assert kinds(planned(mod, {"x": 2, "y": 2}, {"k": sharding})) == []


def test_scales_of_blocks_are_split_with_what_they_scale():
    kernel = block_scaled_product().with_attr("global_symbol", "product")
    shapes = [tuple(int(n) for n in kernel.buffer_map[param].shape) for param in kernel.params]
    names = [str(kernel.buffer_map[param].name) for param in kernel.params]
    given = dict(zip(names[:-1], shapes[:-1], strict=True))
    mod = module(given, [("out", call(kernel, *given, shape=shapes[-1]))])
    data = operands(mod)
    whole = mt.run_sequential(mod, data)
    for name in given:
        for dim in range(2):
            made = mt.distribute_module(mod, {"x": 2}, {name: {"x": dim}})
            torch.testing.assert_close(made(*data), whole, rtol=1e-4, atol=1e-4)
