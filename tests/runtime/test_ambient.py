"""What torch was told elsewhere never changes a result: every public function that computes, in every such state."""

import threading
from functools import cached_property

import pytest
import torch
from tvm import relax

import mesh_tensor as mt
from kernels.matmul import matmul
from mesh_tensor.runtime.ambient import Computing
from mesh_tensor.runtime.elementwise import DeviceThreads, copy, device_threads
from tests.plan.modules import function

from .ambient_states import STATES, TRANSFORMS, within
from .programs import accumulate_kernel

MESH = {"x": 2, "y": 2}
LAYOUTS = {"A": {"x": 0, "y": 1}, "B": {"y": 0}, "C": {"x": 0}}
SIZES = (45, 33, 70)


def _module(x, w):
    """A layer with whatever autocast, a default dtype or another precision would change."""

    def build(emit, x, w):
        hidden = emit(relax.op.nn.gelu(emit(relax.op.matmul(x, w))))
        made = emit(relax.op.add(hidden, emit(relax.op.full((SIZES[0], SIZES[1]), relax.const(0.1, "float32")))))
        return emit(relax.op.nn.softmax(emit(relax.op.subtract(made, emit(relax.op.mean(made, [1], True))))))

    return function(build, x=tuple(x.shape), w=tuple(w.shape))


def _module_reference(x, w):
    made = torch.nn.functional.gelu(x.double() @ w.double()) + 0.1
    return torch.softmax(made - made.mean(1, keepdim=True), 1)


class Layers(torch.nn.Module):
    """An embedding, scans and a choice by indices have gradients by torch's recording, a norm by its own function; the
    batch norm writes its statistics."""

    def __init__(self):
        super().__init__()
        self.embed, self.down = torch.nn.Embedding(20, 16), torch.nn.Linear(16, 20)
        self.norms = torch.nn.ModuleList([torch.nn.LayerNorm(16), torch.nn.BatchNorm1d(7)])

    def forward(self, ids):
        hidden = self.embed(ids)
        for norm in self.norms:
            hidden = norm(hidden + hidden.cumsum(1).gather(1, ids.unsqueeze(-1).expand(-1, -1, 16) % 7))
        return self.down(hidden).transpose(1, 2)


class Trained:
    """Steps of training, on a mesh and by torch."""

    def __init__(self):
        torch.manual_seed(2)
        model, self.batch = Layers(), tuple(torch.randint(0, 20, (2, 4, 7)))
        loss = torch.nn.functional.cross_entropy
        step = mt.training_step(model, loss, self.batch, optimizer="momentum", lr=0.1)
        layouts = {"ids": {"x": 0}, "target": {"x": 0}, "down.weight": {"y": 0}, "embed.weight": {"y": 0}}
        self.run = mt.distribute_module(step, MESH, layouts)
        self.first = {name: value.clone() for name, value in self.run.state_dict().items()}
        optimizer = torch.optim.SGD(model.parameters(), 0.1, 0.9)
        for _ in range(3):
            value = loss(model(self.batch[0]), self.batch[1])
            optimizer.zero_grad(), value.backward(), optimizer.step()
        self.third = value.detach().double()

    def third_loss(self):
        """From the first state on."""
        self.run.load_state_dict(self.first)
        return [self.run(*self.batch) for _ in range(3)][-1]


class Given:
    """Tensors, and what was made of kernels and modules before torch was told anything."""

    def __init__(self, name):
        torch.manual_seed(1)
        m, n, k = SIZES
        self.a, self.b = torch.randn(m, k), torch.randn(k, n)
        self.func = mt.annotate(matmul(m, n, k, 16, 16, 16), MESH, LAYOUTS)
        self.c, self.interpreted = (mt.compile(self.func, target=target) for target in ("c", "interpret"))
        self.op = mt.as_custom_op(self.c, f"ambient_{name}")
        self.mod = mt.annotate_module(_module(self.a, self.b), MESH, {"x": {"x": 0, "y": 1}})
        self.module = mt.distribute_module(self.mod, weights={"w": self.b})
        self.large = torch.randn(3001, 1501)
        self.tiles = mt.distribute(self.a, MESH, {"x": 0, "y": 1})
        self.accumulate = mt.compile(
            mt.annotate(accumulate_kernel(45 * 70), {"x": 4}, {"A": {"x": 0}, "B": {"x": 0}}), target="c"
        )
        self.small = self.a * 1e-20, self.b * 1e-20
        self.denormals = self.c(*self.small)
        assert 0 < self.denormals.abs().max() < 2e-38
        self.out, self.flat, self.total = torch.empty(SIZES[:2]), self.a.reshape(-1), torch.empty(45 * 70)
        self.product = self.a.double() @ self.b.double()
        self.layer = _module_reference(self.a, self.b)

    @cached_property
    def trained(self):
        return Trained()


def _into_given(given):
    assert given.c(given.a, given.b, given.out) is given.out
    return given.out


def _large(given):
    moved = mt.distribute(given.large, MESH, {"x": 0, "y": 1}).redistribute({"x": 1})
    return moved.redistribute({"y": 0}).full()


