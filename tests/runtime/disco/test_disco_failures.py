"""What goes wrong on the workers of a Disco session is said by name, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import tvm
import tvm_ffi
from tvm import relax
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from tests.plan.seed_modules import MLP
from tests.refusals import refusal

LAYOUT = {"x": {"x": 1}}


@I.ir_module
class OneFails:
    """A worker function as the seed draws it; the function that it calls fails on worker 1."""

    @R.function
    def worker_func(x: R.Object):
        with R.dataflow():
            whole = R.call_dps_packed("runtime.disco.broadcast_from_worker0", (x, True), R.Tensor((4,), "float32"))
            bad = R.call_pure_packed("tests.disco.fail_on_1", whole, sinfo_args=(R.Tensor((4,), "float32"),))
            again = R.call_dps_packed("runtime.disco.allreduce", (bad, R.shape([0]), True), R.Tensor((4,), "float32"))
            R.output(again)
        return again


@tvm_ffi.register_global_func("tests.disco.fail_on_1")
def _fail_on_1(tensor):
    if tvm_ffi.get_global_func("runtime.disco.worker_rank")() == 1:
        raise ValueError("this worker has a bad day")
    return tensor


def _small():
    builder = relax.BlockBuilder()
    x = relax.Var("x", relax.TensorStructInfo((6, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.sum(x, axis=[1]))
        builder.emit_func_output(y)
    return builder.get()


def test_one_worker_fails(tmp_path):
    """The one to blame is named, and those who wait for it are let go at once."""
    path = str(tmp_path / "module.so")
    relax.build(OneFails, target="c").export_library(path)
    with mt.DiscoSession({"x": 3}, threads=True, timeout=30) as session:
        machine = session.act("load", path)
        start = time.monotonic()
        message = refusal(lambda: session.act("run", machine, "worker_func", session.put(torch.ones(4))))
        assert time.monotonic() - start < 10
        assert "worker 1 raised ValueError: this worker has a bad day" in message
        assert "worker 0" not in message
        assert "worker 2" not in message
        with pytest.raises(mt.MeshTensorError, match=r"broken\) can't be used\n  why: worker 1 raised ValueError"):
            session.put(torch.ones(4))
    with pytest.raises(mt.MeshTensorError, match="closed"):
        session.put(torch.ones(4))


@pytest.mark.parametrize(
    ("sent", "words"),
    [(signal.SIGKILL, r"worker 1 has ended \(signal 9\)"), (signal.SIGSTOP, "worker 1 did not answer within 2 s")],
)
def test_a_process_ends_or_hangs(sent, words):
    run = mt.distribute_module(_small(), {"x": 2}, LAYOUT)
    with mt.DiscoModule(run, timeout=2) as on_disco:
        torch.testing.assert_close(on_disco(torch.ones(6, 4)), torch.full((6,), 4.0))
        ids = on_disco.session.process_ids
        os.kill(ids[1], sent)
        with pytest.raises(mt.MeshTensorError, match=words):
            on_disco(torch.ones(6, 4))
    with pytest.raises(ProcessLookupError):
        os.kill(ids[1], 0)


def test_bad_arguments():
    run = mt.distribute_module(_small(), {"x": 2}, LAYOUT)
    with mt.DiscoSession({"y": 2}, threads=True) as session:
        with pytest.raises(
            mt.MeshTensorError, match=r'the session is for Mesh\({"y": 2}\), the module for Mesh\({"x": 2}\)'
        ):
            mt.DiscoModule(run, session)
        with pytest.raises(mt.MeshTensorError, match="options for one"):
            mt.DiscoModule(mt.distribute_module(_small(), {"y": 2}, {}), session, timeout=3)
    with mt.DiscoModule(run, threads=True) as on_disco:
        with pytest.raises(mt.MeshTensorError, match="parameter 'x'"):
            on_disco(torch.ones(6, 5))
        with pytest.raises(mt.MeshTensorError, match="argument 'x' is a MeshTensor"):
            on_disco(mt.distribute(torch.ones(6, 4), {"x": 2}, {}))
        torch.testing.assert_close(on_disco(torch.ones(6, 4)), torch.full((6,), 4.0))


def test_the_name_of_the_worker_function_is_taken():
    function = MLP["foo"].with_attr("global_symbol", "worker_func")
    mod = tvm.IRModule({"worker_func": function}, attrs=MLP.attrs, global_infos=MLP.global_infos)
    with pytest.raises(mt.MeshTensorError, match="the module has a function 'worker_func'"):
        mt.to_disco(mt.distribute_module(mod, function="worker_func"))


def test_what_is_no_distributed_module():
    for use in (mt.to_disco, mt.run_on_disco, mt.DiscoModule):
        with pytest.raises(
            mt.MeshTensorError, match="takes a MeshModule, not int\n  fix: make one: mt.distribute_module"
        ):
            use(3)
