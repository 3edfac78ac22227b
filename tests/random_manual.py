"""Random manual computations, one in another too, several in a module, and their gradients: beside torch, which runs
what every device does, one after the other, in float64."""

from __future__ import annotations

import math
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tvm import relax

import mesh_tensor as mt
from tests.random_modules.check import RIGHT, Outcome

op, comm = relax.op, mt.comm
MESHES = [{"x": 2}, {"x": 3}, {"x": 2, "y": 2}, {"x": 2, "y": 3}, {"x": 3, "y": 2}, {"x": 2, "y": 2, "z": 2}]
LARGEST = 600  # elements of a tile


@dataclass(eq=False)
class Held:
    """What every device has: `tiles` by rank, of all of the mesh; those along `own` differ. `var`: its variable."""

    tiles: list[torch.Tensor]
    own: frozenset[str] = frozenset()
    var: Any = None

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.tiles[0].shape)

    @property
    def is_float(self) -> bool:
        return self.tiles[0].is_floating_point()


@dataclass(eq=False)
class Function:
    """A function on tiles, over the manual axes `axes`; `steps`: (results, operands, what is bound)."""

    axes: tuple[str, ...]
    params: list[Held]
    steps: list[tuple[list[Held], list[Held], Callable[..., relax.Expr]]] = field(default_factory=list)
    inner: list[tuple[Function, list[Held]]] = field(default_factory=list)
    called: Any = None  # the variable of the function, once it is written

    @property
    def values(self) -> list[Held]:
        return [*self.params, *(value for made, _, _ in self.steps for value in made)]


