"""Files, started as people start them: with and without torchrun, and again after a rank is lost."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.launcher.api import elastic_launch
from torch.distributed.run import config_from_args, get_args_parser

from . import kernel_bodies
from .elastic_training import LOST_AT, STEPS, restarted, start
from .launcher import run

ROOT = Path(__file__).parents[3]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone"]


@pytest.mark.parametrize(
    ("started_by", "meshes"),
    [
        ([sys.executable], [{"x": 2}, {"x": 2, "y": 2}]),
        ([*TORCHRUN, "--nproc-per-node", "2"], [{"x": 2}]),
    ],
    ids=["one process", "2 ranks"],
)
def test_mlp(started_by, meshes):
    outer = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    command = [*started_by, "-m", "kernels.mlp"]
    ended = subprocess.run(command, cwd=ROOT, env=outer, capture_output=True, text=True, timeout=200, check=False)
    assert ended.returncode == 0, ended.stderr
    _check(ended.stdout, meshes)


def test_mlp_on_four_ranks():
    """Forked here: what starts processes is the same for two and for four."""
    first, *others = run(kernel_bodies.mlp_of_ranks, 4)
    _check(first, [{"x": 4}, {"x": 2, "y": 2}])
    assert others == [""] * 3


def _check(said, meshes):
    axes = [", ".join(f'"{axis}": {size}' for axis, size in mesh.items()) for mesh in meshes]
    assert re.findall(r"^=* ?Mesh\({(.*)}\): ", said, re.MULTILINE) == axes
    errors = [float(error) for error in re.findall(r"largest error against torch: (\S+)", said)]
    assert len(errors) == len(meshes)
    assert max(errors) < 1e-4


@pytest.fixture
def signals_as_before():
    """torchrun's agent has handlers of its own, and leaves them."""
    caught = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT)
    before = [signal.getsignal(one) for one in caught]
    yield
    for one, handler in zip(caught, before, strict=True):
        signal.signal(one, handler)


@pytest.mark.usefixtures("signals_as_before")
def test_restart(tmp_path, monkeypatch):
    """As docs/ranks.md says: what the second generation of ranks computes goes on from the first one's. Torchrun's
    agent is in this process, and its ranks are forked as those of other tests."""
    page = (ROOT / "docs" / "ranks.md").read_text()
    words = re.search(r"^(TORCH_\S+)=1 torchrun (.*) (script.py)$", page, re.MULTILINE)
    assert words is not None
    monkeypatch.setenv(words[1], "1")
    config, *_ = config_from_args(get_args_parser().parse_args([*words[2].split(), words[3]]))
    config.start_method = "forkserver"
    made = elastic_launch(config, restarted)(tmp_path / "saved")
    assert made[0] == f"generation 1: from step {LOST_AT} to {STEPS}"
    step, state = torch.load(tmp_path / "saved")
    expected, weight = start()
    for _ in range(STEPS):
        expected = expected @ weight
    assert step == STEPS
    torch.testing.assert_close(state, expected, rtol=1e-4, atol=1e-4)
