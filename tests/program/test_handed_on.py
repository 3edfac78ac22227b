"""What others wait for is made first, as far as that takes no more memory; what comes later finds what it needs."""

import random

import pytest
import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.program.builder import handed_on_first
from mesh_tensor.program.steps import OpStep
from mesh_tensor.program.verify import peak_bytes

ROWS, WIDTH = 8, 8


class Given(nn.Module):
    """A function of tensors."""

    def __init__(self, run):
        super().__init__()
        self.run = run

    def forward(self, *tensors):
        return self.run(*tensors)


def planned(run, *shapes):
    """The program of a function of tensors of these shapes, on one device, and its results' values."""
    tensors = tuple(torch.randn(shape) for shape in shapes)
    module = mt.from_torch(torch.export.export(Given(run), tensors), check=False)
    made = mt.distribute_module(module, {"x": 1}, {})
    return made.program, made.plan.made.result


def parts(program, wanted, ends=frozenset(), totals=(), kept=None):
    """Both parts of the steps, once each step has been seen to find what it reads, and all results to be there."""
    first, rest = handed_on_first(program, wanted, ends, totals, kept or {})
    there, values = set(program.inputs), program.values
    for number, step in enumerate((*first, *rest)):
        assert {values[name].storage for name in step.reads} <= there
        there |= {values[name].storage for name in step.writes}
        there -= set(step.ends)
        assert number + 1 != len(first) or not rest or {values[name].storage for name in wanted} <= there
    assert program.outputs <= there
    work = [step for step in program.steps if isinstance(step, OpStep)]
    assert sorted(map(id, work)) == sorted(id(step) for step in (*first, *rest) if isinstance(step, OpStep))
    return first, rest


def products(program, steps):
    """The storages that products write."""
    return [program.values[step.writes[0]].storage for step in steps if step.uses and step.is_long]


def backward(x1, x2, above1, above2, dy, w1, w2):
    """Of two layers with activations in front; of what is saved and ends here, half is no operand of a product."""
    d2 = dy * above2
    dw2 = x2.T @ d2
    d1 = (d2 @ w2.T) * above1
    dw1 = x1.T @ d1
    return d1 @ w1.T, dw1, dw2


SQUARES = [(ROWS, WIDTH)] * 5 + [(WIDTH, WIDTH)] * 2


def saved(program):
    """The storages of what the forward saved, and of the gradient that comes in."""
    return [program.values[parameter.input].storage for parameter in program.parameters[:5]]


def test_gradients_of_weights_come_when_the_stage_before_has_its_own():
    program, (dx, dw1, dw2) = planned(backward, *SQUARES)
    values, (first, rest) = program.values, parts(program, [dx], saved(program), [dw1, dw2])
    assert products(program, first)[-1] == values[dx].storage
    assert len(products(program, first)) == 2
    assert products(program, rest) == [values[dw2].storage, values[dw1].storage]


def test_nothing_comes_later_where_nothing_is_wanted_or_all_of_it_is():
    program, (dx, dw1, dw2) = planned(backward, *SQUARES)
    assert parts(program, [])[1] == ()
    first, rest = parts(program, [dx, dw1, dw2])
    assert len(products(program, first)) == 4
    assert products(program, rest) == []


def test_inputs_that_end_are_kept_until_what_comes_later():
    """As long as they take no more memory than there was: what is freed for them is as large."""
    program, (dx, dw1, dw2) = planned(backward, *SQUARES)
    x2 = program.values[program.parameters[1].input].storage
    first, rest = parts(program, [dx], saved(program), [dw1, dw2])
    assert not any(x2 in step.ends for step in first)
    assert sum(x2 in step.ends for step in rest) == 1


def test_what_would_take_more_memory_stays_where_it_was():
    """A large operand of the weight's gradient would be there while another large one is."""

    def large(x, dy, w):
        wide = torch.relu(dy @ w)  # (rows, 64 * width)
        dw = x.T @ wide
        again = torch.relu((dy + wide.sum(1, keepdim=True)) @ w)
        return (again * again).sum(1, keepdim=True) * dy, dw

    program, (dx, dw) = planned(large, (ROWS, 1), (ROWS, WIDTH), (WIDTH, 64 * WIDTH))
    first, rest = parts(program, [dx])
    assert program.values[dw].storage in products(program, first)
    assert program.values[dw].storage not in products(program, rest)


def test_a_gradient_that_something_needs_is_no_less_urgent():
    def needed(x1, dy, w1):
        dw = x1.T @ dy
        return dy @ (w1 - dw).T, dw

    program, (dx, dw) = planned(needed, (ROWS, WIDTH), (ROWS, WIDTH), (WIDTH, WIDTH))
    first, rest = parts(program, [dx])
    assert products(program, first) == [program.values[name].storage for name in (dw, dx)]
    assert products(program, rest) == []


def test_what_leaves_something_for_a_step_beside_values_comes_before_it():
    program, (dx, dw1, dw2) = planned(backward, *SQUARES)
    first, rest = parts(program, [dx], saved(program), [dw1, dw2], {dw2: "kept of dx", dx: "kept of dx"})
    assert products(program, first)[-1] == program.values[dx].storage
    assert program.values[dw2].storage in products(program, first)
    assert products(program, rest) == [program.values[dw1].storage]


@pytest.mark.parametrize("seed", range(12))
def test_random_graphs_are_in_an_order_that_works_and_takes_no_more(seed):
    chance = random.Random(seed)

    def run(*tensors):
        known = list(tensors)
        for _ in range(chance.randrange(6, 24)):
            one, other = chance.choice(known), chance.choice(known)
            known.append(chance.choice([torch.matmul, torch.add, lambda a, b: torch.relu(a) * b])(one, other))
        return tuple(chance.sample(known[len(tensors) :], 4))

    program, results = planned(run, *[(WIDTH, WIDTH)] * 3)
    wanted = chance.sample(results, chance.randrange(1, 3))
    first, rest = parts(program, wanted)
    ran = type(program)(program.name, program.mesh, program.parameters, program.values, (*first, *rest))
    assert peak_bytes(ran) <= peak_bytes(program)
