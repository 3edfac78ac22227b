"""Beam search on a mesh finds what the model alone does, each row fed from its start at every token; and what callers
bring of their own for tokens."""

import pytest
import torch

import mesh_tensor as mt
from kernels.models import llama, llama_decoder
from mesh_tensor.api.beams import Beams

CONFIG = llama.Config(batch=3, positions=16, layers=1)
MASK = torch.tensor([[1, 1, 1, 1], [0, 0, 1, 1]])
IDS = torch.randint(1, CONFIG.vocabulary, (2, 4), generator=torch.Generator().manual_seed(1)) * MASK


@pytest.fixture(scope="module")
def made():
    torch.manual_seed(0)
    model = llama.build(CONFIG)
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1.7)
    module = mt.from_torch(llama_decoder.export(model, CONFIG))
    layout = llama_decoder.layout(CONFIG, "x", vocabulary=True)
    return model, mt.distribute_module(module, {"x": 2}, layout, poison=True)


def best(model, prompt, most, beams, ends):
    """What follows a prompt, by the definition: a list of rows and their scores, and one of those that ended."""
    going, ended = [(0.0, [])], []
    for number in range(1, most + 1):
        found = []
        for score, tokens in going:
            with torch.no_grad():
                logits = model(torch.cat([prompt, torch.tensor(tokens, dtype=torch.long)])[None])[0, -1]
            found += [(score + p, [*tokens, token]) for token, p in enumerate(logits.log_softmax(-1).tolist())]
        found = sorted(found, key=lambda row: -row[0])[: beams.count * max(2, 1 + len(ends))]
        done = [row for row in found[: beams.count] if row[1][-1] in ends or number == most]
        full = len(ended) == beams.count and beams.early_stopping is True
        ended += [] if full else [(score / number**beams.length_penalty, tokens) for score, tokens in done]
        ended = sorted(ended, key=lambda row: -row[0])[: beams.count]
        going = [row for row in found if row[1][-1] not in ends][: beams.count]
        longest = most if beams.early_stopping == "never" and beams.length_penalty > 0 else number
        hopeless = len(ended) == beams.count and going[0][0] / longest**beams.length_penalty <= ended[-1][0]
        if hopeless or (beams.early_stopping is True and len(ended) == beams.count):
            break
    return ended[0][1]


@pytest.mark.parametrize(
    ("beams", "ends"),
    [(Beams(3), []), (Beams(2, 1.0, True), range(10, 20)), (Beams(3, 2.0, "never"), [7, 9]), (Beams(3, -1.0), [7, 30])],
    ids=["none", "early", "never", "short"],
)
def test_beams(made, beams, ends):
    expected = [best(made[0], i[m.bool()], 6, beams, ends) for i, m in zip(IDS, MASK, strict=True)]
    said = {"num_beams": beams.count, "length_penalty": beams.length_penalty, "early_stopping": beams.early_stopping}
    found = mt.generate(made[1], IDS, 6, attention_mask=MASK, eos_token_id=list(ends), pad_token_id=0, **said)
    widest = max(map(len, expected))
    assert found[:, 4:].tolist() == [row + [0] * (widest - len(row)) for row in expected]


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
        ({"num_beams": 2, "temperature": 1.0}, "2 beams of drawn tokens"),
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
