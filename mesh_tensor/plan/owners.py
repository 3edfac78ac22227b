"""Owners: values of which every token's part is on the device that owns the token, and 0 on all others.

Such is what is looked up in a table whose rows are split: the weights of experts per token, or what experts make of
their groups of rows. What is computed of it token by token, and leaves 0 where there is 0, lies so again: every device
computes what its experts contribute, and one sum completes the result.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from mesh_tensor.base.dtypes import NARROW
from mesh_tensor.rules.operator.linear_algebra import GROUPED, LOOKED_UP

from .atoms import AtomFactors, NodeRule
from .decide import Decision
from .ir import Node, Value

Parts = tuple[tuple[str, str], ...]  # (axis, op)


@dataclass(frozen=True)
class Owner:
    """`index` says which of so many `rows` a token looks up, and so which device owns it; `tokens` are the atoms in
    which the tokens stand. Not `zero`: the devices that don't own a token have some finite number for it."""

    index: Value
    rows: int
    tokens: tuple[int, ...]
    zero: bool = True


@dataclass(frozen=True)
class Pending:
    """What completes a value: over which axes its parts are combined by which op; and who owns them, if one does."""

    parts: Parts
    owner: Owner | None = None


@dataclass(frozen=True)
class LookUp:
    """Which operand has the rows, along which factor, and which one says who looks up what; `tokens`: the factors of
    the tokens, None for all of the ids'."""

    table: int
    factor: str
    ids: int
    tokens: tuple[str, ...] | None


LOOK_UPS = {"take": LookUp(0, "row", 1, None), GROUPED: LookUp(1, "g", 2, ("s",)), LOOKED_UP: LookUp(1, "g", 2, None)}
# Functions of one operand, element by element: 0 of 0, or finite of 0.
_ACTIVATIONS = frozenset({f"nn.{name}" for name in ("gelu", "gelu_tanh", "leakyrelu", "relu", "relu6", "selu", "silu")})
_KEEP_ZERO = _ACTIVATIONS | {"abs", "astype", "erf", "negative", "sign", "sin", "sqrt", "square", "tanh"}
_STAY_FINITE = frozenset({"sigmoid", "exp", "cos", "cosh", "nn.softplus"})


def look_up_of(node: Node) -> LookUp | None:
    """How the node looks rows up, if it does."""
    found = LOOK_UPS.get(node.call.operator)
    return found if found is not None and len(node.inputs) > found.ids else None


def row_factor(rule: NodeRule, look_up: LookUp) -> str | None:
    """The factor of the rows that axes split, if they may."""
    names = (look_up.factor, f"{look_up.factor}.0")
    return next((name for name in names if name in rule.sizes and name in rule.reduced), None)


def owner_made(node: Node, rule: NodeRule, decision: Decision) -> Pending | None:
    """What the result of a node that looks up rows lies as, if axes split those rows and nothing else is pending."""
    look_up = look_up_of(node)
    if look_up is None or len(decision.produced) != 1 or not decision.produced[0].partial:
        return None
    (result,), factor = decision.produced, row_factor(rule, look_up)
    if any(decision.split.get(axis) != factor for axis, _ in result.partial):
        return None
    tokens = rule.inputs[look_up.ids] if look_up.tokens is None else look_up.tokens
    places = _places(tokens, rule.outputs[0])
    if places is None:
        return None
    table = node.inputs[look_up.table].type
    dim = next(d for d, name in enumerate(rule.rule.inputs[look_up.table]) if name == look_up.factor)
    return Pending(result.partial, Owner(node.inputs[look_up.ids], table.shape[dim], places))


def taken_by_owners(
    node: Node, rule: NodeRule, decision: Decision, waiting: Mapping[int, Pending], refused: Collection[Value]
) -> Pending | None:
    """What the result lies as of a node that takes these operands as they are, because who owns a token has what it
    takes to compute its part, and all others make 0; None if that is not so."""
    owners = [pending.owner for pending in waiting.values()]
    (parts,) = {pending.parts for pending in waiting.values()}
    if len(node.outputs) != 1 or any(op != "sum" for _, op in parts) or "float" not in node.outputs[0].type.dtype:
        return None
    found = [owner for owner in owners if owner is not None]
    if len(found) < len(owners) or len({(owner.index, owner.rows) for owner in found}) > 1:
        return None
    tokens = {_factors(rule.inputs[i], owner.tokens) for i, owner in zip(waiting, found, strict=True)}
    if len(tokens) > 1:
        return None
    (factors,) = tokens
    if factors is None or (zero := _is_zero(node, rule, waiting)) is None:
        return None
    made = owner_made(node, rule, decision)
    if made is None and any(axis in decision.split for axis, _ in parts):
        return None
    places = _places(factors, rule.outputs[0])
    if (look_up := look_up_of(node)) is not None and look_up.table in waiting and made is not None:
        return None  # its rows are split, and are no parts then
    if made is not None:
        same = made.parts == parts and made.owner is not None and made.owner.tokens == places
        return made if same and zero and made.owner is not None and _key(made.owner) == _key(found[0]) else None
    if not zero and node.outputs[0] in refused:
        return None
    if more := decision.produced[0].partial:
        sums = all(op == "sum" for _, op in more) and zero and node.outputs[0].type.dtype not in NARROW
        axes = decision.produced[0].mesh.in_order([axis for axis, _ in (*parts, *more)])
        return Pending(tuple([(axis, "sum") for axis in axes])) if sums else None
    return Pending(parts, None if places is None else replace(found[0], tokens=places, zero=zero))


def kept(rule: NodeRule, waiting: Mapping[int, Pending], result: AtomFactors) -> Owner | None:
    """The owner of a result of a node that is linear in what waits: that of all that does."""
    owners = {
        (pending.owner, None if pending.owner is None else _factors(rule.inputs[i], pending.owner.tokens))
        for i, pending in waiting.items()
    }
    named = {(None if owner is None else _key(owner), factors) for owner, factors in owners}
    if len(named) != 1:
        return None
    owner, factors = owners.pop()
    places = None if factors is None else _places(factors, result)
    return None if owner is None or places is None else replace(owner, tokens=places)


def _is_zero(node: Node, rule: NodeRule, waiting: Mapping[int, Pending]) -> bool | None:
    """Whether the result is 0 for tokens of others (True), or at least finite; None if that is not known."""
    zeros = [pending.owner is not None and pending.owner.zero for pending in waiting.values()]
    if len(node.inputs) == 1 and len(waiting) == 1:
        if node.call.name in _KEEP_ZERO:
            return zeros[0]
        return False if node.call.name in _STAY_FINITE else None
    each = all(frozenset({i}) in rule.rule.linear for i in waiting)
    return True if each and any(zeros) else None


def _key(owner: Owner) -> tuple[Value, int]:
    return owner.index, owner.rows


def _factors(factors: tuple[str | None, ...], places: tuple[int, ...]) -> tuple[str, ...] | None:
    """The factors in which the tokens stand; None if some dim of theirs is needed whole."""
    found = tuple([factors[place] for place in places])
    return None if None in found else tuple([factor for factor in found if factor is not None])


def _places(tokens: tuple[str | None, ...], factors: tuple[str | None, ...]) -> tuple[int, ...] | None:
    """Where the tokens stand, if all of them do."""
    if any(token is None or token not in factors for token in tokens):
        return None
    return tuple([factors.index(token) for token in tokens])
