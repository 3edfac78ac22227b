"""What Shardy has words for, one by one: open and closed dims, priorities, replicated axes, groups, barriers, order."""

import pytest
import torch
from tvm import relax

import mesh_tensor as mt

from .modules import function, layouts

op = relax.op
X, XY, XYZ = {"x": 2}, {"x": 2, "y": 2}, {"x": 2, "y": 2, "z": 2}
ROWS, CLASH = {"x": {"x": 0}, "w": {"y": 1}}, {"x": {"x": 0}, "w": {"x": 1}}
# name: mesh, layouts that are stated, what else is said, and the layouts that follow
CASES = {
    "closed": (XY, {"x": {"x": 0}, "lv": {}}, {}, {"lv_sharded": "R, R", "lv1": "R, R"}),
    "open dim 1": (XY, {**ROWS, "lv": {}}, {"open": {"lv": [1]}}, {"lv_sharded": "R, S[1]"}),
    "open dim 0": (XY, {**ROWS, "lv": {}}, {"open": {"lv": [0]}}, {"lv_sharded": "S[0], R"}),
    "later along x": (X, CLASH, {"priority": {"x": {"x": 1}}}, {"lv": "S[1]"}),
    "the other later": (X, CLASH, {"priority": {"w": {"x": 1}}}, {"lv": "S[0]"}),
    "closed and later": (XY, {**CLASH, "lv": {"y": 0}}, {"priority": {"lv": 1}}, {"lv_sharded": "R, S[0]"}),
    "replicated": (XY, {**ROWS, "lv": {"y": None}}, {"open": ["lv"]}, {"lv_sharded": "S[0], R"}),
    "replicate": (XY, {**ROWS, "lv": {"sharding": {}, "replicate": "x"}}, {"open": ["lv"]}, {"lv_sharded": "R, S[1]"}),
    "a part replicated": (
        {"x": 4},
        {"x": {"x:(1)2": 0}, "lv": {"x:(2)2": None}},
        {"open": ["lv"]},
        {"lv_sharded": "S[0], R"},
    ),
    "a group": (X, {"x": {"x": 0}}, {"groups": {"g": ["x", "x2"]}, "barriers": {"x": "none"}}, {"x2": "S[0]"}),
    "a group's order": (XY, {"x": {("y", "x"): 0}}, {"groups": {"g": ["x", "x2"]}}, {"x2": "S[0:1], S[0]"}),
    "order and open": (
        XYZ,
        {"x": {("y", "x"): 0}, "w": {"z": 1}, "lv": {}},
        {"open": ["lv"]},
        {"lv_sharded": "S[0:1], S[0], S[1]"},
    ),
    "barrier": (X, {"x": {"x": 0}}, {"barriers": {"lv": "none"}}, {"lv": "S[0]", "lv1": "R"}),
    "forward": (X, {"x": {"x": 0}}, {"barriers": {"lv": "forward"}}, {"lv1": "S[0]"}),
    "not backward": (X, {"x": {"x": 0}}, {"barriers": {"lv": "backward"}}, {"lv1": "R"}),
    "backward": (X, {"lv1": {"x": 0}}, {"barriers": {"lv": "backward"}}, {"lv": "S[0]", "x": "S[0]"}),
    "not forward": (X, {"lv1": {"x": 0}}, {"barriers": {"lv": "forward"}}, {"x": "R"}),
}


@pytest.mark.parametrize("name", CASES)
def test_words(name):
    mesh, stated, said, expected = CASES[name]

    def build(emit, x, w, x2):
        return emit(relax.Tuple([emit(op.nn.relu(emit(op.matmul(x, w)))), emit(op.negative(x2))]))

    mod = function(build, x=(8, 4), w=(4, 6), x2=(8, 4))
    run = mt.distribute_module(mt.annotate_module(mod, mesh, stated, **said), mesh, poison=True)
    inputs = [torch.randn(8, 4), torch.randn(4, 6), torch.randn(8, 4)]
    for have, want in zip(run(*inputs), mt.run_sequential(mod, inputs), strict=True):
        torch.testing.assert_close(have, want, rtol=1e-4, atol=1e-4)
    found = layouts(run.plan)
    assert {value: found[value] for value in expected} == expected
