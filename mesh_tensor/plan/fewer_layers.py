"""A module with some of its alike layers: what a plan of all of them says for other sizes can be read off a plan of a
few, which is quickly made.

Layers are alike where the same operators are called on the same symbolic types, with the same attributes, constants
and annotations, and where operands come from the same place of the layer or of the one before, from the same place of
all, or from parameters that are alike. Found in the symbolic module, this holds for all sizes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tvm import ir, relax, tirx

from mesh_tensor.annotations.names import relax_function
from mesh_tensor.rules.operator.call import Structure

from .ir import ANNOTATE, REDISTRIBUTE, STATE_ATTR
from .manual import is_collective
from .reader import Annotations
from .repeats import UnknownKindError, called, kind_of, stretches

_LONGEST = 2048  # bindings of a layer


@dataclass(frozen=True, eq=False)
class FewerLayers:
    """`module` has fewer of the function's `layers`; `stands`: per variable of the whole function, which of the small
    one stands for it (itself, if it is there)."""

    module: ir.IRModule
    stands: Mapping[str, str]
    layers: int


def fewer_layers(
    mod: ir.IRModule, function: str, annotations: Annotations, held: Collection[str], copies: int
) -> FewerLayers | None:
    """The module with so many of its alike layers: the first one, the last one, and the one after the first. None where
    there are no more of them, or where the function has something other than operators on tensors in one sequence."""
    func = relax_function(mod, function)
    try:
        read = _Function(func, function, annotations, held)
        layers = _found(read)
        if layers is None or layers.count <= copies:
            return None
        return _Writer(read, layers, copies).written(mod, function)
    except (_NotAlikeError, UnknownKindError):
        return None


class _NotAlikeError(Exception):
    """The function is none of those that are looked at."""


@dataclass(frozen=True)
class _Layers:
    """`count` layers of `length` bindings each, of those that are computed, from the one numbered `start`."""

    start: int
    length: int
    count: int


@dataclass(frozen=True, eq=False)
class _Computed:
    """A binding: `kind` is equal for those that differ in nothing but their operands. `refs`: per operand the number of
    the binding that computes it, or the variable of a parameter, or of one with a layout stated for it."""

    binding: relax.Binding
    kind: tuple
    refs: tuple[int | relax.Var, ...]


@dataclass(eq=False)
class _Function:
    """A function's bindings: those that are `computed`, and the others, which state layouts of parameters."""

    func: relax.Function
    name: str
    annotations: Annotations
    held: Collection[str]
    computed: list[_Computed] = field(default_factory=list)
    given: dict[relax.Var, tuple] = field(default_factory=dict)  # a parameter, or one as it is stated: what it is
    source: dict[relax.Var, relax.Var] = field(default_factory=dict)  # of one as it is stated
    numbers: dict[relax.Var, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.func.body, relax.SeqExpr):
            raise _NotAlikeError
        for var in self.func.params[:]:
            self.given[var] = Structure(var.struct_info), self._stated(var), var.name_hint in self.held
        for block in self.func.body.blocks[:]:
            for binding in block.bindings[:]:
                self._add(binding)
        names = [var.name_hint for var in (*self.given, *self.numbers)]
        if len(set(names)) < len(names):
            raise _NotAlikeError

    def _add(self, binding: relax.Binding) -> None:
        var, value = binding.var, binding.value
        info = type(binding), Structure(var.struct_info), self._stated(var)
        if isinstance(binding, relax.MatchCast) and not self._symbols.issuperset(
            relax.analysis.definable_tir_vars_in_struct_info(binding.struct_info)
        ):
            raise _NotAlikeError  # it makes a symbol
        refs: list[relax.Var] = []
        _check(value)
        kind = (*info, kind_of(value, refs))
        if called(value) in (ANNOTATE, REDISTRIBUTE) and refs[0] in self.given:
            self.given[var], self.source[var] = (*kind, self.given[refs[0]]), refs[0]
            return
        known = tuple([self.given.get(ref) for ref in refs])
        found = tuple([ref if ref in self.given else self.numbers[ref] for ref in refs])
        self.numbers[var] = len(self.computed)
        self.computed.append(_Computed(binding, (*kind, known), found))

    @cached_property
    def _symbols(self) -> set[tirx.Var]:
        """Those that parameters define."""
        find = relax.analysis.definable_tir_vars_in_struct_info
        return {symbol for var in self.func.params[:] for symbol in find(var.struct_info)}

    def _stated(self, var: relax.Var) -> Any:
        return self.annotations.get((self.name, var.name_hint))

    @property
    def returned(self) -> Sequence[relax.Var] | None:
        """The fields of what it returns; None if that is one tensor, or no tuple of variables."""
        body: relax.Expr = self.func.body.body
        if isinstance(body, relax.Var) and body in self.numbers:
            body = self.computed[self.numbers[body]].binding.value
        if not isinstance(body, relax.Tuple):
            return None
        if not all(isinstance(one, relax.Var) for one in body.fields):
            raise _NotAlikeError
        return body.fields[:]

    def chain(self, var: relax.Var) -> list[relax.Var]:
        """A parameter as it is stated, as it was stated before, ..., and the parameter."""
        found = [var]
        while found[-1] in self.source:
            found.append(self.source[found[-1]])
        return found


