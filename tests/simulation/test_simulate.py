"""Simulations of kernels and modules: closed forms, the runtime's memory, and what they are shown as."""

import json
from dataclasses import replace

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from kernels.matmul import matmul
from kernels.models import gpt2
from mesh_tensor.base.machine import Link, Machine, Memory, Roofline
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.vjp import vjp_call
from tests.plan.loop_modules import LOOPS, Loop, looped, recurrent, unrolled

FAST = Machine(
    "fast",
    {"float32": 1e12},
    (Memory(10**12, 1e11),),
    (Link("near", 8, rate=1e10, start=1e-6), Link("far", None, rate=1e9, start=1e-5)),
)
LAYOUTS = {"A": {"x": 1}, "B": {"x": 0}, "C": {}}


def k_split(devices, size=128, **options):
    func = mt.annotate(matmul(size, size, size), mt.Mesh({"x": devices}), LAYOUTS)
    return mt.compile(func, target="interpret", **options)


@pytest.fixture(scope="module")
def gpt():
    config = gpt2.Config(layers=2, width=32, positions=8, batch=4)
    tokens = torch.randint(config.vocabulary, (4, 8))
    return mt.from_torch(torch.export.export(gpt2.build(config), (tokens,)), check=False), tokens


def distributed(gpt, mesh, layouts):
    imported, _ = gpt
    return mt.distribute_module(imported.mod, mesh, layouts, weights=imported.params)


def test_a_kernel_and_its_all_reduce():
    """The kernel's operations, then one tile around a ring (two ranks send as much in a tree)."""
    made = mt.simulate(k_split(2), FAST)
    kernel, reduced = 2 * 128 * 128 * 64 / 1e12, 1e-6 + 4 * 128 * 128 / 1e10
    tiles = 4 * 128 * (64 + 64 + 128) / 1e11
    assert made.computing == pytest.approx(max(kernel, tiles))
    assert made.communicating == pytest.approx(reduced)
    assert made.time == pytest.approx(made.computing + made.communicating)
    assert made.exposed == pytest.approx(reduced / made.time)


def test_a_launch_is_paid_per_step_and_processors_are_shared():
    plain = mt.simulate(k_split(4), FAST)
    assert mt.simulate(k_split(4), replace(FAST, launch=1e-3)).computing == pytest.approx(plain.computing + 1e-3)
    assert mt.simulate(k_split(4), replace(FAST, processors=2)).computing == pytest.approx(2 * plain.computing)
    assert mt.simulate(k_split(4), replace(FAST, processors=4)).computing == plain.computing


def test_devices_that_share_processors_work_once_for_all_that_have_the_same_memory(gpt):
    """What is replicated is one tensor, until groups of devices reduce or gather their own."""
    shared = replace(FAST, processors=1)
    one, whole, reduced = (
        mt.simulate(distributed(gpt, mesh, layouts), shared).computing
        for mesh, layouts in (({"x": 1}, {}), ({"x": 2, "y": 2}, {}), ({"x": 2, "y": 2}, {"wte_weight": {"y": 0}}))
    )
    assert whole == pytest.approx(one)
    assert 1.5 * whole < reduced < 2.5 * whole


def test_slabs_hide_the_collective_where_it_takes_nothing_from_the_kernel():
    bulk, slabs = (mt.simulate(k_split(2, 256, overlap=count), FAST) for count in ("off", 4))
    assert slabs.communicating > bulk.communicating  # it starts four times
    assert slabs.exposed < bulk.exposed
    assert slabs.critical_path[-1].stream == "near"
    busy = mt.simulate(k_split(2, 256, overlap=4), replace(FAST, busy=1.0))
    assert busy.time > slabs.time


@pytest.mark.parametrize(("mesh", "layouts"), [({"x": 1}, {}), ({"x": 2}, {"tokens": {"x": 0}}), ({"x": 3}, {})])
def test_memory_is_what_the_runtime_holds(gpt, mesh, layouts):
    run = distributed(gpt, mesh, layouts)
    run(gpt[1])
    (launch,) = run._launches
    assert mt.simulate(run).peak_bytes == launch._run.peak_bytes


@pytest.mark.parametrize("layouts", [LAYOUTS, {"A": {"x": 0}, "C": {"x": 1}}, {"C": {"x": 0}}])
def test_memory_of_kernels_is_what_the_runtime_holds(layouts):
    kern = mt.compile(mt.annotate(matmul(48, 40, 32), mt.Mesh({"x": 3}), layouts), target="interpret")
    kern(torch.ones(48, 32), torch.ones(32, 40))
    assert mt.simulate(kern).peak_bytes == kern.peak_bytes


