"""Gradients of manual computations, beside torch's of what all devices do."""

import random

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from mesh_tensor.rules.operator.manual import devices_call

from .test_manual import manual_module
from .test_manual_failures import refused

op, comm = relax.op, mt.comm
MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}]
SIZE = 12  # of both dims


class Devices:
    """A random program on tiles: `emit`ted into a body, and run by torch on the tiles of all devices."""

    def __init__(self, rng, mesh):
        self.rng, self.mesh, self.steps = rng, mt.Mesh(mesh), []
        self.layout = {axis: rng.choice([0, 1]) for axis in mesh if rng.random() < 0.8}
        self.weight = {axis: rng.choice([0, 1]) for axis in mesh if rng.random() < 0.4}
        shape = self.tile(self.layout)
        for _ in range(rng.randint(2, 5)):
            shape = self.draw(shape)
        self.shape = shape

    def tile(self, layout):
        return list(mt.Sharding.make(self.mesh, 2, layout).tile_shape((SIZE, SIZE)))

    def draw(self, shape):
        kinds = ["sin", "weight", "all_reduce", "all_gather", "reduce_scatter", "all_to_all", "permute", "broadcast"]
        kind = self.rng.choice([*kinds, "scatter", "index"])
        axes = {a: self.mesh.size(a) for a in self.mesh if self.rng.random() < 0.7} or {"x": self.mesh.size("x")}
        count, dim, other = mt.Mesh(axes).num_devices, self.rng.choice([0, 1]), self.rng.choice([0, 1])
        divides = shape[dim] % count == 0
        if kind in ("reduce_scatter", "all_to_all", "scatter") and not divides:
            kind = "sin"
        made = list(shape)
        if kind in ("all_gather", "all_to_all") and shape[other if kind == "all_to_all" else dim] * count > 60:
            kind = "sin"
        if kind in ("reduce_scatter", "all_to_all", "scatter"):
            made[dim] //= count
        if kind in ("all_gather", "all_to_all"):
            made[other if kind == "all_to_all" else dim] *= count
        axis = self.rng.choice(list(axes))
        size = self.mesh.size(axis)
        pairs = [
            p for p in zip(range(size), self.rng.sample(range(size), size), strict=True) if self.rng.random() < 0.7
        ]
        reduction = self.rng.choice(["sum", "avg", "max", "min", "prod"])
        root = self.rng.randrange(count)
        self.steps.append((kind, axes, dim, other, axis, pairs, reduction, root))
        return made

    def body(self, emit, t, w):
        scale = emit(op.mean(w))
        for kind, axes, dim, other, axis, pairs, reduction, root in self.steps:
            one = {axis: axes[axis]}
            made = {
                "sin": lambda t: op.sin(t),
                "weight": lambda t, scale=scale: op.multiply(t, scale),
                "all_reduce": lambda t: comm.all_reduce(t, axes, reduction),  # noqa: B023
                "all_gather": lambda t: comm.all_gather(t, axes, dim),  # noqa: B023
                "reduce_scatter": lambda t: comm.reduce_scatter(t, axes, dim, "sum"),  # noqa: B023
                "all_to_all": lambda t: comm.all_to_all(t, axes, dim, other),  # noqa: B023
                "permute": lambda t: comm.permute(t, one, pairs),  # noqa: B023
                "broadcast": lambda t: comm.broadcast(t, axes, root),  # noqa: B023
                "scatter": lambda t: comm.scatter(t, axes, dim, root),  # noqa: B023
                "index": lambda t: op.multiply(t, emit(op.astype(emit(comm.axis_index(axes)), "float32"))),  # noqa: B023
            }[kind](t)
            t = emit(made)
        return emit(comm.all_reduce(emit(op.sum(emit(op.sin(t)))), self.mesh.shape))

    def tiles(self, x, layout):
        sharding, made = mt.Sharding.make(self.mesh, 2, layout), []
        for rank in range(self.mesh.num_devices):
            start = sharding.tile_offset((SIZE, SIZE), rank)
            made.append(
                x[tuple(slice(a, a + n) for a, n in zip(start, sharding.tile_shape((SIZE, SIZE)), strict=True))]
            )
        return made

    def group(self, rank, axes):
        """The ranks of a device's group, in order, and its place there."""
        group, at = mt.Mesh(axes), self.mesh.coordinate(rank)
        ranks = [self.mesh.rank({**at, **group.coordinate(n)}) for n in range(group.num_devices)]
        return ranks, ranks.index(rank)

    def reference(self, x, w):
        held, scales = self.tiles(x, self.layout), [tile.mean() for tile in self.tiles(w, self.weight)]
        reduce = {"sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "max": lambda x: x.amax(0)}
        reduce |= {"min": lambda x: x.amin(0), "prod": lambda x: x.prod(0)}
        for kind, axes, dim, other, axis, pairs, reduction, root in self.steps:
            made = []
            for rank in range(len(held)):
                ranks, me = self.group(rank, {axis: axes[axis]} if kind == "permute" else axes)
                tiles, n = [held[r] for r in ranks], len(ranks)
                sources = {target: source for source, target in pairs}
                made.append(
                    {
                        "sin": lambda: held[rank].sin(),  # noqa: B023
                        "weight": lambda: held[rank] * scales[rank],  # noqa: B023
                        "all_reduce": lambda: reduce[reduction](torch.stack(tiles)),  # noqa: B023
                        "all_gather": lambda: torch.cat(tiles, dim),  # noqa: B023
                        "reduce_scatter": lambda: sum(tiles).chunk(n, dim)[me],  # noqa: B023
                        "all_to_all": lambda: torch.cat([t.chunk(n, dim)[me] for t in tiles], other),  # noqa: B023
                        "permute": lambda: tiles[sources[me]] if me in sources else held[rank] * 0,  # noqa: B023
                        "broadcast": lambda: tiles[root],  # noqa: B023
                        "scatter": lambda: tiles[root].chunk(n, dim)[me],  # noqa: B023
                        "index": lambda: held[rank] * me,  # noqa: B023
                    }[kind]()
                )
            held = made
        return sum(tile.sin().sum() for tile in held)


def check_random(seed):
    """Loss and gradients, on one device and on a mesh, of any layouts outside, as torch's; False: nothing to train."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    devices = Devices(rng, mesh)
    mod = manual_module(devices.body, [(SIZE, SIZE)] * 2, mesh, [devices.layout, devices.weight], {})
    torch.manual_seed(seed)
    x, w = (torch.rand(SIZE, SIZE, dtype=torch.float64).float().requires_grad_() for _ in range(2))
    loss = devices.reference(x, w)
    wanted = torch.autograd.grad(loss, [x, w], allow_unused=True, materialize_grads=True)
    names = [name for name, gradient in zip(("x0", "x1"), wanted, strict=True) if gradient.any()]
    if "x0" not in names:
        return False
    made = mt.gradient(mod, names)
    stated = {name: {axis: rng.choice([0, 1]) for axis in mesh if rng.random() < 0.5} for name in ("x0", "x1")}
    run, given = mt.distribute_module(made, mesh, stated, poison=True), [x.detach(), w.detach()]
    for found, gradients in (run(*given), mt.run_sequential(made, given)):
        torch.testing.assert_close(found, loss.detach(), rtol=1e-4, atol=1e-4)
        kept = [one for one in wanted if one.any()]
        for mine, theirs in zip(gradients, kept, strict=True):
            torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * float(theirs.abs().max()) + 1e-5)
    return True


@pytest.mark.parametrize("seed", range(6))
def test_random_programs(seed):
    assert sum(check_random(3 * seed + n) for n in range(3)) > 1


@pytest.mark.parametrize("seed", [0, 2])
def test_calls_that_torch_records(seed):
    """The backward is a module of its own, to which what devices have of their own is handed."""
    rng = random.Random(seed)
    mesh = rng.choice(MESHES)
    devices = Devices(rng, mesh)
    mod = manual_module(devices.body, [(SIZE, SIZE)] * 2, mesh, [devices.layout, devices.weight], {})
    given = [torch.rand(SIZE, SIZE, requires_grad=True) for _ in range(2)]
    ways = devices.reference, mt.distribute_module(mod, mesh, {})
    theirs, mine = [torch.autograd.grad(way(*given), given, allow_unused=True) for way in ways]
    torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3)


def test_bytes():
    """The gradient of all-gather is a reduce-scatter (an all-to-all and a sum take as much), of reduce-scatter an
    all-gather: a product as Megatron splits it with sequences takes as much back as there (and x is gathered again
    for the gradient of its weight, as weights are)."""
    tile, mesh = 4 * 8 * 6, {"x": 4}

    def body(emit, x, up, down):
        hidden = emit(op.nn.relu(emit(op.matmul(emit(comm.all_gather(x, mesh, 0)), up))))
        return emit(comm.reduce_scatter(emit(op.matmul(hidden, down)), mesh, 0))

    def loss(emit, y):
        return emit(op.sum(emit(op.sin(y))))

    layouts = [{"x": 0}, {"x": 1}, {"x": 0}]
    mod = manual_module(body, [(8, 6), (6, 8), (8, 6)], mesh, layouts, {"x": 0}, more=loss)
    run = mt.distribute_module(mt.gradient(mod), mesh, {f"x{n}": one for n, one in enumerate(layouts)})
    sent = [(step.src, step.bytes) for step in run.program.collectives if step.bytes > 16]
    assert dict(sent).keys() == {"gv_1", "gv4", "d_8", "d_gv_1"}
    assert {size for _, size in sent} == {tile * 3 // 4}


def flat(name, given, axes, made, more=lambda emit, x: x):
    """main(x): what leads into what devices have of their own or out of it, by itself."""
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorStructInfo(given, "float32"))
    with builder.function("main", [x]):
        builder.emit_func_output(more(builder.emit, builder.emit(devices_call(name, x, axes, made))))
    return builder.get()


def test_what_gradients_write_is_checked():
    def distributed(mod, mesh):
        return lambda: mt.distribute_module(mod, mesh, {})

    own = flat("mesh.per_device", (2, 4), ("x",), (4,))
    refused(distributed(own, {"x": 2}), "devices along 'x' may have different values of 'gv'", "results of 'main'")
    refused(distributed(own, {"x": 4}), "axis 'x' of 2 devices has 4 in Mesh")
    refused(distributed(own, {"y": 2}), "axis 'x' of 2 devices is none of Mesh")
    out = flat("mesh.all_devices", (4,), ("x",), (2, 4))
    refused(distributed(out, {"x": 2}), "devices do not have their own along 'x'", "main.gv")
    twice = flat(
        "mesh.per_device", (2, 2), ("x",), (2,), lambda emit, x: emit(devices_call("mesh.per_device", x, ("x",), ()))
    )
    refused(distributed(twice, {"x": 2}), "devices have their own along 'x'")
    two = flat("mesh.per_device", (2, 2, 4), ("y", "x"), (4,))
    refused(distributed(two, {"x": 2, "y": 2}), "the axes are 'y', 'x', but 'x', 'y' in the mesh")


def test_axes_of_one_module():
    """Two manual computations that no mesh has the axes of."""

    def gradient(first, second):
        mod = manual_module(lambda emit, t: emit(op.sin(t)), [(8,)], first, [{"x": 0}], {"x": 0})
        builder, x = relax.BlockBuilder(mod), relax.Var("x", relax.TensorStructInfo((16,), "float32"))
        with builder.function("half", [relax.Var("t", relax.TensorStructInfo((4,), "float32"))], private=True):
            builder.emit_func_output(builder.emit(op.zeros((4,), "float32")))
        with builder.function("loss", [x]):
            part = builder.emit(op.strided_slice(x, [0], [0], [8]))
            y = builder.emit(relax.Call(mod.get_global_var("main"), [part]))
            half = builder.get().get_global_var("half")
            layout = [{"x": 0}]
            z = builder.emit(mt.manual_computation(half, [y if second["x"] == 2 else x], second, layout, layout[0]))
            builder.emit_func_output(builder.emit(op.add(builder.emit(op.sum(y)), builder.emit(op.sum(z)))))
        return lambda: mt.gradient(builder.get(), function="loss")

    where = "manual computations of one module"
    refused(gradient({"x": 2, "y": 2}, {"y": 2, "x": 2}), "axes are in several orders: ", where)
    refused(gradient({"x": 2}, {"x": 4}), "axis 'x' has 2, 4 devices", where)
