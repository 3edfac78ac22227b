"""Stages by dynamic programming: as good as trying everything; and what they send to each other."""

import random
from dataclasses import replace

import pytest

from mesh_tensor.base.machine import Link, Machine, Memory
from mesh_tensor.searching.choices import Choice, Part, Question, cut_best
from mesh_tensor.searching.pieces import Composer, Model, Piece


def everything(question, parts=(), layers=None, devices=None):
    """All ways to cut, of those that fit."""
    layers = question.layers if layers is None else layers
    devices = question.devices if devices is None else devices
    if parts and not layers and not devices and question.fits(parts):
        yield parts
    for count in range(1, layers + 1 if devices else 1):
        for data, model in question.sizes:
            if data * model <= devices:
                more = (*parts, Part(count, data, model))
                yield from everything(question, more, layers - count, devices - data * model)


def asked(seed):
    """A question of random sizes, speeds and memory."""
    rng = random.Random(seed)
    speed = {(d, m): rng.uniform(0.3, 1) for d in range(1, 5) for m in (1, 2)}
    sizes = [(1, 1), *(size for size in speed if rng.random() < 0.6 and size != (1, 1))]
    before, after = rng.uniform(0, 2), rng.uniform(0, 2)

    def seconds(part, first, last):
        return (part.layers + before * first + after * last) * speed[part.data, part.model] / part.devices**0.7

    def memory(part, first, last, held):
        return (part.layers * (2 + held) + 3 * first + 2 * last) / part.devices

    sizes_of = rng.randint(1, 5), rng.randint(1, 5), rng.randint(1, 6)
    return Question(*sizes_of, sizes, seconds, memory, rng.uniform(2, 30))


@pytest.mark.parametrize("block", range(4))
def test_as_good_as_everything(block):
    fitting = 0
    for seed in range(block * 25, block * 25 + 25):
        question = asked(seed)
        all_ways = [question.takes(parts) for parts in everything(question)]
        found = cut_best(question)
        assert (found is None) == (not all_ways)
        if found is not None:
            fitting += 1
            assert question.takes(found) == pytest.approx(min(all_ways))
            assert question.fits(found)
            assert sum(part.layers for part in found) == question.layers
            assert sum(part.devices for part in found) == question.devices
    assert fitting > 10


def test_a_slow_end_gets_more_devices():
    """What comes after the layers takes as long as four of them: the last stage has two of three devices."""

    def seconds(part, first, last):
        return (part.layers + 4 * last) / part.devices

    question = Question(5, 3, 64, [(1, 1), (2, 1)], seconds, lambda *_: 0, 1)
    assert cut_best(question) == (Part(3, 1, 1), Part(2, 2, 1))


def test_a_stage_that_holds_more_microbatches_needs_more_memory():
    """The first of two stages keeps two microbatches: it gets fewer layers, though that takes longer."""

    def seconds(part, first, last):
        return float(part.layers)

    def memory(part, first, last, held):
        return part.layers * held

    free, tight = (Question(6, 2, 8, [(1, 1)], seconds, memory, limit) for limit in (6, 4))
    assert [part.layers for part in cut_best(free)] == [3, 3]
    assert [part.layers for part in cut_best(tight)] == [2, 4]
    assert cut_best(Question(6, 2, 8, [(1, 1)], seconds, memory, 3)) is None


def test_stages_in_one_node_send_over_the_link_inside():
    """Four meshes of two devices, in nodes of four: of three ways, only the middle one leaves a node."""
    links = Link("inside", 4, rate=1e30, start=1.0), Link("between", None, rate=1e30, start=10.0)
    composer = Composer(Machine("nodes", {"float32": 1e12}, (Memory(10**9, 1e12),), links), states=2)
    piece = Piece(forward=1.0, backward=2.0, weights=0, elements=0, tensors=0, kept=0, taken=0, received=0, working=0)
    nothing = replace(piece, forward=0.0, backward=0.0)
    model = Model(nothing, piece, nothing, layers=4)
    for meshes, sent in ((4, 1 + 10 + 1), (2, 1), (1, 0)):
        choice = Choice(model=2, meshes=meshes, microbatches=1)
        taken = composer.seconds(choice, [model] * meshes, model.cut(meshes))
        assert taken == 4 * (1 + 2) + 2 * sent
