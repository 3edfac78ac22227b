"""Measuring this machine: numbers that can be, and that say which of two programs is slower."""

from dataclasses import replace
from unittest import mock

import pytest
import torch
from tilelang import language as T
from tvm import relax

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.softmax import softmax
from mesh_tensor.api import machine as measure
from mesh_tensor.api import probe_models, probes
from mesh_tensor.base.machine import Machine, Memory
from tests.runtime.programs import add_one_kernel as add_one


def test_chains_tell_steps_from_calls():
    """Of runs that take 3 seconds beside 0.5 for each operator: the least of what each chain took."""
    disturbed = iter([0.0, 100.0, 100.0, 0.0])

    def least(run, budget):
        (short,) = run.args
        assert tuple(short.shape) == (16, 16)
        return 3.0 + 0.5 * len(run.func.program.ops) + next(disturbed)

    chain = probes.Chain(probes.PROBES[0], 16, "float32")
    with mock.patch.object(probes, "least", least):
        assert chain.run().step > 10
        assert (chain.run().step, chain.call) == (0.5, 3.0)


def test_the_least_of_several_runs_counts():
    """By CPU time, without what is done before each: of a clock that goes on by what is taken of it."""
    took, clock = iter([9.0, 5.0, 2.0, 4.0, 3.0, 6.0]), [0.0]

    def go(seconds):
        clock[0] += seconds

    with mock.patch.object(probes.time, "process_time", side_effect=lambda: clock[0]):
        assert probes.least(lambda: go(next(took)), 1.0, before=lambda: go(100.0)) == 2.0
    assert next(took, None) is None


def test_layers_of_a_chain_have_weights_of_their_own_that_calls_do_not_pass():
    shapes = probes.LINEAR.shapes(4)
    made = probes._chain(probes.LINEAR, shapes, ["float32"] * len(shapes), 3)
    assert [p.name_hint for p in made["main"].params] == ["x0", "w0_0", "w0_1", "w1_0", "w1_1", "w2_0", "w2_1"]
    run = probes._ready(made, own=6)
    assert [tuple(given.shape) for given in run.args] == [(4, 4)]
    assert [step.call.name for step in run.func.program.ops] == ["fused.linear"] * 3
    assert run().min() > 4**3 * 0.5**4  # of numbers from 0.5 up


def test_one_disturbed_change_of_layout_does_not_count():
    """What something else made slow once: a rate of 0.5 GB/s instead of 8 was measured like that."""
    changes = measure._Changes(16)
    changes.run(0.01)
    first, ways = changes.seconds, changes._ways
    assert 0 < first < 1
    changes._ways = dict.fromkeys(ways, 1.0)
    changes.run(0.01)
    assert changes.seconds < 0.5


@pytest.fixture(scope="module")
def machine():
    """Measured in a hurry: only what comes first, and once. Torch's threads are then as they were."""
    threads = torch.get_num_threads()
    out_of_time = pytest.warns(UserWarning, match=r"Machine.measure\(0\): not measured, out of time: .*nn.gelu")
    with mock.patch.object(measure, "_ROUNDS", 1), out_of_time as warned:
        made = measure.measure(0.0)
    assert "simulated at the rates of operations and memory alone" in str(warned[0].message)
    assert "measure for longer, or when less else is running" in str(warned[0].message)
    assert torch.get_num_threads() == threads
    return made


def test_a_machine_comes_out(machine):
    assert machine.processors >= 1
    assert machine.busy == 1.0
    assert machine.processor == probe_models.this_processor()
    assert 1e8 < machine.peak("float32") < 1e14
    assert [level.size for level in machine.memory] == sorted(level.size for level in machine.memory)
    rates = [level.rate for level in machine.memory]
    assert rates == sorted(rates, reverse=True)
    assert {"product", "kernel", "view"} <= set(machine.classes)
    assert machine.sources["classes"].startswith("not measured, out of time: ")
    assert mt.Machine.from_text(machine.to_text()) == machine
    assert f"{machine.processors} processors; where devices take turns" in str(machine)


def test_devices_that_take_turns_cost_what_their_steps_do(machine):
    """One device runs operators as one function, several go step by step: that is measured, too."""
    assert machine.start >= 1.0
    assert 0.0 <= machine.turn < 1e-2
    mod, times = probe_models.block(16, 16, 4), []
    for devices in (1, 2):
        run = mt.distribute_module(mod, {"x": devices}, {"x": {"x": 0}}, target="c")
        times.append(mt.simulate(run, replace(machine, processors=1, turn=1e-3, start=2.0)).time)
        steps = len(run.program.ops)
    assert times[1] - times[0] > 0.5e-3 * steps


def test_larger_products_take_longer_there(machine):
    def run(size):
        builder = relax.BlockBuilder()
        x = relax.Var("x", relax.TensorStructInfo((size, size), "float32"))
        with builder.function("main", [x]):
            with builder.dataflow():
                result = builder.emit_output(builder.emit(relax.op.matmul(x, x)))
            builder.emit_func_output(result)
        return mt.simulate(mt.distribute_module(builder.get(), {"x": 1}), machine).time

    assert run(64) < run(256) < run(1024)


