"""`mesh.vjp`: the gradients of any operator's operands, as one operator.

`R.call_pure_packed("mesh.vjp", *operands, *gradients of results, R.str(text))`: the text says which operator (as
`call_text` writes it), of which operands gradients are wanted, and which operands and results' gradients are given. An
operand that no wanted gradient depends on is not.

Its rule comes from the operator's own. Where that sums over a factor that is split, devices have parts of the sum, and
the gradient of each part is that of the sum; so factors keep their meaning, and a factor that an operand lacks is
summed in its gradient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from tvm import relax

from mesh_tensor.base.dtypes import NARROW, TensorType
from mesh_tensor.base.errors import MeshTensorError, refuse

from .call import OpCall, op_call
from .call_text import dumps, expression_text, info_of, loads, read_expression, type_of, type_text
from .rule import Dim, LocalCall, OpRule, atoms_of, rule, rule_of

VJP = "mesh.vjp"
# Of operators whose results, or what else they compute, their gradients need.
_RECORDED = {"nn.attention", "nn.attention_bias", "nn.layer_norm", "nn.rms_norm"}
_LEAST_EPSILON = 1e-12  # its third power of an inverse root is finite in float32


@dataclass(frozen=True, eq=False)
class Vjp:
    """What the text of a `mesh.vjp` says.

    calls      the operator's call; on tiles it may be several, one after the other. Each comes with its operands: an
               int n is the n-th of `operands`, then of what the calls give; or a constant.
    operands   types of all the operator's operands
    wrt        the operands whose gradients are the results, in order
    given      the operands that are given
    seeds      the results of the operator whose gradients are given, after `given`
    """

    calls: tuple[tuple[OpCall, tuple[int | relax.Constant, ...]], ...]
    operands: tuple[TensorType, ...]
    wrt: tuple[int, ...]
    given: tuple[int, ...]
    seeds: tuple[int, ...]

    @property
    def forward(self) -> OpCall:
        """The operator's one call."""
        if len(self.calls) != 1:
            refuse("the gradient of several operators at once has no sharding rule", fix="take them one by one")
        return self.calls[0][0]


def can_be_recorded(call: OpCall) -> bool:
    """Whether what the operator has computed helps to compute its gradients, which would run it again else."""
    stated = vjp_of(call)
    return len(stated.calls) == 1 and stated.calls[0][0].name in _RECORDED and len(stated.given) == len(stated.operands)


def called_with(call: OpCall, args: Sequence[str]) -> tuple[OpCall, tuple[str, ...]]:
    """The operator's call of gradients that take `args` and can be recorded, and what of these are its operands."""
    stated = vjp_of(call)
    operands = dict(zip(stated.given, args, strict=False))
    return stated.forward, tuple([operands[number] for number in range(len(operands))])


def vjp_call(
    call: OpCall,
    operands: Sequence[relax.Expr] | Mapping[int, relax.Expr],
    seeds: dict[int, relax.Expr],
    wrt: Sequence[int],
) -> relax.Call:
    """The gradients of `operands[i]` for i in `wrt`, as a tuple if they are several. An operand that none of
    them depends on may be left out.

    seeds   result -> its gradient
    """
    rule_ = rule_of(call)
    linear = len(wrt) == 1 and frozenset(wrt) in rule_.linear
    given = [i for i in range(len(call.inputs)) if not (linear and i in wrt)]
    stand_ins = _stand_ins(call.inputs)
    expr = LocalCall(call, tuple(stand_ins), (), (), ()).again()
    return _packed(
        expression_text(expr, stand_ins), call.inputs, wrt, given, list(seeds),
        [*(operands[i] for i in given), *seeds.values()], [call.inputs[i] for i in wrt],
    )  # fmt: skip


def vjp_of(call: OpCall) -> Vjp:
    """What a call of `mesh.vjp` says. Refused where its text is none that `vjp_call` wrote, or does not fit its
    operands."""
    text = call.literals[-1] if call.literals else None
    if not isinstance(text, str):
        refuse("mesh.vjp without a text that says of which operator", where=str(call.expr))
    stated = _read(text)
    expected = [*(stated.operands[i] for i in stated.given), *(stated.calls[-1][0].outputs[i] for i in stated.seeds)]
    shapes = [tensor.shape for tensor in call.inputs]
    wanted = [stated.operands[i].shape for i in stated.wrt]
    if shapes != [t.shape for t in expected] or [tensor.shape for tensor in call.outputs] != wanted:
        refuse(f"mesh.vjp of {text} on operands of {shapes}", where=str(call.expr), why="they don't fit each other")
    return stated


@rule(VJP)
def vjp(call: OpCall) -> OpRule:
    stated = vjp_of(call)
    of = rule_of(stated.forward)
    inputs = (*(of.inputs[i] for i in stated.given), *(of.outputs[i] for i in stated.seeds))
    outputs = tuple(of.inputs[i] for i in stated.wrt)
    lacking = [f for f in _factors(inputs) if _is_lacking(f, outputs)]
    combined = {f for f, op in of.reduced.items() if op != "sum"}
    # A result that all devices have whole would count once per device.
    seeds = inputs[len(stated.given) :]
    combined |= {f for f in lacking if f not in of.reduced and _is_lacking(f, seeds)}
    combined |= {reaches.factor for reaches in of.windows.values()}  # a margin's gradient is its owner's
    # Padding is 0 where gradients are summed over it, and what norms make of that has to be finite.
    combined |= set(lacking) if stated.forward.attr("epsilon", 1.0) < _LEAST_EPSILON else set()
    return OpRule(
        inputs,
        outputs,
        {f: "sum" for f in lacking if f not in combined | of.unsplit},
        sizes={f: size for f, size in of.sizes.items() if f in {*_factors(inputs), *_factors(outputs)}},
        linear=(frozenset(range(len(stated.given), len(inputs))),),
        unsplit=of.unsplit | combined,
        positional=of.positional,
        localize=_local,
    )


