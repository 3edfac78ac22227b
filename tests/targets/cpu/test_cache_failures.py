"""Where compiled kernels can't be kept, that is said once, and kernels run all the same."""

import os
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch

import mesh_tensor as mt
from mesh_tensor.base.environment import CACHE_VARIABLE
from mesh_tensor.targets.cpu import cache as cpu_cache
from mesh_tensor.targets.cpu.kernel import compile_for_cpu

from .kernels import dynamic_scale

ROOT = Path(__file__).parents[3]


def scaled(factor):
    x, y = torch.randn(5, 7), torch.empty(5, 7)
    compile_for_cpu(dynamic_scale(factor))(x, y)
    return torch.equal(y, x * factor)


@pytest.fixture
def fresh(monkeypatch):
    """As in a process that has not compiled anything."""
    for name in ("_warned", "_cleaned"):
        monkeypatch.setattr(cpu_cache, name, type(getattr(cpu_cache, name))())
    cpu_cache._temporary_folder.cache_clear()
    yield
    cpu_cache._temporary_folder.cache_clear()


@pytest.fixture
def unwritable(tmp_path, monkeypatch, fresh):
    """A cache where a file stands in the way, which nobody may write to, not even root."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "cache"))
    return tmp_path / "file" / "cache"


def test_a_cache_that_can_not_be_written(unwritable, monkeypatch):
    with pytest.warns(UserWarning, match="compiled kernels can't be kept in") as caught:
        assert scaled(11.0)
    (warning,) = caught
    text = str(warning.message)
    assert str(unwritable / "mesh_tensor") in text
    assert "Not a directory" in text
    assert "set TILELANG_CACHE_DIR to a folder with space that can be written" in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert scaled(12.0)  # the warning is given once
        monkeypatch.setattr("mesh_tensor.targets.cpu.build.compile_library", None)
        assert scaled(11.0)  # and what was compiled is found again


def test_a_full_cache(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr("mesh_tensor.targets.cpu.build.compile_library", full_below(tmp_path))
    with pytest.warns(UserWarning, match="No space left on device"):
        assert scaled(13.0)
    assert not list((tmp_path / "mesh_tensor").iterdir())


def full_below(folder):
    from mesh_tensor.targets.cpu.build import compile_library

    def build(source, library):
        if folder in library.parents:
            raise OSError(28, "No space left on device")
        compile_library(source, library)

    return build


def test_nowhere_to_compile(unwritable, monkeypatch, tmp_path):
    monkeypatch.setattr(cpu_cache.tempfile, "tempdir", str(tmp_path / "file" / "other"))
    with (
        pytest.warns(UserWarning, match="can't be kept"),
        pytest.raises(mt.MeshTensorError, match="nowhere to compile") as error,
    ):
        scaled(14.0)
    assert "TILELANG_CACHE_DIR or TMPDIR" in str(error.value)


def test_a_home_that_can_not_be_written(tmp_path, monkeypatch):
    """TileLang's own cache is below HOME, too. What is read from the environment is read by another process."""
    (tmp_path / "file").write_text("")
    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    ended = subprocess.run(
        [sys.executable, "-m", "tests.targets.cpu.cache_process", "2.0", "3.0"],
        cwd=ROOT,
        env={**os.environ, "HOME": str(tmp_path / "file" / "home"), "PYTHONWARNINGS": "default"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    out, err = ended.stdout, ended.stderr
    assert out.split() == ["70.0", "105.0"], err
    assert err.count("compiled kernels can't be kept in") == 1
    assert f"{tmp_path / 'file' / 'home' / '.tilelang' / 'cache'} (Not a directory)" in err
    assert "set TILELANG_CACHE_DIR to a folder" in err


def test_a_library_that_can_not_be_loaded(tmp_path, monkeypatch, fresh):
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path))
    monkeypatch.setattr(
        "mesh_tensor.targets.cpu.build.compile_library", lambda source, library: library.write_bytes(b"no library")
    )
    with pytest.raises(mt.MeshTensorError, match="its library can't be loaded") as error:
        scaled(15.0)
    assert "too short" in str(error.value)
    assert "CXX" in str(error.value)
