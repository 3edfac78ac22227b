"""RankKernel: a compiled kernel on the ranks of a process group, called with DTensors or with local tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from .errors import MeshTensorError, refuse
from .overlap import has_collectives, overlapped
from .program import Program
from .runtime.distributed.agree import agree, program_facts
from .runtime.distributed.dtensor import from_placements, is_dtensor
from .runtime.distributed.dtensor_ports import enter, leave
from .runtime.distributed.faults import Faults
from .runtime.distributed.rank_launch import RankLaunch, Tiling, tiling_of
from .runtime.distributed.ranks import Ranks
from .runtime.distributed.rates import rates_of
from .runtime.kernels import Target
from .sharding import Sharding
from .signature import Signature, Sizes


@dataclass(frozen=True)
class Compiled:
    """What a kernel is, whatever runs it."""

    signature: Signature
    target: Target
    strict: bool
    poison: bool
    overlap: str | int
    program_of: Callable[[Sizes], Program]
    ran: Callable[[Program], None]


class RankKernel:
    """The kernel on `ranks`. Every rank has to make the same calls."""

    def __init__(self, compiled: Compiled, ranks: Ranks) -> None:
        self._compiled, self.ranks = compiled, ranks
        self._signature, self._device = compiled.signature, compiled.target.device()
        self._faults = Faults(ranks, compiled.signature.name)
        self._launches: dict[tuple[int, ...], RankLaunch] = {}
        self._tilings: dict[str, Tiling] = {}

    def __call__(self, given: Mapping[str, Any], returned: Sequence[str]) -> list[Any]:
        """Run on DTensors; the written parameters `returned`, as DTensors that lie as annotated, or as what was
        passed."""
        self._faults.begin()
        with torch.no_grad():
            launch, layouts = self._ready(lambda: self._check_dtensors(given))
            tensors = {name: given[name] for name in layouts}
            locals_ = {name: enter(launch, name, tensor, layouts[name]) for name, tensor in tensors.items()}
            results = launch(locals_, self._signature.scalars(given), _entangled(locals_))
            return [leave(launch, name, tensors.get(name), layouts.get(name), results[name]) for name in returned]

    def local(self, given: Mapping[str, Any], returned: Sequence[str]) -> list[torch.Tensor]:
        """Run on this rank's local tensors: valid parts, or whole tiles."""
        self._faults.begin()
        launch = self._launches.get(())
        if launch is None or any(self._problem(name, given.get(name)) for name in self._tilings):
            launch, _ = self._ready(lambda: self._check_locals(given))
        locals_ = {name: _plain(given[name]) for name in self._tilings if name in given}
        entangled = len(locals_) > launch.inputs and _entangled(locals_)
        results = launch(locals_, self._signature.scalars(given), entangled)
        return [given.get(name, results[name]) for name in returned]

    def _ready(self, check: Callable[[], tuple[Sizes, dict[str, Sharding]]]) -> tuple[RankLaunch, dict[str, Sharding]]:
        """The launch for these arguments, and how they lie. Before it is made, the ranks agree on it."""
        try:
            sizes, layouts = check()
            key = tuple(sizes[var] for var in self._signature.symbols)
            launch, program = self._launches.get(key), self._compiled.program_of(sizes)
            self._check_strict(program, layouts)
        except MeshTensorError as error:
            if self._launches:
                self._faults.tell(error, "the checks of the call")
            else:
                agree(self.ranks, self._faults, self._device, {}, refusal=str(error))
            raise
        if launch is None:
            launch = self._launches[key] = self._make(program, layouts)
        self._compiled.ran(launch.program)
        return launch, layouts

    def _make(self, program: Program, layouts: Mapping[str, Sharding]) -> RankLaunch:
        compiled = self._compiled
        facts = program_facts(program, compiled.target.name, {name: str(layout) for name, layout in layouts.items()})
        agree(self.ranks, self._faults, self._device, {**facts, "overlap": str(compiled.overlap)})
        if compiled.overlap == "auto" and has_collectives(program):
            program = self._with_overlap(program)
        try:
            return RankLaunch(program, compiled.target, self.ranks, self._faults, poison=compiled.poison)
        except Exception as error:
            self._faults.tell(error, "making the kernel ready")
            raise

    def _with_overlap(self, program: Program) -> Program:
        """The program with collectives beside kernels where that pays on these ranks."""
        if self._device.type != "cpu":
            return replace(program, overlap=(f"auto: in bulk: nothing was measured on {self._device.type} ranks",))
        return overlapped(program, rates_of(self.ranks, self._faults))

    def _check_dtensors(self, given: Mapping[str, Any]) -> tuple[Sizes, dict[str, Sharding]]:
        tensors = {name: value for name, value in given.items() if name in self._signature.tensors}
        problems = [
            f"parameter {name!r}: a {type(value).__name__}, but other parameters are DTensors"
            if not is_dtensor(value)
            else f"parameter {name!r}: on {value.device_mesh}, but expected {self.ranks.device_mesh}"
            for name, value in tensors.items()
            if not is_dtensor(value) or value.device_mesh != self.ranks.device_mesh
        ]
        if problems:
            fix = "pass DTensors of one DeviceMesh (torch.distributed.tensor.distribute_tensor makes them)"
            refuse(problems, where=self._where(), fix=fix)
        sizes = self._signature.check(given, self.ranks.mesh, self._device)
        return sizes, {n: from_placements(self.ranks.mesh, t.ndim, t.placements) for n, t in tensors.items()}

    def _check_locals(self, given: Mapping[str, Any]) -> tuple[Sizes, dict[str, Sharding]]:
        if self._signature.symbols:
            refuse(
                "local tensors don't say how large the whole tensors are",
                where=self._where(),
                why="the kernel has symbolic dims",
                fix="pass DTensors, or compile the kernel with its sizes",
            )
        if not self._tilings:
            values, rank = self._compiled.program_of({}), self.ranks.rank
            for parameter in values.parameters:
                value = values.values[str(parameter.input or parameter.output)]
                self._tilings[parameter.name] = tiling_of(value, rank)
        problems = [
            f"parameter {name!r}: {problem}"
            for name in self._tilings
            if (problem := self._problem(name, given.get(name)))
        ]
        if problems:
            fix = "pass this rank's part of every tensor, or its whole tile, padding included"
            refuse(problems, where=self._where(), fix=fix)
        return {}, {}

    def _problem(self, name: str, value: Any) -> str:
        """What is wrong with a local tensor, if there is one."""
        tiling = self._tilings[name]
        if value is None or (
            type(value) is torch.Tensor
            and value.dtype is tiling.dtype
            and (value.shape == tiling.tile_shape or value.shape == tiling.valid_shape)
            and value.device == self._device
        ):
            return ""
        if is_dtensor(value) or not isinstance(value, torch.Tensor):
            return f"a {type(value).__name__}, but expected a plain torch tensor"
        shapes = " or ".join(str(tuple(s)) for s in dict.fromkeys((tiling.valid_shape, tiling.tile_shape)))
        is_ = f"{tuple(value.shape)} {value.dtype} on {value.device}"
        if isinstance(value, torch.nn.Parameter) and f"{value.dtype}" == f"{tiling.dtype}":
            value = value.detach()
            return self._problem(name, value)
        return f"{is_}, but expected {shapes} {tiling.dtype} on {self._device}"

    def _check_strict(self, program: Program, layouts: Mapping[str, Sharding]) -> None:
        if not self._compiled.strict:
            return
        problems = []
        for parameter in program.parameters:
            expected = program.values[str(parameter.input or parameter.output)].sharding
            layout = layouts.get(parameter.name, expected)
            if layout != expected:
                problems.append(f"parameter {parameter.name!r}: lies as '{layout}', but expected '{expected}'")
        if problems:
            fix = "redistribute the DTensor so, or compile without strict=True"
            refuse(problems, where=self._where(), fix=fix)

    def _where(self) -> str:
        return f"call of kernel {self._signature.name!r} on {self.ranks.mesh}"


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach() if tensor.requires_grad else tensor


def _entangled(tensors: Mapping[str, torch.Tensor | None]) -> bool:
    """Some of them may overlap in memory."""
    places = [
        tensor.untyped_storage().data_ptr() for tensor in tensors.values() if tensor is not None and tensor.numel()
    ]
    return len(set(places)) < len(places)
