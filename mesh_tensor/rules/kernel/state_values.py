"""What one iteration of a loop makes of what the loop carries, as far as sums of powers can say it.

A value is `sum(coefficient * atom) + sum(part * 2**(sum(rate * atom)) * carried)`. Atoms are what a row of the state
was before the iteration, and maxima that it was part of; a *part* depends on no earlier iteration. What has another
shape is not known (`None`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Any

from mesh_tensor.tir.linear import Linear

from .padding import ANYTHING, Content

_ROUNDING = 2.0**-21  # how far two rates may differ that were rounded to float32


class Level(IntEnum):
    """How a part lies along the factor: the same at all of its positions, one per position, or the positions of a block
    added up."""

    FIXED = 0
    POINT = 1
    SUM = 2


@dataclass(frozen=True)
class Atom:
    """A number of every row. `key`: ("before", live range), ("block", statement) for a maximum over a block, or ("max",
    the keys of what it is the maximum of). `place`: which row, as keys of linear forms."""

    key: tuple[Any, ...]
    place: tuple[Linear, ...] = field(compare=False)
    at: tuple[Any, ...] = ()

    @staticmethod
    def make(key: tuple[Any, ...], place: Iterable[Linear]) -> Atom:
        place = tuple(place)
        return Atom(key, place, tuple(form.key for form in place))

    def moved(self, place: Iterable[Linear]) -> Atom:
        """The same number of another row."""
        return Atom.make(self.key, place)

    @property
    def keys(self) -> frozenset[tuple[Any, ...]]:
        """The keys of all that it is the maximum of, itself if it is none."""
        return self.key[1] if self.key[0] == "max" else frozenset({self.key})

    def is_at_least(self, other: Atom) -> bool:
        """Whether it is the maximum of another one, of the same row, and maybe of more."""
        return self.at == other.at and self.keys >= other.keys


@dataclass(frozen=True)
class Part:
    """What depends on no earlier iteration; its `number`, if that is a constant."""

    level: Level
    number: float | None = None

    def times(self, other: Part) -> Part | None:
        """The product, None where it is no sum over positions any more."""
        number = None if self.number is None or other.number is None else self.number * other.number
        low, high = sorted((self.level, other.level))
        return None if high is Level.SUM and low is not Level.FIXED else Part(high, number)

    def plus(self, other: Part) -> Part | None:
        """The sum, None where it depends on how many blocks there are."""
        if self.number == 0 or other.number == 0:
            return other if self.number == 0 else self
        if (self.level is Level.SUM) is not (other.level is Level.SUM):
            return None
        number = None if self.number is None or other.number is None else self.number + other.number
        return Part(max(self.level, other.level), number)


#: An exponent of 2: the rate of every atom in it.
Power = frozenset[tuple[Atom, float]]

#: What a part is multiplied with: a power of 2, and what the loop carries (None: nothing).
Factor = tuple[Power, Atom | None]

#: A sum of parts, each times its factors.
Terms = Mapping[Factor, Part]

_PLAIN: Factor = (frozenset(), None)

_FIXED = Part(Level.FIXED)


def power(rates: Mapping[Atom, float]) -> Power:
    """The exponent with these rates; what cancels is not in it."""
    return frozenset((atom, rate) for atom, rate in rates.items() if rate)


def add_rates(a: Mapping[Atom, float], b: Mapping[Atom, float]) -> dict[Atom, float]:
    """The sum of two linear combinations; what differs by rounding cancels."""
    total = dict(a)
    for atom, rate in b.items():
        old = total.get(atom, 0.0)
        new = old + rate
        total[atom] = 0.0 if abs(new) <= _ROUNDING * abs(rate) else new
    return {atom: rate for atom, rate in total.items() if rate}


@dataclass(frozen=True)
class StateValue:
    """`atoms` plus `terms`, plus `scale` times the logarithm of `log` if there is one. `padding`: what it is past the
    end of the factor's dim. `is_finite`: where the atom that it is is the lowest value, a number stands in for it."""

    atoms: Mapping[Atom, float] = field(default_factory=dict)
    terms: Terms = field(default_factory=dict)
    log: Terms | None = None
    scale: float = 1.0
    padding: Content = ANYTHING
    is_finite: bool = False

    @property
    def part(self) -> Part | None:
        """The value, if no earlier iteration has part in it."""
        if self.atoms or self.log is not None or any(factor != _PLAIN for factor in self.terms):
            return None
        return self.terms.get(_PLAIN, Part(Level.FIXED, 0.0))

    @property
    def number(self) -> float | None:
        """The value, if it is a constant."""
        return None if self.part is None else self.part.number

    @property
    def atom(self) -> Atom | None:
        """The atom that the value is, None if it is anything else."""
        ((atom, rate), *more) = self.atoms.items() if self.atoms else [(None, 0.0)]
        return atom if rate == 1 and not more and not self.terms and self.log is None else None

    def past(self, padding: Content) -> StateValue:
        """The value with something else past the end."""
        return replace(self, padding=padding)