def _local(local: LocalCall) -> relax.Expr:
    """The gradients of the operator's call on tiles. Parts of low-precision sums are computed in float32."""
    stated = vjp_of(local.call)
    call, given = stated.forward, len(stated.given)
    of = rule_of(call)
    tiles, layouts = [TensorType((), "")] * len(call.inputs), [local.layouts[-1]] * len(call.inputs)
    for numbers, found, how in (
        (stated.wrt, local.out_tiles, local.out_layouts),
        (stated.given, local.in_tiles, local.layouts),
    ):
        for number, shape, layout in zip(numbers, found, how, strict=False):
            dtype = "float32" if local.wide and call.inputs[number].dtype in NARROW else call.inputs[number].dtype
            tiles[number], layouts[number] = TensorType(shape, dtype), layout
    stand_ins = _stand_ins(tiles)
    made = _result_tiles(of, call, tiles, dict(zip(stated.seeds, local.in_tiles[given:], strict=True)))
    in_tiles = tuple(tile.shape for tile in tiles)
    inner = LocalCall(call, tuple(stand_ins), in_tiles, made, tuple(layouts), local.wide, local.out_layouts)
    expr = of.localize(inner) if of.localize else inner.again()
    wanted = [TensorType(t, d) for t, d in zip(local.out_tiles, local.dtypes, strict=True)]
    text = expression_text(expr, stand_ins)
    return _packed(text, tiles, stated.wrt, stated.given, stated.seeds, local.args, wanted)


def _result_tiles(
    of: OpRule, call: OpCall, tiles: Sequence[TensorType], known: dict[int, tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """The tiles of all results: where a result's gradient is not given, as its factors are split elsewhere."""
    sizes: dict[Dim, int] = {}
    shapes = [
        *((d, t.shape) for d, t in zip(of.inputs, tiles, strict=True)),
        *((of.outputs[i], s) for i, s in known.items()),
    ]
    for dims, shape in shapes:
        sizes |= {dim: size for dim, size in zip(dims, shape, strict=True) if dim is not None}
    return tuple(
        known.get(i, tuple(size if d is None else sizes[d] for d, size in zip(of.outputs[i], out.shape, strict=True)))
        for i, out in enumerate(call.outputs)
    )


def _packed(
    text: Any,
    operands: Sequence[TensorType],
    wrt: Sequence[int],
    given: Sequence[int],
    seeds: Sequence[int],
    args: Sequence[relax.Expr],
    results: Sequence[TensorType],
) -> relax.Call:
    types = [type_text(tensor) for tensor in operands]
    said = {"of": text, "operands": types, "wrt": list(wrt), "given": list(given), "seeds": list(seeds)}
    infos = [info_of(tensor) for tensor in results]
    info = infos[0] if len(infos) == 1 else relax.TupleStructInfo(infos)
    return relax.op.call_pure_packed(VJP, *args, relax.StringImm(dumps(said)), sinfo_args=[info])


@lru_cache(maxsize=4096)
def _read(text: str) -> Vjp:
    said = loads(text)
    try:
        operands = tuple(type_of(tensor) for tensor in said["operands"])
        wrt, given, seeds = (tuple(map(int, said[name])) for name in ("wrt", "given", "seeds"))
        stand_ins = _stand_ins(operands)
        expr = read_expression(said["of"], stand_ins)
        builder = relax.BlockBuilder()
        builder._begin_binding_block()
        builder.emit(expr)
        bindings = list(builder._end_block().bindings)
    except MeshTensorError:
        raise
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        refuse(f"{text[:200]!r} is no text of mesh.vjp", why=str(error).splitlines()[0] if str(error) else "")
    numbers: dict[relax.Var, tuple[int, ...]] = {var: (number,) for number, var in enumerate(stand_ins)}
    calls = []
    for binding in bindings:
        call = op_call(binding.value)
        calls.append((call, tuple(n for arg in binding.value.args for n in _numbers(arg, numbers))))
        first = sum(map(len, numbers.values()))
        numbers[binding.var] = tuple(range(first, first + len(call.outputs)))
    if not set(wrt) | set(given) <= set(range(len(operands))) or not set(seeds) <= set(
        range(len(calls[-1][0].outputs))
    ):
        refuse(f"{text[:200]!r} names operands or results that there are not")
    return Vjp(tuple(calls), operands, wrt, given, seeds)


def _numbers(arg: relax.Expr, known: dict[relax.Var, tuple[int, ...]]) -> tuple[int | relax.Constant, ...]:
    if isinstance(arg, relax.Tuple):
        return tuple(n for field in arg.fields for n in _numbers(field, known))
    if isinstance(arg, relax.Constant):
        return (arg,)
    return known.get(arg, ()) if isinstance(arg, relax.Var) else ()


def _stand_ins(types: Sequence[TensorType]) -> list[relax.Var]:
    return [relax.Var(f"x{number}", info_of(tensor)) for number, tensor in enumerate(types)]


def _is_lacking(factor: str, tensors: Sequence[Sequence[Dim]]) -> bool:
    """Whether some tensor does not have the factor."""
    return any(factor not in _factors([dims]) for dims in tensors)


def _factors(tensors: Sequence[Sequence[Dim]]) -> list[str]:
    return list(dict.fromkeys(f for dims in tensors for dim in dims for f in atoms_of(dim)))
