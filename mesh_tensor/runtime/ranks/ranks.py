"""Ranks: a DeviceMesh of torch's, seen as the mesh of a kernel, with this process's place in it and its groups."""

from __future__ import annotations

import atexit
import hashlib
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.base.mesh import Mesh

from .calls import Calls, refuse_forked
from .device_meshes import backends, check_backend, check_fit, device_mesh_of, named, timeout_of, world_group
from .lane import GlooWire, StoreBoard, Wire, can_share, end_watch, machine_of, place_here, said_timeout, watch
from .shared_meeting import shared_wire

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Group:
    """Some ranks of the mesh. What they exchange goes over the connections of `calls`, if it is `tagged`, or else over
    the `process_group`, whose order `members` is in."""

    members: tuple[int, ...]
    process_group: dist.ProcessGroup | None
    calls: Calls | None = None
    tagged: bool = False


_NONCE = 16  # bytes that no two meetings have in common
_LENGTH = 4  # bytes that say how long a rank's words are
_alive: WeakSet[Ranks] = WeakSet()


class Ranks:
    """`mesh` as processes: device i of the mesh is the process at place i of `device_mesh`; this one is `rank`."""

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh, device_type: str) -> None:
        check_fit(mesh, device_mesh)
        at = device_mesh.get_coordinate()
        places = device_mesh.mesh.flatten().tolist()
        if at is None:
            refuse(
                f"rank {dist.get_rank()} has no place in the DeviceMesh",
                where=str(mesh),
                why=f"its ranks are {places}",
                fix="call the kernel on these ranks only",
            )
        self.mesh, self.device_mesh = mesh, device_mesh
        self.rank = mesh.rank(dict(zip(mesh.axis_names, at, strict=True)))
        self._places: list[int] = places
        self._place_of = {place: rank for rank, place in enumerate(places)}
        self._groups: dict[tuple[int, ...], Group] = {}
        self._device = torch.device(device_type)
        self.calls = Calls(self.rank, places, str(mesh))
        self.met: list[bytes] = []  # the `place_here` of each rank, once they have met
        _alive.add(self)
        config = dist.get_backend_config(device_mesh.get_group(0))
        check_backend(device_type, config, str(mesh))
        self._tagged = backends(config).get(device_type) == "gloo"

    def place(self, rank: int) -> int:
        """The process that is device `rank` of the mesh, as torch.distributed numbers it."""
        return self._places[rank]

    def elsewhere(self, tensor: Any) -> str:
        """What is wrong with a DTensor on another DeviceMesh, perhaps of these ranks in another order; or nothing."""
        if tensor.device_mesh == self.device_mesh:
            return ""
        there, here = named(tensor.device_mesh), named(self.device_mesh)  # two threads' are not equal to torch
        return "" if there == here else f"on {there}, but expected {here}"

    def machine(self) -> Machine | None:
        """What the ranks are, once they have met; None where nothing was measured."""
        return machine_of(self.met) if self._device.type == "cpu" else None

    def group(self, axes: Iterable[str]) -> Group:
        """The ranks that differ from this one only on `axes`: the DeviceMesh's own group where it has one. Made once;
        all members have to ask."""
        wanted = self.mesh.in_order(axes)
        members = self.mesh.group_of(self.rank, wanted)
        if members not in self._groups:
            self._groups[members] = self._group(wanted, members)
        return self._groups[members]

    def everybody(self) -> Group:
        """All ranks of the mesh."""
        return self.group(self.mesh.axis_names)

    def meet(self) -> bool:
        """Make connections of the mesh's own, once. All ranks have to ask at the same time. False: they ask for
        different meshes, and can say so by `say`."""
        with self.calls.lock:
            if self.calls.connected:
                return True
            mesh = hashlib.sha256(f"{self.mesh} {self._places} {self._device.type}".encode()).digest()
            place = place_here()
            said = self.say(mesh + os.urandom(_NONCE) + len(place).to_bytes(_LENGTH, "little"))
            if any(words[: len(mesh)] != mesh for words in said):
                return False
            longest = max(int.from_bytes(words[-_LENGTH:], "little") for words in said)
            self.met = self.say(place.ljust(longest))
            name = said[0][len(mesh) : -_LENGTH].hex()
            store = dist.PrefixStore(f"mesh_tensor/{name}", default_store())
            timeout = said_timeout() or timeout_of(world_group())
            connect: Callable[[int], Wire] = partial(_connected, store, self.rank, len(self._places), timeout)
            if can_share(self.met):
                connect = partial(_connected_here, name, self.rank, len(self._places), timeout)
            board = StoreBoard(store.clone() if hasattr(store, "clone") else store)
            self.calls.begin(name, board, connect, timeout)
            watch(self.calls)
            return True

    def meet_here(self) -> None:
        """Return when all ranks are in this call."""
        if not self.meet():
            refuse("ranks call on different meshes", where=str(self.mesh), fix="make the same calls on every rank")
        self.calls.meet()

    def say(self, words: bytes) -> list[bytes]:
        """What each rank says, in order of rank, over the ranks' own group, which notices at once that one has ended.
        All say as much."""
        group = self.everybody()
        count = len(group.members)
        sent = torch.frombuffer(bytearray(words) * count, dtype=torch.uint8).to(self._device)
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(received, sent, group=group.process_group, async_op=True)
        assert work is not None
        work.wait(said_timeout() or timeout_of(world_group()))
        data = received.cpu().numpy().tobytes()
        by_member = {m: data[i * len(words) : (i + 1) * len(words)] for i, m in enumerate(group.members)}
        return [by_member[rank] for rank in range(count)]

    def is_gone(self) -> bool:
        """Whether its process group was destroyed, and another one made since."""
        return not vars(self)

    def let_go(self) -> None:
        """Forget all groups, for good."""
        for group in vars(self).get("_groups", {}).values():
            vars(group).clear()  # exchanges of kernels that are still there have them, too
        if not self.is_gone():
            self.calls.let_go()
        vars(self).clear()

    def _group(self, axes: tuple[str, ...], members: tuple[int, ...]) -> Group:
        needed = [axis for axis in axes if self.mesh.size(axis) > 1]
        places = sorted(self._places[member] for member in members)
        if len(needed) <= 1:
            axis = (needed or axes or self.mesh.axis_names)[0]
            process_group = self.device_mesh.get_group(self.mesh.axis_names.index(axis))
        elif places == list(range(dist.get_world_size())):
            process_group = world_group()
        elif self._tagged and len(members) < self.mesh.num_devices:
            return Group(members, None, self.calls, True)
        else:
            process_group = dist.new_group(places, timeout=timeout_of(world_group()), use_local_synchronization=True)
        order = dist.get_process_group_ranks(process_group)
        return Group(tuple(self._place_of[place] for place in order), process_group, self.calls, self._tagged)


