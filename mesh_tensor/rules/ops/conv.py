"""Rules of convolutions and pools."""

from __future__ import annotations

from .call import OpCall
from .rule import Dim, OpRule
from .table import rule

_NARROW = ("float16", "bfloat16")


@rule("nn.conv1d", "nn.conv2d", "nn.conv3d")
def convolution(call: OpCall) -> OpRule:
    """Batch and output channels are parallel, input channels are summed, places are needed whole."""
    layout = call.attr("data_layout")
    whole = call.attr("groups", 1) != 1 or call.outputs[0].dtype in _NARROW
    channels = None if whole else "i"
    filters = None if call.attr("groups", 1) != 1 else "o"
    data = _dims(layout, {"N": "n", "C": channels})
    weight = _dims(call.attr("kernel_layout"), {"O": filters, "I": channels})
    out = _dims(call.attr("out_layout") or layout, {"N": "n", "C": filters})
    reduced = {"i": "sum"} if channels else {}
    return OpRule((data, weight), (out,), reduced, linear=(frozenset({0}), frozenset({1})))


@rule(*(f"nn.{kind}_pool{n}d" for kind in ("max", "avg", "adaptive_avg") for n in (1, 2, 3)))
def pool(call: OpCall) -> OpRule:
    """Batch and channels are parallel."""
    names: dict[str, Dim] = {"N": "n", "C": "c"}
    layout = call.attr("layout")
    return OpRule((_dims(layout, names),), (_dims(call.attr("out_layout") or layout, names),))


def _dims(layout: str, names: dict[str, Dim]) -> tuple[Dim, ...]:
    """A Dim per letter; of a layout with blocked dims (a digit in it) nothing is split."""
    letters = [letter for letter in layout if letter.isalpha()]
    plain = len(letters) == len(layout)
    return tuple(names.get(letter) if plain else None for letter in letters)
