"""How far the way of a program is through the source: files, calls, and changes from one package to another.

python -m benchmarks.bench_way

A file is on the way if one of its functions is called, imports aside. A switch is a call of a function by one of
another package (a folder of `mesh_tensor/`); what lies between them in TVM, torch or Python is left out. `base/` and
`tir/` are the words that all packages use: switches between the others are counted apart.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import FrameType

import torch

import mesh_tensor as mt
from kernels.matmul import matmul

from ._timing import header, table

_ROOT = os.path.dirname(mt.__file__) + os.sep
_WORDS = ("base/", "tir/")


@dataclass
class Way:
    """The calls of functions by file, and of functions in other packages by (caller's package, called function)."""

    files: Counter[str] = field(default_factory=Counter)
    switches: Counter[tuple[str, str]] = field(default_factory=Counter)
    importing: int = 0

    def __call__(self, frame: FrameType, event: str, _: object) -> None:
        file = frame.f_code.co_filename
        if not file.startswith(_ROOT) or event not in ("call", "return"):
            return
        if frame.f_code.co_name == "<module>":
            self.importing += 1 if event == "call" else -1
        elif event == "call" and not self.importing:
            self.files[file[len(_ROOT) :]] += 1
            caller = _caller(frame)
            if caller is not None and _package(caller) != _package(frame):
                self.switches[(_package(caller), f"{file[len(_ROOT) :]} {frame.f_code.co_qualname}")] += 1

    @property
    def between_parts(self) -> int:
        """The switches to packages that do something, and not only name it."""
        return sum(n for (_, called), n in self.switches.items() if not called.startswith(_WORDS))

    def __add__(self, other: Way) -> Way:
        return Way(self.files + other.files, self.switches + other.switches)


def _caller(frame: FrameType) -> FrameType | None:
    back = frame.f_back
    while back is not None and not back.f_code.co_filename.startswith(_ROOT):
        back = back.f_back
    return back


def _package(frame: FrameType) -> str:
    return os.path.dirname(frame.f_code.co_filename[len(_ROOT) :])


def way_of(run: Callable[[], object]) -> tuple[Way, object]:
    """The way of a call, and its result."""
    way = Way()
    sys.setprofile(way)
    try:
        result = run()
    finally:
        sys.setprofile(None)
    return way, result


def matmul_ways() -> dict[str, Way]:
    """A matmul from `mt.annotate` to its first result, on a mesh of 2 x 2."""
    func, mesh, layouts = matmul(128, 128, 128), mt.Mesh({"x": 2, "y": 2}), {"A": {"x": 0, "y": 1}, "B": {"y": 0}}
    annotate, func = way_of(lambda: mt.annotate(func, mesh, {**layouts, "C": {"x": 0}}))
    build, kernel = way_of(lambda: mt.compile(func))
    call, _ = way_of(lambda: kernel(torch.randn(128, 128), torch.randn(128, 128), torch.zeros(128, 128)))
    return {"annotate": annotate, "compile": build, "first call": call, "all": annotate + build + call}


def module_ways() -> dict[str, Way]:
    """An MLP of torch from `mt.annotate_module` to its first result, on a mesh of 2."""
    layers = torch.nn.Sequential(torch.nn.Linear(64, 128), torch.nn.GELU(), torch.nn.Linear(128, 64))
    example = torch.randn(8, 64)
    model = mt.from_torch(torch.export.export(layers, (example,)))
    shardings = {"0.weight": {"x": 0}, "0.bias": {"x": 0}, "2.weight": {"x": 1}}
    annotate, mod = way_of(lambda: mt.annotate_module(model.mod, {"x": 2}, shardings))
    build, module = way_of(lambda: mt.distribute_module(mod, weights=model.params))
    call, _ = way_of(lambda: module(example))
    return {"annotate": annotate, "distribute_module": build, "first call": call, "all": annotate + build + call}


def report(title: str, ways: dict[str, Way]) -> str:
    """Files, calls and switches of every stage, and what is most often called from other packages."""
    rows = [
        (n, len(w.files), sum(w.files.values()), sum(w.switches.values()), w.between_parts) for n, w in ways.items()
    ]
    most = [(f"{caller} -> {called}", count) for (caller, called), count in ways["all"].switches.most_common(12)]
    parts = [
        table([title, "files", "calls", "switches", "not to base/, tir/"], rows),
        table(["called from another package", "times"], most),
    ]
    return f"## {title}\n\n" + "\n\n".join(parts)


if __name__ == "__main__":
    print(header("The way through the source"))
    print(report("matmul", matmul_ways()))
    print(report("MLP", module_ways()))
