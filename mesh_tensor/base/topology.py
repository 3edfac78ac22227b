"""Topology: several meshes with names, and the devices that each has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from .errors import did_you_mean, listing, refuse, shown
from .mesh import Mesh


class Topology:
    """Named meshes, in order. Their devices are disjoint and numbered in that order, unless `devices` says otherwise.

    Immutable; equal and hashed by value. `topology["m0"]` is a mesh; iteration gives names.

    Args:
        meshes: from names to meshes, or to dicts from axes to sizes; or a Topology, which is copied.
        devices: per mesh the numbers of its devices, from 0 up, in the order of their ranks in it. Two meshes may have
            a device in common; together they use all numbers up to the largest one.

    Raises:
        MeshTensorError: no mesh, a name that is no non-empty str, or devices that are not as many as a mesh has, are
            twice in one, or leave a number out; all that is wrong is listed.

    >>> topology = Topology({"m0": {"x": 2}, "m1": {"x": 2, "y": 2}})
    >>> topology.num_devices, topology.devices("m1"), topology.places(3)
    (6, (2, 3, 4, 5), (('m1', 1),))
    """

    __slots__ = ("_devices", "_meshes")

    _meshes: dict[str, Mesh]
    _devices: dict[str, tuple[int, ...]]

    def __init__(
        self,
        meshes: Mapping[str, Mesh | Mapping[str, int]] | Topology,
        devices: Mapping[str, Sequence[int]] | None = None,
    ) -> None:
        if isinstance(meshes, Topology):
            made, places = meshes._meshes, meshes._devices
        else:
            made = _checked(meshes)
            places = _in_order(made) if devices is None else _placed(made, devices)
        object.__setattr__(self, "_meshes", made)
        object.__setattr__(self, "_devices", places)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the meshes, in order."""
        return tuple(self._meshes)

    @property
    def num_devices(self) -> int:
        """How many devices all meshes have together."""
        return len({device for devices in self._devices.values() for device in devices})

    @property
    def is_disjoint(self) -> bool:
        """Whether no device is in two meshes."""
        return sum(map(len, self._devices.values())) == self.num_devices

    def devices(self, name: str) -> tuple[int, ...]:
        """The devices of a mesh, by their rank in it. Refused where no mesh is called so."""
        self[name]
        return self._devices[name]

    def places(self, device: int) -> tuple[tuple[str, int], ...]:
        """The meshes that a device is in, with its rank in each; none for a number that is no device's."""
        return tuple((name, there.index(device)) for name, there in self._devices.items() if device in there)

    def __getitem__(self, name: str) -> Mesh:
        if name not in self._meshes:
            refuse(
                f"no mesh is called {shown(name)}{did_you_mean(name, self._meshes)}",
                where=str(self),
                fix=f"use one of {listing(self.names)}",
            )
        return self._meshes[name]

    def __contains__(self, name: object) -> bool:
        return name in self._meshes

    def __iter__(self) -> Iterator[str]:
        return iter(self._meshes)

    def __len__(self) -> int:
        return len(self._meshes)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Topology):
            return NotImplemented
        return list(self._meshes.items()) == list(other._meshes.items()) and self._devices == other._devices

    def __hash__(self) -> int:
        return hash((tuple(self._meshes.items()), tuple(self._devices.values())))

    def __repr__(self) -> str:
        inside = ", ".join(f'"{name}": {mesh.shape}' for name, mesh in self._meshes.items()).replace("'", '"')
        plain = self._devices == _in_order(self._meshes)
        return f"Topology({{{inside}}})" if plain else f"Topology({{{inside}}}, devices={self._devices})"

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"a Topology is immutable: can't set {name!r}; make a new Topology")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"a Topology is immutable: can't delete {name!r}")

    def __reduce__(self) -> tuple[type[Topology], tuple[dict[str, Mesh], dict[str, tuple[int, ...]]]]:
        return Topology, (dict(self._meshes), dict(self._devices))


def _checked(meshes: Mapping[str, Mesh | Mapping[str, int]]) -> dict[str, Mesh]:
    fix = 'write it as {"m0": {"x": 2}, "m1": {"x": 2, "y": 2}}: names with meshes'
    if not isinstance(meshes, Mapping):
        refuse(f"a topology is a dict from names to meshes, not {shown(meshes)}", fix=fix)
    if not meshes:
        refuse("the topology has no mesh", fix=fix)
    bad = [
        f"mesh name {shown(name)} is not a non-empty str" for name in meshes if not isinstance(name, str) or not name
    ]
    if bad:
        refuse(bad, where=f"topology {shown(dict(meshes))}", fix=fix)
    return {name: mesh if isinstance(mesh, Mesh) else Mesh(mesh) for name, mesh in meshes.items()}


def _in_order(meshes: Mapping[str, Mesh]) -> dict[str, tuple[int, ...]]:
    places, start = {}, 0
    for name, mesh in meshes.items():
        places[name] = tuple(range(start, start + mesh.num_devices))
        start += mesh.num_devices
    return places


def _placed(meshes: Mapping[str, Mesh], devices: Mapping[str, Sequence[int]]) -> dict[str, tuple[int, ...]]:
    """The devices that a caller gives: every mesh as many as it has, none twice in one, all from 0 used."""
    problems = [f"devices for {shown(name)}, which is no mesh" for name in devices if name not in meshes]
    problems += [f"no devices for mesh {name!r}" for name in meshes if name not in devices]
    for name in [name for name in meshes if name in devices]:
        there, wanted = list(devices[name]), meshes[name].num_devices
        if not all(isinstance(device, int) and not isinstance(device, bool) and device >= 0 for device in there):
            problems.append(f"mesh {name!r} has devices {shown(there)}, which are not all numbers from 0")
        elif len(there) != wanted:
            problems.append(f"mesh {name!r} has {wanted} devices, but {len(there)} are given")
        elif twice := [device for device, times in Counter(there).items() if times > 1]:
            problems.append(f"mesh {name!r} has device {listing(twice)} twice")
    if not problems:
        used = {device for name in meshes for device in devices[name]}
        unused = sorted(set(range(max(used) + 1)) - used)
        problems += [f"device {device} is in no mesh" for device in unused]
    if problems:
        refuse(problems, where="a topology", fix='give every mesh its devices, as in devices={"m0": [0, 1], "m1": [2]}')
    return {name: tuple(devices[name]) for name in meshes}
