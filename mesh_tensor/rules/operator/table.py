"""The table of rules: operator name -> the function that makes its OpRule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from mesh_tensor.base.errors import refuse

from .call import OpCall, operator_name
from .rule import Dim, OpRule, atoms_of

RuleMaker = Callable[[OpCall], OpRule]
_RULES: dict[str, RuleMaker] = {}


def rule(*names: str) -> Callable[[RuleMaker], RuleMaker]:
    """Register a function as the rule of the operators of these names (without "relax.")."""

    def register(make: RuleMaker) -> RuleMaker:
        _RULES.update(dict.fromkeys(names, make))
        return make

    return register


def has_rule(name: str) -> bool:
    """Whether the operator has a rule."""
    return name in _RULES


def rule_of(call: OpCall, binding: str = "") -> OpRule:
    """The rule of a call, checked against its shapes. `binding` is what the call is bound to, for messages.

    Raises:
        MeshTensorError: the operator has no rule.
    """
    name = operator_name(call)
    if name not in _RULES:
        refuse(
            f"operator R.{call.name} has no sharding rule",
            where=f"{binding} = {call.expr}" if binding else str(call.expr),
            fix="pass replicate_unknown=True to compute it replicated, or add a rule (docs/adding_an_op.md)",
        )
    made = _RULES[name](call)
    _check(call, made)
    return replace(made, linear=tuple(filter(partial(_keeps_dtype, call), made.linear)))


def _keeps_dtype(call: OpCall, together: frozenset[int]) -> bool:
    """Whether sums of operands and of results are the same sums: int8 wraps where the int32 made of it does not,
    and bools are not added."""
    dtypes = {call.inputs[n].dtype for n in together} | {out.dtype for out in call.outputs}
    return len(dtypes) == 1 and "bool" not in dtypes


def whole_rule(call: OpCall) -> OpRule:
    """The rule of an operator that nothing is known of: every dim is needed whole."""
    return OpRule(
        tuple((None,) * t.ndim for t in call.inputs),
        tuple((None,) * t.ndim for t in call.outputs),
    )


def _check(call: OpCall, made: OpRule) -> None:
    """Every dim has its Dim, a factor has one size, and what devices make of their parts of it is known."""
    sizes = dict(made.sizes)
    kept = set.intersection(*(_factors([dims]) for dims in made.outputs))
    lost = (
        _factors(made.inputs)
        - _factors(made.outputs)
        - set(made.reduced)
        - made.unsplit
        - {*made.alike.values()}
        - made.devices
    )
    assert not lost, f"the rule of {call.name} does not say what becomes of {sorted(lost)}"
    assert not kept & set(made.reduced), (
        f"the rule of {call.name} reduces {sorted(made.reduced)}, which all results have"
    )
    for types, all_dims in ((call.inputs, made.inputs), (call.outputs, made.outputs)):
        assert len(types) == len(all_dims), f"the rule of {call.name} is for {len(all_dims)} tensors, not {len(types)}"
        for tensor, dims in zip(types, all_dims, strict=True):
            assert tensor.ndim == len(dims), f"the rule of {call.name} has {dims} for a tensor of shape {tensor.shape}"
            for size, dim in zip(tensor.shape, dims, strict=True):
                product = 1
                for atom in atoms_of(dim):
                    product *= sizes.setdefault(atom, size)
                assert dim is None or product == size, f"{call.name}: {dim} of size {size} has factors of {product}"


def _factors(tensors: Iterable[Sequence[Dim]]) -> set[str]:
    return {f for dims in tensors for dim in dims for f in atoms_of(dim)}
