"""The weights that a module on a mesh holds: laid out once, read back, and replaced."""

import weakref

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import mesh_tensor as mt
from tests.refusals import refusal


class Model(nn.Module):
    """An embedding whose table is tied to the head, and a fused layer of three parts, split over the second of them."""

    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(12, 8), nn.Linear(8, 12, bias=False)
        self.head.weight = self.table.weight
        self.fused = nn.Linear(8, 24)
        self.down = nn.Linear(8, 8)

    def forward(self, ids):
        a, b, c = self.fused(self.table(ids)).reshape(*ids.shape, 3, 8).unbind(-2)
        return self.head(self.down(F.gelu(a) * b + c))


IDS = torch.arange(10).reshape(2, 5)
SHARDINGS = {"table.weight": {"x": 0}, "fused.*": {"x": 0}, "down.weight": {"x": 1}}


@pytest.fixture(scope="module")
def module():
    rows = torch.export.Dim("rows", min=1, max=64)
    return mt.from_torch(torch.export.export(Model(), (IDS,), dynamic_shapes=({0: rows},)))


def made(module, model, **options):
    return mt.distribute_module(module.mod, {"x": 2}, SHARDINGS, weights=model.state_dict(), **options)


def test_state_dicts(module):
    model, other = Model(), Model()
    run = made(module, model)
    for _ in range(2):  # as given, then laid out
        state = run.state_dict()
        assert state.keys() == model.state_dict().keys()
        assert state["head.weight"] is state["table.weight"]
        assert all(torch.equal(state[name], tensor) for name, tensor in model.state_dict().items())
        torch.testing.assert_close(run(IDS), model(IDS).detach())
    held = run.state_dict(full=False)
    assert isinstance(held["down.weight"], mt.MeshTensor)
    assert str(held["down.weight"].sharding) == "S[1]"
    assert torch.equal(held["fused.weight"], model.fused.weight)
    run.load_state_dict(other.state_dict())
    torch.testing.assert_close(run(IDS), other(IDS).detach())
    run.load_state_dict(made(module, model).state_dict(full=False))
    torch.testing.assert_close(run(IDS), model(IDS).detach())
    run.load_state_dict(held)
    torch.testing.assert_close(run(IDS), model(IDS).detach())


def test_a_part_of_a_state(module):
    model, other = Model(), Model()
    run = made(module, model)
    run(IDS)
    run.load_state_dict({"_orig_mod.down.weight": other.down.weight}, strict=False)
    model.down.weight = other.down.weight
    torch.testing.assert_close(run(IDS), model(IDS).detach())


def test_states_that_do_not_fit(module):
    model = Model()
    run = made(module, model)
    state = dict(model.state_dict())
    state["down.wieght"] = state.pop("down.weight")
    state["down.bias"] = torch.zeros(3)
    for wrong, *said in (
        (state, "there is no parameter 'down.wieght'", "did you mean 'down.weight'?", "parameter 'down.bias': (3,)"),
        ({"down.weight": model.down.weight}, "'fused.weight' is missing", "'table.weight' is missing"),
        ({**model.state_dict(), "ids": IDS}, "'ids' is no weight of this run, but an input"),
        ({**model.state_dict(), "head.weight": torch.zeros(12, 8)}, "under two names"),
        (None, "the weights are a NoneType"),
    ):
        message = refusal(run.load_state_dict, wrong)
        for text in said:
            assert text in message
        torch.testing.assert_close(run(IDS), model(IDS).detach())


def test_tied_weights_that_were_stored_under_both_names(module, tmp_path):
    """They are equal tensors then, in memory or in files; others are refused."""
    model = Model()
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    assert {"table.weight", "head.weight"} <= state.keys()
    pytest.importorskip("safetensors.torch").save_file(state, tmp_path / "both.safetensors")
    for given in (state, mt.open_weights(tmp_path / "both.safetensors")):
        run = made(module, Model())
        run.load_state_dict(given)
        torch.testing.assert_close(run(IDS), model(IDS).detach())


def test_weights_are_laid_out_once_whatever_sizes_come(module):
    model = Model()
    run = made(module, model)
    tiles = []
    for rows in (2, 3, 4, 5):
        ids = torch.randint(12, (rows, 5))
        torch.testing.assert_close(run(ids), model(ids).detach())
        known = next(iter(reversed(list(run._launches))))._held
        tiles.append({name: [t.data_ptr() for t in known[name].tiles()] for name in ("down_weight", "fused_weight")})
    assert all(here == tiles[0] for here in tiles)


def test_donated_weights_are_let_go(module):
    model = Model()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items() if name != "head.weight"}
    pointers = {name: tensor.untyped_storage().data_ptr() for name, tensor in weights.items()}
    run = made(module, model, donate=False)
    run = mt.distribute_module(module.mod, {"x": 2}, SHARDINGS, weights=weights, donate=True)
    assert not weights
    torch.testing.assert_close(run(IDS), model(IDS).detach())
    held = [tensor for tensor in run._weights.values() if isinstance(tensor, torch.Tensor)]
    assert not held
    assert pointers
    with pytest.raises(mt.MeshTensorError, match="donate takes the tensors out of `weights`"):
        mt.distribute_module(module.mod, {"x": 2}, SHARDINGS, donate=True)


