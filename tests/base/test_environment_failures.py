"""Old versions and a cache that can't be written: said at import, with what is wrong and the way out."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import mesh_tensor
from mesh_tensor.base import environment as _environment
from mesh_tensor.base.environment import check_versions

ROOT = Path(mesh_tensor.__file__).resolve().parent.parent


def refusal(monkeypatch, **versions):
    """What is said where these versions are installed."""
    real = _environment._installed
    monkeypatch.setattr(_environment, "_installed", lambda name: versions.get(name, real(name)))
    with pytest.raises(ImportError) as error:
        check_versions()
    return str(error.value)


def test_an_old_tilelang(monkeypatch):
    message = refusal(monkeypatch, tilelang="0.1.6.post2+cu121")
    assert "mesh_tensor needs tilelang <0.2,>=0.1.15, and 0.1.6.post2+cu121 is installed" in message
    assert '`pip install "tilelang<0.2,>=0.1.15"`' in message
    assert "torch" not in message


def test_everything_that_is_wrong_is_said(monkeypatch):
    message = refusal(monkeypatch, tilelang="0.2.0", torch="2.5.1+cpu")
    assert "needs tilelang <0.2,>=0.1.15, and 0.2.0 is installed" in message
    assert "needs torch >=2.9, and 2.5.1+cpu is installed" in message


def test_what_is_not_installed(monkeypatch):
    assert "needs tilelang <0.2,>=0.1.15, and none is installed" in refusal(monkeypatch, tilelang="")


def test_an_old_python(monkeypatch):
    monkeypatch.setattr(_environment, "_PYTHON", (4, 2))
    message = refusal(monkeypatch)
    assert f"needs Python 4.2 or newer, and this is {sys.version.split()[0]}" in message
    assert "use a newer Python" in message


def test_versions_that_fit(monkeypatch):
    for found in ("0.1.15", "0.1.15.post1+cu128", "0.1.16.dev0", "0.1.20"):
        monkeypatch.setattr(_environment, "_installed", {"tilelang": found, "torch": "10.0"}.get)
        check_versions()
    monkeypatch.setattr(_environment, "_installed", lambda name: None)  # built from source, without a version
    check_versions()


def test_what_is_checked_is_what_the_project_states():
    stated = (ROOT / "pyproject.toml").read_text()
    dependencies = re.search(r"^dependencies = \[(.*)\]", stated, re.MULTILINE).group(1).replace('"', "").split(", ")
    found = [name + ",".join(sorted(bounds.split(","), reverse=True)) for name, bounds in _environment._requirements()]
    assert found == dependencies
    assert f'requires-python = ">={".".join(map(str, _environment._PYTHON))}"' in stated


@pytest.fixture
def imported(tmp_path):
    """What importing mesh_tensor says in another process, where HOME or a variable is this."""

    def imported(**environment):
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONWARNINGS": "default", **environment}
        done = subprocess.run(
            [sys.executable, "-c", "import mesh_tensor, tilelang; print(tilelang.env.TILELANG_CACHE_DIR)"],
            **{"env": environment, "cwd": tmp_path, "capture_output": True, "text": True, "check": False},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.strip(), done.stderr

    return imported


def test_an_old_tilelang_is_found_before_it_is_imported(tmp_path):
    (tmp_path / "tilelang").mkdir()
    (tmp_path / "tilelang" / "__init__.py").write_text("raise AttributeError('from inside')")
    (tmp_path / "tilelang-0.1.2.dist-info").mkdir()
    (tmp_path / "tilelang-0.1.2.dist-info" / "METADATA").write_text("Name: tilelang\nVersion: 0.1.2\n")
    path = os.pathsep.join([str(tmp_path), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", "import mesh_tensor"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert "ImportError: mesh_tensor needs tilelang <0.2,>=0.1.15, and 0.1.2 is installed" in done.stderr
    assert "from inside" not in done.stderr


def test_a_cache_that_can_not_be(imported, tmp_path):
    (tmp_path / "file").write_text("")
    folder, said = imported(TILELANG_CACHE_DIR=str(tmp_path / "file" / "cache"))
    assert said.count("compiled kernels can't be kept in") == 1
    assert f"kept in {tmp_path / 'file' / 'cache'} (Not a directory)" in said
    assert "set TILELANG_CACHE_DIR to a folder" in said
    assert not Path(folder).exists()


def test_a_cache_that_can_be(imported, tmp_path):
    folder, said = imported(TILELANG_CACHE_DIR=str(tmp_path / "new" / "cache"))
    assert folder == str(tmp_path / "new" / "cache")
    assert "can't be kept" not in said
