"""Values (state_values) of one buffer's element, said in the indices of an access, or in the buffer's dims.

A place in terms of dims is a linear form of their numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from mesh_tensor.tir.linear import Linear

from .state_values import Atom, Factor, Part, Terms, Value

_Place = Callable[[Linear], Linear | None]


def moved(value: Value, forms: Sequence[Linear]) -> Value | None:
    """A value in terms of dims, at an access's indices."""
    return _replaced(value, lambda form: at(form, forms))


def at(form: Linear, forms: Sequence[Linear]) -> Linear:
    """A form of dims, with forms in their places."""
    total = Linear({v: c for v, c in form.terms.items() if not isinstance(v, int)}, form.const)
    for dim, coefficient in form.terms.items():
        if isinstance(dim, int):
            total = total + forms[dim].scaled(coefficient)
    return total


def stored(value: Value, forms: Sequence[Linear | None]) -> Value | None:
    """A value in terms of the dims of what is written at the indices; None if it varies with something else."""

    def dim(form: Linear) -> Linear | None:
        if not form.terms:
            return form
        found = [d for d, other in enumerate(forms) if other is not None and other.same_as(form)]
        return Linear({found[0]: 1}) if found else None

    return _replaced(value, dim)


def _replaced(value: Value, place: _Place) -> Value | None:
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
    return Value(atoms, terms, log, value.scale, value.padding)


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
