"""What a call of an operator computes."""

from __future__ import annotations

import math
from dataclasses import replace

from mesh_tensor.base.dtypes import TensorType, dtype_bits
from mesh_tensor.base.machine import Machine, Work
from mesh_tensor.base.machine_presets import CPU

from .blocked_convolution import Convolution, is_convolution
from .call import OpCall
from .conv import CONV_ADD
from .linear_algebra import GROUPED, LINEAR, LOOKED_UP, MATMUL_ADD
from .nn import LOG_SOFTMAX_BACKWARD, SHARED_ATTENTION, SOFTMAX_GRADIENT
from .vjp import VJP, vjp_of

# Classes of operators by what bounds their time; what is not here works element by element.
_CLASSES = {
    "product": "matmul outer einsum nn.attention nn.attention_bias aten._grouped_mm.default nn.conv1d nn.conv2d"
    " nn.conv3d nn.conv1d_transpose nn.conv2d_transpose nn.conv3d_transpose",
    "view": "reshape flatten nn.batch_flatten expand_dims squeeze permute_dims broadcast_to loop.row strided_slice"
    " split aten.diagonal.default aten.unfold.default wrap_param mesh.per_device mesh.all_devices mesh.of_device",
    "move": "concat stack repeat tile flip nn.pad nn.pixel_shuffle meshgrid slice_scatter take gather_elements"
    " gather_nd index_tensor scatter_nd scatter_elements index_put one_hot aten.roll.default mesh.joined_parts"
    " mesh.local_gather mesh.local_join mesh.local_scatter mesh.local_take",
    "reduce": "sum mean max min prod variance std argmax argmin cumsum cumprod nn.softmax nn.log_softmax"
    " nn.layer_norm nn.rms_norm nn.group_norm nn.instance_norm nn.cross_entropy_with_logits nn.nll_loss collapse_sum_to"
    " collapse_sum_like",
}
_CONVOLUTIONS = (*CONV_ADD, *CONV_ADD.values())
_CONVOLUTION = "nn.conv2d"  # the class of all of them
_LOOKUPS = ("take", "gather_elements", "gather_nd", "mesh.local_take", "mesh.local_gather")
_CLASS_OF = {name: kind for kind, names in _CLASSES.items() for name in names.split()}
_CLASS_OF |= dict.fromkeys((LINEAR, MATMUL_ADD, GROUPED, LOOKED_UP, *CONV_ADD.values()), "product")
_ATTENTION = {name: name for name in SHARED_ATTENTION} | {shared: name for name, shared in SHARED_ATTENTION.items()}
_CLASS_OF |= dict.fromkeys(_ATTENTION, "product")
_CLASS_OF |= dict.fromkeys((SOFTMAX_GRADIENT, LOG_SOFTMAX_BACKWARD), "reduce")


def class_of(name: str) -> str:
    """The class of an operator, as a Machine knows classes: product, view, move, reduce or elementwise."""
    return _CLASS_OF.get(name, "elementwise")


def count_flops(call: OpCall) -> int:
    """Floating-point operations: 2 per multiply-add of what contracts; 1 per element of the largest tensor else.
    Gradients: three times what they are of."""
    if call.name in ("matmul", LINEAR, MATMUL_ADD) or call.operator in (GROUPED, LOOKED_UP):
        return 2 * call.outputs[0].elements * call.inputs[0].shape[-1]
    if call.operator == "loop.row":
        return call.outputs[0].elements
    if call.name == "einsum":
        return 2 * _labelled(call)
    if call.operator == VJP:
        return _differentiated(call)
    if (call.name.startswith("nn.conv") or call.name in CONV_ADD.values()) and len(call.inputs) > 1:
        weight = call.inputs[1]
        return 2 * call.outputs[0].elements * weight.elements // max(1, weight.shape[0])
    if call.name in _ATTENTION:
        return 4 * _scores(call) * call.inputs[0].shape[-1]
    counted = call.outputs if call.operator in _LOOKUPS else (*call.inputs, *call.outputs)
    return max((math.prod(tensor.shape) for tensor in counted), default=0)


def _scores(call: OpCall) -> int:
    """Of attention, how many there are, each of a query and a key."""
    batch, queries, heads, _ = call.inputs[0].shape
    return batch * queries * heads * call.inputs[1].shape[1 if call.name in SHARED_ATTENTION else 2]


def _labelled(call: OpCall) -> int:
    """How many combinations of labels a contraction goes through."""
    terms = call.attr("subscripts").partition("->")[0].replace(" ", "").split(",")
    sizes: dict[str, int] = {}
    for term, tensor in zip(terms, call.inputs, strict=True):
        if len(term) != tensor.ndim:  # it has "..."
            return max(t.elements for t in (*call.inputs, *call.outputs))
        sizes |= {label: max(size, sizes.get(label, 1)) for label, size in zip(term, tensor.shape, strict=True)}
    return math.prod(sizes.values())


