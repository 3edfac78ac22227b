"""Stages that cost alike: the bindings of a function, in order, cut where the dearest stage is cheapest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from tvm import ir, relax

from mesh_tensor.annotations.names import bindings, relax_functions
from mesh_tensor.base.dtypes import dtype_bits
from mesh_tensor.base.errors import refuse
from mesh_tensor.base.machine import Machine
from mesh_tensor.rules.operator.call import op_call
from mesh_tensor.rules.operator.cost import count_flops

from .assign import NamedStage
from .flow import Flow

_MOST = 400  # places where cuts are tried: those over which the least goes


def balanced_stages(flow: Flow, count: int, inputs: Sequence[str], machine: Machine) -> list[NamedStage]:
    """The function in `count` stages. A stage takes as long as its operators on one device of the machine, and as what
    it takes from earlier ones needs over its outermost link.

    Raises:
        MeshTensorError: there are fewer places to cut, or sizes are open.
    """
    varying = flow.below(inputs)
    names = [name for name in flow.bindings if name in varying]
    seconds = _seconds(flow, names, machine)
    places = _places(flow, names, machine)
    if len(places) < count - 1:
        refuse(
            f"{count} stages of a function that can be cut in {len(places)} places",
            where=f"stages of {flow.function!r}",
            fix=f"ask for at most {len(places) + 1} stages",
        )
    ends = _cut(seconds, places, count)
    starts = [0, *ends]
    return [NamedStage(tuple(names[a:b])) for a, b in zip(starts, [*ends, len(names)], strict=True)]


def _cut(seconds: Sequence[float], arriving: Mapping[int, float], count: int) -> list[int]:
    """Where the stages after the first start, so that the dearest takes least; of equals, that with less arriving."""
    total = [0.0]
    for each in seconds:
        total.append(total[-1] + each)
    places = [0, *arriving, len(seconds)]
    # best[place]: (the dearest stage up to there, what arrives in all, where stages start)
    best: dict[int, tuple[float, float, list[int]]] = {0: (0.0, 0.0, [])}
    for stage in range(count):
        ending = places[1:-1] if stage < count - 1 else places[-1:]
        best = {
            end: min(
                (
                    max(dear, total[end] - total[start] + arriving.get(start, 0.0)),
                    sent + arriving.get(start, 0.0),
                    [*at, start],
                )
                for start, (dear, sent, at) in best.items()
                if start < end
            )
            for end in ending
            if any(start < end for start in best)
        }
    return best[len(seconds)][2][1:]


def _places(flow: Flow, names: Sequence[str], machine: Machine) -> dict[int, float]:
    """Where the bindings can be cut: position -> the seconds that what goes over takes; tuples can't go."""
    rate, start = (machine.links[-1].rate, machine.links[-1].start) if machine.links else (math.inf, 0.0)
    position = {name: i for i, name in enumerate(names)}
    last = {name: max((position[u] for u in flow.users[name] if u in position), default=-1) for name in names}
    found = {}
    for cut in range(1, len(names)):
        crossing = [name for name in names[:cut] if last[name] >= cut]
        infos = [flow.bindings[name].var.struct_info for name in crossing]
        if crossing and all(isinstance(info, relax.TensorStructInfo) for info in infos):
            found[cut] = sum(start + _bytes(info) / rate for info in infos)
    kept = sorted(found, key=lambda cut: (found[cut], cut))[:_MOST]
    return {cut: found[cut] for cut in sorted(kept)}


def _seconds(flow: Flow, names: Sequence[str], machine: Machine) -> list[float]:
    """What each binding takes on one device."""
    functions = relax_functions(flow.mod)
    known: dict[str, float] = {}

    def of(expr: relax.Expr) -> float:
        if not isinstance(expr, relax.Call):
            return 0.0
        if isinstance(expr.op, ir.GlobalVar):
            called = expr.op.name_hint
            if called not in known and called in functions:
                known[called] = sum(of(binding.value) for binding in bindings(functions[called]))
            return known.get(called, 0.0)
        call = op_call(expr)
        tensors = (*call.inputs, *call.outputs)
        nbytes = sum(t.elements * dtype_bits(t.dtype) // 8 for t in tensors)
        dtype = call.outputs[0].dtype if call.outputs else "float32"
        work = machine.work(count_flops(call), nbytes, dtype, call.name, "product" if call.name == "matmul" else "")
        return work.seconds

    return [of(flow.bindings[name].value) for name in names]


def _bytes(info: relax.TensorStructInfo) -> int:
    return math.prod(int(extent) for extent in info.shape.values) * dtype_bits(info.dtype) // 8
