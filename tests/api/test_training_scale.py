"""The loss scale of the next step."""

from mesh_tensor.api.training_optimizer import LossScale


def test_grows_after_an_interval_and_halves_after_an_overflow():
    scale = LossScale(8.0, dynamic=True, interval=3)
    for _ in range(2):
        scale = scale.after_step()
    assert (scale.value, scale.good) == (8.0, 2)
    scale = scale.after_step()
    assert (scale.value, scale.good) == (16.0, 0)
    scale = scale.after_step().after_overflow()
    assert (scale.value, scale.good) == (8.0, 0)


def test_falls_no_lower_than_one():
    scale = LossScale(2.0, dynamic=True).after_overflow()
    assert (scale.value, scale.can_fall) == (1.0, False)


def test_a_number_stays():
    scale = LossScale.make(8)
    assert scale.after_step() == scale
    assert not scale.can_fall
