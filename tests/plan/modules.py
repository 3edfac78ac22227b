"""Small modules for the tests of the graph level, and what is found in their plans."""

from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor.program.plan_module import plan_module
from mesh_tensor.program.steps import CollectiveStep


def planned(mod, mesh, shardings, **options):
    """The plan of `main`, annotated so."""
    mod = mt.annotate_module(mod, mesh, shardings, **options)
    stated = mt.read_module_annotations(mod)
    return plan_module(stated.module, "main", stated.mesh, stated.annotations)


def layouts(plan):
    """Name of a value -> its layout, as text."""
    return {value.name: str(layout) for value, layout in plan.layouts.of.items()}


def kinds(plan):
    """The collectives, in order."""
    return [step.kind for step in plan.made.program.steps if isinstance(step, CollectiveStep)]


def function(build, **shapes):
    """A module whose `main` takes float32 tensors of these shapes and returns what `build(emit, *vars)` gives."""
    variables = [relax.Var(name, relax.TensorStructInfo(shape, "float32")) for name, shape in shapes.items()]
    builder = relax.BlockBuilder()
    with builder.function("main", variables):
        with builder.dataflow():
            result = builder.emit_output(build(builder.emit, *variables))
        builder.emit_func_output(result)
    return builder.get()


@I.ir_module
class Heads:
    """Batch and heads are merged and taken apart again."""

    @R.function
    def main(x: R.Tensor((2, 6, 12), "float32"), w: R.Tensor((12, 12), "float32")) -> R.Tensor((2, 6, 12), "float32"):
        with R.dataflow():
            projected = R.matmul(x, w)
            heads = R.reshape(projected, R.shape([2, 6, 4, 3]))
            turned = R.permute_dims(heads, axes=[0, 2, 1, 3])
            merged = R.reshape(turned, R.shape([8, 6, 3]))
            scaled = R.multiply(merged, R.const(2.0, "float32"))
            apart = R.reshape(scaled, R.shape([2, 4, 6, 3]))
            back = R.permute_dims(apart, axes=[0, 2, 1, 3])
            result = R.reshape(back, R.shape([2, 6, 12]))
            R.output(result)
        return result
