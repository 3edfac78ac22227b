"""One call of a program: the caller's tensors become tiles, the steps run, and tiles become what the caller gets."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace

import torch

from mesh_tensor.program.program import Parameter, Program, ProgramValue
from mesh_tensor.runtime.ambient import mark_written, overlaps
from mesh_tensor.runtime.backend import Memory, copied
from mesh_tensor.runtime.elementwise import clone
from mesh_tensor.runtime.placement import Layout, Tiles
from mesh_tensor.targets.dtypes import torch_dtype
from mesh_tensor.targets.kernels import Target
from mesh_tensor.targets.op_steps import has_own_memory
from mesh_tensor.targets.totals import total_of

from .mesh_tensor import MeshTensor, distribute, of_tiles
from .virtual_mesh import VirtualMesh

AnyTensor = torch.Tensor | MeshTensor


@dataclass(frozen=True)
class _VirtualPort:
    """A parameter of the program: where its input comes in, where its output comes out, and in which layouts.

    `overwritten`: the steps write to the input's storage. `in_place`: what they leave there is the output.
    `comes_made`: an operator makes the output, in memory of its own. `comes_new`: that is the whole output, and nothing
    else has the memory."""

    name: str
    input: Layout | None
    input_storage: str
    output: Layout | None
    output_storage: str
    overwritten: bool
    in_place: bool
    comes_made: bool
    comes_new: bool


class Launch:
    """A program, made ready for a target's virtual mesh. Can be called from several threads at once. `fixed`: tensors
    for parameters, the same in all calls. `totals`: values that are added to what a call has for them."""

    def __init__(
        self,
        program: Program,
        target: Target,
        *,
        poison: bool = False,
        fixed: Mapping[str, MeshTensor] | None = None,
        totals: Collection[str] = (),
    ) -> None:
        self.program = program
        self.peak_bytes = 0
        self._mesh = VirtualMesh(program, target, poison=poison, totals=totals)
        made = {program.values[name].storage for step in program.steps for name in step.makes}
        self._ports = [_port(parameter, program, self._mesh, made) for parameter in program.parameters]
        self._poison = poison
        self._fixed = fixed or {}
        self._first = Memory({})
        there = [port for port in self._ports if port.name in self._fixed and not port.overwritten and port.input]
        for port in there:
            self._hold(self._first, port, self._fixed[port.name], direct=False, apart=True)
        held = {port.name for port in there}
        self._entries = [port for port in self._ports if port.input is not None and port.name not in held]
        self._exits = [port for port in self._ports if port.output is not None]

    def resized(self, program: Program) -> Launch | None:
        """The same for a program that differs in sizes only (`VirtualMesh.resized`), not in those of what is fixed."""
        mesh = self._mesh.resized(program)
        if mesh is None:
            return None
        made = copy(self)
        made.program, made._mesh, made.peak_bytes = program, mesh, 0
        before = self.program.values
        pairs = zip(self._ports, program.parameters, strict=True)
        made._ports = [_resized(port, parameter, before, mesh) for port, parameter in pairs]
        ports = {port.name: port for port in made._ports}
        made._entries, made._exits = ([ports[port.name] for port in some] for some in (self._entries, self._exits))
        return made

    def __call__(
        self,
        tensors: Mapping[str, AnyTensor | None],
        scalars: Mapping[str, int | float],
        *,
        as_mesh_tensors: bool = False,
        entangled: bool = False,
        leave: Callable[[Memory], bool] | None = None,
        totals: Mapping[str, MeshTensor] | None = None,
    ) -> dict[str, AnyTensor]:
        """The written parameters after the run. `tensors` has an entry for every parameter that is read and not fixed:
        what is only written, and is None or not there, is a new tensor. All are checked already, and contiguous.
        `entangled`: some of them may overlap in memory, so that results go to memory of their own first.
        `as_mesh_tensors`: results are MeshTensors. `leave` says, before a step overwrites MeshTensors, whether these
        may be those that were given, instead of copies."""
        memory = Memory(dict(scalars), self._first)
        for name, total in (totals or {}).items():
            memory.held[total_of(self.program.values[name].storage)] = list(total.tiles())
        apart = not entangled
        direct = apart and not as_mesh_tensors
        for port in self._entries:
            tensor = tensors.get(port.name)
            tensor = self._fixed.get(port.name) if tensor is None else tensor
            if tensor is not None:
                self._hold(memory, port, tensor, direct, apart, leave is not None)
        targets = {}
        for port in self._exits:
            assert port.output is not None
            tensor = targets[port.name] = self._target(port, tensors.get(port.name), as_mesh_tensors)
            if not port.in_place and not port.comes_made:
                memory.hold(port.output_storage, self._room(port, tensor, direct), port.output.tile_bytes)

        def before_overwriting() -> None:
            if leave is not None and not leave(memory):
                memory.held |= copied([port.input_storage for port in self._ports if port.overwritten], memory.held)

        self._mesh.run(memory, before_overwriting)
        self.peak_bytes = max(self.peak_bytes, memory.peak_bytes)
        left = {
            port.name: _leave(port, memory.held[port.output_storage], targets[port.name], as_mesh_tensors)
            for port in self._exits
        }
        given = [tensor for port in self._exits if (tensor := tensors.get(port.name)) is not None]
        mark_written(part for tensor in given for part in _parts(tensor))
        return left

    def zeros(self, parameter: Parameter, as_mesh_tensor: bool) -> AnyTensor:
        """What a parameter that is read, too, starts from when nobody passes it."""
        value = self.program.values[str(parameter.input)]
        tensor = torch.zeros(value.shape, dtype=torch_dtype(value.dtype), device=self._mesh.device)
        return distribute(tensor, self.program.mesh, value.sharding) if as_mesh_tensor else tensor

    def tensor_types(self) -> list[tuple[str, tuple[int, ...], torch.dtype]]:
        """Name, shape and dtype of every parameter."""
        layouts = [(port.name, port.input or port.output) for port in self._ports]
        return [(name, layout.shape, layout.dtype) for name, layout in layouts if layout is not None]

    def _hold(
        self, memory: Memory, port: _VirtualPort, tensor: AnyTensor, direct: bool, apart: bool, own: bool = False
    ) -> None:
        assert port.input is not None
        memory.hold(port.input_storage, self._enter(port, tensor, direct, apart, own), port.input.tile_bytes)

    def _enter(self, port: _VirtualPort, tensor: AnyTensor, direct: bool, apart: bool, own: bool) -> Tiles:
        assert port.input is not None
        if isinstance(tensor, MeshTensor):
            here = tensor if tensor.layout is port.input else tensor.redistribute(port.input.sharding)
            tiles = list(here.tiles())
            if port.overwritten and not ((own or (port.in_place and apart)) and here.tiles_are_apart):
                return [clone(tile) for tile in tiles]
            return tiles
        borrow = not port.overwritten or (port.in_place and direct)
        return port.input.spread(tensor, borrow=borrow, share=not port.overwritten, poison=self._poison)

    def _target(self, port: _VirtualPort, tensor: AnyTensor | None, as_mesh_tensors: bool) -> AnyTensor | None:
        """What the result is to end up in; None where it is a new MeshTensor, or operators make it: then its memory is
        taken when it is there."""
        return tensor if tensor is not None or as_mesh_tensors or port.comes_made else _new(port, self._mesh.device)

    def _room(self, port: _VirtualPort, target: AnyTensor | None, direct: bool) -> Tiles:
        """Tiles for an output that does not start as an input."""
        assert port.output is not None
        if direct and port.input is None and isinstance(target, torch.Tensor):
            return port.output.spread_blank(target, self._poison)
        return port.output.allocate(self._mesh.device, self._poison)


def entangled(tensors: Mapping[str, AnyTensor | None], writes: Collection[str], name: str) -> bool:
    """Some tensor that was passed to the kernel `name` and is one of `writes` overlaps in memory with another. Refused
    where two that are written do."""
    if all(tensors[name] is None for name in writes):
        return False
    given = {param: _parts(tensor) for param, tensor in tensors.items() if tensor is not None}
    return overlaps(given, writes, f"call of kernel {name!r}")


def _parts(tensor: AnyTensor) -> Sequence[torch.Tensor]:
    return (tensor,) if isinstance(tensor, torch.Tensor) else list(tensor.tiles())


def _new(port: _VirtualPort, device: torch.device) -> torch.Tensor:
    assert port.output is not None
    return torch.empty(port.output.shape, dtype=port.output.dtype, device=device)


def _leave(port: _VirtualPort, tiles: Tiles, target: AnyTensor | None, as_mesh_tensors: bool) -> AnyTensor:
    assert port.output is not None
    if target is None and not as_mesh_tensors and not port.comes_new:
        target = _new(port, tiles[0].device)
    if isinstance(target, MeshTensor):
        made = of_tiles(tiles, port.output).redistribute(target.sharding)
        target.overwrite(made.tiles())
        return target
    if target is not None:
        port.output.collect(tiles, target)
    elif not as_mesh_tensors:
        (tile,) = tiles
        return tile
    return of_tiles(tiles, port.output) if as_mesh_tensors or target is None else target


def _port(parameter: Parameter, program: Program, mesh: VirtualMesh, made: Collection[str]) -> _VirtualPort:
    """The port of a parameter. `made`: the storages that operators make."""
    values = program.values
    taken = values[parameter.input].storage if parameter.input else ""
    given = values[parameter.output].storage if parameter.output else ""
    return _VirtualPort(
        name=parameter.name,
        input=mesh.layout(parameter.input) if parameter.input else None,
        input_storage=taken,
        output=mesh.layout(parameter.output) if parameter.output else None,
        output_storage=given,
        overwritten=taken in program.last_writes,
        in_place=bool(taken) and taken == given,
        comes_made=given in made,
        comes_new=given in made and program.mesh.num_devices == 1 and has_own_memory(program, str(parameter.output)),
    )


def _resized(
    port: _VirtualPort, parameter: Parameter, before: Mapping[str, ProgramValue], mesh: VirtualMesh
) -> _VirtualPort:
    """A port where values have other sizes than `before`."""
    names = [name for name in (parameter.input, parameter.output) if name]
    if all(mesh.program.values[name] is before[name] for name in names):
        return port
    return replace(
        port,
        input=mesh.layout(parameter.input) if parameter.input else None,
        output=mesh.layout(parameter.output) if parameter.output else None,
    )
