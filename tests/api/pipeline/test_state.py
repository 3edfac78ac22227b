"""What a model writes (running statistics) in pipelines: handed on from microbatch to microbatch, kept from call to
call, as torch does that runs one microbatch after the other."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor import MeshTensorError
from mesh_tensor.api.pipeline.weights import StageWeights
from tests.api.pipeline.models import Normed

TOPOLOGY = {"m0": {"d": 2}, "m1": {"d": 3}}
ROWS, NORMS = 4, ["norms.0", "norms.1"]


def example(rows=ROWS):
    return torch.randn(rows, 6), torch.randn(rows, 6)


def pipeline(model, cuts=("fcs.1",), topology=TOPOLOGY, microbatches=3, **options):
    module = mt.from_torch(torch.export.export(model, example()))
    named = [*NORMS, "fcs.1"] if model.counts else NORMS
    options = {"train": True, "per_microbatch": named, **options}
    shardings = {"x": {"d": 0}, "y": {"d": 0}}
    return module, mt.pipeline(module, topology, cuts, shardings, microbatches=microbatches, **options)


def step(model, batch, microbatches=3):
    """The mean loss of the microbatches, one after the other, and its gradients."""
    model.zero_grad()
    total = torch.zeros(())
    for pair in zip(*(tensor.chunk(microbatches) for tensor in batch), strict=True):
        loss = model(*pair) * len(pair[0]) / len(batch[0])
        loss.backward()
        total += loss.detach()
    return total


def check(run, module, model, batch, microbatches=3):
    loss, wanted = run(*batch), step(model, batch, microbatches)
    torch.testing.assert_close(loss, wanted, rtol=1e-5, atol=1e-6)
    gradients = run.gradients()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[module.names[name]], parameter.grad, rtol=1e-4, atol=2e-6, msg=name)
    check_buffers(run, model)


def check_buffers(run, model):
    state = run.state_dict()
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(state[name], buffer, rtol=1e-5, atol=1e-6, msg=name)


def sgd(weight, gradient, state):
    momentum = state["m"] = 0.9 * state["m"] + gradient if state else gradient
    return weight - 0.1 * momentum


THREE = ["fcs.0", "norms.0", "fcs.1"]


@pytest.mark.parametrize(
    ("schedule", "cuts", "options", "counts"),
    [
        ("1f1b", ["fcs.1"], {}, True),
        ("1f1b", 2, {}, False),
        ("gpipe", ["fcs.0"], {"recompute": True}, True),
        ("zb-h1", ["fcs.0"], {"topology": {"m0": {"d": 1}, "m1": {"d": 2, "m": 2}}}, True),
        ("interleaved", THREE, {}, False),
        ("dualpipev", THREE, {"recompute": True, "microbatches": 4}, False),
        ("zbv", THREE, {"memory": {"norms.0.running_mean": "pinned_host", "norms.0": "pinned_host"}}, True),
    ],
)
def test_statistics_go_from_microbatch_to_microbatch(schedule, cuts, options, counts):
    """Where the model multiplies with what it writes, backwards take what their own forward took."""
    model = Normed(counts)
    module, run = pipeline(model, cuts, schedule=schedule, **options)
    rule = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for _ in range(2):
        check(run, module, model, example(ROWS * run.microbatches), run.microbatches)
        run.update(sgd)
        rule.step()


class OfInputs(nn.Module):
    """A batch norm of what it takes, and of more; keeps means of what it takes, by a count that inputs alone make."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.norm, self.fc, self.head = nn.BatchNorm1d(6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x, y):
        there = (y > 0).float()
        self.mean.copy_((x * there).sum(0) / (there.sum() + 1))
        return F.mse_loss(self.head(self.norm(torch.tanh(self.fc(self.norm(x))))), y)


