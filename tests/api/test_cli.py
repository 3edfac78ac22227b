"""The command line: what it prints and writes, and what it refuses."""

import json
import sys
from pathlib import Path

import pytest

import mesh_tensor as mt
from mesh_tensor.api.cli import main
from mesh_tensor.base.machine import Link, Machine, Memory

TRAINED = "from tests.api.test_search_training import exported"
SOURCE = """
import torch
import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.models import mlp

kernel = mt.annotate(matmul(64, 64, 64), mt.Mesh({"x": 4}), {"A": {"x": 1}, "B": {"x": 0}, "C": {}})

def model():
    return mt.from_torch(torch.export.export(mlp.build(), mlp.example_inputs()), check=False)

number = 3
layer = torch.nn.Linear(2, 2)
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "model.py"
    path.write_text(SOURCE)
    return path


def test_simulate(file, tmp_path, capsys):
    page, trace = tmp_path / "a.html", tmp_path / "a.json"
    assert main(["simulate", f"{file}:kernel", "--machine", "h100x8", "--page", str(page), "--trace", str(trace)]) == 0
    said = capsys.readouterr().out
    assert 'on Mesh({"x": 4}), machine h100x8' in said
    assert "all_reduce over x" in said
    assert "1. " in said
    assert "<svg" in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]


@pytest.mark.parametrize("name", ["kernel", "distributed"])
def test_explain(file, capsys, name):
    file.write_text(SOURCE + "\ndef distributed():\n    return mt.distribute_module(model(), {'x': 4})\n")
    assert main(["explain", f"{file}:{name}"]) == 0
    said = capsys.readouterr().out
    assert 'on Mesh({"x": 4})' in said
    assert "steps of each device" in said


def test_a_file_imports_what_lies_beside_it(file, capsys):
    (file.parent / "beside_a_model.py").write_text("number = 3")
    file.write_text("from beside_a_model import number\ndef lazily():\n    import beside_a_model\n    return number")
    for name in ("number", "lazily"):
        assert main(["simulate", f"{file}:{name}"]) == 1
        assert "3 can't be simulated" in capsys.readouterr().err
    assert str(file.parent) not in sys.path


def test_search(file, capsys):
    assert main(["search", f"{file}:model", "--devices", "2"]) == 0
    said = capsys.readouterr().out
    assert "strategies on gloo with a core per rank" in said
    assert "mod = mt.annotate_module(mod, {" in said


def test_search_how_to_train(file, tmp_path, capsys):
    source = TRAINED + "\ndef loss():\n    return exported(2)[1]\n"
    file.write_text(source)
    page, saved = tmp_path / "best.html", tmp_path / "found.json"
    few = ["--devices", "2", "--batch", "4", "--schedules", "1f1b,zb-h1", "--zero", "0", "--model", "1"]
    assert main(["search", f"{file}:loss", *few, "--machine", "h100x2", "--save", str(saved), "--page", str(page)]) == 0
    said = capsys.readouterr().out
    assert "ways to train on h100x2, batch 4" in said
    assert "run = mt.pipeline(" in said
    assert "machine='h100x2'," in said
    assert "<svg" in page.read_text()
    assert main(["search", f"{file}:loss", *few, "--machine", "h100x2", "--known", str(saved)]) == 0
    assert capsys.readouterr().out == said


def test_a_machine_of_a_file(file, tmp_path, capsys):
    machine = Machine("mine", {"float32": 1e12}, (Memory(10**9, 1e11),), (Link("wire", None, 1e9, 1e-5),))
    (tmp_path / "machine.json").write_text(machine.to_text())
    assert main(["simulate", f"{file}:kernel", "--machine", str(tmp_path / "machine.json")]) == 0
    assert "machine mine" in capsys.readouterr().out


def test_machines(capsys):
    assert main(["machines"]) == 0
    said = capsys.readouterr().out
    assert all(f"machine {name}" in said for name in Machine.presets() if name != "cpu")


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["simulate", "{file}:kernl"], "has no 'kernl'; did you mean 'kernel'?"),
        (["simulate", "nowhere.py:kernel"], "there is no file 'nowhere.py'"),
        (["simulate", "kernel"], "there is no file 'kernel'"),
        (["simulate", "{file}:number"], "3 can't be simulated"),
        (["simulate", "{file}:layer"], "Linear(in_features=2, out_features=2, bias=True) can't be simulated"),
        (["explain", "{file}:number"], "of 3 nothing was decided"),
        (["search", "{file}:layer", "--devices", "2"], "mt.from_torch(torch.export.export(model, inputs))"),
        (["simulate", "{file}:kernel", "--machine", "h100x2"], "has 4 devices, the machine 2"),
        (["simulate", "{file}:kernel", "--machine", "x100"], "there is no machine 'x100'"),
        (["simulate", "{file}:kernel", "--machine", "foo.json"], "there is no file 'foo.json'"),
        (["simulate", "{file}:kernel", "--machine", "at/foo"], "or one of 'cpu', 'laptop', 'v100', 'a100', 'h100'"),
        (["simulate", "{file}:kernel", "--machine", "{file}.bin"], "a machine's text is no JSON"),
        (["search", "{file}:number", "--devices", "2"], "search"),
        (["search", "{file}:kernel", "--devices", "2", "--save", "f"], "a search over a kernel's layouts is not saved"),
        (["search", "{file}:model", "--devices", "2", "--memory-limit", "1"], "no strategy fits into 1 bytes"),
    ],
)
def test_refusals_are_told_on_stderr(file, capsys, arguments, fact):
    Path(f"{file}.bin").write_bytes(b"\xff\xfe\x00")
    assert main([argument.replace("{file}", str(file)) for argument in arguments]) == 1
    said = capsys.readouterr()
    assert fact in said.err
    assert "Traceback" not in said.err


def test_help(capsys):
    with pytest.raises(SystemExit):
        main(["--help"])
    assert "simulate" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"mesh-tensor {mt.__version__}\n"


def test_what_a_file_raises_is_told_with_its_line(file, capsys):
    for source, told in (
        ("def loss(x): return x", "missing 1 required positional argument: 'x'"),
        ("def loss():\n    raise ValueError('mine')", "fails: ValueError: mine"),
        ("def (", "fails: "),
        ("import nowhere_at_all", "No module named 'nowhere_at_all'"),
    ):
        file.write_text(source)
        assert main(["simulate", f"{file}:loss"]) == 1
        assert told in capsys.readouterr().err


def test_files_that_cannot_be_written_and_numbers_that_are_none(file, tmp_path, capsys):
    assert main(["simulate", f"{file}:kernel", "--page", str(tmp_path)]) == 1
    assert f"Is a directory: '{tmp_path}'" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["search", f"{file}:model", "--devices", "2", "--zero", "a"])
    assert "'a' is no list of numbers, as 1,2 is" in capsys.readouterr().err
