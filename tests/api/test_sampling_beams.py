"""Beam search on a mesh finds what the model alone does, each row fed from its start at every token; and what callers
bring of their own for tokens."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import llama, llama_decoder
from mesh_tensor.api.module_ports import ports_of
from mesh_tensor.api.sampling import Beams, Sampling

CONFIG = llama.Config(batch=3, positions=16, layers=1)
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
IDS = torch.randint(1, CONFIG.vocabulary, (2, 4), generator=torch.Generator().manual_seed(1)) * MASK


@pytest.fixture(scope="module")
def imported():
    torch.manual_seed(0)
    model = llama.build(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.7)
    return model, mt.from_torch(llama_decoder.export(model, CONFIG))


@pytest.fixture(scope="module")
def made(imported):
    layout = llama_decoder.layout(CONFIG, "x", vocabulary=True)
    return imported[0], mt.distribute_module(imported[1], {"x": 2}, layout, poison=True)


def best(model, prompt, most, beams, ends, noise=None):
    """What follows a prompt, the best row first, by the definition: a list of rows and their scores, and one of those
    that ended. `noise` of each token's number: what is followed is drawn, of 5 tokens of a row, at a temperature."""
    going, ended = [(0.0, [])], []
    for number in range(1, most + 1):
        found = []
        for score, tokens in going:
            with torch.no_grad():
                logits = model(torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)])[None])[0, -1]
            scores = logits.log_softmax(-1)
            if noise is not None:
                scores = torch.where(scores >= scores.topk(5).values[-1], scores / 0.7, -torch.inf)
            found += [(score + p, [*tokens, token]) for token, p in enumerate(scores.tolist())]
        added = [0.0] * len(found) if noise is None else noise(number - 1)
        drawn = sorted(zip(found, added, strict=False), key=lambda one: -one[0][0] - one[1])
        found = [row for row, _ in drawn[: beams.count * max(2, 1 + len(ends))]]
        done = [row for row in found[: beams.count] if row[1][-1] in ends or number == most]
        full = len(ended) == beams.count and beams.early_stopping is True
        ended += [] if full else [(score / number**beams.length_penalty, tokens) for score, tokens in done]
        ended = sorted(ended, key=lambda row: -row[0])[: beams.count]
        going = sorted([row for row in found if row[1][-1] not in ends], key=lambda row: -row[0])[: beams.count]
        longest = most if beams.early_stopping == "never" and beams.length_penalty > 0 else number
        hopeless = len(ended) == beams.count and going[0][0] / longest**beams.length_penalty <= ended[-1][0]
        if hopeless or (beams.early_stopping is True and len(ended) == beams.count):
            break
    return [tokens for _, tokens in ended]


@pytest.mark.parametrize(
    ("beams", "ends"),
    [(Beams(3), []), (Beams(2, 1.0, True), range(10, 20)), (Beams(3, 2.0, "never"), [7, 9]), (Beams(3, -1.0), [7, 30])],
    ids=["none", "early", "never", "short"],
)
def test_beams(made, beams, ends):
    each = beams.count - 1
    expected = [
        row for i, m in zip(IDS, MASK, strict=True) for row in best(made[0], i[m.bool()], 6, beams, ends)[:each]
    ]
    said = {"num_beams": beams.count, "length_penalty": beams.length_penalty, "early_stopping": beams.early_stopping}
    said |= {"num_return_sequences": each, "eos_token_id": list(ends), "pad_token_id": 0}
    found = mt.generate(made[1], IDS, 6, attention_mask=MASK, **said)
    widest = max(map(len, expected))
    assert found[:, 4:].tolist() == [row + [0] * (widest - len(row)) for row in expected]


