"""Modules whose own annotations are for several device meshes (R.dist.annotate_sharding): each runs on all of them."""

import pytest
import torch
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from mesh_tensor import MeshTensorError


@I.ir_module
class There:
    """Over three meshes, and back to the first."""

    I.module_global_infos(
        {
            "mesh": [
                R.device_mesh((2, 2), I.Range(0, 4)),
                R.device_mesh((3,), I.Range(4, 7)),
                R.device_mesh((1,), I.Range(7, 8)),
            ]
        }
    )

    @R.function
    def main(
        x: R.Tensor((8, 6), "float32"),
        y: R.Tensor((8, 6), "float32"),
        a: R.Tensor((6, 6), "float32"),
        b: R.Tensor((6, 6), "float32"),
        c: R.Tensor((6, 6), "float32"),
    ):
        with R.dataflow():
            x0 = R.dist.annotate_sharding(x, device_mesh="mesh[0]", placement="S[0], R")
            a0 = R.dist.annotate_sharding(a, device_mesh="mesh[0]", placement="R, S[1]")
            h = R.matmul(x0, a0)
            h1 = R.dist.annotate_sharding(h, device_mesh="mesh[1]", placement="S[0]")
            g = R.tanh(R.matmul(h1, b))
            g2 = R.dist.annotate_sharding(g, device_mesh="mesh[2]", placement="R")
            k = R.matmul(g2, c)
            k0 = R.dist.annotate_sharding(k, device_mesh="mesh[0]", placement="S[0], S[1]")
            d = R.subtract(k0, y)
            loss = R.mean(R.multiply(d, d))
            R.output(loss)
        return loss


def by_torch(weights, x, y):
    a, b, c = weights.values()
    return ((torch.tanh(x @ a @ b) @ c - y) ** 2).mean()


OWN = mt.Schedule.of(["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 1F1 1B0 1B1", "2F0 2F1 2B0 2B1"])


@pytest.mark.parametrize("schedule", ["gpipe", OWN], ids=["gpipe", "own"])
def test_three_meshes_and_back(schedule):
    weights = {name: torch.randn(6, 6) / 2 for name in "abc"}
    run = mt.pipeline(There, weights=weights, microbatches=2, train=True, schedule=schedule, reduction="mean")
    assert [stage.mesh for stage in run.stages] == ["mesh0", "mesh1", "mesh2", "mesh0"]
    laid_out = [{name: str(layout) for name, layout in here.layouts.items()} for here in run.fragments]
    assert (laid_out[0]["x"], laid_out[0]["a"], laid_out[1]["h"], laid_out[2]["g"], laid_out[3]["k"]) == (
        "S[0], R", "R, S[1]", "S[0]", "R", "S[0], S[1]",
    )  # fmt: skip
    x, y = torch.randn(16, 6), torch.randn(16, 6)
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    loss = by_torch(leaves, x, y)
    torch.testing.assert_close(run(x, y), loss.detach())
    wanted = torch.autograd.grad(loss, list(leaves.values()))
    for name, gradient in zip(leaves, wanted, strict=True):
        torch.testing.assert_close(run.gradients()[name], gradient, rtol=1e-4, atol=1e-6, msg=name)


def test_meshes_of_other_names_and_sizes():
    weights = {name: torch.randn(6, 6) / 2 for name in "abc"}
    x, y = torch.randn(8, 6), torch.randn(8, 6)
    named = mt.pipeline(There, {"p": {"u": 2, "v": 2}, "q": {"u": 3}, "r": {"u": 1}}, weights=weights)
    torch.testing.assert_close(named(x, y), by_torch(weights, x, y))
    with pytest.raises(MeshTensorError, match=r'annotated for Mesh\({"axis0": 2, "axis1": 2}\), not for Mesh\({"u": 4'):
        mt.pipeline(There, {"p": {"u": 4, "v": 1}, "q": {"u": 3}, "r": {"u": 1}}, weights=weights)
    with pytest.raises(MeshTensorError, match="annotations are not for the 2 meshes of the topology"):
        mt.pipeline(There, {"p": {"u": 2, "v": 2}, "q": {"u": 3}}, weights=weights)
    with pytest.raises(MeshTensorError, match=r"4 stages on 3 meshes(?s:.*)a Schedule of your own"):
        mt.pipeline(There, weights=weights, microbatches=2, train=True, reduction="mean")


@I.ir_module
class Joined:
    """Branches on meshes that share a device, joined on the first; weights alone say where they are multiplied."""

    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((2,), I.Range(1, 3))]})

    @R.function
    def main(
        x: R.Tensor((8, 6), "float32"), a: R.Tensor((6, 6), "float32"), b: R.Tensor((6, 6), "float32")
    ) -> R.Tensor((8, 6), "float32"):
        with R.dataflow():
            a0 = R.dist.annotate_sharding(a, device_mesh="mesh[0]", placement="S[1]")
            b1 = R.dist.annotate_sharding(b, device_mesh="mesh[1]", placement="S[0]")
            left = R.matmul(x, a0)
            right = R.matmul(x, b1)
            both = R.add(left, right)
            back = R.dist.annotate_sharding(both, device_mesh="mesh[0]", placement="R")
            out = R.multiply(back, left)
            R.output(out)
        return out


def test_branches_of_annotated_weights():
    weights, x = {name: torch.randn(6, 6) / 2 for name in "ab"}, torch.randn(8, 6)
    run = mt.pipeline(Joined, weights=weights)
    assert [(stage.mesh, stage.params) for stage in run.stages] == [
        ("mesh0", ("x", "a")), ("mesh1", ("x", "b")), ("mesh0", ()),
    ]  # fmt: skip
    assert run.topology.devices("mesh1") == (1, 2)
    left = x @ weights["a"]
    torch.testing.assert_close(run(x), (left + x @ weights["b"]) * left, rtol=1e-4, atol=1e-5)


@I.ir_module
class Inside:
    """Annotated in functions that are called, not where they are called."""

    I.module_global_infos({"mesh": [R.device_mesh((2,), I.Range(0, 2)), R.device_mesh((2,), I.Range(2, 4))]})

    @R.function(private=True)
    def first(x: R.Tensor((8, 6), "float32")) -> R.Tensor((8, 6), "float32"):
        with R.dataflow():
            made = R.dist.annotate_sharding(R.tanh(x), device_mesh="mesh[0]", placement="S[0]")
            R.output(made)
        return made

    @R.function(private=True)
    def second(x: R.Tensor((8, 6), "float32")) -> R.Tensor((8, 6), "float32"):
        with R.dataflow():
            made = R.dist.annotate_sharding(R.exp(x), device_mesh="mesh[1]", placement="S[0]")
            R.output(made)
        return made

    @R.function
    def main(x: R.Tensor((8, 6), "float32")) -> R.Tensor((8, 6), "float32"):
        cls = Inside
        with R.dataflow():
            one = cls.first(x)
            two = cls.second(one)
            R.output(two)
        return two


def test_annotations_inside_of_what_is_called():
    with pytest.raises(MeshTensorError, match=r"no stages are stated(?s:.*)annotate what 'main' passes to it"):
        mt.pipeline(Inside)
    with pytest.raises(MeshTensorError, match="mt.pipeline runs a module on several meshes"):
        mt.distribute_module(Inside)
