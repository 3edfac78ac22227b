"""One rank's call of a program: the caller's local tensors become tiles, the steps run on this process's tile with
collectives over torch.distributed, and what comes out is valid parts.

How DTensors enter and leave a rank's launch: as they lie where that fits, redistributed where it doesn't.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.program.program import Parameter
from mesh_tensor.redistribution.plan import RedistributionPlan
from mesh_tensor.runtime.ambient import mark_written
from mesh_tensor.runtime.backend import Memory, copied
from mesh_tensor.runtime.elementwise import clone, copy
from mesh_tensor.targets.dtypes import dtype_name

from .dtensor import agreed, as_agreed, laid_dtensor, lies_like_torch, local_part
from .plan import Changes
from .rank_backend import RankBackend
from .tiling import Tiling, tiling_of

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(slots=True)  # not frozen: that would take most of the time of a launch for a new size
class _RankPort:
    """A parameter of the program: how its input and its output lie, and where in memory.

    `fresh`: the input's memory is written, so the caller's can't be taken for it."""

    name: str
    input: Tiling | None
    input_storage: str
    output: Tiling | None
    output_storage: str
    fresh: bool

    @property
    def tiling(self) -> Tiling:
        """How an argument for it lies."""
        tiling = self.input or self.output
        assert tiling is not None
        return tiling


class RankLaunch:
    """A program, made ready for one rank: how calls enter and leave what a backend runs."""

    def __init__(self, backend: RankBackend) -> None:
        self.program, self.ranks, self._backend = backend.program, backend.ranks, backend
        self._ports = [self._port(parameter) for parameter in self.program.parameters]
        self.ports = {port.name: port for port in self._ports}
        self.tilings = {port.name: port.tiling for port in self._ports}
        self.inputs = sum(port.input is not None for port in self._ports)
        self.changes = Changes(self.ranks, backend.faults)

    def __call__(
        self,
        locals_: Mapping[str, torch.Tensor | None],
        scalars: Mapping[str, int | float],
        entangled: bool = False,
        leave: Callable[[Memory], bool] | None = None,
    ) -> dict[str, torch.Tensor]:
        """The valid parts of the written parameters. `locals_` has this rank's part of every parameter, as a valid
        part or a whole tile, or None where there is nothing to come in. What is given for an output is written;
        `entangled`: only when all steps are done, because it may overlap with an input. `leave` says, before a step
        overwrites inputs, whether these may be those that were given, instead of copies."""
        memory = Memory(dict(scalars))
        for port in self._ports:
            given = locals_.get(port.name)
            if port.input is not None:
                own = not port.fresh or leave is not None
                ready = given is not None and own and port.input.serves(given)
                memory.held[port.input_storage] = given if ready else self._enter(port, given)
            elif given is not None and not entangled and port.output is not None and port.output.serves(given):
                memory.held[port.output_storage] = given

        def before_overwriting() -> None:
            if leave is not None and not leave(memory):
                memory.held |= copied([port.input_storage for port in self._ports if port.fresh], memory.held)

        self._backend.run(memory, before_overwriting)
        results, written = {}, []
        for port in self._ports:
            if port.output is not None:
                tile, given = memory.held[port.output_storage], locals_.get(port.name)
                results[port.name] = port.output.valid(tile)
                if given is not None and given is not tile:
                    self._write(port.output, tile, given)
                written += [] if given is None else [given]
        mark_written(written)
        return results

    def on_tiles(
        self, held: dict[str, Any], kept: dict[str, Any] | None, hand_on: Callable[[], None] = lambda: None
    ) -> dict[str, Any]:
        """Run on tiles of the inputs, by storage, as `entered` gives them; what the storages hold afterwards. `kept`
        has what was carried to this program, and gets what is carried from it; `hand_on` is for what `hands_on`."""
        memory = Memory({})
        memory.held = held
        if kept:
            held.update((name, kept.pop(name)) for name in self._backend.carried & kept.keys())
        self._backend.run(memory, hand_on=hand_on)
        if kept is not None:
            kept.update((name, held[name]) for name in self._backend.carried & held.keys())
        return held

    @property
    def hands_on(self) -> bool:
        """Whether some results are there before all steps have run."""
        return self._backend.hands_on

    def entered(self, name: str, local: torch.Tensor) -> torch.Tensor:
        """This rank's part of an input as its tile: of memory of its own, where the steps write to it."""
        return self._enter(self.ports[name], local)

    @staticmethod
    def _write(tiling: Tiling, tile: torch.Tensor, given: torch.Tensor) -> None:
        source = tiling.valid(tile)
        target = tiling.valid(given) if given.shape == tiling.tile_shape else given
        if target.numel():
            copy(target, source)

    def _enter(self, port: _RankPort, given: torch.Tensor | None) -> torch.Tensor:
        assert port.input is not None
        if given is not None and not port.fresh and port.input.serves(given):
            return given
        if given is None:
            return torch.zeros(port.input.tile_shape, dtype=port.input.dtype, device=self._backend.device)
        tile = port.input.tile(given, self._backend.poison)
        return clone(tile) if tile is given and port.fresh else tile

    def _port(self, parameter: Parameter) -> _RankPort:
        values = self.program.values
        taken = values[parameter.input] if parameter.input else None
        given = values[parameter.output] if parameter.output else None
        return _RankPort(
            parameter.name,
            tiling_of(taken, self.ranks.rank) if taken else None,
            taken.storage if taken else "",
            tiling_of(given, self.ranks.rank) if given else None,
            given.storage if given else "",
            taken is not None and taken.storage in self.program.last_writes,
        )


