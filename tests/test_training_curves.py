"""A thin sample of `make curves`."""

import pytest

from tests.training_curves import LOSS, PARAMETERS, differences

_SAMPLE = {"MoE": "model 2", "ResNet": "data 3", "LLaMA": "zero 1"}


@pytest.mark.parametrize(("name", "mesh"), _SAMPLE.items())
def test_as_torch(name, mesh):
    ((_, loss, parameter),) = differences(name, [mesh], steps=8)
    assert loss <= LOSS
    assert parameter <= PARAMETERS