CALLS = {
    "kernel": (lambda g: g.c(g.a, g.b), lambda g: g.product),
    "kernel that was interpreted": (lambda g: g.interpreted(g.a, g.b), lambda g: g.product),
    "kernel into a tensor": (_into_given, lambda g: g.product),
    "kernel in place": (lambda g: g.accumulate(g.flat, g.total), lambda g: 1 + g.flat),
    "kernel on tiles": (lambda g: g.c(g.tiles, g.b).full(), lambda g: g.product),
    "kernel that is compiled there": (lambda g: mt.compile(g.func, target="c")(g.a, g.b), lambda g: g.product),
    "denormals": (lambda g: g.c(*g.small), lambda g: g.denormals),
    "custom op": (lambda g: g.op(g.a, g.b), lambda g: g.product),
    "redistribute": (_large, lambda g: g.large),
    "module": (lambda g: g.module(g.a), lambda g: g.layer),
    "module on tiles": (lambda g: g.module(g.tiles).full(), lambda g: g.layer),
    "module that is made there": (
        lambda g: mt.distribute_module(g.mod, weights={"w": g.b})(g.a),
        lambda g: g.layer,
    ),
    "steps of training": (lambda g: g.trained.third_loss(), lambda g: g.trained.third),
    "run_sequential": (lambda g: mt.run_sequential(g.mod, [g.a, g.b]), lambda g: g.layer),
}


@pytest.fixture(scope="module")
def given():
    return Given("states")


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own jvp
@pytest.mark.parametrize(
    ("call", "state"),
    [
        (call, state)
        for call in CALLS
        for state in (*STATES, *TRANSFORMS)
        if call != "custom op" or not state.endswith("mode that rounds")  # it is torch's own: modes see its result
    ],
)
def test_a_result_is_what_it_is_elsewhere(given, call, state):
    run, wanted = CALLS[call]
    expected = wanted(given)
    for _ in range(2):
        given.out.fill_(7.0), given.total.fill_(1.0)
        device_threads().close()  # so that new ones are started there
        result = within(state, lambda: run(given))
        assert (type(result), result.device.type, result.dtype) == (torch.Tensor, "cpu", torch.float32)
        _same(result, expected)
    given.total.fill_(1.0)
    _same(run(given), expected)


def _same(result, expected):
    if expected.dtype == torch.float32:  # moved, or computed by the same kernel
        assert torch.equal(result, expected)
    else:
        torch.testing.assert_close(result.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("grows", [False, True])
def test_tensors_of_inference_mode_are_written_elsewhere(given, grows):
    """Torch itself refuses that."""
    with torch.inference_mode():
        out, large = torch.empty(SIZES[:2]), torch.empty(3001, 1501)
    if grows:
        copy(large, given.large)
        assert torch.equal(large, given.large)
    else:
        _same(given.c(given.a, given.b, out), given.product)
        given.interpreted(given.a, given.b, out)
        _same(out, given.product)


def test_parameters_are_written_where_no_gradient_is_recorded(given):
    out = torch.nn.Parameter(torch.empty(3001, 1501))
    with torch.no_grad():
        copy(out, given.large)
        moved = mt.distribute(out, MESH, {"x": 0})
    assert torch.equal(out, given.large)
    assert torch.equal(moved.full(), given.large)


def test_threads_of_devices_compute_as_their_caller():
    """Whoever takes which part."""
    together, seen = threading.Barrier(2, timeout=60), {}

    def work(index):
        together.wait()
        seen[index] = torch.is_inference_mode_enabled(), torch.is_grad_enabled()

    threads = DeviceThreads(2)
    with torch.inference_mode():
        threads.run(work, 2)
        assert set(seen.values()) == {(True, False)}
    with torch.no_grad():
        threads.run(work, 2)
        assert set(seen.values()) == {(False, False)}
    threads.close()


@pytest.mark.parametrize("what", ["kernel", "module"])
def test_a_compiled_graph_ends_where_a_call_begins(what):
    """torch.compile went on below our functions, and compiled what they do: on ranks it ended the mesh."""
    given, graphs = Given(f"compiled_{what}"), []
    call = given.c if what == "kernel" else given.module
    rest = (given.b,) if what == "kernel" else ()

    def compiler(graph, _):
        graphs.append(graph)
        return graph.forward

    def model(a):
        return call(a + 1, *rest) * 2

    assert torch.equal(torch.compile(model, backend=compiler)(given.a), model(given.a))
    assert len(graphs) == 2  # of what is before the call, and of what is behind it


def test_precision_is_set_aside_until_the_last_call_ends(monkeypatch):
    """Two calls at a time: the first one to end leaves the other its precision."""
    inside, first_ended, seen, full = threading.Event(), threading.Event(), [], torch.full
    mod = function(lambda emit, x: emit(relax.op.add(x, emit(relax.op.ones((4, 4), "float32")))), x=(4, 4))
    module = mt.distribute_module(mt.annotate_module(mod, MESH, {"x": {"x": 0}}))

    def slow():
        with Computing():
            inside.set()
            first_ended.wait(60)
            seen.append(_precision())

    def watched(*args, **kwargs):
        seen.append(_precision())
        return full(*args, **kwargs)

    monkeypatch.setattr(torch, "full", watched)
    with STATES["a lower precision of float32"]():
        assert _precision() == "bf16"
        other = threading.Thread(target=slow)
        other.start()
        inside.wait(60)
        assert mt.run_sequential(mod, [torch.ones(4, 4)]).eq(2).all()
        assert module(torch.ones(4, 4)).eq(2).all()
        assert _precision() == "ieee"
        first_ended.set()
        other.join()
        assert _precision() == "bf16"
        assert torch.get_float32_matmul_precision() == "medium"
    assert len(seen) >= 3
    assert set(seen) == {"ieee"}


def _precision():
    """That of products on a CPU."""
    return torch._C._get_fp32_precision_getter("mkldnn", "matmul")