def test_what_inputs_alone_make_is_a_microbatchs_where_it_is_kept_or_stated():
    model = OfInputs()
    module = mt.from_torch(torch.export.export(model, example()))
    options = {"microbatches": 3, "train": True, "per_microbatch": ["norm"]}
    run = mt.pipeline(module, TOPOLOGY, ["norm@1"], {"x": {"d": 0}}, **options)
    check(run, module, model, example(3 * ROWS))


class Averages(nn.Module):
    """Keeps a running mean of what it takes, before another layer; rows of any number."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x, y):
        x = self.a(x)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        self.last.copy_(x.detach()[0])
        return F.mse_loss(self.b(torch.tanh(x)), y)


def test_an_open_batch_of_which_the_last_part_is_smaller():
    model, rows = Averages(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, example(5), dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    module = mt.from_torch(program)
    run = mt.pipeline(module, TOPOLOGY, ["a"], {"x": {"d": 0}}, microbatches=3, train=True, schedule="zb-h1")
    model.mean.add_(1)  # the pipeline has its own
    assert torch.equal(run.state_dict()["mean"], torch.zeros(6))
    model.mean.sub_(1)
    for rows in (12, 11):
        check(run, module, model, example(rows))


class OpenNorm(nn.Module):
    """A batch norm over rows and positions, of any number of both."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.conv, self.bn, self.out = nn.Conv1d(6, 4, 1), nn.BatchNorm1d(4), nn.Conv1d(4, 6, 1)

    def forward(self, x, y):
        return F.mse_loss(self.out(torch.relu(self.bn(self.conv(x)))), y)


def open_norm(positions):
    """With an open number of rows; of positions, too, or as many."""
    sizes = {0: torch.export.Dim("rows", min=1, max=64)}
    sizes |= {} if positions else {2: torch.export.Dim("positions", min=1, max=64)}
    model, given = OpenNorm(), torch.randn(4, 6, positions or 5)
    program = torch.export.export(model, (given, given.clone()), dynamic_shapes={"x": sizes, "y": sizes})
    return model, mt.from_torch(program)


@pytest.mark.parametrize(("schedule", "positions"), [("1f1b", 3), ("zb-h1", None)])
def test_batch_norms_of_open_sizes(schedule, positions):
    """Statistics are those of every microbatch, the last of which is smaller; each counts by its number of elements."""
    model, module = open_norm(positions)
    options = {"microbatches": 3, "train": True, "schedule": schedule, "per_microbatch": ["bn"]}
    options["train"] = [name for name in module.params if name not in module.state]
    run = mt.pipeline(module, TOPOLOGY, ["conv"], {"x": {"d": 0}}, **options)
    for rows in (12, 11):
        size = rows, 6, positions or 7
        check(run, module, model, (torch.randn(size), torch.randn(size)))


def test_a_batch_norm_of_one_element():
    """Torch refuses it, too: it has no variance."""
    _, module = open_norm(1)
    run = mt.pipeline(module, TOPOLOGY, ["conv"], microbatches=3, per_microbatch=["bn"])
    with pytest.raises(MeshTensorError, match=r"but the module is for s[0-9]+ \* 1 >= 2"):
        run(torch.randn(7, 6, 1), torch.randn(7, 6, 1))
    _, module = open_norm(None)
    run = mt.distribute_module(module, {"d": 2}, {"x": {"d": 0}})
    with pytest.raises(MeshTensorError, match=r"but the module is for s[0-9]+ \* s[0-9]+ >= 2"):
        run(torch.randn(1, 6, 1), torch.randn(1, 6, 1))


class Normalized(nn.Module):
    """Gives rows, and a number that it writes and returns."""

    def __init__(self):
        super().__init__()
        self.fc, self.bn, self.out = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 2)

    def forward(self, x):
        return self.out(self.bn(self.fc(x)))