def test_drawn_beams(made):
    """Two prompts in two turns, each with noise of its own; what is drawn without putting back has no row twice."""
    drawn, expected = Sampling(0.7, 5, None, 3), []
    for row, (ids, mask) in enumerate(zip(IDS, MASK, strict=True)):

        def noise(number, row=row):
            return drawn.noise(CONFIG.vocabulary * 3, number, range(row, row + 1))[0].tolist()

        expected += best(made[0], ids[mask.bool()], 6, Beams(3), [], noise)
    said = {"do_sample": True, "temperature": 0.7, "top_k": 5, "seed": 3, "num_beams": 3, "num_return_sequences": 3}
    found = mt.generate(made[1], IDS, 6, attention_mask=MASK, **said)[:, 4:].tolist()
    assert found == expected
    assert len(set(map(tuple, found))) == 6


def test_several_rows_of_a_prompt(made):
    drawn = {"do_sample": True, "seed": 5}
    found = mt.generate(made[1], IDS, 6, attention_mask=MASK, num_return_sequences=2, **drawn)
    ids, mask = (tensor.repeat_interleave(2, dim=0) for tensor in (IDS, MASK))
    assert torch.equal(found, mt.generate(made[1], ids, 6, attention_mask=mask, **drawn))
    assert not torch.equal(found[0], found[1])
    config = {"num_return_sequences": 2, "do_sample": True, "top_k": 0, "max_new_tokens": 6}
    assert torch.equal(found, mt.generate(made[1], IDS, attention_mask=MASK, generation_config=config, seed=5))


@pytest.mark.parametrize(
    ("layout", "places", "stay"),
    [({"x": 1}, [1, 1, 0], True), ({"x": 0}, [1, 0, 2], True), ({"x": 0, "y": 0}, [0, 2, 1], False)],
    ids=["heads", "rows that stay", "rows that change devices"],
)
def test_rows_that_take_places_of_others(imported, layout, places, stay):
    layouts = dict.fromkeys(("keys_0", "values_0"), layout)
    run = mt.distribute_module(imported[1], {"x": 2, "y": 2}, layouts, poison=True)
    mt.generate(run, IDS, 3, attention_mask=MASK)
    before, places = run.state_dict(), torch.tensor(places)
    kept = [port for port in ports_of(run.plan) if port.name.endswith(tuple(layouts))]
    assert [port.rows(places) is not None for port in kept] == [stay] * 2
    run.reorder_state(places)
    after = run.state_dict()
    for name in layouts:
        assert torch.equal(after[name], before[name][places])
        assert not torch.equal(after[name], before[name])


def test_more_beams_find_likelier_rows(made):
    """Six tokens of the likeliest each, and of three beams: other rows, likelier ones."""

    def score(row):
        with torch.no_grad():
            scores = made[0](row[None])[0].log_softmax(-1)
        return sum(float(scores[place - 1, row[place]]) for place in range(4, len(row)))

    one, three = (mt.generate(made[1], IDS[:1], 6, num_beams=beams)[0] for beams in (1, 3))
    assert score(three) > score(one) + 0.1


def test_what_a_config_says(made):
    run = made[1]
    free = mt.generate(run, IDS, 8, attention_mask=MASK)
    end = int(free[0, 6])
    explicit = {"eos_token_id": [end], "pad_token_id": 3, "repetition_penalty": 1.4}
    expected = mt.generate(run, IDS, 8, attention_mask=MASK, min_new_tokens=1, **explicit)
    config = {**explicit, "max_length": 12, "min_length": 5, "do_sample": False, "temperature": 0.6, "top_k": 50}
    assert torch.equal(mt.generate(run, IDS, attention_mask=MASK, generation_config=config), expected)
    assert (
        mt.generate(run, IDS, 2, attention_mask=MASK, generation_config={**config, "max_new_tokens": 9}).shape[1] == 6
    )
    drawn = mt.generate(run, IDS, 8, attention_mask=MASK, temperature=0.6, top_k=5, eos_token_id=[end], pad_token_id=3)
    config = {"do_sample": True, "temperature": 0.6, "top_k": 5, "eos_token_id": end, "pad_token_id": 3, "use_cache": 1}
    given = {"attention_mask": MASK, "generation_config": {**config, "max_new_tokens": 8}}
    assert torch.equal(mt.generate(run, IDS, **given), drawn)
    greedy = mt.generate(run, IDS, 8, attention_mask=MASK, eos_token_id=[end], pad_token_id=3)
    assert torch.equal(mt.generate(run, IDS, do_sample=False, **given), greedy)


