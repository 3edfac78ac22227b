"""Manual computations: collectives on tiles, against the devices one by one, and what they send."""

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt

from .modules import kinds, layouts

op, comm = relax.op, mt.comm


def manual_module(body, shapes, mesh, ins, outs, axes=None, more=lambda emit, x: x):
    """main: `more` of what `body(emit, *tiles)` makes of the tiles of tensors of these shapes."""
    mesh = mt.Mesh(mesh)
    manual = mt.Mesh({axis: mesh.size(axis) for axis in (axes or mesh)})
    tiles = [mt.Sharding.make(manual, len(s), one).tile_shape(s) for s, one in zip(shapes, ins, strict=True)]
    builder = relax.BlockBuilder()
    params = [relax.Var(f"t{n}", relax.TensorStructInfo(tile, "float32")) for n, tile in enumerate(tiles)]
    with builder.function("body", params, private=True):
        builder.emit_func_output(body(builder.emit, *params))
    variables = [relax.Var(f"x{n}", relax.TensorStructInfo(shape, "float32")) for n, shape in enumerate(shapes)]
    callee = builder.get().get_global_var("body")
    with builder.function("main", variables):
        with builder.dataflow():
            made = builder.emit(mt.manual_computation(callee, variables, mesh, ins, outs, axes=axes))
            result = builder.emit_output(more(builder.emit, made))
        builder.emit_func_output(result)
    return builder.get()


def check(mod, mesh, stated, *shapes):
    """Distributed, with poison, as on one device."""
    torch.manual_seed(0)
    inputs = [torch.randn(shape) for shape in shapes]
    run = mt.distribute_module(mod, mesh, stated, poison=True)
    torch.testing.assert_close(run(*inputs), mt.run_sequential(mod, inputs), rtol=1e-4, atol=1e-4)
    return run, inputs


X = {"x": 4}
RING = [(n, (n + 1) % 4) for n in range(4)]
# name: the collective, where results lie, what numpy makes of the rows of devices, and the bytes that are received
COLLECTIVES = {
    "sum": (lambda t: comm.all_reduce(t, X), {}, lambda d: d.sum(0), 192),
    "max": (lambda t: comm.all_reduce(t, X, "max"), {}, lambda d: d.max(0), 192),
    "avg": (lambda t: comm.all_reduce(t, X, "avg"), {}, lambda d: d.mean(0), 192),
    "gather": (lambda t: comm.all_gather(t, X, 1), {}, lambda d: np.concatenate(list(d), 1), 384),
    "reduce_scatter": (lambda t: comm.reduce_scatter(t, X, 1), {"x": 1}, lambda d: d.sum(0), 96),
    "all_to_all": (lambda t: comm.all_to_all(t, X, 1, 0), {"x": 1}, lambda d: d.reshape(8, 16), 96),
    "one dim": (
        lambda t: comm.all_to_all(t, X, 1, 1),
        {"x": 0},
        lambda d: d.reshape(4, 2, 4, 4).transpose(2, 1, 0, 3).reshape(8, 16),
        96,
    ),
    "ring": (lambda t: comm.permute(t, X, RING), {"x": 0}, lambda d: np.roll(d, 1, 0).reshape(8, 16), 128),
    "few": (
        lambda t: comm.permute(t, X, [(0, 2), (3, 1)]),
        {"x": 0},
        lambda d: np.stack([d[0] * 0, d[3], d[0], d[0] * 0]).reshape(8, 16),
        128,
    ),
    "nothing": (lambda t: comm.permute(t, X, []), {"x": 0}, lambda d: d.reshape(8, 16) * 0, 0),
    "broadcast": (lambda t: comm.broadcast(t, X, 2), {}, lambda d: d[2], 128),
    "scatter": (lambda t: comm.scatter(t, X, 1, 3), {"x": 1}, lambda d: d[3], 32),
}


@pytest.mark.parametrize("name", COLLECTIVES)
def test_collectives(name):
    make, out, expected, received = COLLECTIVES[name]
    mod = manual_module(lambda emit, t: emit(make(t)), [(8, 16)], X, [{"x": 0}], out)
    run, (x,) = check(mod, X, {}, (8, 16))
    wanted = torch.tensor(np.ascontiguousarray(expected(x.numpy().reshape(4, 2, 16))))
    torch.testing.assert_close(run(x), wanted, rtol=1e-5, atol=1e-5)
    # a result that all devices have may still be in parts, which nobody gathers
    assert sum(step.bytes for step in run.program.collectives) == (0 if name == "gather" else received)