def ranks_of(mesh: Mesh, device_mesh: DeviceMesh | None, device_type: str) -> Ranks:
    """The Ranks of these, made once. Without a DeviceMesh, the mesh's devices are all ranks there are, in order."""
    if not (dist.is_available() and dist.is_initialized()):
        refuse(
            "there is no process group",
            where=str(mesh),
            why="torch.distributed is not initialized in this process",
            fix="start it with torchrun and call torch.distributed.init_process_group(); plain tensors run on a virtual"
            " mesh without one",
        )
    if device_mesh is not None and type(device_mesh).__name__ != "DeviceMesh":
        refuse(f"device_mesh is a {type(device_mesh).__name__}", where=str(mesh), fix="pass a torch DeviceMesh")
    world = world_group()
    if _forked and _forked[0] is world:
        refuse_forked(str(mesh))
    with _making:
        if _made and _made[0] is not world:
            _let_go()  # another process group than before: what was made with that one is gone
            _worlds[0] += 1
        _made[:] = [world]
        if device_mesh is not None:
            _check_current(mesh, device_mesh)
        key = (mesh, device_mesh, device_type)
        if key not in _known:
            _known[key] = Ranks(mesh, device_mesh or device_mesh_of(mesh, device_type), device_type)
        return _known[key]


def known_on(mesh: Mesh | None, device_mesh: DeviceMesh | None) -> list[Ranks]:
    """The Ranks there are on a mesh, or on a DeviceMesh, that have met."""
    found = [
        ranks
        for (its_mesh, its_device_mesh, _), ranks in list(_known.items())
        if (its_mesh == mesh if device_mesh is None else its_device_mesh == device_mesh) and ranks.calls.connected
    ]
    return sorted(found, key=lambda ranks: (str(ranks.mesh), ranks.calls.name))


def are_current() -> bool:
    """Whether what `ranks_of` gave last belongs to the process group that there is now."""
    return bool(_made) and _made[0] is dist.group.WORLD


_making = threading.RLock()  # held by a thread that looks for a mesh's Ranks, and makes them
_known: dict[tuple[Any, ...], Ranks] = {}
_made: list[Any] = []
_forked: list[Any] = []  # the process group that there was when this process was forked from another
_worlds = [0]  # how many process groups there were before
_first_seen: dict[int, tuple[ref[DeviceMesh], int]] = {}  # when, by the id of a DeviceMesh


def _check_current(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    """A DeviceMesh finds its groups by their names, which those of a later process group have, too."""
    place = id(device_mesh)
    seen = _first_seen.get(place)
    if seen is None or seen[0]() is not device_mesh:
        seen = _first_seen[place] = ref(device_mesh, lambda _: _first_seen.pop(place, None) and None), _worlds[0]
    if seen[1] != _worlds[0]:
        refuse(
            "the DeviceMesh is of a process group that was destroyed",
            where=str(mesh),
            why="there is another process group now",
            fix="make it, and what lies on it, anew",
        )


def _leave_to_parent() -> None:
    """In a forked process: what the ranks are connected by goes on in the other one."""
    _forked[:] = [dist.group.WORLD] if dist.is_available() and dist.is_initialized() else []
    for ranks in list(_alive):
        if not ranks.is_gone():
            ranks.calls.is_forked = True


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _let_go() -> None:
    """Groups that are held keep their connections and threads. One that is still held when Python takes itself apart,
    after torch's own end, aborts the process."""
    end_watch()
    _known.clear()
    _made.clear()
    for ranks in list(_alive):
        ranks.let_go()


def default_store() -> Any:
    """The store of the user's process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _connected(store: Any, rank: int, count: int, timeout: Any, generation: int) -> GlooWire:
    return GlooWire(dist.PrefixStore(str(generation), store), rank, count, timeout)


def _connected_here(name: str, rank: int, count: int, timeout: Any, generation: int) -> Wire:
    return shared_wire(f"{name} {generation}", rank, count, timeout)
