"""Pipelines on ranks of torch.distributed: the bits of the virtual topology, and no hang when something goes wrong."""

import re
from functools import partial

import pytest

import mesh_tensor as mt
from tests.api.pipeline import order_bodies as orders
from tests.api.pipeline import rank_bodies as bodies
from tests.api.pipeline.models import chain
from tests.runtime.ranks.launcher import run


@pytest.fixture(scope="module")
def on_four():
    """What the bodies for two meshes of two ranks gave, one after the other, per rank."""
    return run(bodies.on_four, 4)


@pytest.fixture(scope="module")
def on_three():
    """What the bodies for meshes of two ranks and one gave, one after the other, per rank."""
    return run(orders.on_three, 3)


def test_ranks_give_the_bits_of_the_virtual_topology_and_refuse_another_schedule_on_one(on_four):
    made = [each["same or refused"] for each in on_four]
    assert made[0][0].keys() == bodies.CUTS.keys()
    for losses, message in made:
        assert losses == made[0][0]
        assert "schedule differ between ranks: ranks 0, 2, 3: 1f1b" in message
        assert "rank 1: zb-h1" in message


def test_what_torch_keeps_goes_from_forward_to_backward(on_four):
    """Of norms and attention, once per microbatch; nothing is left."""
    for number, each in enumerate(on_four):
        first = number < 2
        for schedule, later in (("1f1b", "B"), ("zb-h1", "W" if first else "I")):
            names, count = each["keeps"][schedule], 1 if first else 2
            assert names.count(f"F +{count}") == names.count(f"{later} -{count}") == 4, names
            assert names.count("W +0") == (4 if later == "I" else 0), names


def test_gradients_for_the_stage_before_are_handed_on_before_those_of_weights(on_four):
    """Once per microbatch; the first stage has nobody to hand them to."""
    for number, each in enumerate(on_four):
        names = each["hands on"]
        assert len(names) == (4 if number else 0)
        assert len(set(names)) <= 1
        assert all(name.startswith("B ") for name in names)


def test_norms_that_are_computed_again_have_their_gradients_where_these_are_handed_on_early(on_four):
    assert len({each["recomputes"] for each in on_four}) == 1


def test_what_a_model_writes_is_that_of_the_virtual_topology_on_all_ranks(on_four):
    for message in [each["writes"] for each in on_four]:
        assert "values of the state differ between ranks: ranks 0, 2, 3: " in message


def test_meshes_of_different_sizes_and_tied_weights(on_three):
    losses = [each["uneven"] for each in on_three]
    assert losses == [losses[0]] * 3


def test_an_action_that_fails_on_one_rank_ends_all(on_four):
    messages = [each["raises in an action"] for each in on_four]
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


def test_an_update_that_is_not_finite_on_one_mesh(on_four):
    for each in on_four:
        assert "the weights would not be finite after it; they stay as they were" in each["not finite"]


def test_a_rule_that_raises_on_one_rank(on_three):
    for first, second, third, fourth in [each["rule raises"] for each in on_three]:
        assert first.startswith(
            "rank 0 raised ValueError: out of luck\n  where: update of a pipeline, the rule on weig"
        )
        assert "nothing was changed" in first
        assert second.startswith("rank 2 raised ValueError: out of luck\n")
        assert third.startswith("rank 1 raised the rule makes 3 of the weight 'w")
        assert [fourth.count(f"rank {rank} raised ValueError") for rank in range(3)] == [1, 1, 1]


def test_calls_that_differ_between_ranks(on_three):
    """Whoever waits for the others is told where they wait, or why they don't."""
    for texts in [each["calls differ"] for each in on_three]:
        for text in texts:
            assert re.search(r"waited in vain|differ between ranks|raised|refused the call|input 'x'|no batch", text), (
                text
            )


def test_ranks_of_several_meshes_that_would_compute_otherwise(on_three):
    for text in [each["computes otherwise"] for each in on_three]:
        assert "gelu differ between ranks: ranks 0, 1: compiled; rank 2: torch's" in text


def test_what_is_divided_by_a_total_of_0_is_refused_on_all_ranks(on_three):
    for each in on_three:
        assert "of the batch is 0, by which it is divided" in each["weights cancel"]


def test_times_of_a_call_are_known_to_all_ranks(on_three):
    for actions, bars in [each["traced"] for each in on_three]:
        assert actions == ["0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3", "1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3"]
        assert [bar[:2] for bar in bars] == [(0, 0), (0, 1), (1, 0)]
        assert all(count in (8, 9) for *_, count in bars)  # and reductions