def test_more_devices_take_less_time_and_memory_until_messages_cost_more(gpt):
    times = {n: mt.simulate(distributed(gpt, {"x": n}, {"tokens": {"x": 0}}), FAST) for n in (1, 2, 4)}
    assert times[4].time < times[2].time < times[1].time
    assert times[4].peak_bytes < times[2].peak_bytes < times[1].peak_bytes


def test_a_mesh_of_65536_devices():
    mesh = mt.Mesh({"x": 256, "y": 256})
    func = mt.annotate(matmul(32768, 32768, 32768), mesh, {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}})
    made = mt.simulate(func, "h100")
    assert [step.kind.split(" ")[0] for step in made.steps] == ["kernel", "all_reduce"]
    assert made.flops == 2 * 32768**3 // 2**16


def test_the_steps_and_the_critical_path(gpt):
    made = mt.simulate(distributed(gpt, {"x": 2}, {"tokens": {"x": 0}}), FAST)
    assert max(step.end for step in made.steps) == made.time
    assert sum(step.end - step.start for step in made.critical_path) == pytest.approx(made.time)
    assert sum(group.seconds for group in made.groups()) == pytest.approx(made.computing + made.communicating)
    assert sum(group.count for group in made.groups()) == len(made.steps)


def test_without_a_kind_of_step_everything_is_over_sooner(gpt):
    made = mt.simulate(distributed(gpt, {"x": 2}, {}), FAST)
    matmuls = sum(step.end - step.start for step in made.steps if step.kind == "fused.linear")
    assert made.without(["fused.linear"]) == pytest.approx(made.time - matmuls)
    assert made.without({step.kind for step in made.steps}) == 0.0


def test_rates():
    made = mt.simulate(k_split(2), FAST)
    assert made.utilisation("float32") == pytest.approx(made.flops / made.time / 1e12)
    assert made.utilisation("float32", 1e6) == pytest.approx(1e6 / made.time / 1e12)
    assert made.per_second(10) == pytest.approx(10 / made.time)


def test_why_names_what_costs_most_and_what_would_change_it():
    slow = replace(FAST, links=(replace(FAST.links[0], devices=2), replace(FAST.links[1], rate=1e7)))
    lines = mt.simulate(k_split(4), slow).why().splitlines()
    assert lines[1].startswith("1. all_reduce over x: 1 x, ")
    assert "bound by far. If it took no time: " in lines[1]
    assert "make its axis a later one of the mesh, inside near" in lines[2]
    assert lines[3].startswith("2. kernel ")
    latency = mt.simulate(k_split(4, 32), replace(FAST, links=(replace(FAST.links[0], start=1.0),))).why()
    assert "join its collectives into fewer and larger ones" in latency


def test_the_table_says_whether_memory_suffices():
    text = str(mt.simulate(k_split(2), FAST))
    assert "kernel matmul_kernel  1 " in text
    assert "all_reduce over x     1 " in text
    assert "more than there is" not in text
    small = mt.simulate(k_split(2), replace(FAST, memory=(Memory(1000, 1e11),)))
    assert not small.fits
    assert "128 KiB of 1000 B per device: more than there is" in str(small)


def test_a_trace_is_what_chrome_reads(tmp_path, gpt):
    made = mt.simulate(distributed(gpt, {"x": 2}, {"tokens": {"x": 0}, "wte_weight": {"x": 1}}), FAST)
    trace = made.trace(tmp_path / "trace.json")
    assert json.loads((tmp_path / "trace.json").read_text()) == trace
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == len(made.steps)
    assert max(bar["ts"] + bar["dur"] for bar in bars) == pytest.approx(made.time * 1e6)
    held = [event["args"]["bytes"] for event in trace["traceEvents"] if event["ph"] == "C"]
    assert 0 < max(held) <= made.peak_bytes
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["device", "near", "far"]