class Transfer(NamedTuple):
    """How a DTensor for a parameter changed its layout, on its way in or out, and who moved it: we by `plan`, or
    torch."""

    parameter: str
    comes_in: bool
    by_torch: bool
    plan: RedistributionPlan


def transfers(launch: RankLaunch, layouts: Mapping[str, Sharding], returned: Sequence[str]) -> list[Transfer]:
    """What `enter` and `leave` do for arguments that lie so."""
    found = []
    for name, layout in layouts.items():
        port = launch.ports[name]
        if port.input is not None:
            way = [layout, agreed(layout, port.input.shape), port.input.sharding]
            found += _between(name, True, port.input, way, by_torch=0)
    for name in returned:
        tiling = launch.ports[name].output
        assert tiling is not None
        layout = layouts.get(name, tiling.sharding)
        way = [tiling.sharding, agreed(layout, tiling.shape), layout]
        found += _between(name, False, tiling, way, by_torch=1)
    return found


def _between(name: str, comes_in: bool, tiling: Tiling, layouts: list[Sharding], by_torch: int) -> list[Transfer]:
    """The changes from each layout to the next; the change number `by_torch` is torch's."""
    dtype = dtype_name(tiling.dtype)
    return [
        Transfer(
            name,
            comes_in,
            number == by_torch,
            RedistributionPlan.make(tiling.shape, dtype, tiling.dtype.itemsize, before, after),
        )
        for number, (before, after) in enumerate(pairwise(layouts))
        if before != after
    ]


def enter(launch: RankLaunch, name: str, tensor: DTensor, layout: Sharding) -> torch.Tensor | None:
    """This rank's part of a DTensor that lies as `layout`, in the layout of the parameter. None: there is nothing to
    come in, and the result can't be written where it is to end up."""
    port = launch.ports[name]
    wanted, shape = port.tiling.sharding, tuple(tensor.shape)
    fits = layout == wanted and lies_like_torch(layout, shape)
    if fits:
        return local_part(tensor)
    if port.input is None:
        return None
    tensor, layout = as_agreed(tensor, layout, launch.ranks)
    local = local_part(tensor)
    if layout == wanted:
        return local
    tiling = Tiling(shape, tensor.dtype, layout, launch.ranks.rank)
    return launch.changes.tile(tiling, wanted, tiling.tile(local))


def leave(launch: RankLaunch, name: str, given: DTensor | None, layout: Sharding | None, result: torch.Tensor) -> Any:
    """The DTensor for a result: the one that was passed, filled, or a new one that lies as the parameter does."""
    tiling = launch.ports[name].output
    assert tiling is not None
    if given is None or layout is None:
        return laid_dtensor(result, tiling, tiling.sharding, launch.ranks, launch.changes)
    if layout == tiling.sharding and lies_like_torch(layout, tiling.shape):
        return given  # it was written
    made = laid_dtensor(result, tiling, layout, launch.ranks, launch.changes)
    target = local_part(given)
    if target.numel():
        copy(target, local_part(made))
    return given
