"""The rule of attention."""

from __future__ import annotations

from .call import OpCall
from .rule import Dim, OpRule
from .table import rule


@rule("nn.attention", "nn.attention_bias")
def attention(call: OpCall) -> OpRule:
    """(batch, sequence, heads, head size): batch and heads are parallel, and so are the values' features; queries are
    where no mask looks at their positions. Keys are needed whole."""
    query, keys, values = (tensor.shape for tensor in call.inputs[:3])
    masked = call.attr("causal_mask") is not None or call.attr("window_size") is not None
    rows: Dim = None if masked else "q"
    heads: Dim = "h" if query[2] == keys[2] == values[2] else None
    inputs: list[tuple[Dim, ...]] = [("b", rows, heads, None), ("b", None, heads, None), ("b", None, heads, "e")]
    for bias in call.inputs[3:]:
        wanted = (("b", query[0]), (heads, query[2]), (rows, query[1]), (None, keys[1]))
        inputs.append(
            tuple(name if size == full else None for size, (name, full) in zip(bias.shape, wanted, strict=True))
        )
    return OpRule(tuple(inputs), (("b", rows, heads, "e"),), linear=(frozenset({2}),))
