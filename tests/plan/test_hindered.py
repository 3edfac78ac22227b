"""Which part of a dim an axis splits, where another part leads to what is needed whole."""

import torch
from torch import nn

import mesh_tensor as mt
from mesh_tensor.program.steps import CollectiveStep

WIDTH, HEADS, TOKENS = 32, 4, 6


def moved(model, given, layout):
    """The collectives of a plan, after a run that is right on a poisoned mesh."""
    torch.manual_seed(0)
    made = mt.from_torch(torch.export.export(model.eval(), given), check=False)
    ran = mt.distribute_module(made.mod, {"x": 2}, layout, weights=made.params, poison=True)
    with torch.no_grad():
        torch.testing.assert_close(ran(*given), model(*given), rtol=1e-4, atol=1e-4)
    return [(step.kind, step.bytes) for step in ran.program.steps if isinstance(step, CollectiveStep) and step.bytes]


class Attention(nn.Module):
    """Attention whose scores get what `bias(x)` makes, as heads x rows x columns."""

    def __init__(self):
        super().__init__()
        for name in ("q", "k", "v", "o"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH, bias=False))

    def heads(self, x, layer):
        return layer(x).view(-1, TOKENS, HEADS, WIDTH // HEADS).transpose(1, 2)

    def forward(self, x):
        q, k, v = (self.heads(x, layer) for layer in (self.q, self.k, self.v))
        scores = (q @ k.transpose(2, 3) + self.bias(x)).softmax(-1)
        return self.o((scores @ v).transpose(1, 2).reshape(-1, TOKENS, WIDTH))

    layout = {f"{name}_weight": {"x": 0} for name in "qkv"} | {"o_weight": {"x": 1}}


class OfOtherRows(Attention):
    """The bias is of the same heads, and its rows come in another order."""

    def __init__(self):
        super().__init__()
        self.relative = nn.Parameter(torch.randn(HEADS, WIDTH, TOKENS))

    def bias(self, x):
        found = torch.einsum("btd,hdj->bthj", x, self.relative)
        return found.reshape(-1, HEADS, TOKENS, TOKENS) + found.permute(0, 2, 1, 3)


class OfTheStream(Attention):
    """The bias is made of the stream's features, taken apart as heads, which norms take whole."""

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH // HEADS, 1, bias=False)
        self.norm = nn.LayerNorm(WIDTH)

    def bias(self, x):
        return self.gate(x.view(-1, TOKENS, HEADS, WIDTH // HEADS)).permute(0, 2, 1, 3)

    def forward(self, x):
        x = self.norm(x)
        return self.norm(x + super().forward(x))


def test_heads_are_split_whatever_is_added_to_scores():
    """Not their features: all devices would add up scores."""
    model, given = OfOtherRows(), (torch.randn(2, TOKENS, WIDTH),)
    kinds = [kind for kind, _ in moved(model, given, model.layout)]
    assert kinds.count("all_reduce") == 1


def test_heads_are_split_where_the_stream_is_taken_apart_as_they_are():
    """A row-split layer's results are needed whole, and what it takes is not."""
    model, given = OfTheStream(), (torch.randn(2, TOKENS, WIDTH),)
    stream = 2 * TOKENS * WIDTH * 4
    assert sum(size for _, size in moved(model, given, model.layout)) == stream