def test_a_page_needs_nothing_else(tmp_path):
    made = mt.simulate(k_split(2), FAST)
    text = made.page(tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == text
    assert text.count("<rect") == len(made.steps) == 2
    assert "http" not in text
    assert "all_reduce over x: " in text


def test_loops_find_what_their_last_turn_left_in_near_memory():
    """The first turn's product takes its weights from far away, all later ones as if the turns were written out."""
    near, wide = replace(FAST, memory=(Memory(20_000, 1e11), Memory(10**12, 1e8))), [(64, 64), (5, 2, 64)]
    times = []
    for make in (looped, unrolled):
        made = mt.simulate(
            mt.distribute_module(make(Loop([(2, 64)], wide, [(2, 64)], recurrent), 5), {"x": 1}, target="c"), near
        )
        times.append([step.end - step.start for step in made.steps if step.kind == "matmul"])
    assert times[0][0] > 2 * times[0][1]
    assert times[0] == pytest.approx(times[1])


def test_every_turn_of_a_loop_is_on_the_critical_path():
    """Nothing runs beside anything on one device: all steps are, in loops as written out."""
    for make in (looped, unrolled):
        run = mt.distribute_module(make(Loop([(2, 64)], [(64, 64), (5, 2, 64)], [(2, 64)], recurrent), 5), {"x": 1})
        made = mt.simulate(run, FAST)
        assert made.critical_path == made.steps
        assert sum(group.critical for group in made.groups()) == pytest.approx(made.time)


def test_attention_reduces_its_scores_between_its_products():
    """Where reductions are slow, heads half as long (as many scores, half the operations) take more than half."""

    def took(size, rate):
        tensor = relax.TensorStructInfo((2, 64, 4, size), "float32")
        q, k, v = (relax.Var(name, tensor) for name in "qkv")
        builder = relax.BlockBuilder()
        with builder.function("main", [q, k, v]):
            with builder.dataflow():
                result = builder.emit_output(builder.emit(relax.op.nn.attention(q, k, v)))
            builder.emit_func_output(result)
        machine = mt.Machine("m", {"float32": 1e9}, [Memory(1 << 40, 1e15)], classes={"reduce": Roofline(flops=rate)})
        return mt.simulate(mt.distribute_module(builder.get(), {"x": 1}), machine).time

    scores = 2 * 4 * 64 * 64
    for size in (16, 32):
        assert took(size, 0.01) == pytest.approx((4 * size * scores + 100 * scores) / 1e9)


def _of(emit, *shapes, dtypes=(), mesh=None, layouts=None):
    """What a function of tensors of these shapes is, on one device or a mesh; `emit` makes its result of a builder and
    these."""
    dtypes = [*dtypes, *["float32"] * (len(shapes) - len(dtypes))]
    infos = [relax.TensorStructInfo(shape, dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
    params = [relax.Var(f"x{number}", info) for number, info in enumerate(infos)]
    builder = relax.BlockBuilder()
    with builder.function("main", params):
        with builder.dataflow():
            result = builder.emit_output(emit(builder, *params))
        builder.emit_func_output(result)
    return mt.distribute_module(builder.get(), mesh or {"x": 1}, layouts or {}, target="c")


TWO = replace(FAST, memory=(Memory(1000, 1e11), Memory(10_000, 1e10), Memory(10**12, 1e9)))


def test_nothing_hides_what_is_read_from_far_memory():
    """An activation's operand, and where its result goes, come from far away before it computes, for however long."""
    run = _of(lambda builder, x: relax.op.nn.relu(builder.emit(relax.op.tanh(x))), (16, 16))  # a run touches 3 KB
    machine = replace(TWO, memory=(Memory(2500, 1e11), Memory(10**12, 1e9)))
    for share in (1e-3, 1e-6):
        first = mt.simulate(run, replace(machine, classes={"tanh": Roofline(flops=share)})).steps[0]
        assert first.end == pytest.approx(256 / (1e12 * share) + 2048 / 1e9 - 2048 / 1e11)


def test_lookups_read_the_rows_that_they_give():
    run = _of(lambda builder, x, at: relax.op.take(x, at, 0), (1 << 20, 8), (4,), dtypes=("float32", "int64"))
    (step,) = mt.simulate(run, FAST).steps
    assert (step.flops, step.nbytes) == (4 * 8, 4 * 8 * 4 * 2 + 4 * 8)


def test_lookups_in_a_split_table_read_no_more_of_it():
    embedding = torch.nn.Embedding(4096, 16)
    places = torch.randint(4096, (8,))
    imported = mt.from_torch(torch.export.export(embedding, (places,)))
    run = mt.distribute_module(imported, {"x": 2}, {"weight": {"x": 0}})
    made = mt.simulate(run, FAST)
    assert made.computing == pytest.approx((8 * 8 + 2 * 4 * 8 * 16) / 1e11)


def test_gradients_of_operators_are_priced_by_their_operator():
    """Two gradients with operands and results of the same shapes, one after the other."""

    def emit(builder, x, seed):
        for forward in (relax.op.nn.gelu, relax.op.nn.silu):
            call = op_call(builder.normalize(forward(x)))
            seed = builder.emit(vjp_call(call, [x], {0: seed}, [0]))
        return seed

    classes = {"gradient of nn.gelu": Roofline(start=1.0), "gradient of nn.silu": Roofline(start=2.0)}
    steps = mt.simulate(_of(emit, (4, 4), (4, 4)), replace(FAST, classes=classes)).steps
    assert [step.kind for step in steps] == ["gradient of nn.gelu", "gradient of nn.silu"]
    assert [step.end - step.start for step in steps] == pytest.approx([1.0, 2.0], rel=1e-3)


def test_what_starts_is_colder_the_more_was_touched_since_its_operator_did():
    """In full beyond the second memory, not at all within the first; halfway, half of that."""

    def took(rows):
        run = _of(lambda builder, x: relax.op.nn.relu(builder.emit(relax.op.nn.relu(x))), (rows, 1))
        first, second = mt.simulate(run, replace(TWO, launch=1.0, cold_start=1.0)).steps
        return [round(step.end - step.start, 2) for step in (first, second)]

    assert took(8) == [1.0, 1.0]
    assert took(10_000) == [1.0, 2.0]
    assert took(688) == [1.0, 1.5]  # two values of 2752 bytes; in eighths


def test_code_of_operators_leaves_caches_while_others_run():
    """The second of two activations, with others between that touch as much as the second memory holds, and no more."""

    def emit(builder, x):
        for _ in range(2):
            x = builder.emit(relax.op.nn.relu(x))
            for _ in range(4):
                x = builder.emit(relax.op.tanh(x))
        return x

    steps = mt.simulate(_of(emit, (250, 1)), replace(TWO, launch=1.0, cold_start=1.0)).steps
    cold = [round(step.end - step.start - 1.0, 2) for step in steps]
    assert cold == [0, 0, 0, 0, 0, 1, 0.25, 0, 0, 0]  # 10,000 bytes since the first; 4,000 since the last of the others


def test_code_leaves_caches_in_every_turn_of_a_loop():
    """An activation before a loop, and one behind it, which is colder the more turns there are between."""

    def cold(turns):
        loop = Loop([(16, 4)], [(4, 4), (turns, 16, 4)], [(16, 4)], recurrent)
        builder = relax.BlockBuilder(looped(loop, turns))
        inner, params = builder.get().get_global_var("main"), builder.get()["main"].params
        params = [relax.Var(param.name_hint, param.struct_info) for param in params]
        with builder.function("outer", params):
            made = builder.emit(relax.Call(inner, [builder.emit(relax.op.nn.relu(params[0])), *params[1:]]))
            builder.emit_func_output(builder.emit(relax.op.nn.relu(builder.emit(relax.TupleGetItem(made, 0)))))
        run = mt.distribute_module(builder.get(), {"x": 1}, function="outer", target="c")
        machine = replace(TWO, memory=(Memory(1000, 1e11), Memory(40_000, 1e10), Memory(10**12, 1e9)))
        steps = mt.simulate(run, replace(machine, launch=1.0, cold_start=1.0)).steps
        *_, last = [step.end - step.start for step in steps if step.kind == "nn.relu"]
        return round(last - 1.0, 2)

    assert cold(2) == 0
    assert 0 < cold(10) < cold(20)


def test_results_are_handed_on_part_by_part_where_devices_share_processors():
    run = _of(lambda builder, x: relax.op.nn.relu(x), (64, 64), mesh={"x": 4}, layouts={"x0": {"x": 0}})
    for processors, parts in ((None, 1), (2, 4)):
        machine = replace(FAST, processors=processors)
        copied = 2 * 4 * 64 * 64 / 1e11
        assert mt.simulate(run, replace(machine, result=1e-3)).time == pytest.approx(
            mt.simulate(run, machine).time + parts * 1e-3 + copied
        )


@pytest.mark.parametrize(("transposed", "copied"), [(0, False), (1, True), (2, False)])
def test_reshapes_of_what_was_transposed_copy_it(transposed, copied):
    def emit(builder, x):
        for _ in range(transposed):
            x = builder.emit(relax.op.permute_dims(x))
        return relax.op.nn.relu(builder.emit(relax.op.reshape(x, (512 * 512,))))

    once = 2 * 4 * 512 * 512 / 1e11
    assert mt.simulate(_of(emit, (512, 512)), FAST).computing == pytest.approx((1 + copied) * once)


def test_devices_that_share_processors_take_small_steps_in_turn_and_large_ones_at_the_same_time():
    def took(size, **shared):
        builder = relax.BlockBuilder()
        x, small = (relax.Var(name, relax.TensorStructInfo((n, n), "float32")) for name, n in (("x", size), ("s", 2)))
        with builder.function("main", [x, small]):
            results = [builder.emit(relax.op.nn.gelu(each)) for each in (small, x)]
            builder.emit_func_output(relax.Tuple(results))
        run = mt.distribute_module(builder.get(), {"x": 2}, {"x": {"x": 0}})
        return mt.simulate(run, replace(FAST, **shared)).computing

    one, two = took(2048, processors=1), took(2048, processors=2)
    assert one == pytest.approx(2 * two)
    assert took(2048, processors=2, apart=1.0) == pytest.approx(two + 1.0)
    assert took(2048, processors=2, apart=1.0, cold_start=1.0) == pytest.approx(
        two + 2.0
    )  # the first step has the other idle
    small = took(8, processors=1)
    assert took(8, processors=2) == took(8, processors=2, apart=1.0) == small > 0


def test_results_are_handed_on_at_a_price():
    run = _of(lambda builder, x: relax.op.nn.relu(x), (64, 64))
    plain = mt.simulate(run, FAST).time
    made = mt.simulate(run, replace(FAST, result=1e-3))
    assert made.time == pytest.approx(plain + 1e-3 + 2 * 4 * 64 * 64 / 1e11)
    assert made.exposed == pytest.approx(0.0)
    kernel = k_split(1)  # writes to what its caller has
    assert mt.simulate(kernel, replace(FAST, result=1e-3)).time == mt.simulate(kernel, FAST).time


def test_results_that_collectives_make_are_handed_on_at_the_same_price():
    """As gradients are that devices add up."""
    run = _of(lambda builder, x: relax.op.sum(x, axis=0), (64, 64), mesh={"x": 2}, layouts={"x0": {"x": 0}})
    assert [step.kind for step in run.program.collectives] == ["all_reduce"]
    plain = mt.simulate(run, FAST).time
    made = mt.simulate(run, replace(FAST, result=1e-3))
    assert made.time == pytest.approx(plain + 1e-3 + 2 * 4 * 64 / 1e11)


@pytest.mark.parametrize("name", LOOPS)
@pytest.mark.parametrize(("mesh", "layouts"), [({"x": 1}, {}), ({"x": 2}, {"c0": {"x": 0}})])
def test_memory_of_loops_is_what_the_runtime_holds(name, mesh, layouts):
    mod = looped(LOOPS[name], 5)
    tensors = [torch.rand([int(size) for size in p.struct_info.shape]) for p in mod["main"].params]
    run = mt.distribute_module(mod, mesh, layouts)
    run(*tensors)
    (launch,) = run._launches
    assert mt.simulate(run).peak_bytes == launch._run.peak_bytes


def test_what_has_no_steps_holds_what_it_is_given():
    builder, x = relax.BlockBuilder(), relax.Var("x", relax.TensorStructInfo((8, 4), "float32"))
    with builder.function("main", [x]):
        with builder.dataflow():
            result = builder.emit_output(x)
        builder.emit_func_output(result)
    run = mt.distribute_module(builder.get(), {"x": 2}, {"x": {"x": 0}})
    run(torch.rand(8, 4))
    (launch,) = run._launches
    assert mt.simulate(run).peak_bytes == launch._run.peak_bytes == 4 * 4 * 4


def test_without_one_kind_is_without_its_steps():
    made = mt.simulate(k_split(2), FAST)
    (kernel,) = {step.kind for step in made.steps if step.stream == "device"}
    assert made.without(kernel) == made.without([kernel]) == pytest.approx(made.communicating)
    with pytest.raises(mt.MeshTensorError, match="nothing is called 'kernels'"):
        made.without(["kernels"])