def test_functions_of_the_callers_own(made):
    free = mt.generate(made[1], IDS, 6, attention_mask=MASK)
    banned = int(free[0, 4])
    seen = []

    def without(ids, logits):
        seen.append((ids.shape, logits.shape))
        logits[:, banned] = -torch.inf
        return logits

    def at_length(ids, _):
        return torch.tensor([False, ids.shape[1] == 6])[: len(ids)]

    found = mt.generate(
        made[1], IDS, 6, attention_mask=MASK, logits_processor=[without], stopping_criteria=at_length, pad_token_id=0
    )
    assert seen[0] == ((2, 4), (2, CONFIG.vocabulary))
    assert banned not in found[:, 4:]
    assert found[0, 4:].all()
    assert found[1, 4:6].all()
    assert not found[1, 6:].any()


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"num_beams": 4}, "4 beams, but the module takes 3 rows"),
        ({"num_beams": 2, "num_return_sequences": 3}, "3 rows are to be returned of 2 beams"),
        ({"num_return_sequences": 2}, "2 rows are to be returned, but the likeliest tokens make one"),
        ({"num_return_sequences": 0}, "num_return_sequences is 0"),
        ({"num_beams": 0, "early_stopping": "soon"}, "(?s)num_beams is 0.*early_stopping is 'soon'"),
        ({"generation_config": {"no_repeat_ngram_size": 2, "typical_p": 0.5}}, "its no_repeat_ngram_size is 2"),
        ({"generation_config": {"typical_p": 0.5, "do_sample": True}}, "its typical_p is 0.5"),
        ({"generation_config": {"max_length": 4}, "max_new_tokens": None}, "its max_length is 4, but prompts have 4"),
        ({"generation_config": 3}, "the generation_config is 3"),
        ({"max_new_tokens": None}, "max_new_tokens is None"),
        ({"stop_strings": ["a"]}, r"stop_strings \['a'\] without a tokenizer"),
        ({"logits_processor": [3]}, "3 in logits_processor can't be called"),
        ({"logits_processor": lambda ids, logits: logits[:1, :1]}, "(?s)it gives.*where: logits_processor of generate"),
        ({"stopping_criteria": lambda ids, _: 1 / 0}, "(?s)ZeroDivisionError.*where: stopping_criteria of generate"),
        ({"stopping_criteria": lambda ids, _: torch.ones(5)}, "for 2 rows"),
    ],
)
def test_refused(made, given, said):
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.generate(made[1], IDS, **{"max_new_tokens": 2, "attention_mask": MASK, **given})


class Counting(llama_decoder.Decoder):
    """It counts its calls, for all rows."""

    def __init__(self, model):
        super().__init__(model, CONFIG)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, ids, mask, positions, start):
        self.count.add_(1)
        return super().forward(ids, mask, positions, start)


def test_a_module_that_keeps_something_else(made):
    whole = torch.ones((3, CONFIG.positions), dtype=torch.long)
    inputs = (torch.ones((3, 4), dtype=torch.long), whole, torch.arange(4).expand(3, -1), torch.tensor(0))
    program = torch.export.export(Counting(made[0]).eval(), inputs)
    run = mt.distribute_module(mt.from_torch(program, check=False), {"x": 2})
    with pytest.raises(mt.MeshTensorError, match="the module keeps 'count', of which nothing says"):
        mt.generate(run, IDS, 2, num_beams=2)
