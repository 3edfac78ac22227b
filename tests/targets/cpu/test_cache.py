"""What is compiled once is kept on disk, whole or not at all, and found again where nothing has changed."""

import os
import random
import socket
import subprocess
import sys
import threading
import time
from functools import partial

import pytest
import tilelang
import torch

import mesh_tensor as mt
from kernels.softmax import softmax
from mesh_tensor.base.environment import CACHE_VARIABLE
from mesh_tensor.base.errors import MeshTensorError, refuse
from mesh_tensor.targets.cpu import build as cpu_build
from mesh_tensor.targets.cpu import build as cpu_compiler
from mesh_tensor.targets.cpu import cache as cpu_cache
from mesh_tensor.targets.cpu.build import compiler_stamp
from mesh_tensor.targets.cpu.kernel import compile_for_cpu, compile_together
from tests.corrupt.mutations import mutated_bytes
from tests.runtime.ranks.launcher import run

from .cache_process import totals_in
from .kernels import dynamic_scale


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache of its own."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_cache, "_cleaned", set())
    return tmp_path / "cache" / "mesh_tensor"


@pytest.fixture
def no_compiler(monkeypatch):
    """From when it is called, calling the compiler is an error."""

    def no_compiler():
        def build(source, library):
            raise AssertionError("the compiler was called")

        monkeypatch.setattr("mesh_tensor.targets.cpu.build.compile_library", build)

    return no_compiler


def scaled(factor):
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    compile_for_cpu(dynamic_scale(factor))(x, y)
    return torch.equal(y, x * factor)


def only_entry(cache):
    """The folder of the only kernel, beside the one of its source."""
    kernel, source = sorted(cache.iterdir(), key=lambda entry: entry.name.startswith("source-"))
    assert source.name.startswith("source-")
    for entry in (kernel, source):
        assert cpu_cache.json.loads((entry / "kernel.json").read_text()) == cpu_cache._note_of(entry / "kernel.so")
    return kernel


def test_the_second_time_nothing_is_compiled(cache, no_compiler):
    assert scaled(5.0)
    assert sorted(path.name for path in only_entry(cache).iterdir()) == ["kernel.json", "kernel.so"]
    no_compiler()
    assert scaled(5.0)


@pytest.fixture
def other_sources(monkeypatch):
    """From when it is called, what makes source of kernels is another version."""
    return lambda: monkeypatch.setattr(cpu_build, "_build_stamp", lambda: "another version")


def test_the_same_source_is_not_compiled_again(cache, no_compiler, other_sources):
    assert scaled(5.0)
    other_sources()
    no_compiler()
    assert scaled(5.0)
    assert len([entry for entry in cache.iterdir() if not entry.name.startswith("source-")]) == 2
    with pytest.raises(AssertionError, match="the compiler was called"):
        scaled(6.0)


def test_a_broken_library_of_the_same_source_is_built_again(cache, other_sources):
    assert scaled(21.0)
    (entry,) = cache.glob("source-*")
    (entry / "kernel.so").unlink()  # this process may have loaded it
    (entry / "kernel.so").write_bytes(b"no library")
    other_sources()
    assert scaled(21.0)
    assert cpu_cache._loaded(entry) is not None
    assert [path.name for path in cache.glob("source-*")] == [entry.name]


def test_the_same_source_with_other_flags_is_compiled(cache, no_compiler, other_sources, monkeypatch):
    assert scaled(5.0)
    other_sources()
    no_compiler()
    monkeypatch.setattr(cpu_build, "FLAGS", (*cpu_build.FLAGS, "-DOTHER"))
    with pytest.raises(AssertionError, match="the compiler was called"):
        scaled(5.0)


