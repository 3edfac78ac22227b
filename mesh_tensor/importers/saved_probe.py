"""A module that nobody vouches for is loaded first in a process of its own, which may die of it.

One such process is started when it is first needed (some 2 seconds) and kept; it forks itself for every module."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import threading
from dataclasses import dataclass
from functools import cache
from typing import IO, Literal

import tvm.script
from tvm import ir, relax, tirx
from tvm.ir import diagnostics

FileForm = Literal["json", "tvmscript"]
#: Seconds that a module may take to be loaded, walked through and printed.
PATIENCE = 120
_START = "import sys; sys.path[:] = {path!r}; from mesh_tensor.importers.saved_probe import serve; serve()"
_LENGTH = struct.Struct("<Q")
_LOCK = threading.Lock()
_processes: dict[int, subprocess.Popen[bytes]] = {}  # by the process that asks: a fork has to start its own


@dataclass(frozen=True)
class Answer:
    """What came of a module: what is wrong with it, or its JSON."""

    problem: str
    text: str = ""


def tried(form: FileForm, text: str) -> Answer:
    """What happens when TVM loads, prints and verifies the module in `text`, in a process of its own."""
    request = json.dumps([form, text]).encode()
    with _LOCK:
        for _ in range(2):  # the process that was kept may have been ended from outside
            process = _process()
            try:
                _write(process.stdin, request)
                return Answer(*json.loads(_read(process.stdout)))
            except (OSError, EOFError):
                _stop()
    return Answer("the process that tries it can't be kept alive")


def look_through(form: FileForm, text: str) -> Answer:
    """The same in this process."""
    loaded = ir.load_json(text) if form == "json" else tvm.script.from_source(text)
    if isinstance(loaded, (relax.Function, tirx.PrimFunc)):
        loaded = ir.IRModule.from_expr(loaded)
    if not isinstance(loaded, ir.IRModule):
        return Answer(f"it holds a {type(loaded).__name__}, which is no module")
    ir.structural_hash(loaded)
    for func in loaded.functions.values():
        if isinstance(func, tirx.PrimFunc):
            tirx.stmt_functor.post_order_visit(func.body, lambda node: None)
        elif isinstance(func, relax.Function):
            relax.analysis.post_order_visit(func, lambda node: None)
    if not relax.analysis.well_formed(loaded):
        return Answer("TVM's check of modules says that it is not well formed")
    loaded.script(show_meta=True)
    return Answer("", ir.save_json(loaded))


def serve() -> None:
    """Answer modules on stdin with what is wrong with them on stdout, until stdin ends."""
    answers = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_RDWR)
    for output in (1, 2):  # TVM's diagnostics
        os.dup2(nowhere, output)
    _no_core_files()
    while True:
        try:
            form, text = json.loads(_read(sys.stdin.buffer))
        except EOFError:
            return
        answer = _in_child(form, text)
        _write(answers, json.dumps([answer.problem, answer.text]).encode())
        if answer.problem:
            _read_symbols()


@cache
def _read_symbols() -> None:
    """Fail to parse a text: to say why, TVM reads the symbols of its libraries, for a second; children share them."""
    with contextlib.suppress(Exception):
        look_through("tvmscript", "wrong")


def _in_child(form: FileForm, text: str) -> Answer:
    """What `look_through` says in a child, or what ended it."""
    here, there = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(here)
            _answer(form, text, there)
            status = 0
        finally:  # whatever happens, what runs after this is not for the child
            os._exit(status)
    os.close(there)
    with os.fdopen(here, "rb") as pipe:
        said = pipe.read()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status == -signal.SIGALRM:
        return Answer(f"TVM was not done with it after {PATIENCE} seconds")
    if status < 0:
        return Answer(f"TVM dies of it ({signal.Signals(-status).name})")
    return Answer(f"the process that tried it ended with status {status}") if status else Answer(*json.loads(said))


def _told(diagnostic: diagnostics.Diagnostic) -> str:
    return f"line {diagnostic.span.line}: {' '.join(diagnostic.message.split())}"


def _answer(form: FileForm, text: str, there: int) -> None:
    signal.alarm(PATIENCE)
    told: list[str] = []  # what the parser prints, in place of saying it in what it raises
    diagnostics.override_renderer(lambda context: told.extend(map(_told, context.diagnostics)))
    try:
        answer = look_through(form, text)
    except BaseException as error:  # whatever TVM raises is what is wrong
        answer = Answer("; ".join(told) or str(error).strip() or type(error).__name__)
    with os.fdopen(there, "wb") as pipe:
        pipe.write(json.dumps([answer.problem, answer.text]).encode())


def _no_core_files() -> None:
    try:
        import resource
    except ImportError:  # not a POSIX system
        return
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))


def _process() -> subprocess.Popen[bytes]:
    process = _processes.get(os.getpid())
    if process is not None and process.poll() is not None:
        _stop()
        process = None
    if process is None:
        process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", _START.format(path=sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        _processes[os.getpid()] = process
    return process


@atexit.register
def _stop() -> None:
    process = _processes.pop(os.getpid(), None)
    if process is not None:
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):  # it has ended, and what was still to be written can't be
                    pipe.close()
        process.wait()


def _write(pipe: IO[bytes] | None, data: bytes) -> None:
    if pipe is None:
        raise EOFError
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes] | None) -> bytes:
    size = _exactly(pipe, _LENGTH.size)
    return _exactly(pipe, _LENGTH.unpack(size)[0])


def _exactly(pipe: IO[bytes] | None, size: int) -> bytes:
    data = pipe.read(size) if pipe is not None else b""
    if len(data) != size:
        raise EOFError
    return data
