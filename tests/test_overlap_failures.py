"""Values of `overlap` that mean nothing."""

import pytest

import mesh_tensor as mt
from kernels.matmul import matmul


@pytest.mark.parametrize("overlap", ["on", 0, -1, 65, 2.0, True, None, [2]])
def test_unknown_overlap(overlap):
    func = mt.annotate(matmul(64, 32, 32), {"x": 2}, {"A": {"x": 1}, "B": {"x": 0}})
    with pytest.raises(mt.MeshTensorError) as error:
        mt.compile(func, target="interpret", overlap=overlap)
    text = str(error.value)
    assert f"overlap={overlap!r} is unknown" in text
    assert "why: it is 'auto', 'off', or into how many slabs (1 .. 64) a kernel beside a collective is split" in text
    assert "fix: leave it out" in text