ONE = Machine("one", {"float32": 1e12}, (Memory(1 << 30, 1e11),), launch=1e-6, call=2e-6)
ONE = replace(ONE, processor=probe_models.this_processor())


@pytest.mark.parametrize(("kernel", "size"), [(matmul, (64, 64, 64)), (softmax, (32, 64))])
def test_a_kernel_takes_what_it_was_measured_to_take(monkeypatch, kernel, size):
    monkeypatch.setattr(probe_models, "least", lambda run, seconds: 1e-3)
    made = ONE.with_kernel(kernel(*size))
    (name,) = made.classes
    one, larger = (mt.simulate(mt.annotate(kernel(*sizes), {"x": 1}, {}), made) for sizes in (size, (256, *size[1:])))
    assert one.time == pytest.approx(1e-3)
    assert larger.time == pytest.approx(1e-3 * 256 / size[0], rel=0.02)
    assert name in str(mt.Machine.from_text(made.to_text()))


def test_blocks_that_are_loaded_again_from_beyond_near_memory_take_their_time():
    """Of two products, one whose operands lie near, and one that is a quarter slower than its operations."""
    near, far = (1e-3, 1e-4, 2e-3), (8e-3, 1e-3, 20e-3)
    made = measure.blocks_class(near, far)
    assert (made.flops, made.again) == (pytest.approx(0.5), pytest.approx(0.25))
    assert measure.blocks_class(near, (8e-3, 1e-3, 15e-3)).again == 0  # no slower: operations hide it
    levels = Memory(1 << 20, 1e11), Memory(1 << 30, 1e10)
    machine = Machine("levels", {"float32": 1e12}, levels, classes={"kernel": made})
    for size, beyond in ((256, 0), (512, 1)):
        (step,) = mt.simulate(mt.annotate(matmul(size, size, size), {"x": 1}, {}), machine).steps
        once, loaded = 3 * 4 * size**2, 2 * 4 * size**3 // 64
        between = once / 3 + 2 * once / 3 * once / loaded  # a matrix, and in every round of it a part of the others
        again = (loaded - once) / (machine.memory_rate(between) * 0.25)
        cold = 0 if once <= 1 << 20 else once / 1e10 - once / machine.memory_rate(once)
        assert step.end - step.start == pytest.approx(2 * size**3 / 5e11 + beyond * again + cold)


def test_a_kernel_is_measured_once(monkeypatch):
    made = ONE.with_kernel(matmul(32, 32, 32))
    assert 0 < mt.simulate(mt.annotate(matmul(32, 32, 32), {"x": 1}, {}), made).time < 1
    monkeypatch.setattr(probe_models, "least", None)
    assert made.with_kernel(matmul(64, 64, 64)) is made


@pytest.mark.parametrize(
    ("kernel", "fact"),
    [
        (matmul, "is no kernel"),
        (3, "int is no kernel"),
        (matmul(T.dynamic("m"), 8, 8), "symbolic dims"),
        (add_one(0), "has no elements"),
    ],
)
def test_what_is_no_kernel_of_known_sizes_is_not_measured(kernel, fact):
    with pytest.raises(mt.MeshTensorError, match=fact):
        ONE.with_kernel(kernel)


@pytest.mark.parametrize("other", [mt.Machine.preset("h100"), replace(ONE, processor="another one")])
def test_a_kernel_that_runs_here_says_nothing_of_another_machine(other):
    with pytest.raises(mt.MeshTensorError, match="says nothing of 'another one'") as caught:
        other.with_kernel(matmul(32, 32, 32))
    for part in (repr(other.name), repr(ONE.processor), "a share of rates that nothing here has", "Machine.measure()"):
        assert part in str(caught.value)


def test_it_is_a_method_of_machine():
    assert mt.Machine._measure is measure.measure


def test_operations_and_copies_of_convolutions_are_told_apart():
    """Of exact rows: a start, operations and copies; where what copies more takes less, copies take nothing."""
    work, copies = [1e-5, 2e-4, 3e-4, 7e-4], [1e-6, 6e-5, 2e-5, 4e-5]
    rows = [(w, 2e-6 + 5e-6 + w / 0.8 + c / 0.25) for w, c in zip(work, copies, strict=True)]
    found = measure._beside_copies(rows, copies, 2e-6)
    assert (found.start, found.flops, found.again) == pytest.approx((5e-6, 0.8, 0.25))
    rows = [(w, 2e-6 + w / 0.8 - c / 10) for w, c in zip(work, copies, strict=True)]
    found = measure._beside_copies(rows, copies, 2e-6)
    assert (found.start, found.flops) == (0, pytest.approx(0.8, rel=0.05))
    assert found.again > 1e8