def truncate(library):
    os.truncate(library, library.stat().st_size // 2)


def zero(library):
    library.write_bytes(bytes(library.stat().st_size))


def flip(library):
    data = bytearray(library.read_bytes())
    data[len(data) // 2] ^= 1
    library.write_bytes(data)


def empty(library):
    library.write_bytes(b"")


def be_a_folder(library):
    library.unlink()
    library.mkdir()


def be_missing(library):
    library.unlink()


def lose_its_note(library):
    (library.parent / "kernel.json").unlink()


def break_its_note(library):
    (library.parent / "kernel.json").write_text("{")


def be_no_entry(library):
    entry = library.parent
    for path in entry.iterdir():
        path.unlink()
    entry.rmdir()
    entry.write_text("a file in its place")


def be_empty(library):
    for path in library.parent.iterdir():
        path.unlink()


def mutated(number):
    def mutate(library):
        library.write_bytes(mutated_bytes(library.read_bytes(), random.Random(number)))

    mutate.__name__ = f"mutated_{number}"
    return mutate


DAMAGE = [
    *map(mutated, range(10)),
    truncate,
    zero,
    flip,
    empty,
    be_a_folder,
    be_missing,
    lose_its_note,
    break_its_note,
    be_no_entry,
    be_empty,
]


def totals(folder, *factors, count=1, **environment):
    """What processes compute at once that keep their kernels in a folder."""
    return run(partial(totals_in, {CACHE_VARIABLE: str(folder), **environment}, factors), count, group=False)


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A cache that another process has filled, with a kernel for each damage: this process has loaded none of them, and
    a system does not load twice what lies at one path."""
    folder = tmp_path_factory.mktemp("made")
    factors = [100.0 + index for index in range(len(DAMAGE) + 1)]
    assert totals(folder, *factors) == [[35 * factor for factor in factors]]
    return folder


def entry_of(made, factor):
    return made / "mesh_tensor" / f"{cpu_build.kernel_key(dynamic_scale(factor))}-{cpu_cache._short(compiler_stamp())}"


@pytest.mark.parametrize("damage", DAMAGE, ids=lambda damage: damage.__name__)
def test_a_broken_library_is_built_again_and_never_loaded(made, monkeypatch, no_compiler, damage):
    monkeypatch.setenv(CACHE_VARIABLE, str(made))
    factor = 100.0 + DAMAGE.index(damage)
    entry = entry_of(made, factor)
    others = set(entry.parent.iterdir()) - {entry}
    damage(entry / "kernel.so")
    assert scaled(factor)
    assert set(entry.parent.iterdir()) == {entry} | others
    assert cpu_cache.json.loads((entry / "kernel.json").read_text()) == cpu_cache._note_of(entry / "kernel.so")
    no_compiler()
    assert scaled(factor)


def test_a_library_of_another_architecture(made, monkeypatch):
    """It is whole, but this system can't load it."""
    monkeypatch.setenv(CACHE_VARIABLE, str(made))
    entry = entry_of(made, 100.0 + len(DAMAGE))
    library = entry / "kernel.so"
    foreign = bytearray(library.read_bytes())
    foreign[18:20] = (0xF3).to_bytes(2, "little")  # e_machine: RISC-V
    library.write_bytes(foreign)
    (entry / "kernel.json").write_text(cpu_cache.json.dumps(cpu_cache._note_of(library)))
    assert scaled(100.0 + len(DAMAGE))
    assert library.read_bytes()[18:20] != foreign[18:20]


def test_many_threads_compile_the_same_kernel_at_once(cache):
    results = []
    threads = [threading.Thread(target=lambda: results.append(scaled(7.0))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [True] * 4
    assert only_entry(cache).is_dir()


def test_processes_compile_the_same_at_once_and_a_warm_cache_needs_no_compiler(cache):
    assert totals(cache.parent, 2.0, count=2) == [[70.0], [70.0]]
    assert only_entry(cache).is_dir()
    assert totals(cache.parent, 2.0, CXX="/nonexistent/g++") == [[70.0]]


def test_without_a_cache_nothing_is_kept(cache, monkeypatch):
    monkeypatch.setattr(tilelang.env, "is_cache_enabled", lambda: False)
    assert scaled(9.0)
    assert not cache.exists()


def test_what_crashed_builds_left_is_removed(cache, monkeypatch):
    ended = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    host, pid = cpu_cache._host(), int(ended.stdout)
    old, new = f"tmp-{cpu_cache._short('other')}-{pid}-x", f"tmp-{cpu_cache._short('other')}-{pid}-y"
    names = {
        f"tmp-{host}-{pid}-abc": False,  # its process has ended
        f"tmp-{host}-{os.getppid()}-abc": True,  # its process lives
        f"tmp-{host}-1-abc": True,  # another user's, perhaps
        old: False,  # another machine's, of long ago
        new: True,  # another machine's, of now
        "tmpab12cd": False,  # without a name, of long ago
        "tmpab12ce": True,
    }
    for name in names:
        (cache / name).mkdir(parents=True)
        (cache / name / "kernel.cpp").write_text("")
    before = time.time() - 2 * cpu_cache._ABANDONED
    for name in (old, "tmpab12cd"):
        os.utime(cache / name, (before, before))
    assert scaled(3.0)
    left = {path.name for path in cache.iterdir() if path.name.startswith("tmp")}
    assert left == {name for name, stays in names.items() if stays}
    assert socket.gethostname() not in str(left)


def test_the_compiler_is_part_of_what_is_looked_for(cache, monkeypatch):
    scaled(5.0)
    monkeypatch.setattr("mesh_tensor.targets.cpu.build.compiler_stamp", lambda: "another compiler")
    assert scaled(5.0)
    assert len(list(cache.iterdir())) == 4


def test_a_compiler_with_arguments(monkeypatch, cache):
    """As people set CXX: ccache and the compiler."""
    found = cpu_compiler.get_cplus_compiler()
    monkeypatch.setattr(cpu_compiler, "get_cplus_compiler", lambda: f"env LC_ALL=C {found}")
    assert scaled(5.0)


def _meeting(monkeypatch, count):
    """So many processors, and compilers that begin when as many are about to: those that ran."""
    meeting, ran, compile_library = threading.Barrier(count, timeout=60), [], cpu_build.compile_library

    def build(source, library):
        meeting.wait()
        ran.append(library)
        compile_library(source, library)

    monkeypatch.setattr(cpu_build, "compile_library", build)
    monkeypatch.setattr(os, "cpu_count", lambda: count)
    return ran


@pytest.mark.parametrize("kept", [True, False])
def test_several_kernels_are_compiled_at_the_same_time(cache, monkeypatch, kept):
    monkeypatch.setattr(tilelang.env, "is_cache_enabled", lambda: kept)
    ran = _meeting(monkeypatch, 2)
    kernels = compile_together([dynamic_scale(factor) for factor in (2.0, 3.0)])
    assert len(ran) == 2
    for factor, kernel in zip((2.0, 3.0), kernels, strict=True):
        x, y = torch.randn(5, 7), torch.empty(5, 7)
        kernel(x, y)
        torch.testing.assert_close(y, x * factor)


def test_a_program_has_its_kernels_compiled_at_the_same_time(cache, monkeypatch):
    """A softmax over split columns is cut twice; of its three kernels none is like another."""
    ran = _meeting(monkeypatch, 3)
    func = mt.annotate(softmax(64, 128), mt.Mesh({"x": 2}), {"X": {"x": 1}, "Y": {"x": 1}})
    kernel = mt.compile(func, target="c", strict=True)
    x = torch.randn(64, 128)
    torch.testing.assert_close(kernel(x), x.softmax(1))
    assert len(ran) == len(kernel.program.kernels) == 3


def test_one_that_cannot_be_compiled_among_several(cache, monkeypatch):
    def build(source, library):
        if "2.000000e+00f" in source.read_text():
            refuse("broken")
        compile_library(source, library)

    compile_library = cpu_build.compile_library
    monkeypatch.setattr(cpu_build, "compile_library", build)
    with pytest.raises(MeshTensorError, match="broken"):
        compile_together([dynamic_scale(factor) for factor in (3.0, 2.0, 4.0)])