def _check(value: relax.Expr) -> None:
    """It is no call but of an operator on tensors."""
    if isinstance(value, relax.Call) and (not called(value) or called(value).startswith("call_tir")):
        raise _NotAlikeError
    if isinstance(value, relax.Call) and is_collective(value):
        raise _NotAlikeError


def _found(read: _Function) -> _Layers | None:
    """The layers that are alike, where leaving out all but one leaves out most."""
    ids: dict[tuple, int] = {}
    kinds = [ids.setdefault(one.kind, len(ids)) for one in read.computed]
    middle, best = len(kinds) // 2, None
    for length in range(1, min(_LONGEST, len(kinds) - middle)):
        if kinds[middle] == kinds[middle + length]:
            start, alike = max(_alike(read.computed, kinds, length), key=lambda each: each[1])
            count = alike // length + 1
            if count > 1 and (best is None or (count - 1) * length > (best.count - 1) * best.length):
                best = _Layers(start, length, count)
    return best


def _alike(computed: Sequence[_Computed], kinds: Sequence[int], length: int) -> list[tuple[int, int]]:
    """Where bindings start that are as those `length` after them, and how many they are."""
    pairs = zip(kinds, kinds[length:], computed, computed[length:], strict=False)
    return [*stretches(a == b and _same_places(one, other, length) for a, b, one, other in pairs), (0, 0)]


def _same_places(one: _Computed, other: _Computed, length: int) -> bool:
    """Whether operands come from the same place, or from one as much earlier; parameters are alike as the kinds are."""
    return all(
        not isinstance(a, int) or a == b or (isinstance(b, int) and a + length == b)
        for a, b in zip(one.refs, other.refs, strict=True)
    )


