"""The catalogue itself: that its cases say what they have to, and that their checks can fail."""

import pytest
import torch

from kernels.catalogue import CASES
from kernels.catalogue.case import parameter_names

from .adversarial import ADVERSARIAL_CASES

ALL_CASES = (*CASES, *ADVERSARIAL_CASES)
BY_NAME = {case.name: case for case in ALL_CASES}


def test_names_are_unique():
    assert len(BY_NAME) == len(ALL_CASES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_sizes_begin_even_and_end_uneven(case):
    assert all(extent % 2 == 0 for extent in case.sizes[0].values())
    assert any(extent % 2 == 1 for extent in case.sizes[-1].values())


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.name)
def test_outputs_are_parameters_and_inputs_fill_the_others(case):
    names = parameter_names(case.build(**case.sizes[0]))
    assert set(case.inouts) <= set(case.outputs) <= set(names)
    read = [name for name in names if name not in case.outputs or name in case.inouts]
    assert len(case.make_inputs(case.sizes[0])) == len(read)


def test_inputs_depend_on_the_seed_only():
    case = BY_NAME["matmul"]
    first, again, other = (case.make_inputs(case.sizes[0], seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], other[0])


def test_an_output_that_is_not_written_fails_the_check():
    case = BY_NAME["matmul"]
    func, inputs = case.build(**case.sizes[0]), case.make_inputs(case.sizes[0])
    with pytest.raises(AssertionError, match=r"(?s)matmul, C: .*Mismatched elements: 1152 / 1152"):
        case.check(case.arguments(func, inputs), case.expected(inputs))


def test_an_error_of_one_percent_in_one_element_fails_the_check():
    case = BY_NAME["softmax"]
    expected = case.expected(case.make_inputs(case.sizes[0]))
    actual = {name: tensor.clone() for name, tensor in expected.items()}
    actual["Y"].view(-1)[actual["Y"].argmax()] *= 1.01
    with pytest.raises(AssertionError, match=r"(?s)softmax, Y: .*Mismatched elements: 1 / 1152"):
        case.check(actual, expected)
