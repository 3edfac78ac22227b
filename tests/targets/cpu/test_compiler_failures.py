"""A compiler that is missing, can't run or fails: what is wrong, where the code is, and the way out."""

import errno
import re
import shlex
from pathlib import Path

import pytest

import mesh_tensor as mt
from mesh_tensor.base.environment import CACHE_VARIABLE
from mesh_tensor.targets.cpu import build as cpu_compiler
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from .kernels import dynamic_scale


@pytest.fixture
def refusal(tmp_path, monkeypatch):
    """What is said where the compiler is this one, by this variable."""
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_compiler.tempfile, "tempdir", str(tmp_path))

    def refusal(compiler, variable="CXX"):
        if variable:
            monkeypatch.setenv(variable, str(compiler))
        monkeypatch.setattr(cpu_compiler, "get_cplus_compiler", lambda: compiler and str(compiler))
        with pytest.raises(mt.MeshTensorError) as error:
            compile_for_cpu(dynamic_scale(2.0))
        return str(error.value)

    return refusal


def script(tmp_path, text):
    path = tmp_path / "compiler"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_no_compiler_anywhere(refusal):
    message = refusal(None, variable="")
    assert "no C++ compiler was found" in message
    assert "apt install g++" in message
    assert "set CXX" in message
    assert 'target="interpret" runs kernels without a compiler' in message


def test_no_compiler_at_that_path(refusal):
    message = refusal("/nonexistent/g++")
    assert "there is no C++ compiler at '/nonexistent/g++'" in message
    assert "the environment variable CXX" in message
    assert "apt install g++" in message
    assert "unset CXX" in message
    assert 'target="interpret"' in message


def test_a_compiler_that_can_not_run(refusal, tmp_path):
    (tmp_path / "text").write_text("no program")
    message = refusal(tmp_path / "text")
    assert f"{str(tmp_path / 'text')!r} can't run" in message
    assert "Permission denied" in message
    message = refusal(tmp_path)
    assert "can't run" in message


def test_a_compiler_that_fails(refusal, tmp_path):
    compiler = script(tmp_path, 'for i in 1 2 3 4 5 6 7; do echo "a.cpp:$i:1: error: number $i" >&2; done; exit 1')
    message = refusal(compiler)
    assert "the C++ compiler fails on the code of a kernel" in message
    for number in range(1, 6):
        assert f"error: number {number}" in message
    assert "number 6" not in message
    assert "... and 2 more" in message
    assert "report it as a bug of mesh_tensor, with that file" in message
    source = Path(re.search(r"where: (\S+),", message).group(1))
    assert "mesh_tensor_kernel" in source.read_text()
    assert f"{compiler} " in message
    assert shlex.quote(str(source)) in message
    assert not list((tmp_path / "cache" / "mesh_tensor").iterdir())


def test_a_compiler_that_says_nothing(refusal, tmp_path):
    assert "it ended with status 3, and wrote no library" in refusal(script(tmp_path, "exit 3"))
    assert "it ended with status 0, and wrote no library" in refusal(script(tmp_path, "exit 0"))
    assert "status -9" in refusal(script(tmp_path, "kill -9 $$"))


def test_a_compiler_without_space(tmp_path, monkeypatch):
    """It is the disk that is full: whoever calls may try elsewhere."""
    compiler = script(tmp_path, 'echo "Fatal error: error writing to /tmp/x.s: No space left on device" >&2; exit 1')
    monkeypatch.setattr(cpu_compiler, "get_cplus_compiler", lambda: str(compiler))
    with pytest.raises(OSError, match="No space left on device") as error:
        cpu_compiler.compile_library(tmp_path / "a.cpp", tmp_path / "a.so")
    assert error.value.errno == errno.ENOSPC