def _differentiated(call: OpCall) -> int:
    """What the operator computes, once more, and as much for every gradient; only this for one that it is linear in."""
    stated = vjp_of(call)
    forward = sum(count_flops(inner) for inner, _ in stated.calls)
    return forward * (len(stated.wrt) + (len(stated.given) == len(stated.operands)))


def touched_bytes(call: OpCall) -> int:
    """The bytes that it reads and writes; of gradients, those of three calls on all of their operands."""
    if call.operator == VJP:
        return 3 * sum(_nbytes(tensor) for of, _ in vjp_of(call).calls for tensor in (*of.inputs, *of.outputs))
    return sum(read_bytes(call)) + sum(map(_nbytes, call.outputs))


def read_bytes(call: OpCall) -> list[int]:
    """The bytes that it reads of each operand: of a table that rows are looked up in, no more than it gives."""
    sizes = [_nbytes(tensor) for tensor in call.inputs]
    if call.operator in _LOOKUPS:
        sizes[0] = min(sizes[0], sum(map(_nbytes, call.outputs)))
    return sizes


def _nbytes(tensor: TensorType) -> int:
    return tensor.elements * dtype_bits(tensor.dtype) // 8


def gradient_class(name: str) -> str:
    """The class of gradients of an operator, as a Machine may know one."""
    return f"gradient of {name}"


def operator_work(call: OpCall, machine: Machine, copied: bool = False, again: bool = False) -> Work:
    """What a call takes on one device of a machine: its operations, or its operands and results once. Views of operands
    move nothing, unless they are `copied`. Gradients are the operator once more, and twice its work backwards; where
    the machine knows their class, they are that, with the operator once more where it runs `again`. The gradient of one
    operand of a convolution is a convolution of as many operations."""
    name = call.operator
    kind = class_of(name)
    if name == VJP:
        return _gradient_work(call, machine, again)
    if kind == "view" and not copied:
        return Work(machine.roofline("view").start * max(1, len(call.outputs)), 0.0, 0.0)
    if name in _CONVOLUTIONS:
        return _convolution_work(call, machine)
    return _on_operands(call, machine, 1, _ATTENTION.get(name, name), "move" if kind == "view" else kind)


def pays_apart(call: OpCall) -> bool:
    """Whether devices that share a CPU make the call at the same time: it makes up for handing it to threads."""
    return operator_work(call, CPU).seconds >= CPU.tuning.seconds_per_thread


def _gradient_work(call: OpCall, machine: Machine, again: bool) -> Work:
    stated = vjp_of(call)
    calls = [of for of, _ in stated.calls]
    if len(calls) == 1 and calls[0].name in _CONVOLUTIONS and len(stated.wrt) == 1:
        return _convolution_work(calls[0], machine, stated.wrt[0])
    parts = [operator_work(of, machine, True) for of in calls]
    classes = [gradient_class(of.operator) for of in calls]
    if any(each not in machine.classes for each in classes):
        own = machine.roofline(VJP)
        start = machine.launch + own.start + 3 * sum(part.start - machine.launch for part in parts)
        return Work(start, 3 * sum(p.flops for p in parts), 3 * sum(p.memory for p in parts) / own.memory)
    made = [_on_operands(of, machine, 3, each) for of, each in zip(calls, classes, strict=True)]
    both = [*made, *parts] if again else made
    return Work(sum(p.start for p in both), sum(p.flops for p in both), sum(p.memory for p in both))


def _convolution_work(call: OpCall, machine: Machine, wrt: int | None = None) -> Work:
    """A convolution, or the gradient of its operand `wrt`. Where the machine knows how fast operands and results are
    copied into blocks of channels, that is beside its operations, which are those of whole blocks."""
    of_gradient = () if wrt is None else (gradient_class(_CONVOLUTION),)
    names = (*of_gradient, call.operator, _CONVOLUTION, "product")
    work, share = _on_operands(call, machine, 1, *names), machine.roofline(*names).again
    if not (share and machine.channel_block and is_convolution(call)):
        return work
    made = Convolution(call, machine.channel_block)
    copied = made.copied_bytes()
    return replace(work, flops=work.flops * made.whole_blocks(wrt), far=copied / (machine.memory_rate(copied) * share))


def _on_operands(call: OpCall, machine: Machine, times: int, *names: str) -> Work:
    """So many times a call's operations, or its operands and results, in a class. Attention's scores become weights
    between its products, as a reduction does that, in no other memory."""
    dtype = next((tensor.dtype for tensor in (*call.inputs, *call.outputs)), "float32")
    nbytes = touched_bytes(call) if times == 1 else times * sum(map(_nbytes, (*call.inputs, *call.outputs)))
    work = machine.work(times * count_flops(call), nbytes, dtype, *names)
    if call.name not in _ATTENTION:
        return work
    return replace(work, flops=work.flops + machine.work(times * _scores(call), 0, dtype, "reduce").flops)
