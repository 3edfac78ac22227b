"""Rules of convolutions and pooling, in any layout without channel blocks. Spatial dims are whole."""

from __future__ import annotations

from typing import Any

from tvm import relax

from mesh_tensor.base.dtypes import is_float

from .call import OpCall
from .rule import Dim, LocalCall, OpRule
from .table import rule, whole_rule

_EACH = (frozenset({0}), frozenset({1}))


@rule("nn.conv1d", "nn.conv2d", "nn.conv3d", "nn.conv1d_transpose", "nn.conv2d_transpose", "nn.conv3d_transpose")
def conv(call: OpCall) -> OpRule:
    """Batch and output channels are parallel, input channels are summed. In groups, channels are (group, channel of the
    group), and groups are parallel."""
    layouts = [call.attr("data_layout"), call.attr("kernel_layout"), _out_layout(call, "data_layout")]
    if not all(layout.isalpha() and layout.isupper() for layout in layouts):
        return whole_rule(call)
    groups = call.attr("groups")
    kernel = dict(zip(layouts[1], call.inputs[1].shape, strict=True))
    if groups == 1:
        factors: list[dict[str, Dim]] = [{"N": "n", "C": "i"}, {"O": "o", "I": "i"}, {"N": "n", "C": "o"}]
        sizes: dict[str, int] = {}
        unsplit: frozenset[str] = frozenset()
    else:
        # The kernel's larger channel dim is over all groups: that of a transposed convolution is of inputs.
        turned = "transpose" in call.name
        outer, inner = ("I", "O") if turned else ("O", "I")
        names = {"O": "o", "I": "i"}
        factors = [
            {"N": "n", "C": ("g", "i")},
            {outer: ("g", names[outer]), inner: names[inner]},
            {"N": "n", "C": ("g", "o")},
        ]
        sizes = {"g": groups, names[outer]: kernel[outer] // groups, names[inner]: kernel[inner]}
        unsplit = frozenset({"i", "o"})
    data, weight, out = (
        tuple(found.get(letter) for letter in layout) for found, layout in zip(factors, layouts, strict=True)
    )
    return OpRule(
        (data, weight), (out,), {"i": "sum"}, sizes=sizes, unsplit=unsplit, linear=_EACH, localize=_convolution
    )


def _out_layout(call: OpCall, source: str) -> str:
    return call.attr("out_layout") or call.attr(source)


def _convolution(local: LocalCall) -> relax.Expr:
    """The tile has as many groups as it has channels for; parts of sums are float32."""
    call = local.call
    channel = call.attr("data_layout").index("C")
    groups = call.attr("groups")
    if groups > 1:
        groups = groups * local.in_tiles[0][channel] // call.inputs[0].shape[channel]
    names = ["strides", "padding", "dilation", "data_layout", "kernel_layout", "out_layout"]
    if "transpose" in call.name:
        names.append("output_padding")
    more: dict[str, Any] = {name: call.attr(name) for name in names}
    dtype = "float32" if local.wide else call.outputs[0].dtype
    make = getattr(relax.op.nn, call.name.removeprefix("nn."))
    return make(*local.args, groups=groups, out_dtype=dtype, **more)


@rule(
    "nn.max_pool1d", "nn.max_pool2d", "nn.max_pool3d", "nn.avg_pool1d", "nn.avg_pool2d", "nn.avg_pool3d",
    "nn.adaptive_avg_pool1d", "nn.adaptive_avg_pool2d", "nn.adaptive_avg_pool3d",
)  # fmt: skip
def pool(call: OpCall) -> OpRule:
    layout, out_layout = call.attr("layout"), _out_layout(call, "layout")
    if not (layout + out_layout).isalpha():
        return whole_rule(call)
    factors = {"N": "n", "C": "c"}
    mean = "avg" in call.name and is_float(call.inputs[0].dtype)
    return OpRule(
        (tuple(map(factors.get, layout)),),
        (tuple(map(factors.get, out_layout)),),
        linear=(frozenset({0}),) if mean else (),
    )


@rule("image.resize2d")
def resize(call: OpCall) -> OpRule:
    """Batch and channels are parallel; places are looked at together."""
    layout = call.attr("layout")
    if not layout.isalpha():
        return whole_rule(call)
    dims = tuple({"N": "n", "C": "c"}.get(letter) for letter in layout)
    return OpRule((dims,), (dims,))
