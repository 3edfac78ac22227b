"""The example trains as torch does, and draws that."""

import re
from xml.etree import ElementTree

import pytest

from examples.train_gpt import picture, train


@pytest.mark.parametrize(("mesh", "zero"), [({"data": 2, "model": 2}, 1), ({"data": 2}, 3)])
def test_losses_are_torchs(mesh, zero):
    losses = train(mesh, 10, zero)
    for ours, theirs in losses:
        assert ours == pytest.approx(theirs, abs=1e-4)
    assert losses[-1][0] < losses[0][0] - 0.5


def test_the_picture_has_both_curves():
    losses = [(5.0, 4.0), (2.5, 3.0), (1.0, 2.0)]
    drawn = ElementTree.fromstring(picture(losses, "losses"))
    curves = [one.attrib["points"].split() for one in drawn if one.tag.endswith("polyline")]
    heights = [[float(re.fullmatch(r"[\d.]+,([\d.]+)", point)[1]) for point in curve] for curve in curves]
    bottom, up = heights[1][0] + 5 * (heights[1][1] - heights[1][0]) / 2.5, (heights[1][1] - heights[1][0]) / 2.5
    for which, curve in zip((1, 0), heights, strict=True):  # torch's is below
        assert curve == pytest.approx([bottom - up * pair[which] for pair in losses])
