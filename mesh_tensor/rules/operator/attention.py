"""The rule of attention."""

from __future__ import annotations

from .call import OpCall
from .rule import Dim, OpRule
from .table import rule


@rule("nn.attention", "nn.attention_bias")
def attention(call: OpCall) -> OpRule:
    """(batch, sequence, heads, head size): batch and heads are parallel, and so are the values' features; queries are
    where no mask looks at their positions. Keys are needed whole. Where several query heads share a key head, query
    heads are (key head, which of them)."""
    query, keys, values = (tensor.shape for tensor in call.inputs[:3])
    masked = call.attr("causal_mask") is not None or call.attr("window_size") is not None
    rows: Dim = None if masked else "q"
    each = query[2] // keys[2]
    fits = query[2] == each * keys[2] and keys[2] == values[2]
    taken: Dim = "h" if fits else None
    heads: Dim = ("h", "shared") if fits and each > 1 else taken
    inputs: list[tuple[Dim, ...]] = [("b", rows, heads, None), ("b", None, taken, None), ("b", None, taken, "e")]
    for bias in call.inputs[3:]:
        wanted = (("b", query[0]), (heads, query[2]), (rows, query[1]), (None, keys[1]))
        inputs.append(
            tuple(name if size == full else None for size, (name, full) in zip(bias.shape, wanted, strict=True))
        )
    return OpRule(
        tuple(inputs),
        (("b", rows, heads, "e"),),
        sizes={"h": keys[2], "shared": each} if fits else {},
        unsplit=frozenset({"shared"}),
        linear=(frozenset({2}),),
    )
