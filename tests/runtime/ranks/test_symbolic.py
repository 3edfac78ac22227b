"""Kernels with symbolic sizes on ranks, and explain after calls on ranks."""

import pytest

from . import symbolic_bodies as bodies
from .launcher import run


@pytest.mark.parametrize(
    "body",
    [
        bodies.even_tiles,
        bodies.uneven_tiles,
        bodies.shapes_that_change,
        bodies.expressions,
        bodies.new_sizes_without_exchange,
    ],
    ids=lambda b: b.__name__,
)
def test_right(body):
    run(body, 2)


def test_sizes_that_nothing_tells():
    first, second = run(bodies.sizes_that_nothing_tells, 2)
    assert "shapes differ between ranks: rank 0: A (8, 6), " in first[0]
    assert "rank 1: A (6, 6), " in second[0]
    assert "of uneven local tensors, say the whole shapes: local(..., shapes=...)" in second[0]
    assert "parameter 'A': (4, 6) torch.float32 on cpu, but expected (5, 6) torch.float32 on cpu" in first[1]
    for texts in (first, second):
        assert "shapes has 'D', but the tensors are 'A', 'B', 'C'" in texts[2]
        assert "shapes says 'A' is (7,), but it is (m, k)" in texts[2]
        assert "shapes says 'B' is (6.5, 5), but it is (k, n)" in texts[2]
        assert "shapes says 'B' is (5, 5), but it is (k=6, n)" in texts[3]
        assert "shapes says 'A' is (7,), but it is (m, k)" in texts[4]
        assert "local tensors don't say how large n is" in texts[5]
        assert "how large k is: 6 by dim 1 of 'A' as 2 tiles, 10 by dim 0 of 'B' as 2 tiles" in texts[6]
        assert "the kernel has symbolic dims" in texts[6]
        assert "say the whole tensors' shapes: local(..., shapes={'A': (m, k)}), or pass DTensors" in texts[6]


def test_tiles_that_become_uneven():
    for texts in run(bodies.tiles_that_become_uneven, 2):
        for uneven, wrong in zip(texts[::2], texts[1::2], strict=True):
            assert "shapes differ between ranks: rank 0: A (8, 6), " in uneven
            assert "rank 1: A (6, 6), " in uneven
            assert "of uneven local tensors, say the whole shapes: local(..., shapes=...)" in uneven
            assert "parameter 'A': (3, 6) torch.float64 on cpu, but expected (3, 6) torch.float32 on cpu" in wrong


def test_explain():
    for before, fitting, changed in run(bodies.explained, 4):
        assert "DTensors" not in before
        assert "DTensors" not in fitting
        section = changed.split("DTensors of the last call on ranks, redistributed\n")[1].split("\n\n")[0].splitlines()
        assert section[0].split() == ["parameter", "goes", "from", "to", "steps", "bytes", "received"]
        assert section[1:] == [
            "  A          in    S[0], S[0]    S[0], S[1]  all_to_all over y                          48",
            "  B          in    P[sum], S[1]  R, S[0]     all_to_all over y; all_reduce(sum) over x  192",
            "  C          out   S[0], S[0]    R, R        all_gather over x, y                       256",
        ]


def test_strict():
    for inputs, outputs, explained in run(bodies.strict_refuses, 2):
        assert "parameter 'A': lies as 'R', but expected 'S[1]'" in inputs
        assert "parameter 'B': lies as 'R', but expected 'S[0]'" in inputs
        assert "parameter 'C': lies as 'S[0]', but expected 'R'" in outputs
        assert "compile without strict=True" in outputs
        assert "DTensors of the last call" not in explained
