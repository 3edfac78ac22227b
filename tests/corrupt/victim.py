"""Loads the files whose paths come on stdin, prints and runs what they hold, and says for each what became of it."""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from tvm import ir

import mesh_tensor as mt
from mesh_tensor.runtime.module_inputs import ModuleSignature

#: Bytes of memory beyond which nothing is given, and seconds that running may take.
MEMORY, PATIENCE = 12 << 30, 20
MOST_ELEMENTS = 1 << 16


class Slow(Exception):
    """Running took too long: it may be a long program."""


def outcome(path: Path) -> tuple[str, str]:
    """A verdict ("module", "refused" or "wrong") and why."""
    try:
        mod = _load(path)
    except mt.MeshTensorError as error:
        return "refused", str(error)
    except Exception:
        return "wrong", traceback.format_exc()
    try:
        mod.script(show_meta=True)
        with _patience():
            return "module", _run(mod)
    except Exception:
        return "wrong", traceback.format_exc()


def _load(path: Path) -> ir.IRModule:
    if path.suffix == ".onnx":
        return mt.from_onnx(path).mod
    return mt.load_module(path, trusted=path.suffix == ".txt")


def _run(mod: ir.IRModule) -> str:
    """Run `main` on random inputs, unless they are large; what was said if that is refused."""
    try:
        signature = ModuleSignature(mod, "main")
        sizes = {str(symbol): 3 for symbol in signature.symbols}
        shapes = {
            param.name: [n if isinstance(n, int) else sizes[str(n)] for n in param.shape] for param in signature.params
        }
        if any(math.prod(shape) > MOST_ELEMENTS for shape in shapes.values()):
            return "not run: it is large"
        kinds = {param.name: getattr(torch, param.dtype) for param in signature.params}
        mt.run_sequential(mod, {name: torch.rand(shape).to(kinds[name]) for name, shape in shapes.items()})
    except mt.MeshTensorError as error:
        return f"not run: {error}"
    except Slow:
        return "not run to its end"
    return ""


@contextmanager
def _patience() -> Iterator[None]:
    def stop(*_: object) -> None:
        raise Slow

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(PATIENCE)
    try:
        yield
    finally:
        signal.alarm(0)


def main() -> None:
    """Answer until stdin ends."""
    answers = os.fdopen(os.dup(1), "w")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):
        os.dup2(nowhere, output)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    torch.manual_seed(0)
    for line in sys.stdin:
        print(json.dumps(outcome(Path(json.loads(line)))), file=answers, flush=True)


if __name__ == "__main__":
    main()
