"""What is built of the project: a wheel that runs alone, a source archive with everything."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

import mesh_tensor as mt

ROOT = Path(__file__).parents[1]
LEFT_OUT = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist")
BUILD = "from setuptools.build_meta import build_sdist, build_wheel; build_sdist({0!r}); build_wheel({0!r})"
USE = """
import sys
import torch
import mesh_tensor as mt
import tilelang.language as T

assert mt.__file__.startswith(sys.argv[1]), mt.__file__


@T.prim_func
def double(A: T.Tensor((64, 32), "float32"), B: T.Tensor((64, 32), "float32")):
    with T.Kernel(4, threads=32) as bx:
        for i, j in T.Parallel(16, 32):
            B[bx * 16 + i, j] = A[bx * 16 + i, j] * 2.0


a = torch.randn(64, 32)
torch.testing.assert_close(mt.compile(mt.annotate(double, {"x": 2}, {"A": {"x": 0}}), target="c")(a), a * 2)
print(mt.__version__)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """A folder with the wheel and the source archive."""
    source, made = tmp_path_factory.mktemp("source") / "project", tmp_path_factory.mktemp("made")
    shutil.copytree(ROOT, source, ignore=LEFT_OUT)
    run = [sys.executable, "-c", BUILD.format(str(made))]
    subprocess.run(run, cwd=source, check=True, capture_output=True, text=True)
    return made


def _files(folder, *suffixes):
    return {
        path.relative_to(ROOT).as_posix()
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix in suffixes and "__pycache__" not in path.parts
    }


def test_wheel_has_the_package_and_nothing_else(built):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == _files("mesh_tensor", ".py", ".pyi", ".h", ".cpp", ".typed") | {"mesh_tensor/py.typed"}
    assert any(name.startswith("mesh_tensor/targets/cpu/csrc/") for name in names)


def test_source_archive_has_everything(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "Makefile",
        "README.md",
        "constraints.txt",
        "pyproject.toml",
    }
    for folder in ("benchmarks", "docs", "kernels", "mesh_tensor", "tests"):
        wanted |= _files(folder, ".py", ".md", ".h", ".cpp", ".json", ".txt")
    assert wanted - names == set()


def test_wheel_runs_from_another_folder(built, tmp_path):
    with zipfile.ZipFile(next(built.glob("*.whl"))) as wheel:
        wheel.extractall(tmp_path / "site")
    (tmp_path / "use.py").write_text("import sys; sys.path.insert(0, sys.argv[1])\n" + USE)
    (tmp_path / "elsewhere").mkdir()
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    run = [sys.executable, "../use.py", str(tmp_path / "site")]
    done = subprocess.run(run, cwd=tmp_path / "elsewhere", env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == mt.__version__


def test_types_are_published():
    assert (ROOT / "mesh_tensor" / "py.typed").is_file()
