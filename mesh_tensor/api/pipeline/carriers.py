"""Carriers: how the values of a pipeline lie on meshes, and get from stage to stage: in one process, or on ranks."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from mesh_tensor.base.sharding import Sharding
from mesh_tensor.redistribution.transfer import TransferPlan
from mesh_tensor.runtime.placement import layout_of
from mesh_tensor.runtime.ranks.lane import Work
from mesh_tensor.runtime.ranks.redistribution import Part, part_of, rank_layout
from mesh_tensor.runtime.ranks.transfers import Arrival, RankTopology, rank_transfer
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute, of_tiles, plan_transfer, run_transfer

from ..fragments import Fragment, StageFragments

Key = tuple[str, int, int, int]  # a value, the stage that makes it, the stage that takes it, the microbatch


class Stopped(Exception):
    """Another mesh failed: what is awaited won't come."""


class Carrier(Protocol):
    """What a mesh's row of actions does with values."""

    def place(self, here: StageFragments, name: str, tensor: torch.Tensor) -> Any:
        """A whole tensor as the stage's value `name` lies."""

    def hand(self, here: StageFragments, there: StageFragments, name: str, value: Any, microbatch: int) -> None:
        """Let another stage have a value, as it lies there."""

    def expect(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> None:
        """Make ready for a value that is to be taken soon."""

    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> Any:
        """A value that another stage hands over, once it is there."""

    def run(
        self,
        fragment: Fragment,
        values: list[Any],
        kept: dict[str, Any],
        totals: dict[int, Any],
        hand_on: Callable[[dict[int, Any]], None],
    ) -> Sequence[Any]:
        """What a fragment makes of values of its mesh, which are forgotten. `kept` has what torch kept of an earlier
        one of its stage and microbatch, and gets what it keeps of this one. `totals`: by the number of a result what it
        is to be added to, of which nobody else has the memory. Those that this was done with are no longer there.
        `hand_on` may get what other stages take, all of it, by numbers, before the rest is computed."""

    def add(self, one: Any, other: Any) -> Any:
        """The sum of two values that lie alike."""

    def laid(self, value: Any, layout: Sharding) -> Any:
        """A value in another layout on its mesh."""

    def moved(self, value: Any, move: Callable[[torch.Tensor], torch.Tensor]) -> Any:
        """A value that lies alike in the memory that `move` gives for its own."""

    def cast(self, value: Any, dtype: torch.dtype) -> Any:
        """A value in another dtype."""
        return self.moved(value, lambda memory: memory.to(dtype))

    def widened(self, value: Any, dtype: torch.dtype, own: bool) -> Any:
        """A value in a dtype that may be wider, of which nobody else has the memory. `own`: nobody has that of the
        value."""

        def wide(memory: torch.Tensor) -> torch.Tensor:
            made = memory.to(dtype)  # + 0 makes -0.0 what it is everywhere
            return made.add_(0) if own or made is not memory else made + 0

        return self.moved(value, wide)

    def accumulate(self, totals: Sequence[Any], values: Sequence[Any]) -> Sequence[Any]:
        """The sums of totals that nobody else has and values, each of which lie alike; may use their memory. Where
        they are partial, so is the sum."""

    def layout(self, value: Any) -> Sharding:
        """How a value lies."""

    def shown(self, value: Any) -> Any:
        """A value as callers compute with it; they can't change it."""
        return value

    def kept(self, value: Any) -> Any:
        """A value of callers as it is kept."""
        return value

    def tiles(self, value: Any) -> Iterable[torch.Tensor]:
        """The memory of a value, in this process."""

    def whole(self, value: Any) -> torch.Tensor:
        """The whole tensor."""


class Mailbox(Carrier):
    """Values of a virtual topology. Taking waits until a value is there, or until a mesh has failed."""

    def __init__(self) -> None:
        self._there: dict[Key, MeshTensor] = {}
        self._changed = threading.Condition()
        self._failed = False

    def place(self, here: StageFragments, name: str, tensor: torch.Tensor) -> MeshTensor:
        return distribute(tensor, here.mesh, here.layouts[name])

    def hand(self, here: StageFragments, there: StageFragments, name: str, value: MeshTensor, microbatch: int) -> None:
        same, layout = here.stage.mesh == there.stage.mesh, there.layouts[name]
        value = value.redistribute(layout) if same else run_transfer(self._route(here, there, name, value), value)
        with self._changed:
            self._there[name, here.stage.index, there.stage.index, microbatch] = value
            self._changed.notify_all()

    @staticmethod
    def _route(here: StageFragments, there: StageFragments, name: str, value: MeshTensor) -> TransferPlan:
        key = (name, there.stage.index)
        plan = here.routes.get(key)
        if plan is None or plan.src != value.sharding:
            plan = plan_transfer(value.shape, value.dtype, value.sharding, there.mesh, there.layouts[name])
            here.routes[key] = plan
        return plan

    def expect(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> None:
        pass  # values come without being asked for

    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> MeshTensor:
        key = (name, there.stage.index, here.stage.index, microbatch)
        with self._changed:
            self._changed.wait_for(lambda: self._failed or key in self._there)
            if self._failed:
                raise Stopped
            return self._there.pop(key)

    def run(
        self,
        fragment: Fragment,
        values: list[MeshTensor],
        kept: dict[str, Any],
        totals: dict[int, MeshTensor],
        hand_on: Callable[[dict[int, Any]], None],
    ) -> Sequence[MeshTensor]:
        return fragment.module.call_tiles(values, totals)

    def add(self, one: MeshTensor, other: MeshTensor) -> MeshTensor:
        return one + other

    def laid(self, value: MeshTensor, layout: Sharding) -> MeshTensor:
        return value.redistribute(layout)

    def accumulate(self, totals: Sequence[MeshTensor], values: Sequence[MeshTensor]) -> Sequence[MeshTensor]:
        return [_tile_by_tile(torch.add, *pair) for pair in zip(totals, values, strict=True)]

    def layout(self, value: MeshTensor) -> Sharding:
        return value.sharding

    def tiles(self, value: MeshTensor) -> Iterable[torch.Tensor]:
        return value.tiles()

    def moved(self, value: MeshTensor, move: Callable[[torch.Tensor], torch.Tensor]) -> MeshTensor:
        return _tile_by_tile(move, value)

    def whole(self, value: MeshTensor) -> torch.Tensor:
        return value.full()

    def check(self) -> None:
        """Raise Stopped if a mesh has failed."""
        if self._failed:
            raise Stopped

    def fail(self) -> None:
        """Wake up all who wait."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class RankCarrier(Carrier):
    """Values of this rank's mesh, as its parts; what others send has a number of its own in the call."""

    def __init__(self, ranks: RankTopology, numbers: Mapping[Key, int]) -> None:
        self._ranks, self._numbers = ranks, numbers
        self._there: dict[Key, Any] = {}
        self._coming: dict[Key, Arrival] = {}
        self._sent: list[tuple[Work, torch.Tensor | None]] = []

    def place(self, here: StageFragments, name: str, tensor: torch.Tensor) -> Part:
        shape = tuple(tensor.shape)
        if name not in here.boxes:
            layout = rank_layout(here.layouts[name], shape)
            here.boxes[name] = layout, layout.box(shape, self._ranks.rank)
        layout, box = here.boxes[name]
        return Part(tensor[box].clone(memory_format=torch.contiguous_format), layout, shape)

    def hand(self, here: StageFragments, there: StageFragments, name: str, value: Part, microbatch: int) -> None:
        key = (name, here.stage.index, there.stage.index, microbatch)
        if here.stage.mesh == there.stage.mesh:
            self._there[key] = value.laid(rank_layout(there.layouts[name], value.shape), self._ranks.mine)
            return
        plan = _route(here, there, name)
        value = value.laid(plan.src, self._ranks.mine)
        self._sent += self._ranks.send(plan, value, there.stage.mesh, self._numbers[key])

    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> Part:
        key = (name, there.stage.index, here.stage.index, microbatch)
        if here.stage.mesh == there.stage.mesh:
            return self._there.pop(key)
        self.expect(here, there, name, microbatch)
        return self._ranks.arrived(self._coming.pop(key))

    def expect(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> None:
        key = (name, there.stage.index, here.stage.index, microbatch)
        if here.stage.mesh == there.stage.mesh or key in self._coming:
            return
        plan, dtype = _route(there, here, name), here.types[name][1]
        self._coming[key] = self._ranks.expect(plan, dtype, there.stage.mesh, self._numbers[key])

    def run(
        self,
        fragment: Fragment,
        values: list[Part],
        kept: dict[str, Any],
        totals: dict[int, Part],
        hand_on: Callable[[dict[int, Any]], None],
    ) -> Sequence[Part]:
        return fragment.module.call_parts(values, self._ranks.mine, kept, totals, hand_on)

    def add(self, one: Part, other: Part) -> Part:
        return Part(one.local + other.laid(one.layout, self._ranks.mine).local, one.layout, one.shape)

    def laid(self, value: Part, layout: Sharding) -> Part:
        return value.laid(rank_layout(layout, value.shape), self._ranks.mine)

    def accumulate(self, totals: Sequence[Part], values: Sequence[Part]) -> Sequence[Part]:
        sums, parts = zip(*(total.addable(value) for total, value in zip(totals, values, strict=True)), strict=True)
        torch._foreach_add_(sums, parts)
        return totals

    def layout(self, value: Part) -> Sharding:
        return value.layout

    def tiles(self, value: Part) -> Iterable[torch.Tensor]:
        return (value.memory,)

    def moved(self, value: Part, move: Callable[[torch.Tensor], torch.Tensor]) -> Part:
        return value.moved(move)

    def whole(self, value: Part) -> torch.Tensor:
        return value.laid(Sharding.of(value.layout.mesh, value.layout.ndim, {}), self._ranks.mine).local

    def shown(self, value: Part) -> Any:
        return Part(value.local.clone(), value.layout, value.shape).dtensor(self._ranks.mine)

    def kept(self, value: Any) -> Part:
        return part_of(value)

    def finish(self) -> None:
        """Wait until all that was sent is."""
        self._ranks.wait([work for work, _ in self._sent])
        self._sent.clear()


def _route(source: StageFragments, target: StageFragments, name: str) -> TransferPlan:
    """How a value goes from a stage to one on another mesh."""
    key = (name, target.stage.index)
    if key not in source.routes:
        shape, dtype = target.types[name]
        layouts = (rank_layout(here.layouts[name], shape) for here in (source, target))
        source.routes[key] = rank_transfer(shape, dtype, *layouts)
    return source.routes[key]


def _tile_by_tile(make: Callable[..., torch.Tensor], *values: MeshTensor) -> MeshTensor:
    """What a function makes of the tiles of tensors that lie alike; devices that share tiles share what is made."""
    made: dict[tuple[int, ...], torch.Tensor] = {}
    tiles = []
    for each in zip(*(value.tiles() for value in values), strict=True):
        key = tuple(map(id, each))
        if key not in made:
            made[key] = make(*each)
        tiles.append(made[key])
    layout, dtype = values[0].layout, tiles[0].dtype
    return of_tiles(tiles, layout if dtype is layout.dtype else layout_of(layout.shape, dtype, layout.sharding))
