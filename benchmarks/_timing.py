"""Timing of one thing against another, and the lines that every report starts with."""

from __future__ import annotations

import platform
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil
import tilelang
import torch

Run = Callable[[], object]


def seconds(run: Run, calls: int = 1) -> float:
    """The time of one call of `run`, over `calls` calls."""
    start = time.perf_counter()
    for _ in range(calls):
        run()
    return (time.perf_counter() - start) / calls


def busiest_thread(run: Run, calls: int = 1) -> float:
    """The CPU time per call that the busiest thread needs: the time of a call where every thread has a core of its own,
    whatever else runs on the machine. A device of a virtual mesh is a thread."""

    def spent() -> dict[int, float]:
        known = [thread.ident for thread in threading.enumerate() if thread.ident is not None]
        return {ident: time.clock_gettime(time.pthread_getcpuclockid(ident)) for ident in known}

    before = spent()
    for _ in range(calls):
        run()
    return max(after - before.get(ident, 0.0) for ident, after in spent().items()) / calls


def interleaved(
    runs: dict[str, Run], rounds: int = 15, calls: int = 1, clock: Callable[[Run, int], float] = seconds
) -> dict[str, list[float]]:
    """Seconds per call of every run, per round, by a clock. The runs take turns, and the turn's order reverses from
    round to round, so that whatever slows the machine down slows all of them."""
    for run in runs.values():
        run()
    times: dict[str, list[float]] = {name: [] for name in runs}
    for turn in range(rounds):
        for name in list(runs)[:: -1 if turn % 2 else 1]:
            times[name].append(clock(runs[name], calls))
    return times


def ratio(times: dict[str, list[float]], of: str, to: str) -> float:
    """The median over rounds of `of`'s time over `to`'s in the same round."""
    return statistics.median(a / b for a, b in zip(times[of], times[to], strict=True))


def median_ms(times: Sequence[float]) -> float:
    """The median in milliseconds."""
    return statistics.median(times) * 1e3


@dataclass(frozen=True)
class Row:
    """What one thing costs beside its peer, both from one run. `must`: the largest `ratio` (its time over the peer's)
    that will do; `within`: the most seconds per call that it may take longer; None where nothing is asked for. A row
    that could not be measured has a `note` instead."""

    what: str
    who: str
    peer: str
    times: Sequence[float] = ()
    peer_times: Sequence[float] = ()
    must: float | None = None
    within: float | None = None
    note: str = ""

    @property
    def ratio(self) -> float:
        """Its time over the peer's, the median over rounds."""
        return statistics.median(a / b for a, b in zip(self.times, self.peer_times, strict=True))

    @property
    def extra(self) -> float:
        """Seconds per call that it takes longer than the peer, the median over rounds."""
        return statistics.median(a - b for a, b in zip(self.times, self.peer_times, strict=True))

    @property
    def holds(self) -> bool:
        """It is as good as it must be; or that could not be measured."""
        if self.note:
            return True
        return (self.must is None or self.ratio <= self.must) and (self.within is None or self.extra <= self.within)


def row(
    what: str,
    times: dict[str, list[float]],
    who: str,
    peer: str,
    must: float | None = None,
    within: float | None = None,
) -> Row:
    """The comparison of two runs that were interleaved."""
    return Row(what, who, peer, times[who], times[peer], must, within)


def verdicts(rows: Sequence[Row]) -> str:
    """A table of rows: milliseconds as median (least), and whether each is as good as it must be."""
    columns = ["what", "who", "ms", "peer", "its ms", "ratio", "must", ""]
    return table(columns, [_verdict(row) for row in rows])


def _verdict(row: Row) -> list[str]:
    if row.note:
        return [row.what, row.who, "", row.peer, "", "", "", row.note]
    musts = [] if row.must is None else [f"<= {row.must:.2f}"]
    musts += [] if row.within is None else [f"+{row.extra * 1e6:.0f} <= {row.within * 1e6:.0f} µs"]
    verdict = "" if not musts else "pass" if row.holds else "FAIL"
    ratio = f"{row.ratio:.2f}"
    return [row.what, row.who, _ms(row.times), row.peer, _ms(row.peer_times), ratio, ", ".join(musts), verdict]


def _ms(times: Sequence[float]) -> str:
    return f"{median_ms(times):.3g} ({min(times) * 1e3:.3g})"


def header(title: str) -> str:
    """The title of a report with its commit, hardware, versions and command."""
    module = f"benchmarks.{Path(sys.argv[0]).stem}".removesuffix(".__main__")
    command = " ".join(["python", "-m", module, *sys.argv[1:]])
    return "\n".join(
        [
            f"# {title}",
            "",
            f"- commit: {_commit()}",
            f"- hardware: {_hardware()}; load before this run {psutil.getloadavg()[0]:.1f}",
            f"- versions: Python {platform.python_version()}, tilelang {tilelang.__version__}, "
            f"torch {torch.__version__}",
            f"- command: `{command}`",
            "",
        ]
    )


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(str(cell) for cell in line) + " |" for line in lines) + "\n"


def _commit() -> str:
    if subprocess.run(["git", "rev-parse"], cwd=Path(__file__).parent, capture_output=True).returncode:
        return "unknown (no checkout)"
    commit = _output(["git", "rev-parse", "--short", "HEAD"])
    return commit + (" with changes" if _output(["git", "status", "--porcelain", "--untracked-files=no"]) else "")


def _output(command: list[str]) -> str:
    return subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=True).stdout.strip()


def _hardware() -> str:
    names = [line.split(":", 1)[1].strip() for line in _cpuinfo() if line.startswith("model name")]
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ", no GPU"
    memory = psutil.virtual_memory().total / 2**30
    return f"{names[0] if names else platform.processor()}, {psutil.cpu_count()} cores, {memory:.0f} GiB{gpu}"


def _cpuinfo() -> list[str]:
    path = Path("/proc/cpuinfo")
    return path.read_text().splitlines() if path.exists() else []
