"""Local modules on the workers of TVM's Disco, processes and threads, against one device."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import tvm_ffi
from tvm import relax, tirx
from tvm.runtime.disco import _ffi_api as disco
from tvm.script import from_source
from tvm.script.parser import ir as I
from tvm.script.parser import relax as R

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.rms_norm import two_pass_rms_norm
from tests.plan.seed_modules import MLP, NESTED
from tests.plan.step_modules import call, legalized, module, operands


@pytest.fixture(scope="module")
def threads():
    """mesh -> a session of threads, kept."""
    sessions = {}

    def session(mesh):
        return sessions.setdefault(str(mesh), sessions.get(str(mesh)) or mt.DiscoSession(mesh, threads=True))

    yield session
    for opened in sessions.values():
        opened.close()


def check(run, mod, data, session, function="main", tolerance=1e-5):
    """The workers give what one device gives."""
    made = mt.DiscoModule(run, session)(*data)
    expected = mt.run_sequential(mod, data, function=function)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=tolerance)


@pytest.mark.parametrize(("mesh", "shardings"), [(None, {}), ({"x": 2, "y": 2}, {"x": {"x": 0}, "weight1": {"y": 1}})])
def test_mlp_of_the_seed_on_processes(mesh, shardings):
    data = [torch.randn(128, 128) / 8 for _ in range(3)]
    plain = _without_annotations() if mesh else MLP
    run = mt.distribute_module(plain, mesh, shardings, function="foo")
    expected = mt.run_sequential(plain, data, function="foo")
    with mt.DiscoModule(run) as on_disco:
        assert len(on_disco.session.process_ids) == run.mesh.num_devices - 1
        for scale in (1, 2):  # the workers stay
            made = on_disco(data[0] * scale, *data[1:])
            wanted = expected if scale == 1 else mt.run_sequential(plain, [data[0] * 2, *data[1:]], function="foo")
            torch.testing.assert_close(made, wanted, rtol=1e-4, atol=1e-5)
    assert on_disco.session.closed


def _without_annotations():
    builder = relax.BlockBuilder()
    params = [relax.Var(name, relax.TensorStructInfo((128, 128), "float32")) for name in ("x", "weight1", "weight2")]
    with builder.function("foo", params):
        with builder.dataflow():
            hidden = builder.emit(relax.op.nn.gelu(builder.emit(relax.op.matmul(params[0], params[1]))))
            result = builder.emit_output(relax.op.matmul(hidden, params[2]))
        builder.emit_func_output(result)
    return builder.get()


def test_worker_function_is_the_seeds():
    """What is whole is broadcast, what is split is scattered, and the local function is called; it parses."""
    made = mt.to_disco(mt.distribute_module(MLP, function="foo"))
    text = made.script()
    worker = text[text.index("def worker_func") :]
    assert "x: R.Object, weight1: R.Object, weight2: R.Object" in worker
    assert worker.count('"runtime.disco.broadcast_from_worker0", (x,') == 1
    assert worker.count('"mesh.scatter_from_worker0", weight1, R.shape([128, 128]), R.str("S[1]")') == 1
    assert worker.count('"mesh.scatter_from_worker0", weight2, R.shape([128, 128]), R.str("S[0]")') == 1
    assert "cls.foo(" in worker
    assert from_source(text).script() == text


@pytest.mark.parametrize(
    ("mesh", "shardings"),
    [
        ({"x": 3}, {"A": {"x": 1}, "D": {"x": 0}}),
        ({"x": 3}, {"x": {"x": 0}, "C": {"x": 1}}),
        ({"x": 2, "y": 3}, {"x": {"x": 0}, "A": {"y": 1}, "C": {"y": 0, "x": 0}}),
        ({"x": 2, "y": 2}, {"x": {"x": 1, "y": 1}, "B": {"x": 0, "y": 1}}),
    ],
    ids=str,
)
def test_nested_functions_and_uneven_tiles(mesh, shardings, threads):
    data = [torch.randn(128, 128) / 8 for _ in range(5)]
    check(mt.distribute_module(NESTED, mesh, shardings), NESTED, data, threads(mesh))


@I.ir_module
class Mixed:
    """Merged dims, a lookup, several results in tuples, dtypes that C has not, what TVM has no code for."""

    @R.function
    def main(
        x: R.Tensor((3, 5, 4, 6), "float32"),
        table: R.Tensor((11, 7), "float16"),
        index: R.Tensor((5,), "int64"),
        mask: R.Tensor((5, 7), "bool"),
    ):
        with R.dataflow():
            merged = R.reshape(R.permute_dims(x, [0, 2, 1, 3]), [12, 5, 6])
            s = R.nn.softmax(merged, axis=-1)
            m = R.max(s, axis=1)
            a = R.nn.attention(x, x, x)
            rows = R.take(table, index, axis=0)
            picked = R.where(mask, rows, R.astype(R.multiply(rows, rows), "float16"))
            total = R.sum(R.astype(picked, "float32"), axis=[0])
            low = R.nn.layer_norm(picked, R.sum(picked, axis=[0]), R.max(picked, axis=[0]), axes=[-1], scale=False)
            R.output(m, a, total, low)
        return (m, (a, total)), low, x


@pytest.mark.parametrize(
    ("mesh", "shardings"),
    [
        ({"x": 2}, {"x": {"x": 2}, "table": {"x": 0}}),
        ({"x": 2}, {"merged": {"x": 0}, "picked": {"x": 0}, "index": {"x": 0}}),
        ({"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}, "table": {"x": 0, "y": 1}, "mask": {"y": 0}}),
        ({"x": 2, "y": 2}, {"x": {"sharding": {"x": 2}, "partial": {"y": "sum"}}, "rows": {"x": 0, "y": 1}}),
    ],
    ids=str,
)
def test_operators_that_tvm_and_torch_compute(mesh, shardings, threads):
    data = [
        torch.randn(3, 5, 4, 6), torch.randn(11, 7).half(), torch.tensor([0, 10, -1, 5, 6]), torch.rand(5, 7) > 0.5
    ]  # fmt: skip
    check(mt.distribute_module(Mixed, mesh, shardings), Mixed, data, threads(mesh), tolerance=2e-3)


def test_tir_functions(threads):
    mod = legalized(module({"x": (7, 10), "w": (10, 6)}, [
        ("h", lambda bb, env: relax.op.matmul(env["x"], env["w"])),
        ("y", lambda bb, env: relax.op.nn.softmax(env["h"], axis=-1)),
    ]))  # fmt: skip
    run = mt.distribute_module(mod, {"x": 2, "y": 2}, {"x": {"x": 0, "y": 1}, "w": {"y": 0}})
    assert mt.to_disco(run).script().count('"mesh.kernel"') == len(run.local_module.functions) - 1 > 1
    check(run, mod, operands(mod), threads({"x": 2, "y": 2}))


def test_tilelang_kernels(threads):
    kernels = [
        ("a", call(matmul(50, 36, 70, 32, 32, 32), "x", "w", shape=(50, 36))),
        ("r", call(two_pass_rms_norm(50, 36, block_N=32), "a", "g", shape=(50, 36))),
    ]
    mod = module({"x": (50, 70), "w": (70, 36), "g": (36,)}, kernels)
    run = mt.distribute_module(mod, {"x": 3}, {"x": {"x": 1}, "w": {"x": 0}, "a": {"x": 0}})
    assert '"mesh.kernel"' in mt.to_disco(run).script()
    check(run, mod, operands(mod), threads({"x": 3}))


def test_sums_of_nothing(threads):
    """Where the code of TVM leaves memory as it was."""
    mod = module({"x": (5, 0, 3), "w": (0, 4)}, [
        ("s", lambda bb, env: relax.op.sum(env["x"], axis=[1])),
        ("m", lambda bb, env: relax.op.matmul(relax.op.permute_dims(env["x"], [0, 2, 1]), env["w"])),
        ("y", lambda bb, env: relax.op.add(env["s"], relax.op.sum(env["m"], axis=[2]))),
    ])  # fmt: skip
    run = mt.distribute_module(mod, {"x": 2}, {"x": {"x": 0}})
    torch.testing.assert_close(mt.DiscoModule(run, threads({"x": 2}))(*operands(mod)), torch.zeros(5, 3))


def test_symbolic_sizes_weights_and_names(threads):
    builder = relax.BlockBuilder()
    n = tirx.Var("n", "int64")
    x = relax.Var("x", relax.TensorStructInfo((n, 6), "float32"))
    w = relax.Var("w", relax.TensorStructInfo((6, 5), "float32"))
    with builder.function("main", [x, w]):
        with builder.dataflow():
            y = builder.emit_output(relax.op.matmul(x, w))
        builder.emit_func_output(y)
    weight = torch.randn(6, 5)
    mod = builder.get()
    run = mt.distribute_module(mod, {"x": 2}, {"w": {"x": 1}}, weights={"w": weight})
    on_disco = mt.DiscoModule(run, threads({"x": 2}))
    for size in (3, 0, 8, 3):
        data = torch.randn(size, 6)
        torch.testing.assert_close(on_disco(x=data), data @ weight)


def test_discos_own_collectives(threads):
    """TVM has them for NCCL only; here they are gloo's."""
    session = threads({"x": 2, "y": 2})._session
    stacked = tvm_ffi.from_dlpack(torch.arange(24.0).reshape(4, 2, 3))

    def on_workers(name, *args):
        return disco.SessionCallPacked(
            session, 0, 0, disco.SessionGetGlobalFunc(session, f"runtime.disco.{name}"), *args
        )

    def empty(shape, first_only=False):
        return on_workers("empty", tvm_ffi.Shape(shape), tvm_ffi.dtype("float32"), None, first_only, True)

    def tensors(ref):
        return [torch.from_dlpack(disco.DRefDebugGetFromRemote(ref, worker)) for worker in range(4)]

    whole, parts = empty((4, 2, 3), first_only=True), empty((2, 3))
    disco.SessionCopyToWorker0(session, stacked, whole)
    on_workers("scatter_from_worker0", whole, True, parts)
    expected = torch.arange(24.0).reshape(4, 2, 3)
    for found, part in zip(tensors(parts), expected, strict=True):
        torch.testing.assert_close(found, part)
    everywhere, reduced, back = empty((4, 2, 3)), empty((2, 3)), empty((4, 2, 3), first_only=True)
    on_workers("broadcast_from_worker0", whole, True, everywhere)
    on_workers("allreduce", parts, tvm_ffi.Shape((3,)), True, reduced)  # 3: max
    on_workers("gather_to_worker0", parts, True, back)
    joined = empty((8, 3))
    on_workers("allgather", parts, True, joined)
    for worker in range(4):
        torch.testing.assert_close(tensors(everywhere)[worker], expected)
        torch.testing.assert_close(tensors(reduced)[worker], expected.amax(0))
        torch.testing.assert_close(tensors(joined)[worker], expected.reshape(8, 3))
    torch.testing.assert_close(torch.from_dlpack(disco.DRefDebugGetFromRemote(back, 0)), expected)


