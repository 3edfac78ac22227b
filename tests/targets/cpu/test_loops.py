"""Compiled loops: where they come from, and on how many threads."""

from __future__ import annotations

import threading

import pytest
import torch

from mesh_tensor.base.errors import MeshTensorError
from mesh_tensor.targets.cpu import loops as ours


def test_without_a_compiler_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> None:
        raise MeshTensorError("no C++ compiler was found")

    monkeypatch.setattr(ours, "find_library", lambda *_: None)
    monkeypatch.setattr(ours, "add_library", fails)
    monkeypatch.setattr(ours, "build_once", fails)
    assert ours.loops.__wrapped__("cpu", "math", "gelu") is None


@pytest.mark.parametrize(("count", "least", "threads"), [(0, 1, 1), (10, 100, 1), (10, 3, 3), (7, 1, 4), (10, 0, 4)])
def test_parts_are_all_there_is(monkeypatch: pytest.MonkeyPatch, count: int, least: int, threads: int) -> None:
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    seen: list[tuple[int, int]] = []
    who: set[int] = set()

    def run(begin: int, end: int) -> None:
        seen.append((begin, end))
        who.add(threading.get_ident())

    ours.in_parts(run, count, least)
    assert sorted(i for begin, end in seen for i in range(begin, end)) == list(range(count))
    assert len(seen) == threads
