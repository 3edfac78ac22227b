"""Carriers: how the values of a pipeline lie on meshes, and get from stage to stage: in one process, or on ranks."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from mesh_tensor.runtime.ranks import redistribute
from mesh_tensor.runtime.ranks.dtensor import as_dtensor, local_part
from mesh_tensor.runtime.ranks.transfers import RankTopology, add_to, added, laid, rank_layout, rank_transfer
from mesh_tensor.runtime.ranks.wire import Work
from mesh_tensor.runtime.virtual.mesh_tensor import MeshTensor, distribute
from mesh_tensor.runtime.virtual.transfer import transfer

from .stages import StageFragments

Key = tuple[str, int, int, int]  # a value, the stage that makes it, the stage that takes it, the microbatch


class Stopped(Exception):
    """Another mesh failed: what is awaited won't come."""


class Carrier(ABC):
    """What a mesh's row of actions does with values."""

    @abstractmethod
    def place(self, here: StageFragments, name: str, tensor: torch.Tensor) -> Any:
        """A whole tensor as the stage's value `name` lies."""

    @abstractmethod
    def hand(self, here: StageFragments, there: StageFragments, name: str, value: Any, microbatch: int) -> None:
        """Let another stage have a value, as it lies there."""

    @abstractmethod
    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> Any:
        """A value that another stage hands over, once it is there."""

    @abstractmethod
    def add(self, one: Any, other: Any) -> Any:
        """The sum of two values that lie alike."""

    def accumulate(self, total: Any, value: Any) -> Any:
        """The sum of a total that nobody else has and a value; may use its memory."""
        return self.add(total, value)

    @abstractmethod
    def tiles(self, value: Any) -> Iterable[torch.Tensor]:
        """The memory of a value, in this process."""

    @abstractmethod
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
        value = value.redistribute(layout) if same else transfer(value, there.mesh, layout)
        with self._changed:
            self._there[name, here.stage.index, there.stage.index, microbatch] = value
            self._changed.notify_all()

    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> MeshTensor:
        key = (name, there.stage.index, here.stage.index, microbatch)
        with self._changed:
            self._changed.wait_for(lambda: self._failed or key in self._there)
            if self._failed:
                raise Stopped
            return self._there.pop(key)

    def add(self, one: MeshTensor, other: MeshTensor) -> MeshTensor:
        return one + other

    def tiles(self, value: MeshTensor) -> Iterable[torch.Tensor]:
        return value.tiles()

    def whole(self, value: MeshTensor) -> torch.Tensor:
        return value.full()

    def fail(self) -> None:
        """Wake up all who wait."""
        with self._changed:
            self._failed = True
            self._changed.notify_all()


class RankCarrier(Carrier):
    """Values of this rank's mesh, DTensors; what others send has a number of its own in the call."""

    def __init__(self, ranks: RankTopology, numbers: Mapping[Key, int]) -> None:
        self._ranks, self._numbers = ranks, numbers
        self._there: dict[Key, Any] = {}
        self._sent: list[tuple[Work, torch.Tensor]] = []

    def place(self, here: StageFragments, name: str, tensor: torch.Tensor) -> Any:
        layout, shape, rank = rank_layout(here.layouts[name], tensor.shape), tuple(tensor.shape), self._ranks.rank
        at = zip(layout.tile_offset(shape, rank), layout.valid_extent(shape, rank), strict=True)
        part = tensor[tuple(slice(start, start + size) for start, size in at)]
        return as_dtensor(part.clone(), self._ranks.mine, layout, shape)

    def hand(self, here: StageFragments, there: StageFragments, name: str, value: Any, microbatch: int) -> None:
        key = (name, here.stage.index, there.stage.index, microbatch)
        shape = tuple(value.shape)
        if here.stage.mesh == there.stage.mesh:
            self._there[key] = laid(value, rank_layout(there.layouts[name], shape))
            return
        source = rank_layout(here.layouts[name], shape)
        plan = rank_transfer(shape, value.dtype, source, rank_layout(there.layouts[name], shape))
        value = laid(value, source)
        self._sent += self._ranks.send(plan, value, there.stage.mesh, self._numbers[key])

    def take(self, here: StageFragments, there: StageFragments, name: str, microbatch: int) -> Any:
        key = (name, there.stage.index, here.stage.index, microbatch)
        if here.stage.mesh == there.stage.mesh:
            return self._there.pop(key)
        shape, dtype = here.types[name]
        target = rank_layout(here.layouts[name], shape)
        plan = rank_transfer(shape, dtype, rank_layout(there.layouts[name], shape), target)
        return self._ranks.receive(plan, dtype, there.stage.mesh, self._numbers[key])

    def add(self, one: Any, other: Any) -> Any:
        return added(one, other)

    def accumulate(self, total: Any, value: Any) -> Any:
        return add_to(total, value)

    def tiles(self, value: Any) -> Iterable[torch.Tensor]:
        return (local_part(value),)

    def whole(self, value: Any) -> torch.Tensor:
        return local_part(redistribute(value, {}))

    def finish(self) -> None:
        """Wait until all that was sent is."""
        self._ranks.wait([work for work, _ in self._sent])
        self._sent.clear()