def constant(number: float) -> StateValue:
    """A number."""
    return StateValue({}, {_PLAIN: Part(Level.FIXED, number)} if number else {}, padding=Content(number))


def independent(level: Level, padding: Content = ANYTHING) -> StateValue:
    """Something that depends on no earlier iteration."""
    return StateValue({}, {_PLAIN: Part(level)}, padding=padding)


def plus(a: StateValue, b: StateValue) -> StateValue | None:
    """The sum."""
    if a.log is not None and b.log is not None:
        return None
    terms = _sum(a.terms, b.terms)
    if terms is None:
        return None
    logs = a if b.log is None else b
    return StateValue(add_rates(a.atoms, b.atoms), terms, logs.log, logs.scale)


def _sum(a: Terms, b: Terms) -> dict[Factor, Part] | None:
    terms = dict(a)
    for factor, part in b.items():
        total = part if factor not in terms else terms[factor].plus(part)
        if total is None:
            return None
        terms[factor] = total
    return {factor: part for factor, part in terms.items() if part.number != 0}


def times(a: StateValue, b: StateValue) -> StateValue | None:
    """The product."""
    if a.number is None and b.number is not None:
        a, b = b, a
    if a.number:
        by = a.number
        terms = {factor: product for factor, part in b.terms.items() if (product := part.times(Part(Level.FIXED, by)))}
        return StateValue({atom: rate * by for atom, rate in b.atoms.items()}, terms, b.log, b.scale * by)
    if a.log is not None or b.log is not None:
        return None
    return _product(_all_terms(a), _all_terms(b))


def _all_terms(value: StateValue) -> Terms:
    """The value with what the loop carries as terms."""
    terms = dict(value.terms)
    for atom, rate in value.atoms.items():
        terms[(frozenset(), atom)] = Part(Level.FIXED, rate)
    return terms


def _product(a: Terms, b: Terms) -> StateValue | None:
    terms: dict[Factor, Part] = {}
    for (power_a, carried_a), part_a in a.items():
        for (power_b, carried_b), part_b in b.items():
            part = part_a.times(part_b)
            if part is None or (carried_a is not None and carried_b is not None):
                return None
            factor = (power(add_rates(dict(power_a), dict(power_b))), carried_a or carried_b)
            total = _sum(terms, {factor: part})
            if total is None:
                return None
            terms = total
    return StateValue({}, terms)


def exponential(value: StateValue, base: float) -> StateValue | None:
    """The base to the power of the value."""
    part = StateValue({}, value.terms, value.log).part
    if part is None or part.level is Level.SUM:
        return None
    rates = {atom: rate * math.log2(base) for atom, rate in value.atoms.items()}
    number = None if part.number is None or math.isinf(part.number) else base**part.number
    return StateValue({}, {(power(rates), None): Part(part.level, number)})