@pytest.mark.parametrize("axes", [{"x": 2, "y": 3}, {"y": 3}, {"x": 2}])
@pytest.mark.parametrize("tiles", [{"x": 1, "y": 0}, {"y": 1}])
def test_one_device_sends(axes, tiles):
    """Every other device gets what it needs from that one, once: of a broadcast the whole, of n in all (n - 1) of it;
    of a scatter its part. Where tiles are the same along an axis, nothing crosses that."""
    mesh, devices = {"x": 2, "y": 3}, mt.Mesh(axes).num_devices
    apart = {axis: dim for axis, dim in tiles.items() if axis not in axes}
    tile = 4 * 12 * 36 // mt.Mesh({axis: mesh[axis] for axis in tiles}).num_devices
    sent = tile if {*axes} & {*tiles} else 0
    for root in (0, devices - 1):
        for kind, out, received in (
            (lambda t, root=root: comm.broadcast(t, axes, root), apart, sent),
            (lambda t, root=root: comm.scatter(t, axes, 1, root), apart | dict.fromkeys(axes, 1), sent // devices),
        ):
            made = lambda emit, t, kind=kind: emit(op.negative(emit(kind(emit(op.exp(t))))))  # noqa: E731
            run, _ = check(manual_module(made, [(12, 36)], mesh, [tiles], out), mesh, {}, (12, 36))
            assert sum(step.bytes for step in run.program.collectives) == received


def test_a_collective_of_megatron():
    """A product split along what it sums over: one all-reduce, and nothing else moves."""
    mod = manual_module(
        lambda emit, x, w: emit(comm.all_reduce(emit(op.matmul(x, w)), {"y": 2})),
        [(8, 6), (6, 4)],
        {"x": 2, "y": 2},
        [{"x": 0, "y": 1}, {"y": 0}],
        {"x": 0},
        more=lambda emit, y: emit(op.nn.relu(y)),
    )
    run, (x, w) = check(mod, {"x": 2, "y": 2}, {}, (8, 6), (6, 4))
    torch.testing.assert_close(run(x, w), torch.relu(x @ w), rtol=1e-4, atol=1e-4)
    assert kinds(run.plan) == ["all_reduce"]
    assert layouts(run.plan)["x0"] == "S[0], S[2]"  # over the atoms 2 x 4, 2 x 3
    assert "all_reduce(sum)" in run.explain()


def test_free_axes_split_what_is_inside():
    """x is manual; y, which is stated of a weight, splits columns in the body: nothing is sent over it."""
    mod = manual_module(
        lambda emit, x, w: emit(comm.all_reduce(emit(op.matmul(x, w)), {"x": 2})),
        [(4, 6), (6, 8)],
        {"x": 2, "y": 2},
        [{"x": 1}, {"x": 0}],
        {},
        axes=["x"],
    )
    run, _ = check(mod, {"x": 2, "y": 2}, {"x1": {"x": 0, "y": 1}}, (4, 6), (6, 8))
    assert kinds(run.plan) == ["all_reduce"]
    assert sum(step.bytes for step in run.program.collectives) == 4 * 4 * 4
    run, _ = check(mod, {"x": 2, "y": 2}, {"body.t1": {"y": 1}}, (4, 6), (6, 8))
    assert sum(step.bytes for step in run.program.collectives) == 4 * 4 * 4


@I.ir_module
class Nested:
    @R.function(private=True)
    def inner(x: R.Tensor((4, 2), "float32")) -> R.Tensor((4, 2), "float32"):
        place = R.astype(comm.axis_index({"x": 2, "y": 2}), "float32")
        return R.multiply(comm.all_reduce(x, {"x": 2}), place)

    @R.function(private=True)
    def body(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        cls = Nested
        y = mt.manual_computation(cls.inner, (x,), {"y": 2}, [{"y": 1}], {"y": 1})
        return R.add(y, x)

    @R.function
    def main(x: R.Tensor((8, 4), "float32")) -> R.Tensor((8, 4), "float32"):
        cls = Nested
        return mt.manual_computation(cls.body, (x,), {"x": 2}, [{"x": 0}], {"x": 0})


@pytest.mark.parametrize("mesh", [{"x": 2, "y": 2}, {"y": 2, "z": 2, "x": 2}])
def test_nested(mesh):
    run, (x,) = check(Nested, mesh, {}, (8, 4))
    summed = x[:4] + x[4:]
    left, right = summed[:, :2], summed[:, 2:]
    wanted = torch.cat([torch.cat([left * 0, right * 1], 1), torch.cat([left * 2, right * 3], 1)]) + x
    torch.testing.assert_close(run(x), wanted)
    again = tvm.script.from_source(Nested.script())
    tvm.ir.assert_structural_equal(again, Nested)


@I.ir_module
class Ccl:
    """R.ccl goes over all manual axes; sizes are symbolic."""

    @R.function(private=True)
    def body(x: R.Tensor(("m", 4), "float32"), w: R.Tensor((4, 6), "float32")) -> R.Tensor(("m", 3), "float32"):
        h = R.ccl.allreduce(R.matmul(x, w), "sum", True)
        g = R.ccl.broadcast_from_worker0(h)
        return R.permute_dims(R.ccl.scatter_from_worker0(R.permute_dims(R.add(h, g)), 2, 0))

    @R.function
    def main(x: R.Tensor(("n", 8), "float32"), w: R.Tensor((8, 6), "float32")):
        cls = Ccl
        with R.dataflow():
            y = mt.manual_computation(cls.body, (x, w), {"x": 2}, [{"x": 1}, {"x": 0}], {"x": 1})
            z = R.negative(y)
            R.output(z)
        return z


def test_ccl_with_symbolic_sizes():
    run = mt.distribute_module(Ccl, {"x": 2, "y": 2}, {"x": {"y": 0}}, poison=True)
    w = torch.randn(8, 6)
    for n in (4, 5, 1):
        x = torch.randn(n, 8)
        torch.testing.assert_close(run(x, w), -2 * (x @ w), rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(mt.run_sequential(Ccl, [x, w]), -2 * (x @ w), rtol=1e-4, atol=1e-4)


def test_results_that_are_partial_and_several():
    """What is stated to be partial is added up once."""

    def body(emit, x):
        return emit(relax.Tuple([emit(op.sum(x, [0])), emit(comm.all_gather(x, {"x": 3}))]))

    outs = [{"sharding": {}, "partial": {"x": "sum"}}, {}]
    mod = manual_module(body, [(6, 4)], {"x": 3}, [{"x": 0}], outs)
    x = torch.randn(6, 4)
    summed, whole = mt.distribute_module(mod, {"x": 3}, {}, poison=True)(x)
    torch.testing.assert_close(summed, x.sum(0))
    torch.testing.assert_close(whole, x)
    torch.testing.assert_close(mt.run_sequential(mod, [x])[0], x.sum(0))


@I.ir_module
class Chosen:
    """Each device takes its own branch; TIR runs on tiles."""

    @R.function(private=True)
    def body(x: R.Tensor((4, 4), "float32")) -> R.Tensor((4, 4), "float32"):
        first = R.equal(comm.axis_index({"x": 2}), R.const(0, "int64"))
        if first:  # noqa: SIM108  (TVMScript has no other form)
            y = comm.all_reduce(x, {"x": 2})
        else:
            y = R.negative(x)
        return y

    @R.function
    def main(x: R.Tensor((8, 4), "float32")):
        cls = Chosen
        y = mt.manual_computation(cls.body, (x,), {"x": 2}, [{"x": 0}], {"x": 0})
        return y


def test_branches_by_device():
    run, (x,) = check(Chosen, {"x": 2}, {}, (8, 4))
    torch.testing.assert_close(run(x), torch.cat([x[:4] + x[4:], -x[4:]]))


def test_saved(tmp_path):
    mt.save_module(Nested, tmp_path / "module.json")
    check(mt.load_module(tmp_path / "module.json"), {"x": 2, "y": 2}, {}, (8, 4))


@pytest.mark.parametrize(("shape", "dim"), [((4, 0), 0), ((0, 4), 0), ((2, 4, 0), 1), ((4, 0), 1)])
def test_tensors_without_elements(shape, dim):
    check(manual_module(lambda emit, x: op.add(x, x), [shape], {"x": 2}, [{"x": dim}], {"x": dim}), {"x": 2}, {}, shape)
    reduced = manual_module(lambda emit, x: comm.all_reduce(x, {"x": 2}), [shape], {"x": 2}, [{"x": dim}], {})
    check(reduced, {"x": 2}, {}, shape)
