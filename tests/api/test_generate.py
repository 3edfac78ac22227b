"""Tokens from a model on a mesh are those of the model alone, fed each row by itself from its start at every token."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import llama, llama_decoder
from mesh_tensor.api.sampling import Sampling

CONFIG = llama.Config(batch=3, positions=20)
GREEDY = Sampling()
MESHES = {"two": {"x": 2}, "three": {"x": 3}, "square": {"x": 2, "y": 2}}


@pytest.fixture(scope="module")
def made():
    """A model whose tokens differ from one another, and its decoder as a module."""
    torch.manual_seed(0)
    model = llama.build(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.7)
    return model, mt.from_torch(llama_decoder.export(model, CONFIG))


@pytest.fixture(scope="module")
def runs(made):
    """The module on each mesh; on the square, y splits the batch."""

    def on(mesh):
        layout = llama_decoder.layout(CONFIG, "x", vocabulary=True)
        if "y" in mesh:
            layout = {**layout, "ids": {"y": 0}}
            layout |= {name: {**layout[name], "y": 0} for name in layout if name.startswith(("keys", "values"))}
        return mt.distribute_module(made[1], mesh, layout, poison=True)

    return {name: on(mesh) for name, mesh in MESHES.items()}


def prompts():
    """Three rows of 5, 2 and 4 tokens."""
    ids = torch.randint(1, CONFIG.vocabulary, (3, 5), generator=torch.Generator().manual_seed(1))
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 0, 1, 1], [0, 1, 1, 1, 1]])
    return ids * mask, mask


def alone(model, ids, mask, count, sampling=GREEDY):
    """The tokens that follow, of torch's model without a cache."""
    made = []
    wide = llama.Llama(CONFIG).eval()
    wide.load_state_dict(model.state_dict())
    for row, (mine, real) in enumerate(zip(ids, mask, strict=True)):
        tokens = mine[real.bool()]
        for number in range(count):
            with torch.no_grad():
                logits = wide(tokens[None])[0, -1]
            rows = torch.zeros(row + 1, len(logits))
            rows[row] = logits
            tokens = torch.cat([tokens, sampling.tokens(rows, number)[row:]])
        made.append(tokens[-count:])
    return torch.cat([ids, torch.stack(made)], dim=1)


@pytest.mark.parametrize("name", MESHES)
def test_greedy_tokens_are_the_models_own(made, runs, name):
    ids, mask = prompts()
    expected = alone(made[0], ids, mask, 12)
    assert len(expected[:, 5:].unique()) > 6
    assert torch.equal(mt.generate(runs[name], ids, 12, attention_mask=mask), expected)


@pytest.mark.parametrize("rows", [(1,), (2, 0), (0, 1, 2, 1, 0, 2, 1)], ids=len)
@pytest.mark.parametrize("options", [{}, {"temperature": 1.5, "top_p": 0.9}], ids=str)
def test_fewer_and_more_prompts_than_the_batch(made, runs, rows, options):
    """A batch is filled up, or there are several; what is drawn goes by the row's number among all."""
    ids, mask = (tensor[list(rows)] for tensor in prompts())
    expected = alone(made[0], ids, mask, 6, Sampling(**options))
    assert torch.equal(mt.generate(runs["square"], ids, 6, attention_mask=mask, **options), expected)


def test_turns_that_end_after_different_numbers_of_tokens(made, runs):
    ids, mask = (tensor[[1, 1, 1, 0]] for tensor in prompts())
    expected = alone(made[0], ids, mask, 8)
    end, other = int(expected[0, 6]), expected[3, 5:].tolist()
    assert end not in other[:2]
    found = mt.generate(runs["two"], ids, 8, attention_mask=mask, eos_token_id=end, pad_token_id=0)
    upto = 6 + (expected[0, 5:] == end).int().argmax() - 1
    assert torch.equal(found[:3, : upto + 1], expected[:3, : upto + 1])
    assert not found[:3, upto + 1 :].any()
    assert found.shape[1] == 5 + (other.index(end) + 1 if end in other else 8)


