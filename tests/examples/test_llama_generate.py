"""The example's tokens on a virtual mesh and on ranks are the model's own."""

import torch

import mesh_tensor as mt
from examples import llama_generate
from examples.llama_generate import byte_model, on_mesh, padded
from kernels.models import llama
from tests.runtime.ranks import launcher

IDS, MASK = padded([list(b"Once"), list(b"A mesh")])


def on_ranks(rank, made):
    """The tokens of one rank; and what it is told if ranks have other prompts."""
    run = on_mesh(made[1], 2)
    tokens = mt.generate(run, IDS, 6, attention_mask=MASK, temperature=0.9, seed=5)
    try:
        mt.generate(run, IDS + rank, 6)
    except mt.MeshTensorError as error:
        return tokens.tolist(), str(error)
    return tokens.tolist(), ""


def test_threads_and_ranks():
    model, module = byte_model()
    run = on_mesh(module, 2)
    greedy = mt.generate(run, IDS, 6, attention_mask=MASK)
    drawn = mt.generate(run, IDS, 6, attention_mask=MASK, temperature=0.9, seed=5)
    wide = llama.build(llama_generate.CONFIG)
    wide.load_state_dict(model.state_dict())
    for row, mask in zip(greedy, MASK, strict=True):
        tokens = row[:6][mask.bool()]
        for _ in range(6):
            with torch.no_grad():
                tokens = torch.cat([tokens, wide(tokens[None])[0, -1].argmax()[None]])
        assert torch.equal(tokens[-6:], row[6:])
    for made, said in launcher.run(on_ranks, 2, before=byte_model):
        assert made == drawn.tolist()
        assert "arguments of generate" in said
        assert "differ between ranks" in said
