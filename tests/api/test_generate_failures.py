"""What can't be generated is refused before anything runs, all of it named."""

import threading

import pytest
import torch

import mesh_tensor as mt
from kernels.models import llama, llama_decoder
from tests.refusals import refusal

CONFIG = llama.Config(batch=2, positions=8, layers=1)
IDS = torch.ones(2, 3, dtype=torch.long)


@pytest.fixture(scope="module")
def run():
    torch.manual_seed(0)
    program = llama_decoder.export(llama.build(CONFIG), CONFIG)
    return mt.distribute_module(mt.from_torch(program, check=False), {"x": 2}, llama_decoder.layout(CONFIG, "x"))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"ids": torch.ones(0, 3, dtype=torch.long)}, "there are no prompts"),
        ({"max_new_tokens": 7}, "prompts of 3 positions and 7 new tokens need 9 positions, but the module keeps 8"),
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"ids": torch.ones(2, 3)}, "ids are torch.float32"),
        ({"ids": torch.ones(2, 0, dtype=torch.long)}, "prompts without tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]])}, "pad prompts on their left"),
        ({"attention_mask": torch.tensor([[0, 0, 0], [1, 1, 1]])}, "prompts without tokens"),
        ({"attention_mask": torch.ones(2, 4)}, r"Tensor \(2, 3\) and Tensor \(2, 4\)"),
        ({"temperature": -1.0}, "temperature is -1.0"),
        ({"top_k": 3}, "at a temperature of 0 nothing is drawn"),
        (
            {"penalty_alpha": 0.5, "topk": 3},
            "(?s)no argument 'penalty_alpha'.*no argument 'topk'; did you mean 'top_k'.*'min_new",
        ),
        ({"do_sample": True, "temperature": 0.0}, "do_sample is True and the temperature is 0.0"),
        ({"do_sample": False, "temperature": 0.7}, "do_sample is False and the temperature is 0.7"),
        ({"repetition_penalty": 0.0, "min_new_tokens": -1}, "(?s)repetition_penalty is 0.0.*min_new_tokens is -1"),
        ({"eos_token_id": "2"}, "eos_token_id is '2'"),
        ({"eos_token_id": [2, 2.5]}, r"eos_token_id is \[2, 2.5\]"),
        (
            {"temperature": "1", "top_p": "1", "repetition_penalty": "1"},
            "(?s)repetition_penalty is '1'.*temperature is '1'",
        ),
        ({"pad_token_id": "0"}, "pad_token_id is '0'"),
        ({"ids": IDS.to("meta")}, "ids or mask are on device meta"),
        ({"temperature": 1.0, "top_k": 0, "top_p": 1.5, "seed": -2}, "(?s)top_k is 0.*top_p is 1.5.*the seed is -2"),
    ],
)
def test_arguments(run, given, said):
    with pytest.raises(mt.MeshTensorError, match=said):
        mt.generate(run, **{"ids": IDS, "max_new_tokens": 2, **given})


def test_two_threads(run):
    """The second one would have started from the tokens of the first."""
    found = []

    def meanwhile(_, logits):
        thread = threading.Thread(target=lambda: found.append(refusal(lambda: mt.generate(run, IDS, 2))))
        thread.start()
        thread.join()
        return logits

    made = mt.generate(run, IDS, 2, logits_processor=meanwhile)
    assert torch.equal(made, mt.generate(run, IDS, 2))
    assert len(found) == 2
    assert all("a call of generate, while another thread's is under way" in text for text in found)


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_from_within_functions_that_it_calls(run, option):
    """They would go on from the tokens of what they are called in, and leave it theirs."""
    expected = mt.generate(run, IDS, 3)
    for within, said in (
        (lambda: mt.generate(run, IDS.flip(1), 1), "a call of generate, from within"),
        (run.reset_state, "a state that is reset, from within"),
        (lambda: run.load_state_dict(run.state_dict()), "a state that is loaded, from within"),
    ):
        texts = []

        def function(_, scores, within=within, texts=texts):
            texts.append(refusal(within))
            return False if scores is None else scores

        assert torch.equal(mt.generate(run, IDS, 3, **{option: function}), expected)
        assert all(text.startswith(f"{said} {option}") for text in texts)
        assert len(texts) == 3
    with pytest.raises(mt.MeshTensorError, match=f"a call of generate, from within {option}"):
        mt.generate(run, IDS, 3, **{option: lambda *_: mt.generate(run, IDS, 1)})
    assert torch.equal(mt.generate(run, IDS, 3), expected)


@pytest.mark.parametrize("option", ["logits_processor", "stopping_criteria"])
def test_functions_that_write_into_the_ids(run, option):
    def function(ids, scores):
        ids.zero_()
        return False if scores is None else scores

    assert torch.equal(mt.generate(run, IDS, 3, **{option: function}), mt.generate(run, IDS, 3))


def test_ids_outside_the_vocabulary(run):
    with pytest.raises(mt.MeshTensorError, match="'ids' has elements from 1 to 48"):
        mt.generate(run, torch.tensor([[1, 48], [1, 1]]), 2)


def test_logits_that_are_no_numbers(run):
    state = run.state_dict()
    run.load_state_dict({"model.head.weight": torch.full((48, 32), torch.nan)}, strict=False)
    with pytest.raises(mt.MeshTensorError, match="logits of token 0 are NaN or infinite"):
        mt.generate(run, IDS, 2)
    run.load_state_dict(state)


def test_a_module_that_takes_something_else():
    model = torch.nn.Linear(4, 4).eval()
    other = mt.distribute_module(mt.from_torch(torch.export.export(model, (torch.ones(2, 4),))), {"x": 2})
    with pytest.raises(mt.MeshTensorError, match=r"takes \(input .*\(ids \(batch, n\), mask \(batch, length\)"):
        mt.generate(other, IDS, 2)
    with pytest.raises(mt.MeshTensorError, match="a Linear generates no tokens"):
        mt.generate(model, IDS, 2)


def test_what_is_no_model_of_transformers():
    with pytest.raises(mt.MeshTensorError, match="a Linear is no causal language model of transformers"):
        mt.from_transformers(torch.nn.Linear(2, 2), 1, 8)
