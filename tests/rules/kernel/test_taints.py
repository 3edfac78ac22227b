"""Taints: the loops that a live range's content may depend on."""

from kernels.matmul import matmul

from .kernels import analysis


def test_taints_follow_values():
    found = analysis(matmul(64, 64, 64, 16, 16, 16))
    taints = {r.buffer.name: {v.name for v in variables} for r, variables in found.taints.items()}
    assert {"ko", "by"} <= taints["A_shared"]
    assert "bx" not in taints["A_shared"]
    assert {"ko", "by", "bx"} <= taints["C_local"]
