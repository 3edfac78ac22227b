"""The command line: `mesh-tensor explain FILE:NAME`, and `simulate` and `search`, for a machine."""

from __future__ import annotations

import argparse
import runpy
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn
from torch.export import ExportedProgram
from tvm import ir, tirx

from mesh_tensor.base.errors import MeshTensorError, did_you_mean, listing, refuse, shown
from mesh_tensor.base.version import __version__
from mesh_tensor.importers import ImportedModule
from mesh_tensor.simulation import simulate

from .compile import compile
from .machine import Machine
from .search import search
from .search_results import FoundKernel

# What can be called, but is not a function of the user's that gives something.
_MADE = (tirx.PrimFunc, ir.IRModule, ImportedModule, nn.Module, ExportedProgram)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; 0 if it went well. What can't be done is told on stderr."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (MeshTensorError, OSError) as error:  # the latter of what is read and written
        print(error, file=sys.stderr)  # noqa: T201
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="mesh-tensor", description="Kernels and modules on meshes.")
    parser.add_argument("--version", action="version", version=f"mesh-tensor {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command")
    what = "a Python file, and what in it: a kernel, a module, a pipeline, or a function that gives one"
    machine = "a preset (see `machines`), or a file that machine.to_text() was written to"

    made = commands.add_parser("explain", help="what was decided, why, and what devices do; nothing of it is run")
    made.add_argument("what", metavar="FILE:NAME", help=what)
    made.set_defaults(run=_explain)

    made = commands.add_parser("simulate", help="what something takes on a machine; nothing of it is run")
    made.add_argument("what", metavar="FILE:NAME", help=what)
    made.add_argument("--machine", default="cpu", help=machine)
    made.add_argument("--page", metavar="HTML", help="write the timeline as a page")
    made.add_argument("--trace", metavar="JSON", help="write the timeline for Perfetto")
    made.set_defaults(run=_simulate)

    made = commands.add_parser("search", help="which layouts take least, or how a module is trained best")
    made.add_argument(
        "what", metavar="FILE:NAME", help="a Python file, and a module or kernel in it, or a function that gives one"
    )
    made.add_argument("--devices", type=int, required=True, help="how many there are")
    made.add_argument("--machine", default="cpu", help=machine)
    made.add_argument("--objective", default="time", help="time, memory or cost (time by devices)")
    made.add_argument("--memory-limit", type=int, help="bytes of a device")
    made.add_argument("--seconds", type=float, default=60.0, help="after which the search ends")
    made.add_argument("--page", metavar="HTML", help="write the best one's timeline as a page")
    made.add_argument("--save", metavar="FILE", help="write what was found")
    made.add_argument("--known", metavar="FILE", help="go on from what --save wrote")
    train = made.add_argument_group("how a module that gives a loss is trained best")
    train.add_argument("--batch", type=int, help="rows of a batch: search for ways to train it")
    train.add_argument("--schedules", type=_words, metavar="A,B", help="schedules of pipelines that are tried")
    for name in ("microbatches", "model", "zero"):
        train.add_argument(f"--{name}", type=_numbers, metavar="N,N", help=f"{name}: what is tried")
    made.set_defaults(run=_search)

    made = commands.add_parser("machines", help="the machines that are known by name")
    made.set_defaults(run=lambda options: _say("\n\n".join(f"{n}: {Machine.preset(n)}" for n in Machine.presets())))

    made = commands.add_parser("measure", help="measure this machine, and write it to a file")
    made.add_argument("file")
    made.set_defaults(run=_measure)
    return parser


def _explain(options: argparse.Namespace) -> None:
    found = _object(options.what)
    found = compile(found) if isinstance(found, tirx.PrimFunc) else found
    if not hasattr(found, "explain"):
        refuse(
            f"of {shown(found)} nothing was decided",
            fix="name an annotated kernel, or what mt.compile, mt.distribute_module or mt.pipeline gives",
        )
    _say(found.explain())


def _simulate(options: argparse.Namespace) -> None:
    made = simulate(_object(options.what), _machine(options.machine))
    _say(f"{made}\n\n{made.why()}")
    for path, write in ((options.page, made.page), (options.trace, made.trace)):
        if path is not None:
            write(path)


def _search(options: argparse.Namespace) -> None:
    module = _object(options.what)
    limits = {"objective": options.objective, "memory_limit": options.memory_limit, "seconds": options.seconds}
    trained = ("batch", "schedules", "microbatches", "model", "zero", "known")
    given = {name: value for name in trained if (value := getattr(options, name)) is not None}
    if options.save is not None and isinstance(module, tirx.PrimFunc):
        refuse("a search over a kernel's layouts is not saved", fix="leave out --save: it takes seconds")
    bar = sys.stderr.isatty()
    found = search(module, options.devices, _machine(options.machine), progress=bar, **limits, **given)
    _say(f"{found}\n\n{found.code()}")
    if options.save is not None and not isinstance(found, FoundKernel):
        found.save(options.save)
    if options.page is not None:
        found.simulation().page(options.page)


def _words(text: str) -> list[str]:
    return text.split(",")


def _numbers(text: str) -> list[int]:
    try:
        return [int(each) for each in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers, as 1,2 is") from None


def _measure(options: argparse.Namespace) -> None:
    machine = Machine.measure()
    Path(options.file).write_text(machine.to_text(), encoding="utf-8")
    _say(str(machine))


def _object(place: str) -> Any:
    """What stands in a file under a name; what it gives, if it is a function that isn't a kernel."""
    path, _, name = place.rpartition(":")
    if not path or not Path(path).is_file():
        refuse(f"there is no file {path or place!r}", fix="write FILE:NAME, as in model.py:run")
    with _beside(path):
        names = _of_user(path, lambda: runpy.run_path(path), f"python {path} shows how it comes to that")
        if name not in names:
            known = sorted(each for each in names if not each.startswith("_"))
            refuse(f"{path} has no {name!r}{did_you_mean(name, known)}", fix=f"name what it has: {listing(known)}")
        found = names[name]
        made = isinstance(found, _MADE) or hasattr(found, "program")
        if callable(found) and not made and not hasattr(found, "schedule"):
            found = _of_user(place, found, "it is called without arguments")
    return found


@contextmanager
def _beside(path: str) -> Iterator[None]:
    """What lies beside a file is imported as it is when Python runs the file."""
    before = sys.path[:]
    sys.path.insert(0, str(Path(path).resolve().parent))
    try:
        yield
    finally:
        sys.path[:] = before


def _of_user(place: str, run: Callable[[], Any], fix: str) -> Any:
    """What the user's own code gives; what it raises is told with the line that did."""
    try:
        return run()
    except MeshTensorError:
        raise
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{last.filename}, line {last.lineno}" if last.filename != __file__ else ""
        what = "".join(traceback.format_exception_only(error)).strip()
        refuse(f"{place} fails: {what}", where=where, fix=fix)


def _machine(name: str) -> Machine:
    path = Path(name)
    if path.is_file():
        return Machine.from_text(path.read_text(encoding="utf-8", errors="replace"))
    if path.suffix == ".json" or path.parent != Path():
        refuse(
            f"there is no file {name!r}",
            where="--machine",
            fix=f"name a file that machine.to_text() wrote, or one of {listing(Machine.presets())}, "
            "with or without a number of devices: h100x16",
        )
    return Machine.preset(name)


def _say(text: str) -> None:
    print(text)  # noqa: T201
