"""What a search over ways to train refuses, and what it says."""

import json
import math

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2, mlp
from tests.api.test_search_training import CPU, exported


@pytest.fixture(scope="module")
def module():
    return exported(2)[1]


def test_too_little_memory_says_the_smallest_that_would_do(module):
    with pytest.raises(
        mt.MeshTensorError, match=r"no way to train fits into 1,000 bytes per device(.|\n)*needs [\d,]+"
    ):
        mt.search(module, 2, CPU, batch=4, memory_limit=1000)


def test_a_model_without_layers(module):
    perceptron = mt.from_torch(torch.export.export(mlp.build(), mlp.example_inputs()), check=False)
    with pytest.raises(mt.MeshTensorError, match=r"nothing repeats in the module(.|\n)*leave out batch"):
        mt.search(perceptron, 2, CPU, batch=4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch": 0}, "batch is 0"),
        ({"batch": 4, "states": -1}, "states is -1"),
        ({"batch": 4, "colours": [1]}, r"held to 'colours'(.|\n)*microbatches, schedules, zero, recompute, sequence"),
        ({"batch": 4, "microbatch": [1]}, "held to 'microbatch'; did you mean 'microbatches'"),
        ({"seed": 0}, r"held to 'seed'(.|\n)*takes no seed"),
        ({"batch": 4, "schedules": ["zbh1"]}, r"no schedule 'zbh1'; did you mean 'zb-h1'"),
        ({"batch": 4, "schedules": "1f1b"}, r"schedules='1f1b', no list of what may be"),
        ({"batch": 4, "zero": 3}, "zero=3, no list of what may be"),
        ({"batch": 4, "zero": [2]}, "zero has 2(.|\\n)*zero has 0, 1 and 3"),
        ({"batch": 4, "sequence": [None]}, "sequence has None"),
        ({"batch": 4, "schedules": ["forward"]}, "the schedule 'forward' has no backward"),
        ({"batch": 4, "inputs": ["z"]}, "there is no input 'z'"),
        ({"batch": 4, "microbatches": [3]}, "no way to train a batch of 4 rows on 2 devices"),
        ({"batch": 4, "known": "nowhere.json"}, "'nowhere.json' holds no search"),
        ({"zero": [3]}, r"zero of a search without a batch(.|\n)*batch="),
    ],
)
def test_what_it_is_asked_for(module, options, message):
    with pytest.raises(mt.MeshTensorError, match=message):
        mt.search(module, 2, CPU, **options)


def test_a_model_without_a_loss():
    model = gpt2.build(gpt2.Config(layers=2, width=32, positions=8, batch=4))
    logits = mt.from_torch(torch.export.export(model, (torch.zeros(4, 8, dtype=torch.int64),)), check=False)
    with pytest.raises(mt.MeshTensorError, match=r"the first result(.|\n)*and no loss"):
        mt.search(logits, 2, CPU, batch=4)


def test_a_relax_module_has_to_say_its_inputs(module):
    with pytest.raises(mt.MeshTensorError, match="say which parameters are no weights"):
        mt.search(module.mod, 2, CPU, batch=4)


@pytest.fixture(scope="module")
def found(module):
    return mt.search(module, 2, CPU, batch=4, **FEW)


FEW = {"finalists": 0, "schedules": ["1f1b"], "zero": [0]}


@pytest.mark.parametrize("other", [{"batch": 8}, {"states": 1}, {"machine": "h100"}])
def test_another_search_was_saved(module, found, tmp_path, other):
    found.save(tmp_path / "found.json")
    with pytest.raises(mt.MeshTensorError, match=rf"is of another search(.|\n)*other '{next(iter(other))}'"):
        mt.search(module, 2, **{"machine": CPU, "batch": 4, "known": tmp_path / "found.json", **FEW, **other})


def test_the_search_of_another_model_was_saved(found, tmp_path):
    found.save(tmp_path / "found.json")
    with pytest.raises(mt.MeshTensorError, match=r"is of another search(.|\n)*other 'parameters'"):
        mt.search(exported(3)[1], 2, CPU, batch=4, known=tmp_path / "found.json", **FEW)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("time", math.nan, "time is nan"),
        ("time", -1.0, "time is -1.0"),
        ("memory", math.inf, "memory is inf"),
        ("layers", [9], "has stages of"),
        ("layers", ["a"], "has stages of|unsupported operand"),
        ("data", [1], "unhashable"),
    ],
)
def test_what_was_saved_is_broken(module, found, tmp_path, name, value, message):
    found.save(tmp_path / "found.json")
    made = json.loads((tmp_path / "found.json").read_text())
    (tmp_path / "found.json").write_text(json.dumps({**made, "plans": [{**made["plans"][0], name: value}]}))
    with pytest.raises(mt.MeshTensorError, match=f"holds no search: .*({message})"):
        mt.search(module, 2, CPU, batch=4, known=tmp_path / "found.json", **FEW)


def test_what_was_saved_needs_more_memory_than_there_is_now(module, found, tmp_path):
    found.save(tmp_path / "found.json")
    limit = sorted(plan.memory for plan in found.plans)[len(found.plans) // 2]
    known = mt.search(module, 2, CPU, batch=4, memory_limit=limit, known=tmp_path / "found.json", **FEW)
    assert max(plan.memory for plan in known.plans) <= limit
    assert known.plans == mt.search(module, 2, CPU, batch=4, memory_limit=limit, **FEW).plans


@pytest.mark.parametrize("size", [(0, 12), (60, -1), ("a", 12), (60, 2.5)])
def test_pictures_of_no_size(found, size):
    with pytest.raises(mt.MeshTensorError, match=r"(width|height) is (.|\n)*numbers of characters"):
        found.picture(*size)


def test_a_plan_of_nobody(found):
    with pytest.raises(mt.MeshTensorError, match="5 is nothing that a search found"):
        found.arguments(5)


def test_what_needs_a_byte_more_than_there_is(module):
    """Pieces say about what plans need: what they say is too little isn't taken, and what they say is too much is."""
    few = {"schedules": ["1f1b"], "microbatches": [2], "recompute": [False]}
    least = mt.search(module, 4, CPU, batch=8, finalists=100, objective="memory", **few).best.memory
    assert mt.search(module, 4, CPU, batch=8, memory_limit=least, **few).best.memory == least
    with pytest.raises(mt.MeshTensorError, match=f"fits into {least - 1:,} bytes(.|\n)*needs {least:,}"):
        mt.search(module, 4, CPU, batch=8, memory_limit=least - 1, **few)


def test_a_machine_that_is_too_small(module):
    with pytest.raises(mt.MeshTensorError, match=r"the search has 64 devices, the machine 16"):
        mt.search(module, 64, "h100x16", batch=64)
