"""Ranks: a DeviceMesh of torch's, seen as the mesh of a kernel, with this process's place in it and its groups."""

from __future__ import annotations

import atexit
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any
from weakref import WeakSet, ref

import torch
import torch.distributed as dist

from ...errors import listing, refuse
from ...mesh import Mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


@dataclass(frozen=True)
class Group:
    """A process group: `members` are ranks of the mesh, in the group's own order; `process_group` runs the
    collectives."""

    members: tuple[int, ...]
    process_group: dist.ProcessGroup


@dataclass(frozen=True)
class Talk:
    """What ranks say to each other goes over it: `all_to_all(received, sent)` on bytes on `device`."""

    members: tuple[int, ...]
    device: torch.device
    all_to_all: Callable[[torch.Tensor, torch.Tensor], None]

    def gather(self, words: bytes) -> list[bytes]:
        """What each member says; all say as much."""
        sent = torch.frombuffer(bytearray(words) * len(self.members), dtype=torch.uint8).to(self.device)
        received = torch.empty_like(sent)
        self.all_to_all(received, sent)
        data = received.cpu().numpy().tobytes()
        return [data[start : start + len(words)] for start in range(0, len(data), len(words))]


_NONCE = 16  # bytes that no two meetings have in common
_alive: WeakSet[Ranks] = WeakSet()


class Ranks:
    """`mesh` as processes: device i of the mesh is the process at place i of `device_mesh`; this one is `rank`."""

    def __init__(self, mesh: Mesh, device_mesh: DeviceMesh, device_type: str) -> None:
        _check_fit(mesh, device_mesh)
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
        self._numbers: dict[str, int] = {}
        self._talk: Talk | None = None
        self._device = torch.device(device_type)
        _alive.add(self)
        check_backend(device_type, dist.get_backend_config(device_mesh.get_group(0)), str(mesh))

    def place(self, rank: int) -> int:
        """The process that is device `rank` of the mesh, as torch.distributed numbers it."""
        return self._places[rank]

    def next_number(self, kernel: str) -> int:
        """Kernels of one name are told apart by the order in which they are first called, alike on all ranks."""
        self._numbers[kernel] = self._numbers.get(kernel, 0) + 1
        return self._numbers[kernel]

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

    def talk(self) -> Talk:
        """The means of all ranks of the mesh to say something. Where one talks while another exchanges data, neither
        takes the other's bytes for its own: that is so from `separate_talk` on."""
        if self._talk is not None:
            return self._talk
        group = self.everybody()
        return Talk(group.members, self._device, partial(dist.all_to_all_single, group=group.process_group))

    def separate_talk(self) -> None:
        """Make connections for talk, once. All ranks of the mesh have to ask at the same time.

        It is no group of `new_group`'s: torch names groups by how many of them a process has, and ranks may differ in
        that."""
        if self._talk is not None or not dist.is_gloo_available() or default_store() is None:
            return
        group = self.everybody()
        name = self.talk().gather(os.urandom(_NONCE))[0].hex()  # not counted: ranks may be older than others
        store = dist.PrefixStore(f"mesh_tensor/talk/{name}", default_store())
        at, timeout = group.members.index(self.rank), _timeout(group.process_group)
        gloo: Any = dist.ProcessGroupGloo(store, at, len(group.members), timeout)
        self._talk = Talk(
            group.members,
            torch.device("cpu"),
            lambda received, sent: gloo.alltoall_base(received, sent, [], []).wait(),
        )
        self._talk.gather(b" ")  # nobody goes on, and perhaps ends, while others are still connecting

    def is_gone(self) -> bool:
        """Whether its process group was destroyed, and another one made since."""
        return not vars(self)

    def let_go(self) -> None:
        """Forget all groups, for good."""
        for group in vars(self).get("_groups", {}).values():
            vars(group).clear()  # exchanges of kernels that are still there have them, too
        vars(self).clear()

    def _group(self, axes: tuple[str, ...], members: tuple[int, ...]) -> Group:
        needed = [axis for axis in axes if self.mesh.size(axis) > 1]
        places = sorted(self._places[member] for member in members)
        if len(needed) <= 1:
            axis = (needed or axes or self.mesh.axis_names)[0]
            process_group = self.device_mesh.get_group(self.mesh.axis_names.index(axis))
        elif places == list(range(dist.get_world_size())):
            process_group = _world()
        else:
            process_group = dist.new_group(places, timeout=_timeout(_world()), use_local_synchronization=True)
        order = dist.get_process_group_ranks(process_group)
        return Group(tuple(self._place_of[place] for place in order), process_group)


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
    world = _world()
    if _made and _made[0] is not world:
        _let_go()  # another process group than before: what was made with that one is gone
        _worlds[0] += 1
    _made[:] = [world]
    if device_mesh is not None:
        _check_current(mesh, device_mesh)
    key = (mesh, device_mesh, device_type)
    if key not in _known:
        _known[key] = Ranks(mesh, device_mesh or _device_mesh_of(mesh, device_type), device_type)
    return _known[key]


