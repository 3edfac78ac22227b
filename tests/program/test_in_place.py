"""Updates in place: which steps overwrite state, when, and that it is not overwritten where it must not be."""

import copy
import signal

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from mesh_tensor.program.steps import OpStep
from mesh_tensor.program.verify import peak_bytes
from mesh_tensor.rules.operator.update import UPDATE_IN_PLACE

DATA = {"x": {"data": 0}, "target": {"data": 0}}


class MLP(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(12, 18), nn.Linear(18, 6)

    def forward(self, x):
        return self.down(torch.tanh(self.up(x)))


class Remembers(MLP):
    """A buffer that is the weight of the step before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("before", torch.zeros(6, 18))

    def forward(self, x):
        y = super().forward(x) + self.before.sum()
        self.before.copy_(self.down.weight.detach())
        return y


def _step(model=None, dtype=torch.float32, **options):
    torch.manual_seed(0)
    x, y = torch.randn(12, 12, dtype=dtype), torch.randint(0, 6, (12,))
    model = (model or MLP()).to(dtype)
    return mt.training_step(model, F.cross_entropy, (x, y), check=False, **{"lr": 0.05, **options}), x, y


def _in_place(run):
    return [step for step in run.program.ops if step.call.name == UPDATE_IN_PLACE]


def _memory(run):
    return {name: [tile.data_ptr() for tile in held.tiles()] for name, held in run._state.items()}


@pytest.mark.parametrize("optimizer", ["sgd", "momentum", "adam", "adamw", "lion"])
def test_updates_come_last_and_keep_memory(optimizer):
    step, x, y = _step(optimizer=optimizer)
    run = mt.distribute_module(step, {"data": 2}, DATA, poison=True)
    program = run.program
    last = [s for s in program.steps[program.overwrites_from :] if isinstance(s, OpStep)]
    assert last == _in_place(run)
    assert len(last) == 4
    run(x, y)
    before = _memory(run)
    run(x, y)
    assert _memory(run) == before


@pytest.mark.parametrize(
    ("options", "zero", "count"),
    [
        ({"eps": 0.0}, 0, 0),  # 0 / 0, where no gradient ever was
        ({"betas": (0.9, 1 - 1e-8)}, 0, 0),
        ({"weight_decay": 1e9}, 0, 0),
        ({}, 1, 0),  # new parameters are gathered
        ({}, 3, 4),
    ],
)
def test_what_is_not_overwritten(options, zero, count):
    step, x, y = _step(zero=zero, **options)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    assert len(_in_place(run)) == count
    run(x, y)


def test_halves_are_not_sure_to_be_finite():
    step, _, _ = _step(dtype=torch.float16)
    assert not _in_place(mt.distribute_module(step, {"data": 2}, DATA))
    step, x, y = _step(dtype=torch.bfloat16)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    assert len(_in_place(run)) == 4
    other = mt.distribute_module(step, {"data": 1}, DATA)
    other.load_state_dict(run.state_dict())
    assert [run(x, y).item() for _ in range(3)] == pytest.approx([other(x, y).item() for _ in range(3)], rel=0.02)


def test_it_takes_less_memory():
    step, x, y = _step()
    runs = [mt.distribute_module(_step(eps=eps)[0], {"data": 2}, DATA) for eps in (1e-8, 0.0)]
    state = sum(tensor.nbytes for tensor in step.state.values())
    assert peak_bytes(runs[1].program) - peak_bytes(runs[0].program) > state / 2
    for run in runs:
        run(x, y)
    assert "fused.update_in_place" in runs[0].explain()


def test_what_a_caller_has_is_not_overwritten():
    step, x, y = _step()
    run = mt.distribute_module(step, {"data": 2}, DATA)
    run(x, y)
    taken = run.state_dict(full=False)
    kept = {name: (t.full() if isinstance(t, mt.MeshTensor) else t).clone() for name, t in taken.items()}
    for _ in range(2):
        run(x, y)
    for name, tensor in taken.items():
        assert torch.equal(tensor.full() if isinstance(tensor, mt.MeshTensor) else tensor, kept[name]), name


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("devices", [1, 2])
def test_what_was_loaded_is_not_overwritten(zero, devices):
    """Neither what a caller has nor the state of the run that it came from, which goes on as it would have."""
    step, x, y = _step(zero=zero)
    runs = [mt.distribute_module(step, {"data": devices}, DATA) for _ in range(2)]
    for _ in range(2):
        runs[0](x, y)
    taken = runs[0].state_dict(full=False)
    kept = {name: (t.full() if isinstance(t, mt.MeshTensor) else t).clone() for name, t in taken.items()}
    runs[1].load_state_dict(taken)
    losses = [runs[1](x, y) for _ in range(3)]
    for name, tensor in runs[0].state_dict().items():
        assert torch.equal(tensor, kept[name]), name
    runs[0].load_state_dict(taken)
    assert [runs[0](x, y) for _ in range(3)] == losses
    for name, tensor in taken.items():
        assert torch.equal(tensor.full() if isinstance(tensor, mt.MeshTensor) else tensor, kept[name]), name


class OwnLoss(nn.Module):
    """A parameter that is the loss."""

    def __init__(self):
        super().__init__()
        self.loss = nn.Parameter(torch.tensor(1.5))

    def forward(self, x, target):
        return self.loss


def test_a_loss_that_is_a_parameter():
    step = mt.training_step(OwnLoss(), None, (torch.randn(4), torch.randn(4)), optimizer="sgd", lr=0.1, check=False)
    run = mt.distribute_module(step, {"data": 2}, {})
    assert not _in_place(run)
    assert [run(torch.randn(4), torch.randn(4)).item() for _ in range(3)] == pytest.approx([1.5, 1.4, 1.3])


def test_a_buffer_that_is_the_old_weight():
    model = Remembers()
    expected, optimizer = copy.deepcopy(model), None
    step, x, y = _step(model, optimizer="sgd", lr=0.1)
    run = mt.distribute_module(step, {"data": 2}, DATA)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(4):
        optimizer.zero_grad()
        loss = F.cross_entropy(expected(x), y)
        loss.backward()
        optimizer.step()
        assert run(x, y).item() == pytest.approx(loss.item(), abs=1e-5)
    torch.testing.assert_close(run.state_dict()["before"], expected.before)


@pytest.mark.parametrize("large", [2.0**31, 1e25])
def test_large_numbers_go_the_other_way(large):
    """Finite ones are accepted as before, in memory of their own; what would overflow is refused, and nothing lost."""
    step, x, y = _step(optimizer="adam")
    run = mt.distribute_module(step, {"data": 2}, DATA)
    run(x, y)
    state = run.state_dict()
    state["opt.exp_avg.up.weight"] = torch.full_like(state["opt.exp_avg.up.weight"], large * 1e6)
    run.load_state_dict(state)
    assert not run._bounded
    run(x, y)
    assert run.steps == 2
    state["opt.exp_avg_sq.up.weight"] = torch.full_like(state["opt.exp_avg_sq.up.weight"], -1.0)
    run.load_state_dict(state)
    with pytest.raises(mt.MeshTensorError, match="not finite"):
        run(x, y)
    for name, tensor in run.state_dict().items():
        assert torch.equal(tensor, state[name]), name


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_waits_for_the_update(monkeypatch):
    step, x, y = _step()
    run, other = (mt.distribute_module(step, {"data": 2}, DATA) for _ in range(2))
    for one in (run, other):
        one(x, y)
    mesh = next(iter(run._module._launches))._run._mesh
    first, *rest = mesh._last
    before, advance = signal.getsignal(signal.SIGINT), run._module.step

    def interrupted(action):
        def act(*args):
            signal.raise_signal(signal.SIGINT)
            return action(*args)

        return act

    monkeypatch.setattr(run._module, "step", interrupted(advance))
    with pytest.raises(KeyboardInterrupt):  # at once: nothing was overwritten
        run(x, y)
    monkeypatch.setattr(run._module, "step", advance)
    assert run.steps == 1
    monkeypatch.setattr(mesh, "_last", [first, interrupted(rest[0]), *rest[1:]])
    with pytest.raises(KeyboardInterrupt):  # after the step
        run(x, y)
    monkeypatch.setattr(mesh, "_last", [first, *rest])
    assert signal.getsignal(signal.SIGINT) is before
    other(x, y)
    expected = other.state_dict()
    assert run.steps == other.steps == 2
    for name, tensor in run.state_dict().items():
        assert torch.equal(tensor, expected[name]), name
    run(x, y)  # on a copy
    monkeypatch.setattr(mesh, "_last", [first, interrupted(interrupted(rest[0])), *rest[1:]])
    with pytest.raises(KeyboardInterrupt):  # the second one does not wait
        run(x, y)
    with pytest.raises(mt.MeshTensorError, match="the state is lost"):
        run(x, y)


def test_an_end_while_state_is_overwritten(monkeypatch):
    step, x, y = _step()
    run = mt.distribute_module(step, {"data": 2}, DATA)
    run(x, y)
    saved = run.state_dict()
    run(x, y)  # on a copy, as the caller has what was saved
    mesh = next(iter(run._module._launches))._run._mesh
    actions = mesh._last

    def stopped(memory):
        raise KeyboardInterrupt

    monkeypatch.setattr(mesh, "_last", [actions[0], stopped])
    with pytest.raises(KeyboardInterrupt):
        run(x, y)
    for ask in (run.state_dict, lambda: run(x, y)):
        with pytest.raises(mt.MeshTensorError, match="the state is lost") as error:
            ask()
        assert "step 3 ended in KeyboardInterrupt while parameters were overwritten" in str(error.value)
        assert "load_state_dict()" in str(error.value)
    monkeypatch.setattr(mesh, "_last", actions)
    run.load_state_dict(saved)
    run(x, y)
    assert run.steps == 2
