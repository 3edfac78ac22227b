"""What the ranks of a mesh can do beside each other: the rates by which it is decided whether collectives overlap."""

from __future__ import annotations

import json
import os
import socket
from weakref import WeakKeyDictionary

from ...overlap_cost import GLOO, GLOO_BESIDE, Rates
from .faults import Faults
from .ranks import Ranks


def rates_of(ranks: Ranks, faults: Faults) -> Rates:
    """The rates of CPU ranks, alike on all of them. The first call for a mesh is a collective."""
    if ranks not in _known:
        mine = json.dumps([socket.gethostname(), _cores()]).encode()
        try:
            longest = max(int(words) for words in ranks.calls.gather(b"%16d" % len(mine)))
            everywhere = [json.loads(words) for words in ranks.calls.gather(mine.ljust(longest))]
        except RuntimeError as error:
            faults.blame(error, "counting the cores of all ranks", range(ranks.mesh.num_devices))
        _known[ranks] = GLOO_BESIDE if _to_spare(everywhere) else GLOO
    return _known[ranks]


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


_known: WeakKeyDictionary[Ranks, Rates] = WeakKeyDictionary()
