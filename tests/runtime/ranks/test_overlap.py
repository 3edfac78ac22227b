"""Kernels in slabs on real ranks."""

import re
from functools import partial

import pytest

from mesh_tensor.runtime.ranks.lane import _to_spare

from . import overlap_bodies as bodies
from .launcher import run

REDUCED = """
kernel 0, start 0, kernel 1, start 1, kernel 2, end 0, start 2, end 1, end 2
"""
GATHERED = """
start 0, start 1, end 0, kernel 0, start 2, end 1, kernel 1, end 2, kernel 2
"""


@pytest.mark.parametrize(
    ("layouts", "held", "until", "expected"),
    [
        ("reduced", 0, 1, REDUCED),
        ("reduced", 0, 2, REDUCED),
        ("reduced", 1, 2, REDUCED),
        ("scattered", 0, 1, REDUCED),
        ("gathered", 1, 0, GATHERED),
        ("gathered", 2, 1, GATHERED),
    ],
)
def test_collectives_run_beside_kernels(layouts, held, until, expected):
    """On rank 0 kernel `until` runs from start to end while collective `held` is under way: rank 1 begins that one only
    when it hears that the kernel has run."""
    for events in run(partial(bodies.events, layouts=layouts, held=held, until=until), 2):
        assert ", ".join(events) == expected.strip()


@pytest.mark.parametrize("target", ["interpret", "c"])
def test_bits_of_bulk(target):
    run(partial(bodies.bits_of_bulk, target=target), 2)


def test_large_slabs():
    run(bodies.large, 2)


def test_ranks_that_were_told_different_things():
    for text in run(bodies.different_overlap, 2):
        assert "overlap differ between ranks: rank 0: off; rank 1: auto" in text


def test_a_rank_that_raises_in_a_slab():
    first, second = run(bodies.raises_in_a_slab, 2)
    assert second == "on purpose"
    assert "rank 1 raised ValueError: on purpose (in step 4 of 10, kernel matmul_kernel[1])" in first
    # Where the other rank is by then depends on what comes first: it starts a slab's, or waits for either.
    assert re.search(r"(the end of )?all_reduce\(C\[(0:16|16:32|32:48)\], sum\) over x, of kernel 'matmul'", first)


@pytest.mark.parametrize(
    ("places", "spare"),
    [
        ([("a", [0, 1]), ("a", [0, 1])], False),
        ([("a", [0, 1, 2, 3]), ("a", [0, 1, 2, 3])], True),
        ([("a", [0, 1]), ("a", [2, 3])], True),
        ([("a", [0]), ("a", [1, 2, 3])], False),
        ([("a", [0, 1]), ("b", [0, 1])], True),
        ([("a", [0, 1]), ("b", [0])], False),
    ],
)
def test_cores_to_spare(places, spare):
    assert _to_spare(places) is spare
