"""OpRule: how the dims of an operator's tensors relate, and what it takes to run it on tiles; and the table of
rules: operator name -> the function that makes its OpRule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from tvm import relax

from mesh_tensor.base.errors import refuse
from mesh_tensor.base.sharding import Sharding
from mesh_tensor.base.window import Reaches

from .call import OpCall, tensor_infos

# What a dim of a tensor is made of: a factor; several, major first, whose sizes multiply to the dim's (a reshape); or
# None: the operator needs (or makes) this dim whole.
Dim = str | tuple[str, ...] | None


@dataclass(frozen=True)
class LocalCall:
    """An operator about to be called on one device's tiles.

    `args` are the tensor operands' tiles (flattened like `call.inputs`); `in_tiles` and `out_tiles` are the tiles'
    shapes; `layouts` say how the operands lie, where they are split into contiguous tiles: a dim that is split in
    strides (see plan.atoms) counts as whole; `out_layouts` say it of the results. `wide`: some result is a part of a
    low-precision sum, and has to be float32; `out_dtypes` are the dtypes of all of them, where they may differ in
    that."""

    call: OpCall
    args: tuple[relax.Expr, ...]
    in_tiles: tuple[tuple[int, ...], ...]
    out_tiles: tuple[tuple[int, ...], ...]
    layouts: tuple[Sharding, ...]
    wide: bool = False
    out_layouts: tuple[Sharding, ...] = ()
    out_dtypes: tuple[str, ...] = ()

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The results' dtypes on tiles."""
        return self.out_dtypes or tuple(out.dtype for out in self.call.outputs)

    def again(self, *, attrs: Any = None, literals: Mapping[int, relax.Expr] | None = None) -> relax.Call:
        """The same call on the tiles: each argument position keeps its form (tuples are rebuilt), except that
        `literals` (by position) replace arguments and `attrs` the attributes."""
        tiles = iter(self.args)
        replaced = literals or {}
        args = [replaced[i] if i in replaced else _refill(arg, tiles) for i, arg in enumerate(self.call.expr.args)]
        old = self.call.expr
        return relax.Call(old.op, args, attrs if attrs is not None else old.attrs, old.sinfo_args)


Localizer = Callable[[LocalCall], relax.Expr]


@dataclass(frozen=True)
class InnerReduction:
    """A value in the middle of a kernel that is combined by `op` over `factor`, and needed whole from there on: where
    an axis splits the factor, a collective completes it. With `op` "scan" it is carried in order, and every device
    needs what all others make of it; with "turns" each device waits for what the one before it makes of it.

    `dims` and `shape` are those of the value over all blocks. `ends`: nothing walks the factor after that, so that
    the axes which split it may split another one."""

    factor: str
    op: str
    dims: tuple[str | None, ...]
    shape: tuple[int, ...]
    dtype: str
    ends: bool


@dataclass(frozen=True)
class OpRule:
    """Dims that share a factor are split together.

    inputs, outputs   per tensor, per dim: a Dim. Size-1 dims that broadcast are None.
    reduced           factor -> the op that combines the devices' results where the factor is split ("sum", "max",
                      "min", "prod"): for factors of inputs that some output lacks. Before the operator reads a tile
                      whose last part is padding along such a factor, the padding is set to the op's neutral element in
                      all operands that have the factor.
    partial           per result the factors of `reduced` that leave it to be completed, with the op, where results
                      differ in that; by default all that it does not have.
    sizes             factor -> size, for factors of compound dims (all others have a dim's size)
    linear            sets of operands: the op is linear in the operands of a set taken together while the others are
                      fixed (add: {0, 1} together; matmul: {0}, {1}). Sums that are not yet reduced pass through.
                      Sets whose dtype is not that of the results are left out when the rule is looked up.
    unsplit           factors that no axis may split.
    positional        factors of single dims whose tiles have to be contiguous: `localize` looks at where they lie.
    alike             factor of a result -> one of an operand, of as many elements: equal tiles of the latter's first
                      atom are tiles of the former, which is one atom.
    windows           (operand, dim) -> what is read of it from where a factor is, of dims that are None otherwise:
                      where axes split that factor, devices take windows of the dim.
    masks             the operator minds its operands' padding itself: nothing has to set it.
    blocks            factor -> size of its blocks, where the tiles of all devices have to be whole blocks.
    first             factor -> how much of it the first tile has to hold, where the axes split it.
    inner             what is reduced inside a kernel, in the order in which it is.
    devices           factors of devices: an axis of that size splits each, and nothing takes it apart.
    moves             the op only moves elements: results pending with any op pass through.
    localize          how the call looks on tiles; None: the same call on the tiles.


    >>> OpRule((("m", "k"), ("k", "n")), (("m", "n"),), {"k": "sum"}, linear=(frozenset({0}), frozenset({1})))
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    reduced: Mapping[str, str] = field(default_factory=dict)
    partial: tuple[Mapping[str, str], ...] = ()
    sizes: Mapping[str, int] = field(default_factory=dict)
    linear: tuple[frozenset[int], ...] = ()
    moves: bool = False
    unsplit: frozenset[str] = frozenset()
    positional: frozenset[str] = frozenset()
    alike: Mapping[str, str] = field(default_factory=dict)
    windows: Mapping[tuple[int, int], Reaches] = field(default_factory=dict)
    blocks: Mapping[str, int] = field(default_factory=dict)
    first: Mapping[str, int] = field(default_factory=dict)
    inner: tuple[InnerReduction, ...] = ()
    masks: bool = False
    devices: frozenset[str] = frozenset()
    localize: Localizer | None = None


def atoms_of(dim: Dim) -> tuple[str, ...]:
    """The factors of a dim, major first; none for a dim that is needed whole."""
    if dim is None:
        return ()
    return (dim,) if isinstance(dim, str) else dim


def _refill(arg: relax.Expr, tiles: Iterator[relax.Expr]) -> relax.Expr:
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_refill(item, tiles) for item in arg.fields])
    count = len(tensor_infos(arg.struct_info))
    if count and isinstance(arg.struct_info, relax.TupleStructInfo):
        return relax.Tuple([next(tiles) for _ in range(count)])
    return next(tiles) if count else arg


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
    """The rule of a call, checked against its shapes. `binding` is what the call is bound to, for messages. Refused
    where the operator has no rule."""
    name = call.operator
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
    return OpRule(tuple((None,) * t.ndim for t in call.inputs), tuple((None,) * t.ndim for t in call.outputs))


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
