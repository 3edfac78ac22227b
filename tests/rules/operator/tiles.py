"""Operators run on tiles as their rules say, device by device, and joined again."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import zip_longest

import torch
from tvm import relax

from mesh_tensor import Mesh, Sharding
from mesh_tensor.base.dtypes import poison_value
from mesh_tensor.base.reductions import neutral
from mesh_tensor.plan.decide import with_window
from mesh_tensor.rules.operator import Dim, LocalCall, OpCall, OpRule, TensorType
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.rule import atoms_of
from mesh_tensor.targets.dtypes import dtype_name, torch_dtype
from mesh_tensor.targets.torch_ops import torch_function

COMBINE: Mapping[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "sum": torch.add,
    "max": torch.maximum,
    "min": torch.minimum,
    "prod": torch.mul,
}
_NARROW = ("float16", "bfloat16")


def factor_sizes(call: OpCall, rule: OpRule) -> dict[str, int]:
    """The size of every factor of a rule."""
    sizes = dict(rule.sizes)
    for tensor, dims in zip((*call.inputs, *call.outputs), (*rule.inputs, *rule.outputs), strict=True):
        sizes |= {dim: size for dim, size in zip(dims, tensor.shape, strict=True) if isinstance(dim, str)}
    return sizes


def assert_runs_on_tiles(call: OpCall, rule: OpRule, split: Mapping[str, int], operands: Sequence[torch.Tensor], **tol):
    """The operator on tiles, with every factor of `split` over that many devices, is the operator on the whole."""
    whole = torch_function(call)(*operands)
    mesh = Mesh({f"m{n}": devices for n, devices in enumerate(split.values())} or {"m0": 1})
    run = _Run(call, rule, dict(zip(split, mesh, strict=False)), mesh)
    tiles = [run.device(rank, operands) for rank in range(mesh.num_devices)]
    for position, expected in enumerate(whole):
        found = run.joined(position, [results[position] for results in tiles])
        torch.testing.assert_close(found.to(expected.dtype), expected, equal_nan=True, **tol)


@dataclass(frozen=True)
class _Run:
    """`axes`: factor -> the axis of the mesh that splits it."""

    call: OpCall
    rule: OpRule
    axes: Mapping[str, str]
    mesh: Mesh

    def device(self, rank: int, operands: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """The results on one device's tiles."""
        tiles = [self._cut(x, dims, rank) for x, dims in zip(operands, self.rule.inputs, strict=True)]
        tiles = [self._windows(x, layout, rank) for x, layout in zip(tiles, self._layouts(), strict=True)]
        return evaluate(self.local(), tiles, self.mesh, rank)

    def local(self) -> relax.Function:
        """The function that every device runs."""
        inputs = [self._tile(t, dims) for t, dims in zip(self.call.inputs, self.rule.inputs, strict=True)]
        outputs = [self._tile(t, dims) for t, dims in zip(self.call.outputs, self.rule.outputs, strict=True)]
        layouts = self._layouts()
        for operand, layout in enumerate(layouts):
            lengths = {dim: window.length for dim, window in layout.windows}
            inputs[operand] = tuple(lengths.get(dim, size) for dim, size in enumerate(inputs[operand]))
        out_layouts = [self._layout(dims) for dims in self.rule.outputs]
        return local_function(self.call, self.rule, inputs, outputs, layouts, self.wide, out_layouts)

    @property
    def wide(self) -> list[bool]:
        """Which results are parts of a low-precision sum."""
        summed = {factor for factor in self.axes if self.rule.reduced.get(factor) == "sum"}
        outputs = zip(self.call.outputs, self.rule.outputs, strict=True)
        return [bool(summed - set(_flat(dims))) and tensor.dtype in _NARROW for tensor, dims in outputs]

    def joined(self, position: int, tiles: Sequence[torch.Tensor]) -> torch.Tensor:
        """A result, of what all devices have of it."""
        dims, tensor = self.rule.outputs[position], self.call.outputs[position]
        ranks = {self._place(dims, rank): [] for rank in range(self.mesh.num_devices)}
        for rank, tile in enumerate(tiles):
            ranks[self._place(dims, rank)].append(tile)
        ops = {self.rule.reduced[f] for f in self.axes if f in self.rule.reduced and f not in _flat(dims)}
        result = torch.zeros(self._refined(tensor.shape, dims), dtype=tiles[0].dtype)
        for place, parts in ranks.items():
            if not ops:
                for part in parts[1:]:
                    torch.testing.assert_close(part, parts[0], equal_nan=True)
            (op,) = ops or {None}
            part = reduce(COMBINE[op], parts) if op else parts[0]
            at = [self._range(*piece) for piece in zip(_flat(dims), result.shape, place, strict=True)]
            part = part.reshape([self._part(f, s) for f, s in zip(_flat(dims), result.shape, strict=True)])
            result[tuple(at)] = part[tuple(slice(0, r.stop - r.start) for r in at)]
        return result.reshape(tensor.shape)

    def _cut(self, x: torch.Tensor, dims: Sequence[Dim], rank: int) -> torch.Tensor:
        """The device's tile. Padding is poison, except where the operator reduces over it."""
        shape = x.shape
        x = x.reshape(self._refined(shape, dims))
        places = list(zip(range(x.ndim), _flat(dims), self._place(dims, rank), strict=True))
        places.sort(key=lambda place: place[1] in self.rule.reduced)  # poison first, then what is neutral
        for dim, factor, index in places:
            at, part = self._range(factor, x.shape[dim], index), self._part(factor, x.shape[dim])
            op = self.rule.reduced.get(factor) if factor and not self.rule.masks else None
            fill = neutral(op, dtype_name(x.dtype)) if op else poison_value(dtype_name(x.dtype))
            held = x.narrow(dim, at.start, at.stop - at.start)
            padding = [part - held.shape[dim] if d == dim else size for d, size in enumerate(held.shape)]
            x = torch.cat([held, torch.full(padding, fill, dtype=x.dtype)], dim)
        return x.reshape([self._merged(dim, size) for dim, size in zip(dims, shape, strict=True)])

    def _tile(self, tensor: TensorType, dims: Sequence[Dim]) -> tuple[int, ...]:
        return tuple(self._merged(dim, size) for dim, size in zip(dims, tensor.shape, strict=True))

    def _merged(self, dim: Dim, size: int) -> int:
        """A dim's size in a tile."""
        if dim is None:
            return size
        return math.prod(self._part(f, self._size(f, size)) for f in atoms_of(dim))

    def _size(self, factor: str, size: int) -> int:
        return self.rule.sizes.get(factor, size)

    def _devices(self, factor: str | None) -> int:
        return self.mesh.size(self.axes[factor]) if factor in self.axes else 1

    def _part(self, factor: str | None, size: int) -> int:
        return -(-size // self._devices(factor))

    def _range(self, factor: str | None, size: int, index: int) -> slice:
        part = self._part(factor, size)
        return slice(min(size, index * part), min(size, (index + 1) * part))

    def _refined(self, shape: Sequence[int], dims: Sequence[Dim]) -> list[int]:
        pairs = zip(dims, shape, strict=True)
        return [s for dim, size in pairs for s in ([self._size(f, size) for f in atoms_of(dim)] if dim else [size])]

    def _place(self, dims: Sequence[Dim], rank: int) -> tuple[int, ...]:
        """Which part of each factor the device has."""
        coordinates = dict(zip(self.mesh, self._coordinates(rank), strict=True))
        return tuple(coordinates[self.axes[f]] if f in self.axes else 0 for f in _flat(dims))

    def _coordinates(self, rank: int) -> tuple[int, ...]:
        return list(itertools.product(*(range(self.mesh.size(axis)) for axis in self.mesh)))[rank]

    def _windows(self, x: torch.Tensor, layout: Sharding, rank: int) -> torch.Tensor:
        """The operand, of which a device has windows of some dims; what lies outside of it is neutral."""
        for dim, window in layout.windows:
            start = window.start([(a, self.mesh.size(a)) for a in layout.dims[dim]], self.mesh.coordinate(rank))
            shape = [window.length if d == dim else size for d, size in enumerate(x.shape)]
            held = torch.full(shape, neutral(window.outside, dtype_name(x.dtype)), dtype=x.dtype)
            for at, low, high in window.parts(x.shape[dim], start):
                held.narrow(dim, at, high - low).copy_(x.narrow(dim, low, high - low))
            x = held
        return x

    def _layouts(self) -> list[Sharding]:
        """How the operands lie."""
        layouts = [self._layout(dims) for dims in self.rule.inputs]
        sizes, split = factor_sizes(self.call, self.rule), {axis: factor for factor, axis in self.axes.items()}
        for (operand, dim), reaches in self.rule.windows.items():
            layouts[operand] = with_window(layouts[operand], dim, reaches, sizes[reaches.factor], split, {})
        return layouts

    def _layout(self, dims: Sequence[Dim]) -> Sharding:
        """The operand's layout, in which a dim that is split in strides counts as whole."""
        split: dict[str, int] = {}
        for position, dim in enumerate(dims):
            first, *minor = atoms_of(dim) or (None,)
            strided = minor and first in self.axes and self.rule.sizes[first] % self._devices(first)
            if first in self.axes and not strided:
                split[self.axes[first]] = position
        return Sharding.make(self.mesh, len(dims), split)


def local_function(
    call: OpCall,
    rule: OpRule,
    inputs: Sequence[tuple[int, ...]],
    outputs: Sequence[tuple[int, ...]],
    layouts: Sequence[Sharding],
    wide: Sequence[bool] = (),
    out_layouts: Sequence[Sharding] = (),
) -> relax.Function:
    """The rule's local call as a function of tiles; TVM infers the tiles that the rule promises."""
    infos = [relax.TensorStructInfo(s, t.dtype) for s, t in zip(inputs, call.inputs, strict=True)]
    tiles = [relax.Var(f"x{n}", info) for n, info in enumerate(infos)]
    dtypes = ["float32" if w else t.dtype for w, t in zip_longest(wide, call.outputs)]
    local = LocalCall(
        call, tuple(tiles), tuple(inputs), tuple(outputs), tuple(layouts), any(wide), tuple(out_layouts), tuple(dtypes)
    )
    builder = relax.BlockBuilder()
    with builder.function("f", tiles):
        with builder.dataflow():
            result = builder.emit_output(builder.emit(rule.localize(local) if rule.localize else local.again()))
        builder.emit_func_output(result)
    function = builder.get()["f"]
    inferred = op_call(function.body.blocks[-1].bindings[-2].value).outputs
    assert [t.shape for t in inferred] == list(outputs)
    assert [t.dtype for t in inferred] == dtypes
    return function


def evaluate(
    function: relax.Function, operands: Sequence[torch.Tensor], mesh: Mesh, rank: int
) -> tuple[torch.Tensor, ...]:
    """The function's result on one device's tiles, operator by operator."""
    known: dict[relax.Var, tuple[torch.Tensor, ...]] = {
        var: (tile,) for var, tile in zip(function.params, operands, strict=True)
    }

    def tensors(expr: relax.Expr) -> tuple[torch.Tensor, ...]:
        if isinstance(expr, relax.Var):
            return known[expr]
        if isinstance(expr, relax.Constant):
            return (torch.from_numpy(expr.data.numpy().copy()),)
        if isinstance(expr, relax.Tuple):
            return tuple(t for field in expr.fields for t in tensors(field))
        if isinstance(expr, relax.Call):
            call = op_call(expr)
            return torch_function(call, mesh, rank)(*[t for arg in expr.args for t in tensors(arg)])
        return ()

    for block in function.body.blocks:
        for binding in block.bindings:
            known[binding.var] = tensors(binding.value)
    results = known[function.body.body]
    expected = op_call(function.body.blocks[-1].bindings[-2].value).outputs
    assert [r.dtype for r in results] == [torch_dtype(t.dtype) for t in expected]
    return results


def _flat(dims: Sequence[Dim]) -> list[str | None]:
    """The factors of all dims; a dim that is whole is one of its own, without a name."""
    return [f for dim in dims for f in (atoms_of(dim) if dim else (None,))]
