"""A run in a process of its own, which takes turns with runs of this process: for what needs other cores, threads or
environment variables than this process has."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

from ._timing import seconds


class Elsewhere:
    """A process that calls `function`, of the module `module`, with these ints, and gets a run from it. Each call makes
    that run once, and returns when it is done. `environment` is added to this process's; `close` ends the process.

    `times`: the seconds of each call so far, as the process itself measured them."""

    def __init__(
        self, module: str, function: str, *arguments: int, environment: Mapping[str, str] | None = None
    ) -> None:
        self.times: list[float] = []
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, module, function, *map(str, arguments)],
            cwd=Path(__file__).parents[1],
            env={**os.environ, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self) -> None:
        commands, answers = self._process.stdin, self._process.stdout
        assert commands is not None
        assert answers is not None
        commands.write("\n")
        commands.flush()
        answer = answers.readline()
        if not answer:
            raise RuntimeError(f"a run elsewhere ended with exit status {self._process.wait()}; its error is above")
        self.times.append(float(answer))

    def close(self) -> None:
        """End the process."""
        self._process.communicate(timeout=60)


def _serve(module: str, function: str, *arguments: str) -> None:
    run = getattr(import_module(module), function)(*map(int, arguments))
    for _ in sys.stdin:
        print(seconds(run), flush=True)


if __name__ == "__main__":
    _serve(*sys.argv[1:])
