"""A kernel's file, started as people start it: with and without torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.parametrize(
    ("started_by", "meshes"),
    [
        ([sys.executable], [{"x": 2}, {"x": 2, "y": 2}]),
        ([*TORCHRUN, "--nproc-per-node", "2"], [{"x": 2}]),
        ([*TORCHRUN, "--nproc-per-node", "4"], [{"x": 4}, {"x": 2, "y": 2}]),
    ],
    ids=["one process", "2 ranks", "4 ranks"],
)
def test_mlp(started_by, meshes):
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [*started_by, "-m", "kernels.mlp"]
    ended = subprocess.run(command, cwd=ROOT, env=outer, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    axes = [", ".join(f'"{axis}": {size}' for axis, size in mesh.items()) for mesh in meshes]
    assert re.findall(r"^=* ?Mesh\({(.*)}\): ", ended.stdout, re.MULTILINE) == axes
    errors = [float(error) for error in re.findall(r"largest error against torch: (\S+)", ended.stdout)]
    assert len(errors) == len(meshes)
    assert max(errors) < 1e-4
