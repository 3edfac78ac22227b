"""Which atoms had better not be split where another one of a dim can be: those that lead to what is needed whole."""

from __future__ import annotations

from collections.abc import Collection
from functools import cached_property
from typing import TYPE_CHECKING

from mesh_tensor.base.joined import Joined

from .ir import Node, Value

if TYPE_CHECKING:
    from .atoms import NodeRule

_Atom = tuple[Value, int]  # a value and where the atom stands in its shape


class Hindrances:
    """What nodes of these rules need whole, and where that comes from."""

    def __init__(self, rules: dict[Node, NodeRule]) -> None:
        self._rules = rules

    def of(self, split: Collection[_Atom]) -> frozenset[_Atom]:
        """Those of some atoms that would lead to what some operator needs whole, where layouts may split all of these:
        the number of parts that a fused layer is split into. Atoms that follow one factor do so together. Devices of a
        manual computation are split, whatever needs them whole."""
        joined = self._joined
        found = {joined.root(atom) for atom in self._needed_whole.intersection(split)}
        return frozenset(atom for atom in split if joined.root(atom) in found) if found else frozenset()

    @cached_property
    def _joined(self) -> Joined[_Atom]:
        """The atoms that follow the same factors."""
        joined = Joined[_Atom]()
        for node, rule in self._rules.items():
            at: dict[str, _Atom] = {}
            for value, factors in zip((*node.inputs, *node.outputs), (*rule.followed, *rule.outputs), strict=True):
                for position, factor in enumerate(factors):
                    if factor is not None and factor not in rule.fixed.values():
                        joined.join(at.setdefault(factor, (value, position)), (value, position))
        return joined

    @cached_property
    def _needed_whole(self) -> set[_Atom]:
        """The atoms which some operator needs whole, there or in what is made of them."""
        found: set[_Atom] = set()
        for node, rule in reversed(self._rules.items()):
            ahead: set[str | None] = set()
            for value, factors in zip(node.outputs, rule.outputs, strict=True):
                ahead.update(factor for position, factor in enumerate(factors) if (value, position) in found)
            ahead.difference_update(rule.fixed.values())
            for value, factors in zip(node.inputs, rule.followed, strict=True):
                for position, factor in enumerate(factors):
                    if factor is None or factor in ahead:
                        found.add((value, position))
        return found
