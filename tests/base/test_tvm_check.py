"""Importing mesh_tensor where another TVM is around."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

import mesh_tensor
from mesh_tensor.base.environment import check_tvm

ROOT = Path(mesh_tensor.__file__).resolve().parent.parent


@pytest.fixture
def run(tmp_path):
    """Run Python code where `import tvm` finds a package that is not tilelang's."""
    (tmp_path / "tvm").mkdir()
    (tmp_path / "tvm" / "__init__.py").write_text("")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])

    def run(code):
        environment = {**os.environ, "PYTHONPATH": path}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
        )

    return run


def test_another_tvm_first_is_a_clear_import_error(run, tmp_path):
    result = run("import tvm, mesh_tensor")
    assert result.returncode != 0
    last = result.stderr[result.stderr.index("ImportError: ") :]
    assert f"`tvm` was already imported from {tmp_path / 'tvm' / '__init__.py'} (apache-tvm?)" in last
    assert "tilelang, which mesh_tensor builds on, brings its own TVM" in last
    assert "`import mesh_tensor` (or `import tilelang`) before anything that imports tvm" in last
    assert "pip uninstall apache-tvm" in last


def test_mesh_tensor_first_is_the_way_out(run):
    result = run("import mesh_tensor, tvm; print(tvm.__file__)")
    assert result.returncode == 0, result.stderr
    assert Path("tilelang", "3rdparty", "tvm").as_posix() in Path(result.stdout.strip()).as_posix()


def _pretend(monkeypatch, file):
    """As if tilelang were not imported yet, and `tvm` were the module in `file`."""
    monkeypatch.delitem(sys.modules, "tilelang")
    module = type(sys)("tvm")
    if file is not None:
        module.__file__ = str(file)
    monkeypatch.setitem(sys.modules, "tvm", module)


def test_tilelangs_own_tvm_first_is_fine(monkeypatch):
    package = Path(importlib.util.find_spec("tilelang").origin).parent
    monkeypatch.delenv("TVM_IMPORT_PYTHON_PATH", raising=False)
    _pretend(monkeypatch, package / "3rdparty" / "tvm" / "python" / "tvm" / "__init__.py")
    check_tvm()


def test_the_tvm_that_tilelang_is_told_to_use_is_fine(monkeypatch, tmp_path):
    monkeypatch.setenv("TVM_IMPORT_PYTHON_PATH", str(tmp_path))
    _pretend(monkeypatch, tmp_path / "tvm" / "__init__.py")
    check_tvm()


def test_a_tvm_from_nowhere(monkeypatch):
    _pretend(monkeypatch, None)
    with pytest.raises(ImportError, match="an unknown place"):
        check_tvm()


def test_nothing_to_say_once_tilelang_is_imported(monkeypatch):
    monkeypatch.setitem(sys.modules, "tvm", type(sys)("tvm"))
    check_tvm()