def test_forwards_alone_write_too():
    model = Normalized()
    module = mt.from_torch(torch.export.export(model, (torch.randn(4, 6),)))
    run = mt.pipeline(module, TOPOLOGY, ["bn"], {"x": {"d": 0}}, microbatches=3, per_microbatch=["bn"])
    x = torch.randn(12, 6)
    for _ in range(2):
        got = run(x)
        torch.testing.assert_close(got, torch.cat([model(part).detach() for part in x.chunk(3)]))
        check_buffers(run, model)
    got.zero_()
    check_buffers(run, model)
    assert run.state_dict()["bn.num_batches_tracked"] == 6


def test_a_call_that_raises_leaves_statistics_as_they_were(monkeypatch):
    from mesh_tensor.api.pipeline import rows

    model = Normed()
    module, run = pipeline(model)
    check(run, module, model, example(12))
    before, backward = run.state_dict(), rows._ACTIONS["B"]

    def broken(row, here, action):
        if str(action) == "0B2":
            raise RuntimeError("out of luck")
        backward(row, here, action)

    monkeypatch.setitem(rows._ACTIONS, "B", broken)
    with pytest.raises(MeshTensorError, match="out of luck"):
        run(*example(12))
    monkeypatch.undo()
    after = run.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    check(run, module, model, example(12))


def test_a_state_that_was_saved_goes_on_with_the_same_bits(tmp_path):
    batches = [example(12) for _ in range(4)]
    _, run = pipeline(Normed(True))
    for batch in batches[:2]:
        run(*batch)
        run.update(sgd)
    torch.save(run.state_dict(), tmp_path / "state.pt")
    _, other = pipeline(Normed(True), schedule="zb-h1")
    state = torch.load(tmp_path / "state.pt")
    assert "update.m.fcs.0.weight" in state
    assert set(dict(Normed().state_dict())) <= set(state)
    other.load_state_dict(state)
    with pytest.raises(MeshTensorError, match="there are no gradients yet"):
        other.gradients()
    for batch in batches[2:]:
        assert torch.equal(run(*batch), other(*batch))
        run.update(sgd)
        other.update(sgd)
    wanted, got = run.state_dict(), other.state_dict()
    assert wanted.keys() == got.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_what_rules_keep_is_loaded_before_there_are_sizes():
    """An open pipeline lays nothing out before its first call; what was loaded waits for that."""
    model, rows = Averages(), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(model, example(5), dynamic_shapes={"x": {0: rows}, "y": {0: rows}})
    run, other = (
        mt.pipeline(mt.from_torch(program), TOPOLOGY, ["a"], {"a.weight": {"d": 0}}, microbatches=3, train=True)
        for _ in range(2)
    )
    for count in (12, 9):
        run(*example(count))
        run.update(sgd)
    state = run.state_dict()
    other.load_state_dict({name: torch.zeros_like(value) for name, value in state.items()})
    other.load_state_dict(state)
    for name, loaded in other.state_dict().items():
        assert torch.equal(loaded, state[name])
        loaded.zero_()  # the caller's own
    batch = example(12)
    for each in (run, other):
        each(*batch)
        each.update(sgd)
    wanted, got = run.state_dict(), other.state_dict()
    assert wanted.keys() == got.keys() == state.keys()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)
    fresh = mt.pipeline(mt.from_torch(program), TOPOLOGY, ["a"], microbatches=3, train=True)
    fresh.load_state_dict(state)
    some = {name: value for name, value in state.items() if name == "a.weight"}
    fresh.load_state_dict(some, strict=False)  # of which there is nothing that rules keep
    assert state.keys() - fresh.state_dict().keys() == {"update.m.a.weight"}


@pytest.mark.parametrize("change", ["update", "load_state_dict"])
def test_an_interrupted_change_changes_nothing(monkeypatch, change):
    """Half of the weights would be those of another step, with nothing to tell them by."""
    (_, run), (_, other) = (pipeline(Normed(True)) for _ in range(2))
    batch, names = example(12), []
    for each in (run, other):
        each(*batch)
        each.update(sgd)
        each(*batch)
    before, put_away = run.state_dict(), StageWeights._put_away
    make = {
        "update": lambda: run.update(sgd),
        "load_state_dict": lambda: run.load_state_dict({name: value + 1 for name, value in before.items()}),
    }[change]

    def interrupted(weights, name, value):
        names.append(name)
        if len(names) == 4:
            raise KeyboardInterrupt
        return put_away(weights, name, value)

    with monkeypatch.context() as patched:
        patched.setattr(StageWeights, "_put_away", interrupted)
        with pytest.raises(KeyboardInterrupt):
            make()
    after = run.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    for each in (run, other):
        each.update(sgd)
    wanted, got = other.state_dict(), run.state_dict()
    assert all(torch.equal(wanted[name], got[name]) for name in wanted)


