"""Modules that were once wrong, found by random modules: each written as small as it gets."""

import torch
import tvm
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt


def same_as_on_one_device(mod, mesh, shardings, **options):
    """Run the module on small whole numbers, on one device and on a poisoned mesh."""
    torch.manual_seed(0)
    shapes = [[int(size) for size in var.struct_info.shape] for var in mod["main"].params]
    inputs = [torch.randint(-3, 4, shape).float() for shape in shapes]
    expected = mt.run_sequential(mod, inputs)
    run = mt.distribute_module(mod, mesh, shardings, poison=True, **options)
    torch.testing.assert_close(run(*inputs), expected, rtol=0, atol=0)
    return run


def test_a_function_of_which_nothing_is_used():
    """Its local function gave an empty tuple, whose type TVM prints but doesn't parse."""

    @I.ir_module
    class Module:
        @R.function(private=True)
        def unused(a: R.Tensor((4, 4), "float32")):
            b = R.nn.relu(a)
            return b

        @R.function
        def main(x: R.Tensor((4, 4), "float32")):
            cls = Module
            y = cls.unused(x)
            z = R.add(x, x)
            return z

    run = same_as_on_one_device(Module, {"x": 2}, {"x": {"x": 0}})
    text = run.local_module.script(show_meta=True)
    assert tvm.ir.structural_equal(tvm.script.from_source(text), run.local_module)


def test_a_collective_on_the_result_of_another_one():
    """The second one was started before the first one was waited for: both had been moved before the same product."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((2, 5, 1), "float32"), w: R.Tensor((5,), "float32")):
            rows = R.squeeze(x, axis=[2])
            large = R.reshape(rows, R.shape([1, 1, 2, 5, 1]))
            three = R.concat((large, large, large), axis=-3)
            product = R.matmul(rows, w)
            flat = R.reshape(three, R.shape([1, 6, 5, 1]))
            equal = R.equal(flat, three)
            return (rows, three, product, equal)

    same_as_on_one_device(Module, {"x": 2}, {"x": "S[1]", "three": {"x": 0}, "flat": {"x": 0}})


def test_a_constant_that_is_only_returned():
    """No operator touches it, so that it had no layout."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((4,), "float32")):
            y = R.add(x, x)
            return (y, R.const([1.0, 2.0, 3.0], "float32"))

    same_as_on_one_device(Module, {"x": 2}, {"x": {"x": 0}})


def test_a_dim_of_size_1_that_becomes_part_of_another():
    """An axis on it leaves all devices but one nothing to repeat: it is needed whole."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((5,), "float32")):
            least = R.min(x, axis=[0], keepdims=True)
            twice = R.repeat(least, 2, axis=0)
            return twice

    same_as_on_one_device(Module, {"x": 2}, {"least": {"x": 0}, "twice": {"x": 0}})


def test_a_partial_result_in_place_whose_dim_of_size_1_has_another_stride():
    """Torch took the tile, a view into the result, for something that overlaps with it in part."""

    @I.ir_module
    class Module:
        @R.function
        def main(x: R.Tensor((1, 5), "float32")):
            y = R.nn.relu(x)
            return y

    largest = {"sharding": {"z": 1}, "partial": {"x": "max"}}
    same_as_on_one_device(Module, {"x": 2, "y": 2, "z": 2}, {"y": largest})