def test_results_without_elements(threads):
    """TVM divides by the size of an empty slice that goes backwards."""
    x = relax.Var("x", relax.TensorStructInfo((8, 4), "float32"))
    builder = relax.BlockBuilder()
    with builder.function("main", [x]):
        empty = builder.emit(relax.op.strided_slice(x, [0], [2], [2], [-1]))
        builder.emit_func_output(builder.emit(relax.op.concat([empty, x], axis=0)))
    run = mt.distribute_module(builder.get(), {"x": 2}, {"x": {"x": 1}})
    check(run, builder.get(), [torch.randn(8, 4)], threads(run.mesh))


def test_views_that_torch_negates_when_it_reads_them():
    class Doubled(torch.nn.Module):
        def forward(self, x):
            return x * 2

    x = torch.randn(7, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Doubled(), (x,))), {"d": 2}, {"x": {"d": 0}})
    assert torch.equal(mt.run_on_disco(run, torch._neg_view(x), threads=True), -2 * x)


def test_several_threads_take_turns(threads):
    class Sums(torch.nn.Module):
        def forward(self, x):
            return x.sum(1)

    x = torch.randn(6, 4)
    run = mt.distribute_module(mt.from_torch(torch.export.export(Sums(), (x,))), {"d": 2}, {"x": {"d": 1}})
    on_disco, given = mt.DiscoModule(run, threads(run.mesh)), [x + n for n in range(12)]
    with ThreadPoolExecutor(3) as callers:
        for tensor, found in zip(given, callers.map(on_disco, given), strict=True):
            torch.testing.assert_close(found, tensor.sum(1))
