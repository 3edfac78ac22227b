"""A bar on stderr for what takes a while."""

from __future__ import annotations

import sys

_WIDTH = 40


def bar(done: int, there_are: int) -> None:
    """Draw it over what was drawn before; a new line at the end."""
    full = _WIDTH * done // there_are
    if done < there_are and _WIDTH * (done - 1) // there_are == full:
        return
    end = "\n" if done == there_are else ""
    print(f"\r[{'#' * full:<{_WIDTH}}] {done} of {there_are}", end=end, file=sys.stderr, flush=True)  # noqa: T201