def test_donated_weights_of_an_exported_program_are_let_go():
    model = nn.Linear(4, 6).eval()
    module = mt.from_torch(torch.export.export(model, (torch.randn(2, 4),)))
    run = mt.distribute_module(module.mod, {"x": 2}, {"weight": {"x": 0}}, weights=module.params, donate=True)
    given, x = weakref.ref(model.weight), torch.randn(2, 4)
    expected = model(x).detach()
    del model
    torch.testing.assert_close(run(x), expected)
    assert given() is None


@pytest.mark.parametrize("mesh", [{"x": 1}, {"x": 2}], ids=str)
@pytest.mark.parametrize("rows", [None, torch.export.Dim("rows", min=1, max=64)])
def test_weights_are_those_when_the_module_was_distributed(mesh, rows):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4)).eval()
    x = torch.randn(4, 4)
    module = mt.from_torch(torch.export.export(model, (x,), dynamic_shapes=({0: rows},)), buffers=True)
    write(model)
    expected = model(x).detach()
    run = mt.distribute_module(module, mesh, {"0.weight": {"x": 0}, "1.running_var": {"x": 0}})
    write(model)
    torch.testing.assert_close(run(x), expected)
    write(model)
    torch.testing.assert_close(run(x), expected)
    state, loaded = model.state_dict(), model(x).detach()
    run.load_state_dict(state)
    write(model)
    torch.testing.assert_close(run(x), loaded)


def test_constants_that_were_written_since_the_import():
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    module = mt.from_torch(torch.export.export(model, (torch.randn(4, 4),)))
    write(model)
    message = refusal(mt.distribute_module, module, {"x": 2}, {})
    for text in ("'1.running_mean', '1.running_var' were written since", "buffers=True"):
        assert text in message


def test_constants_stay_for_new_sizes_and_after_loading():
    """A model's buffers may be written while a run of it is used: by more training."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).eval()
    x, rows = torch.randn(8, 4), torch.export.Dim("rows", min=2, max=64)
    module = mt.from_torch(torch.export.export(model, (x,), dynamic_shapes=({0: rows},)))
    run = mt.distribute_module(module, {"x": 2}, {})
    expected, state = model(x).detach(), {name: value.clone() for name, value in model.state_dict().items()}
    torch.testing.assert_close(run(x), expected)
    write(model)
    for count in (4, 5):
        torch.testing.assert_close(run(x[:count]), expected[:count])
    run.load_state_dict(state)
    torch.testing.assert_close(run(x), expected)
    with pytest.raises(mt.MeshTensorError, match="other values than the module's constants"):
        run.load_state_dict(model.state_dict())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_is_written_after_its_step_was_made(dtype):
    """A step has copies of constants, and of what it keeps in float32."""
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval()).to(dtype)
    batch = torch.randn(8, 4).to(dtype), torch.randn(8, 6).to(dtype)
    step = mt.training_step(model, nn.functional.mse_loss, batch, optimizer="sgd", check=False)
    write(model)
    with pytest.raises(mt.MeshTensorError, match="written since") as error:
        mt.distribute_module(step, {"x": 2}, {})
    assert "'1.running_mean'" in str(error.value)
    assert ("'0.weight'" in str(error.value)) == (dtype == torch.bfloat16), str(error.value)


def test_state_is_that_when_the_module_was_distributed():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("seen", torch.zeros(4))

        def forward(self, x):
            self.seen.add_(x)
            return self.seen * 2

    model = Counts()
    module = mt.from_torch(torch.export.export(model, (torch.ones(4),)))
    run = mt.distribute_module(module, {"x": 2}, {"seen": {"x": 0}})
    model.seen.fill_(5)
    assert run(torch.ones(4)).tolist() == [2.0] * 4
    run.reset_state()
    assert run(torch.ones(4)).tolist() == [2.0] * 4


@pytest.mark.parametrize("called", [False, True])
def test_states_are_their_takers(called):
    """Before the first call they were the memory that the run goes on from; what is not trained was the model's."""
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].requires_grad_(False)
    module = mt.from_torch(torch.export.export(model, (x,)))
    forward = mt.distribute_module(module, {"x": 2}, {"0.weight": {"x": 0}})
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.0)
    train = mt.distribute_module(step, {"x": 2}, {"0.weight": {"x": 0}})
    expected, before = model(x).detach(), {name: held.clone() for name, held in model.state_dict().items()}
    if called:
        forward(x), train(x, y)
    for run in (forward, train):
        for held in (*run.state_dict().values(), *run.state_dict(full=False).values()):
            if isinstance(held, torch.Tensor):
                held.zero_()
        state = run.state_dict()
        assert all(torch.equal(state[name], own) for name, own in before.items())
    assert all(torch.equal(own, before[name]) for name, own in model.state_dict().items())
    torch.testing.assert_close(forward(x), expected)
    torch.testing.assert_close(train(x, y), F.mse_loss(expected, y))
    write(model)
    state = train.state_dict()
    assert all(torch.equal(state[name], own) for name, own in before.items())
    train.load_state_dict(state)


def test_training_starts_from_what_there_was_when_the_step_was_distributed():
    model, x, y = nn.Sequential(nn.Linear(4, 4)), torch.randn(2, 4), torch.randn(2, 4)
    step = mt.training_step(model, F.mse_loss, (x, y), optimizer="sgd", lr=0.1)
    run, expected = mt.distribute_module(step, {"x": 2}, {"0.weight": {"x": 0}}), F.mse_loss(model(x), y).detach()
    write(model)
    torch.testing.assert_close(run(x, y), expected)


def write(model):
    """Other values, in the same memory."""
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.mul_(2).add_(1)
