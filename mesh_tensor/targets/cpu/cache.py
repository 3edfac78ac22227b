"""Compiled kernels on disk, between runs: found if they are as they were written, and written whole or not at all.

They lie in the folder `mesh_tensor` of TileLang's cache, which TILELANG_CACHE_DIR moves: a folder per kernel and
compiler, with the library and a note of its size and hash. Another one per C++ source and compiler has the same: what
makes source of kernels changes more often than the source that comes of it, which is then not compiled again."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import json
import os
import shutil
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import tilelang

from mesh_tensor.base.environment import CACHE_VARIABLE, temporary_folder, warn_of_cache
from mesh_tensor.base.errors import refuse

_LIBRARY, _NOTE, _SOURCE = "kernel.so", "kernel.json", "kernel.cpp"
_BUILDING, _BY_SOURCE = "tmp", "source"
_ABANDONED = 3600.0  # seconds: no build takes as long
_lock = threading.Lock()

Build = Callable[[Path, Path], None]  # from source to library


def cache_folder() -> Path:
    """Where compiled kernels are kept."""
    return Path(tilelang.env.TILELANG_CACHE_DIR or "~/.tilelang/cache").expanduser() / "mesh_tensor"


def find_library(kernel: str, compiler: str) -> ctypes.CDLL | None:
    """The library of a kernel as a compiler makes it, if it is there and whole; as any one made it, where `compiler` is
    "". Both are texts for all that matters."""
    for root in [cache_folder(), *([_temporary_folder()] if _temporary_folder.cache_info().currsize else [])]:
        entries = [root / f"{kernel}-{_short(compiler)}"] if compiler else sorted(root.glob(f"{kernel}-*"))
        for entry in entries:
            library = _loaded(entry)
            if library is not None:
                return library
    return None


def add_library(kernel: str, compiler: str, source: str, build: Build) -> ctypes.CDLL:
    """The library that `build` makes of `source`, kept for the next time. Where the cache can't be written, it is kept
    for this process, with one warning."""
    name = f"{kernel}-{_short(compiler)}"
    try:
        entry = _built(cache_folder(), name, source, build)
    except OSError as error:
        _warn(error)
        entry = _in_temporary_folder(name, source, build)
    library = _loaded(entry)
    if library is None:
        refuse(
            "a kernel was compiled, but its library can't be loaded",
            where=str(entry),
            why=_why_not(entry / _LIBRARY),
            fix=f"set {CACHE_VARIABLE} to a folder on a file system that may hold programs; check the compiler (CXX)",
        )
    return library


def _in_temporary_folder(name: str, source: str, build: Build) -> Path:
    try:
        return _built(_temporary_folder(), name, source, build)
    except OSError as error:
        refuse(
            "there is nowhere to compile a kernel",
            where=f"{cache_folder()} and {tempfile.gettempdir()}",
            why=error.strerror or str(error),
            fix=f"set {CACHE_VARIABLE} or TMPDIR to a folder with space that can be written",
        )


def build_once(source: str, build: Build) -> ctypes.CDLL:
    """The library that `build` makes of `source`; nothing is kept."""
    with tempfile.TemporaryDirectory() as folder:
        return ctypes.CDLL(str(_compiled(Path(folder), source, build)))


def _loaded(entry: Path) -> ctypes.CDLL | None:
    """The library of an entry, if it is what its note says."""
    library = entry / _LIBRARY
    try:
        note = json.loads((entry / _NOTE).read_text())
        whole = note == _note_of(library)
    except (OSError, ValueError):
        return None
    try:
        return ctypes.CDLL(str(library)) if whole else None
    except OSError:  # of another system, though it is as it was written
        return None


def _note_of(library: Path) -> dict[str, object]:
    data = library.read_bytes()
    return {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _built(root: Path, name: str, source: str, build: Build) -> Path:
    """The entry `name` in `root`, built beside it and moved there as a whole."""
    root.mkdir(parents=True, exist_ok=True)
    _clean(root)
    entry, same = root / name, root / _name_by_source(source, compiler=name.rpartition("-")[2])
    with _building_folder(root) as folder:
        made = folder / "entry"
        made.mkdir()
        if _loaded(same) is None:
            library = _compiled(made, source, build)
            (made / _SOURCE).unlink()
            (made / _NOTE).write_text(json.dumps(_note_of(library)))
            shutil.copytree(made, folder / "same")
            _move(folder / "same", same)
        else:
            for part in (_LIBRARY, _NOTE):
                shutil.copyfile(same / part, made / part)
        _move(made, entry)
    return entry


def _name_by_source(source: str, compiler: str) -> str:
    return f"{_BY_SOURCE}-{hashlib.sha256(source.encode()).hexdigest()}-{compiler}"


def _move(made: Path, entry: Path) -> None:
    """Put a folder in its place as a whole."""
    for _ in range(2):
        try:
            os.rename(made, entry)
            return
        except OSError:  # something is there: of another process that was quicker, or broken
            if _loaded(entry) is not None:
                return
            with contextlib.suppress(FileNotFoundError):
                os.rename(entry, made.parent / f"broken{time.monotonic_ns()}")
    os.rename(made, entry)


def _compiled(folder: Path, source: str, build: Build) -> Path:
    text, library = folder / _SOURCE, folder / _LIBRARY
    text.write_text(source)
    build(text, library)
    return library


@contextlib.contextmanager
def _building_folder(root: Path) -> Iterator[Path]:
    """A folder of this process to build in; its name says whose it is."""
    folder = Path(tempfile.mkdtemp(dir=root, prefix=f"{_BUILDING}-{_host()}-{os.getpid()}-"))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _clean(root: Path) -> None:
    """Remove what builds left that were ended from outside; once per process and folder."""
    with _lock:
        if root in _cleaned:
            return
        _cleaned.add(root)
    for folder in root.glob(f"{_BUILDING}*"):
        if _is_abandoned(folder):
            shutil.rmtree(folder, ignore_errors=True)


def _is_abandoned(folder: Path) -> bool:
    """Whether nobody builds there: its process, on this machine, has ended; or nothing has happened for an hour."""
    parts = folder.name.split("-")
    if len(parts) == 4 and parts[1] == _host() and parts[2].isdigit():
        with contextlib.suppress(PermissionError, OverflowError):  # it is there, and another user's
            try:
                os.kill(int(parts[2]), 0)
            except ProcessLookupError:
                return True
    with contextlib.suppress(OSError):
        return time.time() - folder.stat().st_mtime > _ABANDONED
    return False


@functools.cache
def _host() -> str:
    """This machine's name, without what tells parts of folders' names apart."""
    return _short(f"{socket.gethostname()} {_boot()}")


def _boot() -> str:
    """What tells one start of a machine, or container, from another, where that is known: process ids start anew."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return ""


def _short(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _why_not(library: Path) -> str:
    try:
        ctypes.CDLL(str(library))
    except OSError as error:
        return str(error)
    return "it is not what was written"


@functools.cache
def _temporary_folder() -> Path:
    return Path(temporary_folder())


def _warn(error: OSError) -> None:
    """Say once what becomes of compiled kernels."""
    with _lock:
        if _warned:
            return
        _warned.append(True)
    warn_of_cache(cache_folder(), error)


_warned: list[bool] = []
_cleaned: set[Path] = set()
