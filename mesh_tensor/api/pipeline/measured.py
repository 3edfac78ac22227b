"""What the last call of a pipeline took: when every device ran each of its actions, as measured."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.topology import Topology
from mesh_tensor.pipelining.clock import Event, Timeline
from mesh_tensor.pipelining.schedule import Action
from mesh_tensor.simulation.pipeline_summary import DeviceRow, chrome_trace

from .ranks import RankRuns
from .stopwatch import Stopwatch


class Measured:
    """The times of a pipeline's last call."""

    topology: Topology
    _runs: RankRuns | None
    _watches: Mapping[str, Stopwatch]  # per mesh, of those in this process

    def timeline(self) -> Timeline:
        """When the actions of the last call ran, mesh by mesh, in seconds since the first one began: each from when
        what it takes is there, until what it makes is handed on. Of a mesh of several ranks, on its first one. All
        ranks have to ask. `mesh_tensor.api.pipeline.explain.svg(run.schedule, times=run.timeline())` draws it.

        Raises:
            MeshTensorError: there was no call, or the last one failed.
        """
        first = [row for row in self._device_rows() if row.device == 0]
        return Timeline(tuple(row.events for row in first), tuple(row.ending for row in first))

    def trace(self, path: str | Path | None = None) -> dict[str, Any]:
        """The same in Chrome's format, for Perfetto or chrome://tracing, written to `path` if there is one: a process
        per mesh, a thread per rank of it, an event per action, and the bytes held for backwards. All ranks have to ask;
        each that has a path writes it.

        Raises:
            MeshTensorError: as `timeline`.
        """
        return chrome_trace(self._device_rows(), {"measured": "seconds since the first action began"}, path)

    def _device_rows(self) -> list[DeviceRow]:
        if not self._watches:
            refuse("there are no times of a call", where=str(self), fix="call the pipeline first")
        device = 0 if self._runs is None else self._runs.ranks.rank
        mine = [[name, device, watch.rows, watch.ending] for name, watch in self._watches.items()]
        words = json.dumps(mine)
        runs = self._runs
        said = [words] if runs is None else runs.call(lambda: ({"trace": "times"}, None), lambda _: runs.heard(words))
        found = [each for text in said for each in json.loads(text)]
        start = min((begin for _, _, rows, _ in found for _, begin, _, _ in rows), default=0.0)
        names = list(self.topology)
        return [_row(names, start, *each) for each in sorted(found, key=lambda each: (names.index(each[0]), each[1]))]


def _row(
    names: Sequence[str], start: float, mesh: str, device: int, rows: Sequence[Any], ending: Sequence[float]
) -> DeviceRow:
    number = names.index(mesh)
    events = tuple(Event(number, begin - start, end - start, Action(*action)) for action, begin, end, _ in rows)
    held = tuple(nbytes for *_, nbytes in rows)
    return DeviceRow(mesh, device, events, (ending[0] - start, ending[1] - start), (*held, 0))
