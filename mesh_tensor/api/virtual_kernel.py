"""VirtualKernel: a compiled kernel on a virtual mesh, called with global tensors and MeshTensors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import torch

from mesh_tensor.base.recent import KERNEL_SIZES, Recent
from mesh_tensor.runtime.virtual.launch import AnyTensor, Launch, entangled
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor

from .compiled import Compiled
from .signature import check_layouts, is_quick

_MANY = 256  # devices: what so many need is made ready when they run, as a kernel may be compiled to be looked at alone


class VirtualKernel:
    """The kernel on all devices of its mesh, in this process. What has no symbolic dims, and not too many devices, is
    made ready here."""

    def __init__(self, compiled: Compiled) -> None:
        self._compiled, self._signature, self._device = compiled, compiled.signature, compiled.target.device()
        self._launches: Recent[tuple[int, ...], Launch] = Recent(KERNEL_SIZES)
        self._peak_bytes = 0  # of calls whose launches are not kept any more
        at_once = not self._signature.symbols and compiled.mesh.num_devices <= _MANY
        self._only = self._launch(()) if at_once else None
        types = [] if self._only is None else self._only.tensor_types()
        self._quick = [(name, torch.Size(shape), dtype) for name, shape, dtype in types]
        self._can_be_quick = len(self._signature.params) == len(self._quick)

    def __call__(self, given: Mapping[str, Any], returned: Sequence[str]) -> list[AnyTensor]:
        """Run on whole tensors; if any is a MeshTensor, all results are, laid out as annotated."""
        quick = self._can_be_quick and is_quick(self._quick, given, self._device)
        launch = self._only if quick and self._only is not None else self._checked(given)
        as_mesh_tensors = any(isinstance(arg, MeshTensor) for arg in given.values())
        tensors: dict[str, AnyTensor | None] = {name: given.get(name) for name in self._signature.tensors}
        for parameter in launch.program.parameters:
            if parameter.input is not None and tensors[parameter.name] is None:
                tensors[parameter.name] = launch.zeros(parameter, as_mesh_tensors)
        results = launch(
            tensors,
            self._signature.scalars(given),
            as_mesh_tensors=as_mesh_tensors,
            entangled=entangled(tensors, self._compiled.writes, self._signature.name),
        )
        return [_result(given.get(name), results[name]) for name in returned]

    def refuse_call(self, error: Exception) -> NoReturn:
        """Raise `error`."""
        raise error

    @property
    def peak_bytes(self) -> int:
        """The most bytes that one device held at once, in tiles and workspaces, in any call so far."""
        return max(self._peak_bytes, *(launch.peak_bytes for launch in self._launches), 0)

    def _checked(self, given: Mapping[str, Any]) -> Launch:
        """Check the arguments; the launch for their sizes."""
        sizes = self._signature.check(given, self._compiled.mesh, self._device)
        launch = self._launch(tuple([sizes[var] for var in self._signature.symbols]))
        if self._signature.symbols:
            self._compiled.ran(launch.program, list)
        if self._compiled.strict:
            layouts = {name: value.sharding for name, value in given.items() if isinstance(value, MeshTensor)}
            where = f"call of kernel {self._signature.name!r} on {launch.program.mesh}"
            fix = "distribute or .redistribute it so, or compile without strict=True"
            check_layouts(layouts, launch.program, where, fix)
        return launch

    def _launch(self, key: tuple[int, ...]) -> Launch:
        launch = self._launches.get(key)
        if launch is None:
            self._peak_bytes = self.peak_bytes
            program = self._compiled.programs.of(dict(zip(self._signature.symbols, key, strict=True)))
            launch = self._launches.put(key, Launch(program, self._compiled.target, poison=self._compiled.poison))
        return launch


def _result(given: Any, result: AnyTensor) -> AnyTensor:
    """The very tensor that was passed, where the result is in it."""
    return given if isinstance(given, torch.Tensor) and isinstance(result, torch.Tensor) else result