@pytest.mark.parametrize("options", [{"temperature": 0.8, "top_k": 9, "seed": 3}, {"temperature": 1.5, "top_p": 0.9}])
def test_drawn_tokens_are_the_same_on_any_mesh(made, runs, options):
    ids, mask = prompts()
    expected = alone(made[0], ids, mask, 6, Sampling(**options))
    for run in runs.values():
        assert torch.equal(mt.generate(run, ids, 6, attention_mask=mask, **options), expected)


def penalised(model, ids, mask, count, penalty, least, end, sampling=GREEDY):
    """As `alone`, of logits that are changed one by one; each row up to its end."""
    made = []
    wide = llama.Llama(CONFIG).eval()
    wide.load_state_dict(model.state_dict())
    for row, (mine, real) in enumerate(zip(ids, mask, strict=True)):
        tokens = mine[real.bool()].tolist()
        for number in range(count):
            with torch.no_grad():
                logits = wide(torch.tensor([tokens]))[0, -1].tolist()
            for token in set(tokens):
                logits[token] *= penalty if logits[token] < 0 else 1 / penalty
            if number < least:
                logits[end] = -torch.inf
            rows = torch.zeros(row + 1, len(logits))
            rows[row] = torch.tensor(logits)
            tokens.append(int(sampling.tokens(rows, number)[row]))
            if tokens[-1] == end:
                break
        made.append(tokens[int(real.sum()) :])
    return made


@pytest.mark.parametrize("options", [{}, {"temperature": 0.9, "seed": 5}], ids=str)
def test_repetitions_cost_and_rows_do_not_end_early(made, runs, options):
    ids, mask = prompts()
    free = mt.generate(runs["two"], ids, 6, attention_mask=mask, **options)
    ids = torch.where(mask == 1, ids, free[:, 5:10])  # what padding holds is no token of the row
    end = int(free[0, 5])  # the first row would end at once
    expected = penalised(made[0], ids, mask, 6, 1.5, 2, end, Sampling(**options))
    assert min(len(row) for row in expected) >= 3
    assert any(set(row) != set(f[5:].tolist()) for row, f in zip(expected, free, strict=True))
    said = {"repetition_penalty": 1.5, "min_new_tokens": 2, "eos_token_id": torch.tensor([end]), "pad_token_id": 0}
    found = mt.generate(runs["square"], ids, 6, attention_mask=mask, do_sample=bool(options), **said, **options)
    for row, tokens in zip(expected, found[:, 5:].tolist(), strict=True):
        assert tokens == row + [0] * (len(tokens) - len(row))


def test_drawing_at_no_stated_temperature(runs):
    """As transformers does: at 1."""
    ids, mask = prompts()
    found = mt.generate(runs["two"], ids, 4, attention_mask=mask, do_sample=True, seed=2)
    assert torch.equal(found, mt.generate(runs["two"], ids, 4, attention_mask=mask, temperature=1.0, seed=2))


def test_the_longest_prompt_and_the_shortest(made, runs):
    for size, new in ((20, 1), (1, 20), (17, 4), (4, 0)):
        ids = torch.randint(1, CONFIG.vocabulary, (3, size), generator=torch.Generator().manual_seed(size))
        expected = alone(made[0], ids, torch.ones_like(ids), new) if new else ids
        assert torch.equal(mt.generate(runs["two"], ids, new), expected)


def test_rows_end(made, runs):
    ids, mask = prompts()
    free = alone(made[0], ids, mask, 8)[:, 5:]
    end = int(free[1, 2])
    first = [row.index(end) if end in row else 7 for row in free.tolist()]
    expected = free.clone()
    for row, last in enumerate(first):
        expected[row, last + 1 :] = 47
    expected = expected[:, : max(first) + 1]
    found = mt.generate(runs["two"], ids, 8, attention_mask=mask, eos_token_id=[end], pad_token_id=47)
    assert torch.equal(found[:, 5:], expected)


def test_keys_and_values_stay_split(runs):
    ids, mask = prompts()
    mt.generate(runs["two"], ids, 4, attention_mask=mask)
    keys = runs["two"].state_dict(full=False)["keys_0"]
    assert keys.sharding.dim_of("x") == 1
    assert {tuple(tile.shape) for tile in keys.tiles()} == {(3, 2, 20, 4)}
    assert not keys.full()[1, :, 8:].any()
    assert keys.full()[1, :, 7].any()
    runs["two"].reset_state()
    assert not runs["two"].state_dict()["keys_0"].any()
