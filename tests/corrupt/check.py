"""What becomes of files that were made wrong, in a process that may die of them."""

from __future__ import annotations

import atexit
import json
import selectors
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import IO

from .corpus import KINDS, make_file

ROOT = Path(__file__).parents[2]
#: Seconds that a file may take, with the start of the process that loads it.
PATIENCE = 240


@dataclass(frozen=True)
class Outcome:
    """`verdict` is "module", "refused" or "wrong"; `reason` says why."""

    verdict: str
    reason: str = ""


class Victim:
    """A process that loads one file after the other; where it dies of one, another takes its place."""

    def __init__(self, command: Sequence[str] = ("-m", "tests.corrupt.victim")) -> None:
        self._command = [sys.executable, "-W", "ignore", *command]
        self._process: subprocess.Popen[str] | None = None

    def outcome(self, path: Path) -> Outcome:
        """What becomes of the file."""
        process = self._started()
        _input(process).write(json.dumps(str(path)) + "\n")
        _input(process).flush()
        answer = self._answer(process)
        if answer:
            return Outcome(*json.loads(answer))
        hangs = answer is None or not _ends(process)
        if hangs:
            process.kill()
        status = process.wait()
        self._close()
        if hangs:
            return Outcome("wrong", f"no answer in {PATIENCE} seconds")
        ended = signal.Signals(-status).name if status < 0 else f"status {status}"
        return Outcome("wrong", f"the process ended with {ended}")

    def __enter__(self) -> Victim:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._close()

    def _started(self) -> subprocess.Popen[str]:
        if self._process is None:
            self._process = subprocess.Popen(
                self._command,
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
        return self._process

    def _answer(self, process: subprocess.Popen[str]) -> str | None:
        """What it says, "" where it ends instead, None where it does neither for so long."""
        assert process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(process.stdout, selectors.EVENT_READ)
            return process.stdout.readline() if selector.select(PATIENCE) else None

    def _close(self) -> None:
        if self._process is not None:
            for pipe in (self._process.stdin, self._process.stdout):
                assert pipe is not None
                pipe.close()
            self._process.wait()
            self._process = None


def run(number: int, victim: Victim | None = None) -> Outcome:
    """What becomes of the file of a number; one that loads is "right"."""
    with tempfile.TemporaryDirectory() as folder:
        kind = KINDS[number % len(KINDS)]
        what, path = make_file(kind, number, Path(folder))
        outcome = (victim or _victim()).outcome(path)
    verdict = "right" if outcome.verdict == "module" else outcome.verdict
    return Outcome(verdict, f"a file ({kind}, {what}): {outcome.reason}")


@cache
def _victim() -> Victim:
    victim = Victim()
    atexit.register(victim.__exit__, None, None, None)
    return victim


def _input(process: subprocess.Popen[str]) -> IO[str]:
    assert process.stdin is not None
    return process.stdin


def _ends(process: subprocess.Popen[str]) -> bool:
    """Whether it has closed its answers, and so is about to end."""
    try:
        process.wait(timeout=5)
    except subprocess.TimeoutExpired:
        return False
    return True
