"""What the ranks of a mesh can do beside each other: the machine by which it is decided whether collectives overlap."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence

from mesh_tensor.base.machine import Machine
from mesh_tensor.base.machine_presets import CPU, CPU_TO_SPARE


def place_here() -> bytes:
    """This process's host and cores, for the other ranks."""
    return json.dumps([socket.gethostname(), _cores()]).encode()


def machine_of(places: Sequence[bytes]) -> Machine:
    """The machine that CPU ranks are, of which each says its `place_here`."""
    return CPU_TO_SPARE if _to_spare([json.loads(words) for words in places]) else CPU


def _cores() -> list[int]:
    """The cores that this process may use."""
    everything = range(os.cpu_count() or 1)
    return sorted(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else everything)


def _to_spare(places: list[tuple[str, list[int]]]) -> bool:
    """Whether every rank has two cores; `places` are the ranks' hosts, and the cores that each may use there."""
    on_host: dict[str, list[list[int]]] = {}
    for host, cores in places:
        on_host.setdefault(host, []).append(cores)
    return all(len(set().union(*ranks)) >= 2 * len(ranks) and min(map(len, ranks)) >= 2 for ranks in on_host.values())
