"""The boundary of a distributed module: tensors as callers have them, and tiles of dims taken apart; and the weights
that it holds, laid out once, whatever sizes it is called with."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeVar

import torch
from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.mesh import Mesh
from mesh_tensor.base.recent import Recent
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.sub_axes import Refinement
from mesh_tensor.importers.weight_files import StoredTensor
from mesh_tensor.plan.atoms import made_plain, plain_sharding
from mesh_tensor.plan.ir import Interleaved
from mesh_tensor.program.plan_module import ModulePlan, Port
from mesh_tensor.program.program import ProgramValue
from mesh_tensor.runtime.module_inputs import ModuleSignature
from mesh_tensor.runtime.placement import Layout, layout_of
from mesh_tensor.runtime.ranks import is_dtensor
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute, of_tiles
from mesh_tensor.targets.dtypes import torch_dtype, torch_tensor

from .own_memory import apart


@dataclass(frozen=True)
class ModulePort(Port):
    """A parameter or a result, as tensors go through it. `parts`: how the caller's mesh is taken apart in the
    program's, if it is."""

    parts: Refinement | None = None

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """As the caller knows it."""
        return tuple(math.prod(atoms) for atoms in self.dims)

    @cached_property
    def refined(self) -> tuple[int, ...]:
        """With every dim taken apart."""
        return tuple(size for atoms in self.dims for size in atoms)

    @cached_property
    def plain(self) -> Sharding | None:
        """The layout over the caller's dims, on the caller's mesh, if there is one."""
        made = plain_sharding(self.sharding, self.dims) if self.order is None else None
        return made if made is None or self.parts is None else self.parts.coarsen(made, self.shape)

    @cached_property
    def nameable(self) -> Sharding:
        """The layout over atoms that has a name over the caller's dims, on the caller's mesh."""
        if self.order is not None:
            return Sharding.of(self._mesh, len(self.refined), {})
        made = made_plain(self.sharding, self.dims)
        if self.parts is not None:
            named = plain_sharding(made, self.dims)
            assert named is not None
            kept = self.parts.coarse(named, self.shape)
            for axis in self._mesh:
                if kept.placement(axis) != named.placement(axis):
                    made = made.with_replicate(axis)
        return made

    @property
    def _mesh(self) -> Mesh:
        return self.sharding.mesh

    @cached_property
    def named(self) -> Sharding:
        """The layout over the caller's dims, on the caller's mesh; what has no name there is gathered."""
        named = plain_sharding(self.nameable, self.dims)
        if named is not None and self.parts is not None:
            named = self.parts.coarsen(named, self.shape)
        assert named is not None
        return named

    def refine(self, tensor: torch.Tensor | MeshTensor) -> torch.Tensor | MeshTensor:
        """A tensor of the caller's as the program takes it."""
        if isinstance(tensor, torch.Tensor):
            return self.arranged(tensor)
        if self._is_same(tensor):
            return tensor
        mesh = self._mesh if self.parts is None else self.parts.base
        if tensor.sharding.mesh != mesh:
            refuse(
                f"{self.name!r} is a MeshTensor on {tensor.sharding.mesh}, but the module runs on {mesh}",
                fix="pass a global tensor, or distribute it on that mesh",
            )
        if self.plain is None:
            return self.spread(tensor.full())
        return _relabel(tensor.redistribute(self.plain), self.refined, self.sharding)

    def spread(self, tensor: torch.Tensor) -> MeshTensor:
        """A global tensor, laid out as the program takes it."""
        return distribute(self.arranged(tensor), self.sharding.mesh, self.sharding)

    def arranged(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor of the caller's over atoms, in the program's order."""
        tensor = tensor.detach()
        return (tensor if self.order is None else _interleaved(tensor, self.order)).contiguous().view(self.refined)

    def restored(self, tensor: torch.Tensor) -> torch.Tensor:
        """A whole tensor of the program's with the caller's dims, in the caller's order."""
        tensor = tensor.view(self.shape)
        return tensor if self.order is None else _in_sections(tensor, self.order)

    def merge(self, result: torch.Tensor | MeshTensor) -> torch.Tensor | MeshTensor:
        """What the program made, as the caller knows it. A MeshTensor in a layout that has no name over the caller's
        dims is gathered where that is so."""
        if isinstance(result, torch.Tensor):
            return self.restored(result)
        if self._is_same(result):
            return result
        if self.order is not None:
            return distribute(self.restored(result.full()), self.named.mesh, self.named)
        return _relabel(result.redistribute(self.nameable), self.shape, self.named)

    def leave(self, value: torch.Tensor | MeshTensor, laid: bool) -> torch.Tensor | MeshTensor:
        """The same, `laid` on the mesh, or whole."""
        if not laid:
            return self.restored(value.full() if isinstance(value, MeshTensor) else value)
        return self.merge(self.spread(value) if isinstance(value, torch.Tensor) else value)

    def _is_same(self, tensor: MeshTensor) -> bool:
        """Whether a tensor in the program's layout is what the caller knows, as it is."""
        if not self._is_as_known:
            return False
        return tensor.layout is self._layout or (tensor.shape == self.shape and tensor.sharding == self.sharding)

    @cached_property
    def _layout(self) -> Layout:
        """How the program has it."""
        return layout_of(self.refined, torch_dtype(self.dtype), self.sharding)

    @cached_property
    def _is_as_known(self) -> bool:
        return self.parts is None and self.refined == self.shape and self.plain == self.sharding

    def rows(self, places: torch.Tensor) -> list[torch.Tensor] | None:
        """Per device the rows of its part that take the place of those it has, where each row of the whole becomes what
        the one at its place was; None if some device lacks one."""
        if len(self.dims[0]) != 1 or (self.order is not None and self.order.dim == 0):
            return None
        found = []
        for device in range(self._mesh.num_devices):
            first = self.sharding.tile_offset(self.refined, device)[0]
            count = self.sharding.valid_extent(self.refined, device)[0]
            own = places[first : first + count] - first
            if bool(((own < 0) | (own >= count)).any()):
                return None
            found.append(own)
        return found

    def torch_dtype(self) -> torch.dtype:
        """The torch dtype."""
        return torch_dtype(self.dtype)


def picked(part: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """These rows of a device's part, and the padding after them, if there is any."""
    padding = torch.arange(len(rows), len(part))
    return part.index_select(0, torch.cat([rows, padding]).to(part.device))


@dataclass(frozen=True, eq=False)
class Refined:
    """A weight as it is laid out for a port, in a layout that has no name over its dims."""

    tensor: MeshTensor
    port: ModulePort

    @property
    def shape(self) -> torch.Size:
        """As the caller knows it."""
        return torch.Size(self.port.shape)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype."""
        return self.tensor.dtype

    def full(self) -> torch.Tensor:
        """The global tensor."""
        return self.port.restored(self.tensor.full())


def _relabel(tensor: MeshTensor, shape: tuple[int, ...], sharding: Sharding) -> MeshTensor:
    """The same tiles as a tensor of another shape of as many elements, laid out alike."""
    layout = layout_of(shape, tensor.dtype, sharding)
    views: dict[int, torch.Tensor] = {}
    tiles = [views.setdefault(id(tile), tile.view(layout.tile_shape)) for tile in tensor.tiles()]
    return of_tiles(tiles, layout)


def ports_of(plan: ModulePlan) -> list[ModulePort]:
    """The parameters and results of a plan, on the boundary."""
    return [module_port(plan, port) for port in plan.ports]


def module_port(plan: ModulePlan, port: Port) -> ModulePort:
    """One of these."""
    return ModulePort(**vars(port), parts=plan.refinement)


def _interleaved(tensor: torch.Tensor, order: Interleaved) -> torch.Tensor:
    parts = [section.unflatten(order.dim, (order.parts, -1)) for section in tensor.split(order.sections, order.dim)]
    return torch.cat(parts, order.dim + 1).flatten(order.dim, order.dim + 1)


def _in_sections(tensor: torch.Tensor, order: Interleaved) -> torch.Tensor:
    """What `_interleaved` was made of."""
    each = [size // order.parts for size in order.sections]
    parts = tensor.unflatten(order.dim, (order.parts, -1)).split(each, order.dim + 1)
    return torch.cat([part.flatten(order.dim, order.dim + 1) for part in parts], order.dim)


def parameter_layouts(plan: ModulePlan) -> dict[str, Sharding]:
    """How the parameters lie, over the caller's dims; what has no name there is replicated."""
    ports = {port.name: port for port in ports_of(plan)}
    return {param: ports[name].named for param, name in zip(plan.params, plan.made.inputs, strict=True)}


def result_layouts(plan: ModulePlan) -> tuple[Sharding, ...]:
    """How MeshTensors that the function returns as one tuple lie."""
    ports = {port.name: port for port in ports_of(plan)}
    return tuple(ports[name].named for name in plan.made.result)


def constant_tensor(constant: relax.Constant, value: ProgramValue) -> MeshTensor:
    """A constant on every device."""
    tensor = torch_tensor(constant.data).clone().view(value.shape)
    return distribute(tensor, value.sharding.mesh, value.sharding)


def constants_digest(constants: Mapping[str, relax.Constant]) -> str:
    """What tells these constants from others, by what they are called and hold."""
    made = hashlib.sha256()
    for name in sorted(constants):
        made.update(name.encode())
        made.update(torch_tensor(constants[name].data).contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return f"digest {made.hexdigest()[:12]}"


T = TypeVar("T")
_LAYOUTS = 4  # that a weight is kept in at most; plans for other sizes may take it in another one


class HeldWeights(Mapping[str, Any]):
    """Weights by parameter, as they are now, in memory that no caller writes: laid out, once they are, where nothing is
    lost by that. `donated`: nobody else has the tensors."""

    def __init__(self, given: Mapping[str, Any], donated: bool = False) -> None:
        self.donated = donated
        self._held = dict(given) if donated else {name: apart(tensor) for name, tensor in given.items()}
        self._names = tuple(given)
        self._laid: dict[str, Recent[tuple, Any]] = {name: Recent(_LAYOUTS) for name in given}

    @staticmethod
    def of(tensors: Mapping[str, Any], given: Mapping[str, Any], donated: bool) -> HeldWeights:
        """These tensors of those that were given; what is laid out for one module is, for others that were given it."""
        if not isinstance(given, HeldWeights):
            return HeldWeights(tensors, donated)
        made = HeldWeights({}, given.donated)
        made._held, made._laid, made._names = given._held, given._laid, tuple(tensors)
        return made

    def some(self, names: Collection[str]) -> HeldWeights:
        """Those of some names."""
        return HeldWeights.of({name: self._held[name] for name in self if name in names}, self, True)

    def laid_out(
        self, name: str, port: ModulePort, lay_out: Callable[[ModulePort, Any], tuple[T, Any]], rank: int | None = None
    ) -> T:
        """A weight as plans with such a port take it, on a rank or on all devices. `lay_out` makes that of the weight,
        and what can be held in the weight's place from now on, or None."""

        def make() -> T:
            made, kept = lay_out(port, self._held[name])
            if kept is not None:
                self._held[name] = kept
            return made

        return self._laid[name].made((port.dims, port.sharding, port.order, rank), make)

    def __getitem__(self, name: str) -> Any:
        return self._held[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def whole(tensor: Any) -> torch.Tensor:
    """A weight in any form as one tensor. Of a DTensor all ranks have to ask."""
    if isinstance(tensor, (MeshTensor, Refined)):
        return tensor.full()
    if isinstance(tensor, StoredTensor):
        return tensor.read()
    return tensor.full_tensor().detach() if is_dtensor(tensor) else tensor.detach()


def checked_state(
    signature: ModuleSignature, held: Mapping[str, Any], state: Mapping[str, Any], device_type: str, strict: bool
) -> dict[str, Any]:
    """What replaces the weights that are held, by parameter, in memory of their own. Refused where names are unknown or
    missing, or shapes or dtypes differ."""
    new = signature.weights(state, device_type)
    called = signature.names
    problems = [f"{called[name][0]!r} is missing" for name in held if strict and name not in new]
    problems += [f"{called[name][0]!r} is no weight of this run, but an input" for name in new if name not in held]
    if problems:
        refuse(
            problems,
            where=f"weights of {signature.function!r}",
            fix="load what state_dict() of the same model gave; strict=False keeps what is missing",
        )
    return {**held, **{name: apart(tensor) for name, tensor in new.items()}}
