"""Shapes that are values, and results whose size the data says."""

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
    for make in (
        lambda: mt.distribute_module(module, {"x": 2}, {"x": {"x": 0}}),
        lambda: mt.run_sequential(
            module, [torch.randn(6), torch.tensor([1]), torch.tensor([3])][: 3 if name[0] == "d" else 1]
        ),
    ):
        with pytest.raises(mt.MeshTensorError) as error:
            make()
        message = str(error.value)
        assert f"how large the result of R.{name} is depends on the data" in message
        assert "where: main." in message
        assert fix in message