class Program:
    """A random program, run as it is drawn; `mod` is it as a module of a loss."""

    def __init__(self, number: int, dtype: torch.dtype = torch.float64) -> None:
        self.rng = random.Random(number)
        self.mesh = mt.Mesh(self.rng.choice(MESHES))
        self.ranks = range(self.mesh.num_devices)
        torch.manual_seed(number)
        sizes = [(12, 12)] * 2 + [(12,), (6, 12)]
        drawn = [torch.randn(size, dtype=torch.float64) for size in self.rng.sample(sizes, 3)]
        self.floats = [tensor.to(dtype).requires_grad_() for tensor in drawn]
        self.ids = torch.randint(0, 2, (12,))
        main = Function((), [self._same(tensor) for tensor in (*self.floats, self.ids)])
        for _ in range(self.rng.randint(1, 2)):
            self.draw(main)
            self.computation(main)
        self.draw(main)
        self.main = main
        ends = [v for v in main.values if v.is_float][-self.rng.randint(1, 4) :]
        self.ends = [*ends, main.params[0]] if self.rng.random() < 0.3 else ends
        self.loss = sum(value.tiles[0].sin().sum() for value in self.ends)
        self.mod = self.module()

    def _same(self, tensor: torch.Tensor) -> Held:
        return Held([tensor for _ in self.ranks])

    def group(self, rank: int, axes: Sequence[str]) -> tuple[list[int], int]:
        """The ranks of a device's group, in order, and its place there."""
        at, group = self.mesh.coordinate(rank), mt.Mesh({axis: self.mesh.size(axis) for axis in axes})
        found = [self.mesh.rank({**at, **group.coordinate(n)}) for n in range(group.num_devices)]
        return found, found.index(rank)

    # What is drawn.

    def add(self, f: Function, operands: list[Held], own: frozenset[str], run: Any, bind: Any) -> Held:
        """A step: `run(rank)` gives its result, `bind` its call."""
        made = Held([run(rank) for rank in self.ranks], own)
        f.steps.append(([made], operands, bind))
        return made

    def local(self, f: Function, operands: list[Held], run: Any, bind: Any) -> Held:
        """A step that every device does by itself."""
        own = frozenset().union(*(value.own for value in operands))
        return self.add(f, operands, own, lambda r: run(*(v.tiles[r] for v in operands)), bind)

    def draw(self, f: Function) -> None:
        for _ in range(self.rng.randint(1, 3)):
            kind = self.rng.choice(["elementwise", "pair", "reduced", "product", "index", "moved", "window"])
            getattr(self, f"_{kind}")(f, self.some(f))

    def some(self, f: Function) -> Held:
        found = [v for v in f.values if v.is_float and v.shape]
        return self.rng.choice(found[-4:] if self.rng.random() < 0.7 else found)

    def _elementwise(self, f: Function, a: Held) -> None:
        kind = self.rng.choice(["sin", "tanh", "square", "softmax"])
        dim = self.rng.randrange(len(a.shape))
        ours = {"sin": op.sin, "tanh": op.tanh, "square": lambda x: op.multiply(x, x)}
        ours["softmax"] = lambda x: op.nn.softmax(x, dim)
        theirs = {"sin": torch.sin, "tanh": torch.tanh, "square": lambda x: x * x, "softmax": lambda x: x.softmax(dim)}
        self.local(f, [a], theirs[kind], ours[kind])

    def _pair(self, f: Function, a: Held) -> None:
        others = [v for v in f.values if v.is_float and v.shape in (a.shape, a.shape[-1:], ())]
        b, times = self.rng.choice(others), self.rng.random() < 0.5
        self.local(
            f,
            [a, b],
            (lambda x, y: x * y.tanh()) if times else (lambda x, y: x - y),
            (lambda x, y: op.multiply(x, op.tanh(y))) if times else op.subtract,
        )

    def _reduced(self, f: Function, a: Held) -> None:
        kind, dim = self.rng.choice(["mean", "sum", "max"]), self.rng.randrange(len(a.shape))
        theirs = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax}[kind]
        ours = {"mean": op.mean, "sum": op.sum, "max": op.max}[kind]
        if self.rng.random() < 0.5:
            self.local(f, [a], lambda x: x - theirs(x, dim, True), lambda x: op.subtract(x, ours(x, [dim], True)))
        elif len(a.shape) > 1:
            self.local(f, [a], lambda x: theirs(x, dim), lambda x: ours(x, [dim], False))

    def _product(self, f: Function, a: Held) -> None:
        others = [v for v in f.values if v.is_float and len(v.shape) == 2 == len(a.shape) and v.shape[1] == a.shape[1]]
        if others and a.shape[0] * others[-1].shape[0] <= LARGEST:
            b = self.rng.choice(others[-1:] + others)
            if a.shape[0] * b.shape[0] > LARGEST:
                return
            self.local(f, [a, b], lambda x, y: (x @ y.T).tanh(), lambda x, y: op.tanh(op.matmul(x, op.permute_dims(y))))

    def _index(self, f: Function, a: Held) -> None:
        """Rows that whole numbers say are looked up, or added to."""
        ids = self.rng.choice([v for v in f.values if not v.is_float and len(v.shape) == 1])
        dim, count = self.rng.randrange(len(a.shape)), ids.shape[0]
        if a.shape[dim] < 2 or math.prod(a.shape) // a.shape[dim] * count > LARGEST:
            return
        if self.rng.random() < 0.6:
            self.local(f, [a, ids], lambda x, i: x.index_select(dim, i), lambda x, i: op.take(x, i, dim))
        elif len(a.shape) == 2 and a.shape[0] == count:
            wide = (count, a.shape[1])
            self.local(
                f,
                [a, ids],
                lambda x, i: x.scatter_add(0, i[:, None].expand(wide), x.sin()),
                lambda x, i: op.scatter_elements(
                    x, op.broadcast_to(op.expand_dims(i, 1), wide), op.sin(x), 0, reduction="add"
                ),
            )

    def _moved(self, f: Function, a: Held) -> None:
        if len(a.shape) == 2 and self.rng.random() < 0.5:
            self.local(f, [a], torch.t, op.permute_dims)
        elif a.shape[0] % 2 == 0:
            shape = (a.shape[0] // 2, 2, *a.shape[1:])
            order = [1, 0, *range(2, len(shape))]
            self.local(
                f,
                [a],
                lambda x: x.reshape(shape).permute(order).reshape(a.shape),
                lambda x: op.reshape(op.permute_dims(op.reshape(x, shape), order), a.shape),
            )

    def _window(self, f: Function, a: Held) -> None:
        """Neighbours: in the tile, or what the device before has at its end, too."""
        dim = self.rng.randrange(len(a.shape))
        size, axes = a.shape[dim], self.entered(f)
        if size < 2 or len(a.shape) > 2:
            return
        last = self.local(
            f, [a], lambda x: x.narrow(dim, size - 1, 1), lambda x: op.strided_slice(x, [dim], [size - 1], [size])
        )
        if axes:
            axis = self.rng.choice(axes)
            count = self.mesh.size(axis)
            pairs = [(n, (n + 1) % count) for n in range(count if self.rng.random() < 0.5 else count - 1)]
            last = self.permuted(f, last, axis, pairs)
        self.local(
            f,
            [last, a],
            lambda e, x: torch.cat([e, x.narrow(dim, 0, size - 1)], dim) * x,
            lambda e, x: op.multiply(op.concat([e, op.strided_slice(x, [dim], [0], [size - 1])], dim), x),
        )

    # Between devices.

    def entered(self, f: Function) -> list[str]:
        return [axis for axis in self.mesh if axis in f.axes]

    def permuted(self, f: Function, a: Held, axis: str, pairs: list[tuple[int, int]]) -> Held:
        sources, one = {target: source for source, target in pairs}, {axis: self.mesh.size(axis)}

        def run(rank: int) -> torch.Tensor:
            ranks, me = self.group(rank, [axis])
            return a.tiles[ranks[sources[me]]] if me in sources else torch.zeros_like(a.tiles[rank])

        return self.add(f, [a], a.own | {axis}, run, lambda x: comm.permute(x, one, pairs))

    def collective(self, f: Function) -> None:
        found = [v for v in f.values if v.shape and (v.is_float or self.rng.random() < 0.2)]
        a = self.rng.choice(found[-5:])
        axes = [axis for axis in self.entered(f) if self.rng.random() < 0.7] or self.entered(f)[:1]
        sizes = {axis: self.mesh.size(axis) for axis in axes}
        count, dim, other = math.prod(sizes.values()), *(self.rng.randrange(len(a.shape)) for _ in range(2))
        kinds = ["permute", "broadcast"]
        kinds += ["reduce", "reduce", "index"] if a.is_float else []
        kinds += ["gather"] if math.prod(a.shape) * count <= LARGEST else []
        kinds += ["scatter", "all_to_all"] if a.shape[dim] % count == 0 else []
        kinds += ["reduce_scatter"] if a.shape[dim] % count == 0 and a.is_float else []
        kind, kept, all_ = self.rng.choice(kinds), a.own - set(axes), a.own | set(axes)
        root, which = self.rng.randrange(count), self.rng.choice(["sum", "sum", "avg", "max", "min", "prod"])
        reduce = {"sum": lambda x: x.sum(0), "avg": lambda x: x.mean(0), "max": lambda x: x.amax(0)}
        reduce |= {"min": lambda x: x.amin(0), "prod": lambda x: x.prod(0)}

        def tiles(rank: int) -> tuple[list[torch.Tensor], int]:
            ranks, me = self.group(rank, axes)
            return [a.tiles[r] for r in ranks], me

        def part(tensor: torch.Tensor, me: int) -> torch.Tensor:
            return tensor.chunk(count, dim)[me]

        def to_all(rank: int) -> torch.Tensor:
            held, me = tiles(rank)
            return torch.cat([part(tile, me) for tile in held], other)

        ways: dict[str, tuple[Any, Any, Any]] = {
            "reduce": (
                kept,
                lambda r: reduce[which](torch.stack(tiles(r)[0])),
                lambda x: comm.all_reduce(x, sizes, which),
            ),
            "gather": (kept, lambda r: torch.cat(tiles(r)[0], dim), lambda x: comm.all_gather(x, sizes, dim)),
            "broadcast": (kept, lambda r: tiles(r)[0][root], lambda x: comm.broadcast(x, sizes, root)),
            "scatter": (
                all_,
                lambda r: part(tiles(r)[0][root], tiles(r)[1]),
                lambda x: comm.scatter(x, sizes, dim, root),
            ),
            "reduce_scatter": (
                all_,
                lambda r: part(torch.stack(tiles(r)[0]).sum(0), tiles(r)[1]),
                lambda x: comm.reduce_scatter(x, sizes, dim),
            ),
            "all_to_all": (all_, to_all, lambda x: comm.all_to_all(x, sizes, dim, other)),
            "index": (
                all_,
                lambda r: torch.where(torch.tensor(tiles(r)[1] == root), a.tiles[r], a.tiles[r].cos()),
                lambda x: op.where(op.equal(comm.axis_index(sizes), relax.const(root, "int64")), x, op.cos(x)),
            ),
        }
        if kind == "permute":
            ends, size = list(range(sizes[axes[0]])), sizes[axes[0]]
            self.rng.shuffle(ends)
            pairs = [pair for pair in zip(range(size), ends, strict=True) if self.rng.random() < 0.8]
            self.permuted(f, a, axes[0], pairs)
            return
        own, run, bind = ways[kind]
        self.add(f, [a], own, run, bind)

    # One in another.

    def computation(self, outer: Function) -> None:
        """A call of a new function on tiles of values, as a step."""
        free = [axis for axis in self.mesh if axis not in outer.axes]
        axes = [axis for axis in free if self.rng.random() < 0.7] or free[:1]
        if not axes:
            return
        sizes = {axis: self.mesh.size(axis) for axis in axes}
        held = [v for v in outer.values if v.shape]
        args = [self.rng.choice(held) for _ in range(self.rng.randint(1, 3))]
        if not any(a.is_float for a in args):
            args.append(self.some(outer))
        args += [self.rng.choice([v for v in held if not v.is_float])]
        layouts = [self.layout(a.shape, axes) for a in args]
        inner = Function((*outer.axes, *axes), [self.tiles(a, one) for a, one in zip(args, layouts, strict=True)])
        for _ in range(self.rng.randint(1, 3)):
            self.draw(inner)
            self.collective(inner)
            if self.rng.random() < 0.25:
                self.computation(inner)
        found = [v for v in inner.values[len(args) :] if v.is_float]
        kept = list(dict.fromkeys(self.rng.choice(found) for _ in range(self.rng.randint(1, 3)))) if found else []
        ends = [self.end(value, axes) for value in kept]
        pairs = [(v, e) for v, e in zip(kept, ends, strict=True) if math.prod(self.whole(v, e[0])) <= 4 * LARGEST]
        if not pairs:
            return
        kept, ends = [v for v, _ in pairs], [e for _, e in pairs]
        made = [self.joined(value, *end, axes) for value, end in pairs]
        outer.inner.append((inner, kept))
        alone = len(kept) == 1
        said = [{"sharding": split, "partial": parts} if parts else split for split, parts in ends]

        def bind(*given: relax.Expr) -> relax.Expr:
            stated = said[0] if alone else said
            return mt.manual_computation(inner.called, given, self.mesh.shape, layouts, stated, axes=list(sizes))

        outer.steps.append((made, args, bind))

    def layout(self, shape: Sequence[int], axes: Sequence[str]) -> dict[str, int]:
        """What axes split of a shape, where they divide it."""
        found: dict[str, int] = {}
        for axis in axes:
            layout = mt.Sharding.make(self.mesh, len(shape), found)
            sizes = [n // layout.num_shards(d) for d, n in enumerate(shape)]
            dims = [d for d, n in enumerate(sizes) if n % self.mesh.size(axis) == 0]
            if dims and self.rng.random() < 0.8:
                found[axis] = self.rng.choice(dims)
        return found

    def tiles(self, a: Held, layout: dict[str, int]) -> Held:
        sharding = mt.Sharding.make(self.mesh, len(a.shape), layout)

        def part(rank: int) -> torch.Tensor:
            start, shape = sharding.tile_offset(a.shape, rank), sharding.tile_shape(a.shape)
            return a.tiles[rank][tuple(slice(b, b + n) for b, n in zip(start, shape, strict=True))]

        return Held([part(rank) for rank in self.ranks], a.own | {*layout})

    def end(self, value: Held, axes: Sequence[str]) -> tuple[dict[str, int], dict[str, str]]:
        """How a result lies: what splits it, and what it is pending over."""
        split: dict[str, int] = {}
        parts: dict[str, str] = {}
        for axis in axes:
            if not value.shape or self.rng.random() < 0.3:
                if axis in value.own:
                    parts[axis] = next(iter(parts.values()), self.rng.choice(["sum", "sum", "max"]))
            else:
                split[axis] = self.rng.randrange(len(value.shape))
        return split, parts

    def whole(self, value: Held, split: dict[str, int]) -> list[int]:
        sharding = mt.Sharding.make(self.mesh, len(value.shape), split)
        return [n * sharding.num_shards(d) for d, n in enumerate(value.shape)]

    def joined(self, value: Held, split: dict[str, int], parts: dict[str, str], axes: Sequence[str]) -> Held:
        """What the tiles make up."""
        held = value.tiles
        for axis, kind in parts.items():
            stacked = [torch.stack([held[r] for r in self.group(rank, [axis])[0]]) for rank in self.ranks]
            held = [tiles.sum(0) if kind == "sum" else tiles.amax(0) for tiles in stacked]
        for axis in reversed([axis for axis in self.mesh if axis in split]):
            held = [torch.cat([held[r] for r in self.group(rank, [axis])[0]], split[axis]) for rank in self.ranks]
        return Held(held, value.own - set(axes))

    # As a module.

    def module(self) -> Any:
        builder = relax.BlockBuilder()
        self.write_inner(builder, self.main)
        for number, param in enumerate(self.main.params):
            param.var = relax.Var(f"p{number}", _info(param))
        with builder.function("main", [param.var for param in self.main.params]):
            with builder.dataflow():
                self.write_steps(builder, self.main)
                terms = [builder.emit(op.sum(op.sin(value.var))) for value in self.ends]
                loss = terms[0]
                for term in terms[1:]:
                    loss = builder.emit(op.add(loss, term))
                loss = builder.emit_output(loss)
            builder.emit_func_output(loss)
        return builder.get()

    def write_inner(self, builder: relax.BlockBuilder, function: Function) -> None:
        for inner, kept in function.inner:
            self.write_inner(builder, inner)
            own = relax.BlockBuilder()
            for number, param in enumerate(inner.params):
                param.var = relax.Var(f"t{number}", _info(param))
            with own.function("made", [param.var for param in inner.params], private=True):
                self.write_steps(own, inner)
                own.emit_func_output(kept[0].var if len(kept) == 1 else relax.Tuple([value.var for value in kept]))
            inner.called = builder.add_func(own.get()["made"], "on_device")

    @staticmethod
    def write_steps(builder: relax.BlockBuilder, function: Function) -> None:
        for made, operands, bind in function.steps:
            var = builder.emit(bind(*(operand.var for operand in operands)))
            parts = [var] if len(made) == 1 else [builder.emit(relax.TupleGetItem(var, n)) for n in range(len(made))]
            for value, part in zip(made, parts, strict=True):
                value.var = part


def _info(value: Held) -> relax.TensorStructInfo:
    return relax.TensorStructInfo(value.shape, "float32" if value.is_float else "int64")


def run(number: int) -> Outcome:
    """The loss and gradients of some inputs, on one device, on a mesh with any layouts around, and as torch records
    them; beside torch."""
    program = Program(number)
    rng = random.Random(number + 1)
    if not program.loss.requires_grad:
        return Outcome("refused", "nothing depends on the inputs")
    wanted = torch.autograd.grad(program.loss, program.floats, allow_unused=True, materialize_grads=True)
    names = [f"p{n}" for n, one in enumerate(wanted) if one.any() and rng.random() < 0.8]
    rough = Program(number, torch.float32).loss.double()
    if not names or not all(one.isfinite().all() for one in wanted) or not rough.isclose(program.loss, rtol=1e-5):
        return Outcome("refused", "nothing depends on the inputs, or rounding shows")
    given = [*(tensor.detach().float() for tensor in program.floats), program.ids]
    mesh = program.mesh.shape if rng.random() < 0.6 else {**program.mesh.shape, "free": rng.choice([2, 5])}
    stated = {f"p{n}": _any_layout(rng, mesh, tensor.ndim) for n, tensor in enumerate(given) if rng.random() < 0.6}
    kept = [wanted[int(name[1:])].float() for name in names]
    try:
        made = mt.gradient(program.mod, names)
        ways = [mt.run_sequential(made, given), mt.distribute_module(made, mesh, stated, poison=True)(*given)]
        leaves = [tensor.clone().requires_grad_(f"p{n}" in names) for n, tensor in enumerate(given)]
        if rng.random() < 0.3:
            loss = mt.distribute_module(program.mod, mesh, stated)(*leaves)
            needed = [leaves[int(name[1:])] for name in names]
            ways.append((loss.detach(), torch.autograd.grad(loss, needed, materialize_grads=True)))
        for loss, found in ways:
            torch.testing.assert_close(loss, program.loss.detach().float(), rtol=1e-4, atol=1e-4)
            for mine, theirs in zip(found, kept, strict=True):
                scale = float(theirs.abs().max())
                torch.testing.assert_close(mine, theirs, rtol=1e-3, atol=1e-3 * scale + 1e-5)
    except mt.MeshTensorError as error:
        return Outcome("refused", str(error))
    except Exception:  # a crash is neither right nor refused, whatever its class
        return Outcome("wrong", traceback.format_exc())
    return RIGHT


def _any_layout(rng: random.Random, mesh: dict[str, int], ndim: int) -> dict[str, int]:
    return {axis: rng.randrange(ndim) for axis in mesh if rng.random() < 0.5}
