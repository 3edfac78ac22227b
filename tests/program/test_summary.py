"""The short form of explain says what the long one adds up to, a line for all layers that are alike."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import gpt2, llama
from mesh_tensor.program.explain import costs


def rows(text, title):
    """The lines of a section, in columns."""
    section = next(part for part in text.split("\n\n") if part.startswith(title))
    return [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in section.splitlines()[2:]]


def number(cell):
    return int(cell.replace(",", ""))


@pytest.mark.parametrize("family", [gpt2, llama])
@pytest.mark.parametrize("layers", [1, 3])
def test_sums_are_those_of_all_steps(family, layers):
    config = family.Config(layers=layers)
    program = torch.export.export(family.build(config), family.example_inputs(config))
    module = mt.from_torch(program, check=False)
    run = mt.distribute_module(module, {"x": 2}, family.tensor_parallel(config, "x", vocabulary=True))
    text = run.explain(short=True)
    kinds, moved = rows(text, "layers"), rows(text, "collectives")
    assert sum(number(row[2]) for row in kinds) == sum(step.flops for step in run.program.steps)
    received = sum(step.bytes for step in run.program.steps)
    assert sum(number(row[3]) for row in kinds) == sum(number(row[4]) for row in moved) == received
    assert sum(int(row[3]) for row in moved) == sum(1 for _ in run.program.collectives)
    assert text.endswith(costs(run.program))
    outputs = (
        ["layers.*.attn.o_proj", "layers.*.mlp.down_proj"]
        if family is llama
        else ["blocks.*.attn.proj", "blocks.*.proj"]
    )
    reduced = {row[1]: (int(row[3]), row[5]) for row in moved if row[0] == "all_reduce(sum)"}
    assert [reduced[name] for name in outputs] == [(layers, "main.lv* (matmul) leaves it partial")] * 2
    assert {row[0]: int(row[1]) for row in kinds}[outputs[1]] == layers


def test_nothing_is_moved():
    model = torch.nn.Linear(4, 4).eval()
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 4),)), check=False)
    text = mt.distribute_module(module, {"x": 2}, {"input": {"x": 0}}).explain(short=True)
    assert "collectives" not in text
    assert "(results)" in text
    assert "0 bytes received" in text
