"""Rules of convolutions and pooling, in any layout without channel blocks. Of spatial dims, a device takes the window
that its tile of the result needs; of transposed convolutions and adaptive pooling they are whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tvm import relax

from mesh_tensor.base.dtypes import is_float
from mesh_tensor.base.window import Reach, Reaches

from .call import OpCall
from .rule import Dim, LocalCall, OpRule, rule, whole_rule

_SPATIAL = "DHW"
_EACH = (frozenset({0}), frozenset({1}))

#: From convolutions to those with a bias (1, C, 1, ...), as programs have them.
CONV_ADD = {f"nn.conv{n}d": f"fused.conv{n}d_add" for n in (1, 2, 3)}


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
    windows = _Windows(layouts[0], layouts[2], call)
    if "transpose" not in call.name:
        out = windows.result(out)
    return OpRule(
        (data, weight),
        (out,),
        {"i": "sum"},
        sizes=sizes,
        unsplit=unsplit,
        linear=_EACH,
        windows=windows.of(kernel) if "transpose" not in call.name else {},
        localize=_convolution,
    )


@dataclass(frozen=True)
class _Windows:
    """The spatial dims of a convolution or a pooling: the result's are factors of their own, called as in its layout,
    and of the data windows are read from there."""

    layout: str
    out_layout: str
    call: OpCall
    outside: str = "sum"

    def result(self, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
        """The result's dims."""
        pairs = zip(self.out_layout, dims, strict=True)
        return tuple(letter.lower() if letter in _SPATIAL else dim for letter, dim in pairs)

    def of(self, sizes: Mapping[str, int]) -> dict[tuple[int, int], Reaches]:
        """The data's windows, of a kernel of these sizes."""
        letters = [letter for letter in _SPATIAL if letter in self.layout]
        before = list(self.call.attr("padding"))[: len(letters)]
        steps = zip(letters, self.call.attr("strides"), self.call.attr("dilation"), before, strict=True)
        return {(0, dim): reaches for dim, reaches in (self._reaches(*step, sizes) for step in steps)}

    def _reaches(
        self, letter: str, stride: int, dilation: int, before: int, sizes: Mapping[str, int]
    ) -> tuple[int, Reaches]:
        dim = self.layout.index(letter)
        extent = self.call.inputs[0].shape[dim]
        reach = Reach(-before, dilation * (sizes[letter] - 1) - before)
        return dim, Reaches(letter.lower(), extent, stride, 1, (reach,), always=True, outside=self.outside)


def _own_padding(local: LocalCall, source: str) -> list[int]:
    """The call's padding on tiles: of what comes as a window, it is there already."""
    layout, padding = local.call.attr(source), list(local.call.attr("padding"))
    letters = [letter for letter in _SPATIAL if letter in layout]
    for number, letter in enumerate(letters):
        if local.layouts[0].window(layout.index(letter)) is not None:
            padding[number] = padding[number + len(letters)] = 0
    return padding


def _out_layout(call: OpCall, source: str) -> str:
    return call.attr("out_layout") or call.attr(source)


def _convolution(local: LocalCall) -> relax.Expr:
    """The tile has as many groups as it has channels for; parts of sums are float32."""
    call = local.call
    channel = call.attr("data_layout").index("C")
    groups = call.attr("groups")
    if groups > 1:
        groups = groups * local.in_tiles[0][channel] // call.inputs[0].shape[channel]
    names = ["strides", "dilation", "data_layout", "kernel_layout", "out_layout"]
    if "transpose" in call.name:
        names.append("output_padding")
    more: dict[str, Any] = {name: call.attr(name) for name in names}
    dtype = "float32" if local.wide else call.outputs[0].dtype
    make = getattr(relax.op.nn, call.name.removeprefix("nn."))
    return make(*local.args, groups=groups, out_dtype=dtype, padding=_own_padding(local, "data_layout"), **more)


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
    largest, out = "max" in call.name, tuple(map(factors.get, out_layout))
    windows = _Windows(layout, out_layout, call, "max" if largest else "sum")
    exact = "adaptive" not in call.name and (
        largest or not (call.attr("ceil_mode") or (any(call.attr("padding")) and not call.attr("count_include_pad")))
    )
    sizes = dict(zip([x for x in _SPATIAL if x in layout], call.attr("pool_size"), strict=True)) if exact else {}
    return OpRule(
        (tuple(map(factors.get, layout)),),
        (windows.result(out) if exact else out,),
        linear=(frozenset({0}),) if mean else (),
        windows=windows.of(sizes) if exact else {},
        localize=(lambda local: _pooling(local, largest)) if exact else None,
    )


def _pooling(local: LocalCall, largest: bool) -> relax.Expr:
    """The pooling of tiles; of their result's size, whatever it was rounded to."""
    call = local.call
    names = ["pool_size", "strides", "dilation", "layout", "out_layout"]
    more: dict[str, Any] = {name: call.attr(name) for name in names}
    if not largest:
        more["count_include_pad"] = call.attr("count_include_pad")
    padding, ceil_mode = _own_padding(local, "layout"), bool(call.attr("ceil_mode"))
    return getattr(relax.op.nn, call.name.removeprefix("nn."))(
        *local.args, padding=padding, ceil_mode=ceil_mode, **more
    )


@rule("image.resize2d")
def resize(call: OpCall) -> OpRule:
    """Batch and channels are parallel; places are looked at together."""
    layout = call.attr("layout")
    if not layout.isalpha():
        return whole_rule(call)
    dims = tuple({"N": "n", "C": "c"}.get(letter) for letter in layout)
    return OpRule((dims,), (dims,))
