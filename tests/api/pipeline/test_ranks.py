"""Pipelines on ranks of torch.distributed: the bits of the virtual topology, and no hang when something goes wrong."""

import re
from functools import partial

import pytest

import mesh_tensor as mt
from tests.api.pipeline import order_bodies as orders
from tests.api.pipeline import rank_bodies as bodies
from tests.api.pipeline.models import chain
from tests.runtime.ranks.launcher import run


def test_ranks_give_the_bits_of_the_virtual_topology_and_refuse_another_schedule_on_one():
    made = run(bodies.same_or_refused, 4)
    assert made[0][0].keys() == bodies.CUTS.keys()
    for losses, message in made:
        assert losses == made[0][0]
        assert "schedule differ between ranks: ranks 0, 2, 3: 1f1b" in message
        assert "rank 1: zb-h1" in message


def test_meshes_of_different_sizes_and_tied_weights():
    losses = run(bodies.uneven, 3)
    assert losses == [losses[0]] * 3


def test_an_action_that_fails_on_one_rank_ends_all():
    messages = run(bodies.raises_in_an_action, 4)
    assert messages[3] == "ValueError: out of luck\n  where: 1B1 (backward of stage 1) on mesh 'm1'"
    for message in messages[:3]:
        assert "rank 3 raised" in message
        assert "ValueError: out of luck" in message
        assert "1B1" in message


@pytest.mark.parametrize("late", [-1, 1])
def test_a_rank_that_is_killed_ends_all(late):
    messages = run(partial(bodies.dies_in_an_action, late=late), 4)
    assert messages[2] is None
    for rank in (0, 1, 3):
        assert "rank 2 has ended, hangs, or is not in this collective" in messages[rank]
        assert "of stage" in messages[rank]


def test_without_ranks_it_is_refused():
    module, _ = chain()
    with pytest.raises(mt.MeshTensorError, match=r"it has 4 devices, but there are 0 ranks"):
        mt.pipeline(module, bodies.TOPOLOGY, ["layer1"], ranks=True)


def test_an_update_that_is_not_finite_on_one_mesh():
    run(bodies.not_finite_on_one_mesh, 4)


def test_a_rule_that_raises_on_one_rank():
    for first, second, third, fourth in run(orders.rule_raises_on_one_rank, 3):
        assert first.startswith(
            "rank 0 raised ValueError: out of luck\n  where: update of a pipeline, the rule on weig"
        )
        assert "nothing was changed" in first
        assert second.startswith("rank 2 raised ValueError: out of luck\n")
        assert third.startswith("rank 1 raised the rule makes 3 of the weight 'w")
        assert [fourth.count(f"rank {rank} raised ValueError") for rank in range(3)] == [1, 1, 1]


def test_calls_that_differ_between_ranks():
    """Whoever waits for the others is told where they wait, or why they don't."""
    for texts in run(orders.calls_differ, 3):
        for text in texts:
            assert re.search(r"waited in vain|differ between ranks|raised|refused the call|input 'x'|no batch", text), (
                text
            )
