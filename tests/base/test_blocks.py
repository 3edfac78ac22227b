"""Margins of tiles of whole blocks, beside sets of elements."""

import pytest

from mesh_tensor.base.blocks import Margins, whole_blocks


def tiles(size, parts, length):
    """The elements that each device has in tiles that long."""
    return [set(range(min(size, n * length), min(size, (n + 1) * length))) for n in range(parts)]


@pytest.mark.parametrize("block", [1, 2, 3, 4, 8, 30])
@pytest.mark.parametrize("parts", [1, 2, 3, 5])
@pytest.mark.parametrize("size", [1, 6, 7, 24, 30])
def test_margins_are_what_devices_lack(size, parts, block):
    walked = whole_blocks(size, parts, block)
    assert walked % parts == 0
    assert walked // parts % block == 0 or block == 1
    plain, blocks = tiles(size, parts, -(-size // parts)), tiles(size, parts, walked // parts)
    assert set().union(*blocks) == set(range(size))
    margins = Margins.of(size, parts, block)
    assert margins.walked == walked
    assert margins.of_inputs * size == pytest.approx(max(len(b - a) for a, b in zip(plain, blocks, strict=True)))
    assert margins.of_results * size == pytest.approx(max(len(a - b) for a, b in zip(plain, blocks, strict=True)))
    assert margins.gathered * size == pytest.approx(size - len(plain[0]))


def test_of_nothing_nothing_is_lacking():
    assert Margins.of(0, 3, 8) == Margins(0, 0, 0, 0)