class _Writer:
    """The function with the layers that are kept."""

    def __init__(self, read: _Function, layers: _Layers, copies: int) -> None:
        self._read, self._layers = read, layers
        last = layers.count - 1
        self._kept = {1: [0], 2: [0, last], 3: [0, 1, last]}[copies]
        self._vars: dict[relax.Var, relax.Var] = {}
        for number, one in enumerate(read.computed):
            self._stand(one, read.computed[self._stands_for(number)])

    def _stands_for(self, number: int) -> int:
        """The number of the binding that stands for one."""
        start, length = self._layers.start, self._layers.length
        layer, place = divmod(number - start, length)
        if not 0 <= layer < self._layers.count or layer in self._kept:
            return number
        return start + self._kept[min(1, len(self._kept) - 2) if len(self._kept) > 1 else 0] * length + place

    def _stand(self, one: _Computed, other: _Computed) -> None:
        self._note(one.binding.var, other.binding.var)
        for mine, its in zip(one.refs, other.refs, strict=True):
            if isinstance(mine, relax.Var) and isinstance(its, relax.Var):
                for a, b in zip(self._read.chain(mine), self._read.chain(its), strict=True):
                    self._note(a, b)

    def _note(self, one: relax.Var, other: relax.Var) -> None:
        if self._vars.setdefault(one, other) is not other and not self._vars[one].same_as(other):
            raise _NotAlikeError  # a parameter that several layers have, or that one layer has twice

    def written(self, mod: ir.IRModule, function: str) -> FewerLayers:
        """The small module."""
        func, numbers = self._read.func, dict[int, int]()
        params = [var for var in func.params[:] if self._is_there(var)]
        blocks = [made for block in func.body.blocks[:] if (made := self._block(block)) is not None]
        body = func.body.body
        if (fields := self._read.returned) is not None:
            body, kept = self._fields(fields), [number for number, var in enumerate(fields) if self._is_there(var)]
            numbers = {number: place for place, number in enumerate(kept)}
            if isinstance(func.body.body, relax.Var):  # it is bound to a tuple, last of all
                var = type(func.body.body)(func.body.body.name_hint, body.struct_info)
                *rest, last = blocks[-1].bindings[:]
                blocks[-1] = type(blocks[-1])([*rest, relax.VarBinding(var, body)])
                self._need(last.var.same_as(func.body.body))
                body = var
        body = self._vars.get(body, body) if isinstance(body, relax.Var) else body
        seq = _typed(relax.SeqExpr(blocks, body), body.struct_info)
        small = relax.Function(params, seq, body.struct_info, func.is_pure)
        self._need(_symbols(small) == _symbols(func))
        if func.attrs is not None and (state := func.attrs.get(STATE_ATTR)):
            small = small.with_attr(STATE_ATTR, self._state(state, numbers))
        made = ir.IRModule({ir.GlobalVar(function): small}, attrs=mod.attrs, global_infos=mod.global_infos)
        whole = (*self._read.given, *self._read.numbers)
        stands = {var.name_hint: self._vars.get(var, var).name_hint for var in whole}
        return FewerLayers(made, stands, self._layers.count)

    @staticmethod
    def _need(holds: bool) -> None:
        if not holds:
            raise _NotAlikeError

    def _is_there(self, var: relax.Var) -> bool:
        return self._vars.get(var, var).same_as(var)

    def _block(self, block: relax.BindingBlock) -> relax.BindingBlock | None:
        kept = []
        for binding in block.bindings[:]:
            if self._is_there(binding.var):
                value = _on(binding.value, lambda var: self._vars.get(var, var))
                kept.append(_bound(binding, value))
        return type(block)(kept) if kept else None

    def _fields(self, fields: Sequence[relax.Var]) -> relax.Tuple:
        """Of a tuple what is there."""
        return relax.Tuple([var for var in fields if self._is_there(var)])

    def _state(self, state: Mapping[str, Any], numbers: Mapping[int, int]) -> dict[str, int]:
        """Which result replaces which parameter: as in the whole function, of those that stand for them."""
        by_name = {var.name_hint: var for var in self._read.given}
        fields = self._read.returned
        if fields is None:
            raise _NotAlikeError
        made: dict[str, int] = {}
        for name, number in state.items():
            param, result = self._vars.get(by_name[name], by_name[name]), fields[int(number)]
            stands = self._vars.get(result, result)
            place = next(i for i, var in enumerate(fields) if var.same_as(stands))
            if made.setdefault(param.name_hint, numbers[place]) != numbers[place]:
                raise _NotAlikeError
        return made


def _bound(binding: relax.Binding, value: relax.Expr) -> relax.Binding:
    if isinstance(binding, relax.MatchCast):
        return relax.MatchCast(binding.var, value, binding.struct_info)
    return relax.VarBinding(binding.var, value)


def _symbols(func: relax.Function) -> set[str]:
    return {var.name for var in relax.analysis.defined_symbolic_vars(func)}


def _on(value: relax.Expr, stands: Callable[[relax.Var], relax.Var]) -> relax.Expr:
    """An expression with what stands for its variables."""
    if isinstance(value, relax.Var):
        return stands(value)
    if not any(not stands(var).same_as(var) for var in _variables(value)):
        return value
    if isinstance(value, relax.Tuple):
        made = relax.Tuple([_on(one, stands) for one in value.fields])
    elif isinstance(value, relax.TupleGetItem):
        made = relax.TupleGetItem(_on(value.tuple_value, stands), value.index)
    else:
        made = relax.Call(value.op, [_on(arg, stands) for arg in value.args], value.attrs, value.sinfo_args)
    return _typed(made, value.struct_info)


def _typed(expr: relax.Expr, info: relax.StructInfo) -> relax.Expr:
    """The expression, whose struct info is known; tuples find theirs out themselves."""
    if expr.struct_info_ is None:
        relax.expr._update_struct_info(expr, info)
    return expr


def _variables(value: relax.Expr) -> Iterator[relax.Var]:
    refs: list[relax.Var] = []
    kind_of(value, refs)
    yield from refs