def inverse(value: StateValue) -> StateValue | None:
    """1 over a power, times something that is the same at all positions; None for anything else."""
    rates = _rates(value)
    return None if rates is None else StateValue({}, {(power({a: -rate for a, rate in rates.items()}), None): _FIXED})


def logarithm_of_power(value: StateValue, base: float) -> StateValue | None:
    """The logarithm of a power, times something that is the same at all positions; None for anything else."""
    rates = _rates(value)
    return (
        None
        if rates is None
        else StateValue({a: rate / math.log2(base) for a, rate in rates.items()}, {_PLAIN: _FIXED})
    )


def _rates(value: StateValue) -> dict[Atom, float] | None:
    """The exponent, of what is a single power, times a part."""
    if value.atoms or value.log is not None or len(value.terms) != 1:
        return None
    (((exponent, carried), part),) = value.terms.items()
    return dict(exponent) if exponent and carried is None and part.level is Level.FIXED else None


def logarithm(value: StateValue, base: float) -> StateValue | None:
    """The logarithm of a sum of powers."""
    if value.atoms or value.log is not None:
        return None
    return StateValue({}, {}, value.terms, 1 / math.log2(base))


def maximum(values: Iterable[StateValue]) -> StateValue | None:
    """The largest, where all of one row are compared."""
    keys: set[tuple[Any, ...]] = set()
    places: dict[tuple[Any, ...], Atom] = {}
    for value in values:
        atom = value.atom
        if atom is not None:
            keys |= atom.keys
            places[atom.at] = atom
        elif value.part is None or value.part.level is not Level.FIXED:
            return None
        else:
            keys.add(("fixed", value.number))
    if len(places) != 1:
        return None
    (atom,) = places.values()
    return StateValue({Atom.make(("max", frozenset(keys)), atom.place): 1.0})


_Place = Callable[[Linear], Linear | None]


def moved(value: StateValue, forms: Sequence[Linear]) -> StateValue | None:
    """A value in terms of dims, at an access's indices."""
    return _replaced(value, lambda form: at(form, forms))


def at(form: Linear, forms: Sequence[Linear]) -> Linear:
    """A form of dims, with forms in their places."""
    total = Linear({v: c for v, c in form.terms.items() if not isinstance(v, int)}, form.const)
    for dim, coefficient in form.terms.items():
        if isinstance(dim, int):
            total = total + forms[dim].scaled(coefficient)
    return total


def stored(value: StateValue, forms: Sequence[Linear | None]) -> StateValue | None:
    """A value in terms of the dims of what is written at the indices; None if it varies with something else."""

    def dim(form: Linear) -> Linear | None:
        if not form.terms:
            return form
        found = [d for d, other in enumerate(forms) if other is not None and other.same_as(form)]
        return Linear({found[0]: 1}) if found else None

    return _replaced(value, dim)


def _replaced(value: StateValue, place: _Place) -> StateValue | None:
    """The value with every atom at another place; None if one has none there."""
    atoms: dict[Atom, float] = {}
    for old, rate in value.atoms.items():
        atom = _atom(old, place)
        if atom is None:
            return None
        atoms[atom] = rate
    terms, log = _terms(value.terms, place), None if value.log is None else _terms(value.log, place)
    if terms is None or (value.log is not None and log is None):
        return None
    return StateValue(atoms, terms, log, value.scale, value.padding, value.is_finite)


def _atom(old: Atom, place: _Place) -> Atom | None:
    forms = [place(form) for form in old.place]
    known = [form for form in forms if form is not None]
    return old.moved(known) if len(known) == len(forms) else None


def _terms(old: Terms, place: _Place) -> Terms | None:
    new: dict[Factor, Part] = {}
    for (exponent, carried), part in old.items():
        power = {(_atom(atom, place), rate) for atom, rate in exponent}
        kept = None if carried is None else _atom(carried, place)
        known = frozenset((atom, rate) for atom, rate in power if atom is not None)
        if len(known) < len(exponent) or (carried is not None and kept is None):
            return None
        new[(known, kept)] = part
    return new
