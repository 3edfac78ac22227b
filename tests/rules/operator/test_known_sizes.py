"""Shapes that are values, and results whose size the data says."""

import numpy
import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt


@I.ir_module
class Shapes:
    @R.function
    def main(x: R.Tensor((6, 4), "float32"), y: R.Tensor((4, 6), "float32")):
        shape = R.shape_of(y)
        turned = R.reshape(x, shape)
        sizes = R.shape_to_tensor(shape)
        return turned, sizes


def test_shapes_of_known_sizes_are_literals():
    x, y = torch.randn(6, 4), torch.randn(4, 6)
    run = mt.distribute_module(Shapes, {"x": 2}, {"x": {"x": 0}}, poison=True)
    for turned, sizes in (run(x, y), mt.run_sequential(Shapes, (x, y))):
        torch.testing.assert_close(torch.as_tensor(turned), x.reshape(4, 6))
        assert torch.as_tensor(sizes).tolist() == [4, 6]


@I.ir_module
class Slice:
    @R.function
    def main(x: R.Tensor((6,), "float32"), begin: R.Tensor((1,), "int64"), end: R.Tensor((1,), "int64")):
        return R.dynamic_strided_slice(x, begin, end, begin)


@I.ir_module
class Nonzero:
    @R.function
    def main(x: R.Tensor((6,), "float32")):
        return R.nonzero(x)


@pytest.mark.parametrize(
    ("module", "name", "fix"), [(Slice, "dynamic_strided_slice", "R.take"), (Nonzero, "nonzero", "R.where")]
)
def test_sizes_that_the_data_says_are_refused_by_name(module, name, fix):
    with pytest.raises(mt.MeshTensorError) as error:
        mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}})
    message = str(error.value)
    assert f"how large the result of R.{name} is depends on the data" in message
    assert "where: main." in message
    assert "R.match_cast to known sizes" in message
    assert fix in message


def test_one_device_takes_what_the_data_says():
    x = torch.tensor([0.0, 1, 2, 0, 3, 4])
    torch.testing.assert_close(mt.run_sequential(Nonzero, [x]), x.nonzero().t())
    made = mt.run_sequential(Slice, [x, torch.tensor([2]), torch.tensor([6])])
    torch.testing.assert_close(made, x[2:6:2])


@I.ir_module
class Said:
    """Three of twelve are not 0, there are four different rows and five different numbers, and two rows are taken."""

    @R.function
    def main(x: R.Tensor((6, 2), "float32"), begin: R.Tensor((2,), "int64"), end: R.Tensor((2,), "int64")):
        places = R.nonzero(x)
        three = R.match_cast(places, R.Tensor((2, 3), "int64"))
        rows = R.match_cast(
            R.unique(x, True, True, True, True, axis=0),
            R.Tuple(
                R.Tensor((4, 2), "float32"), R.Tensor((4,), "int64"), R.Tensor((6,), "int64"), R.Tensor((4,), "int64")
            ),
        )
        numbers = R.match_cast(R.unique(x), R.Tensor((4,), "float32"))
        cut = R.dynamic_strided_slice(x, begin, end, R.const([2, 1], "int64"))
        two = R.match_cast(cut, R.Tensor((2, 2), "float32"))
        return R.add(two, two), three, rows, numbers


def said(x, begin, end):
    rows, first, inverse, counts = numpy.unique(x.numpy(), True, True, True, axis=0)
    two = x[int(begin[0]) : int(end[0]) : 2]
    return 2 * two, x.nonzero().t(), *map(torch.tensor, (rows, first, inverse.reshape(-1), counts)), x.unique()


@pytest.mark.parametrize("poison", [True, False])
@pytest.mark.parametrize("mesh", [{"x": 2}, {"x": 4}])
def test_sizes_that_the_module_says(mesh, poison):
    x = torch.zeros(6, 2)
    x[1, 0], x[3, 1], x[4, 1] = 3.0, -1.0, 7.0
    given = x, torch.tensor([1, 0]), torch.tensor([5, 2])
    run = mt.distribute_module(Said, mesh, {"x": {"x": 0}}, poison=poison)
    for made in (run(*given), mt.run_sequential(Said, list(given))):
        flat = [leaf for item in made for leaf in (item if isinstance(item, tuple) else (item,))]
        for one, wanted in zip(flat, said(*given), strict=True):
            torch.testing.assert_close(torch.as_tensor(one), wanted)
    for wrong, facts in (
        ((x + 2, *given[1:]), "R.nonzero gives (2, 12), but the module says (2, 3)"),
        ((x, given[1], torch.tensor([6, 2])), "R.dynamic_strided_slice gives (3, 2), but the module says (2, 2)"),
    ):
        with pytest.raises(mt.MeshTensorError) as error:
            run(*wrong)
        assert facts in str(error.value)
        assert "what R.match_cast says" in str(error.value)
    torch.testing.assert_close(torch.as_tensor(run(*given)[1]), given[0].nonzero().t())  # and goes on
