"""Whatever bytes a file holds, loading it ends in a module that can be printed and run, or in a MeshTensorError."""

from collections import Counter

import pytest

import mesh_tensor as mt
from tests.plan.modules import Heads

from .check import Victim, run
from .corpus import KINDS, make_file
from .mutations import OF_BYTES, OF_NODES

COUNTS = {"json": 190, "saved": 20, "text": 40, "onnx": 50}
#: Answers the first file; ends by a signal, or not at all, at the second.
MORTAL = """
import os, sys
sys.stdin.readline()
print('["module", ""]', flush=True)
if "segv" in sys.stdin.readline():
    os.kill(os.getpid(), 11)
sys.stdin.readline()
"""


@pytest.fixture(scope="module")
def victim():
    """One process for all files, as long as it lives."""
    with Victim() as victim:
        yield victim


@pytest.mark.parametrize("kind", KINDS)
def test_files_made_wrong(victim, kind, tmp_path):
    wrong, verdicts, done = {}, Counter(), Counter()
    for number in range(COUNTS[kind]):
        what, path = make_file(kind, number, tmp_path)
        outcome = victim.outcome(path)
        verdicts[outcome.verdict] += 1
        done[what.split(": ")[-1]] += 1
        if outcome.verdict == "wrong":
            wrong[number, what] = outcome.reason
    assert not wrong
    assert verdicts["refused"] > COUNTS[kind] // 2
    assert verdicts["module"] > 0 or kind == "saved"
    if kind == "json":
        assert set(done) == {*OF_BYTES, *OF_NODES}


def test_files_as_they_should_be(victim, tmp_path):
    mt.save_module(Heads, tmp_path / "good.json")
    (tmp_path / "good.txt").write_text(Heads.script(show_meta=True))
    for name in ("good.json", "good.txt"):
        outcome = victim.outcome(tmp_path / name)
        assert (outcome.verdict, outcome.reason) == ("module", "")


def test_a_file_that_kills_is_found_out(tmp_path, monkeypatch):
    with Victim(["-c", MORTAL]) as victim:
        for _ in range(2):  # the second time, in another process
            assert victim.outcome(tmp_path / "first").verdict == "module"
            outcome = victim.outcome(tmp_path / "segv")
            assert (outcome.verdict, outcome.reason) == ("wrong", "the process ended with SIGSEGV")
        assert victim.outcome(tmp_path / "first").verdict == "module"
        monkeypatch.setattr("tests.corrupt.check.PATIENCE", 1)
        assert victim.outcome(tmp_path / "for ever").reason == "no answer in 1 seconds"


def test_the_fuzzers_files(victim):
    assert run(0, victim).verdict in ("right", "refused")
    assert run(1, victim).reason.startswith("a file (saved, saved with a checksum): ")