def are_current() -> bool:
    """Whether what `ranks_of` gave last belongs to the process group that there is now."""
    return bool(_made) and _made[0] is dist.group.WORLD


_known: dict[tuple[Any, ...], Ranks] = {}
_made: list[Any] = []
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


@atexit.register
def _let_go() -> None:
    """Groups that are held keep their connections and threads. One that is still held when Python takes itself apart,
    after torch's own end, aborts the process."""
    _known.clear()
    _made.clear()
    for ranks in list(_alive):
        ranks.let_go()


def check_backend(device_type: str, config: str, where: str) -> None:
    """The process group moves tensors of this device type; `config` is torch's, as in `cpu:gloo,cuda:nccl`."""
    backends = dict(entry.split(":", 1) for entry in config.split(",") if ":" in entry)
    backend = backends.get(device_type)
    if backend == "fake":
        refuse(
            "the process group is a fake one, which moves nothing", where=where, fix="use a virtual mesh without ranks"
        )
    if backend is None or (device_type == "cuda" and backend == "gloo"):
        backend_words = f"has {backend} for it" if backend else f"has {config}"
        right = "nccl" if device_type == "cuda" else "gloo"
        refuse(
            f"the kernel's tensors are on {device_type!r}, but the process group {backend_words}",
            where=where,
            fix=f"init_process_group({f'{device_type}:{right}'!r}), or compile the kernel for another target",
        )


def named(device_mesh: DeviceMesh) -> str:
    """A DeviceMesh with all that tells it from another."""
    return f"{device_mesh} of ranks {device_mesh.mesh.tolist()}"


def _check_fit(mesh: Mesh, device_mesh: DeviceMesh) -> None:
    names, sizes = device_mesh.mesh_dim_names, tuple(device_mesh.mesh.shape)
    problems = []
    if names is not None and tuple(names) != mesh.axis_names:
        problems.append(f"the DeviceMesh has axes {listing(names)}, the kernel's mesh {listing(mesh.axis_names)}")
    if sizes != tuple(mesh.shape.values()):
        problems.append(f"the DeviceMesh has sizes {sizes}, the kernel's mesh {tuple(mesh.shape.values())}")
    if problems:
        axes = ", ".join(mesh.axis_names)
        fix = f"use a DeviceMesh, or a part of one, with the axes {axes}, or annotate for the axes of this one"
        refuse(problems, where=str(mesh), fix=fix)


def _device_mesh_of(mesh: Mesh, device_type: str) -> DeviceMesh:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

    world = dist.get_world_size()
    if world != mesh.num_devices:
        refuse(
            f"the mesh has {mesh.num_devices} devices, but there are {world} ranks",
            where=str(mesh),
            fix=f"start {mesh.num_devices} ranks, use a mesh of {world} devices, or pass the DeviceMesh to run on",
        )
    sizes = tuple(mesh.shape.values())
    if world in sizes:
        return init_device_mesh(device_type, sizes, mesh_dim_names=mesh.axis_names)
    # init_device_mesh gives the groups of several axes torch's default timeout, half an hour
    timeout, groups = _timeout(_world()), []
    for axis in mesh:
        sides = sorted({mesh.group_of(rank, [axis]) for rank in range(world)})
        groups.append(dist.new_subgroups_by_enumeration([list(side) for side in sides], timeout=timeout)[0])
    places = torch.arange(world).view(sizes)
    return DeviceMesh.from_group(groups, device_type, places, mesh_dim_names=mesh.axis_names)


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def default_store() -> Any:
    """The store of the user's process group."""
    from torch.distributed.distributed_c10d import _get_default_store

    return _get_default_store()


def _timeout(process_group: Any) -> Any:
    for device_type in ("cpu", "cuda"):
        try:
            return process_group._get_backend(torch.device(device_type)).options._timeout
        except (AttributeError, RuntimeError):
            continue
    return None