def test_a_models_own_state_is_loaded():
    model = Normed()
    module, run = pipeline(model)
    run(*example(12))
    run.update(sgd)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.5)
    run.load_state_dict(model.state_dict() | {"update.m.fcs.0.bias": torch.zeros(6)})
    check(run, module, model, example(12))


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"fcs.0.weight": torch.zeros(2, 2)}, ["'fcs.0.weight': (2, 2), but expected (6, 6)"]),
        ({"fcs.9.weight": torch.zeros(2, 2)}, ["there is no parameter 'fcs.9.weight'"]),
        ({"update.m.fcs.7.bias": torch.zeros(6)}, ["there is no weight 'fcs.7.bias'", "did you mean 'fcs."]),
        ({"update.m.fcs.0.bias": torch.zeros(5)}, ["'update.m.fcs.0.bias' is", "no number or tensor of the weight's"]),
        (None, ["'norms.0.running_mean' is missing"]),
    ],
)
def test_states_that_do_not_fit(change, facts):
    model = Normed()
    _, run = pipeline(model)
    before = run.state_dict()
    state = {**before, **(change or {})}
    if change is None:
        del state["norms.0.running_mean"]
    with pytest.raises(MeshTensorError) as raised:
        run.load_state_dict(state)
    assert all(fact in str(raised.value) for fact in facts), raised.value
    after = run.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)


class Shared(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.bn = nn.Linear(6, 6), nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.bn(self.b(self.bn(self.a(x)).relu())).square().mean()


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x):
        x = self.a(x) * self.seen
        self.seen.mul_(2)
        return self.b(x).square().mean()


OUT_OF_ORDER = mt.Schedule.of(["0F1 0F0 0B0 0B1", "1F1 1F0 1B0 1B1"])


@pytest.mark.parametrize(
    ("model", "options", "facts"),
    [
        (Shared, {"topology": dict.fromkeys(("m0", "m1", "m2"), {"d": 1}), "stages": ["a", "b"], "microbatches": 1},
         ["'bn_running_mean', which the model writes, is of stages 1, 2"]),
        (Reads, {"schedule": OUT_OF_ORDER, "train": True, "per_microbatch": ["b"]},
         ["stage 1, which writes 'seen', runs forwards of microbatches [1, 0]", "what a microbatch leaves of it"]),
        (Reads, {}, ["microbatches don't make the result", "seen is another one for each part"]),
        (Reads, {"train": ["seen"], "per_microbatch": ["b"]}, ["'seen' is written by the model itself"]),
    ],
)  # fmt: skip
def test_state_that_microbatches_can_not_hand_on(model, options, facts):
    module = mt.from_torch(torch.export.export(model(), (torch.randn(2, 6),)))
    options = {"topology": TOPOLOGY, "stages": ["a"], "microbatches": 2, **options}
    with pytest.raises(MeshTensorError) as raised:
        mt.pipeline(module, **options)
    assert all(fact in str(raised.value) for fact in facts), raised.value


def test_weights_without_what_the_model_writes():
    module = mt.from_torch(torch.export.export(Reads(), (torch.randn(2, 6),)))
    weights = {name: tensor for name, tensor in module.params.items() if name != "seen"}
    with pytest.raises(MeshTensorError, match=r"the weights lack 'seen', which the model writes"):
        mt.pipeline(module, TOPOLOGY, ["a"], weights=weights)
