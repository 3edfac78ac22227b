"""Which values of a module the names of a caller mean."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from typing import Any

from tvm import ir, relax

from mesh_tensor.base.errors import did_you_mean, listing

from .names import SourceNames, known, relax_function, relax_functions, source_names, variables

#: A function's name, and that of a variable in it.
Key = tuple[str, str]


class NamedValues:
    """The values of a module by their names in its functions; those of `function` also by the names that they had
    where the module comes from."""

    def __init__(self, mod: ir.IRModule, function: str) -> None:
        functions = relax_functions(mod)
        self._function = function
        self._vars = {name: _by_name(func) for name, func in functions.items()}
        self._sources = source_names(relax_function(mod, function))
        self._named = SourceNames(self._sources)
        self._unused = {
            (name, param.name_hint)
            for name, func in functions.items()
            for param in set(func.params) - set(relax.analysis.free_vars(func.body))
        }

    def meant_by(self, names: Iterable[Any]) -> tuple[list[tuple[Any, Key, relax.Var]], list[str]]:
        """Each name, or pattern, with the values that it means; and what is wrong with names. What a name means,
        patterns don't mean as well."""
        meant, problems, patterns = [], [], []
        for name in names:
            found = self._find(name)
            if isinstance(found, str) and is_pattern(name):
                patterns.append(name)
            elif isinstance(found, str):
                problems.append(found)
            elif found[0] in self._unused and self._named.ours(name) != name:
                problems.append(f"nothing uses parameter {name!r}, so there is nothing to lay out")
            else:
                meant.append((name, *found))
        taken = {key for _, key, _ in meant}
        for pattern in patterns:
            fitting = self._fitting(pattern)
            if not fitting:
                problems.append(f"no value that is used has a name like {_shown(pattern)}")
            meant += [(pattern, key, var) for key, var in fitting.items() if key not in taken]
        return meant, problems

    def _find(self, name: Any) -> tuple[Key, relax.Var] | str:
        """The value of that name, or what is wrong with the name."""
        if not isinstance(name, str):
            return f"{name!r} is no name of a value"
        where, value = self._function, self._named.ours(name)
        other, _, rest = name.partition(".")
        if value not in self._vars[where] and other in self._vars:
            where, value = other, rest
        found = self._vars[where].get(value, [])
        if len(found) > 1:
            return f"{name!r} names {len(found)} values (what TVMScript prints has a name for each, and parses)"
        return ((where, value), found[0]) if found else self._unknown(name, where, value)

    def _fitting(self, pattern: str | re.Pattern[str]) -> dict[Key, relax.Var]:
        """The values whose names a pattern fits: those that they had where the module comes from, or else its own."""
        found = {}
        for names in (self._sources, self._vars[self._function]):
            for name in names:
                value = self._find(name) if _fits(pattern, name) else ""
                if not isinstance(value, str) and value[0] not in self._unused:
                    found[value[0]] = value[1]
            if found:
                break
        return found

    def _unknown(self, name: str, where: str, value: str) -> str:
        called = {ours: theirs for theirs, ours in reversed(self._sources.items())} if where == self._function else {}
        names = [called.get(own, own) for own in self._vars[where]]
        close = did_you_mean(value, dict.fromkeys([*names, *self._vars[where]]))
        text = f"there is no value {value!r} in {where!r}, which has {known(value, names)}{close}"
        functions = [other for other in self._vars if other != self._function]
        return f"{text}; other functions: {listing(functions)}" if value == name and "." in name else text


def _by_name(func: relax.Function) -> dict[str, list[relax.Var]]:
    found: dict[str, list[relax.Var]] = {}
    for var in variables(func):
        found.setdefault(var.name_hint, []).append(var)
    return found


def is_pattern(name: Any) -> bool:
    """Whether a name stands for all that fit it."""
    return isinstance(name, re.Pattern) or (isinstance(name, str) and any(char in name for char in "*?["))


def _fits(pattern: str | re.Pattern[str], name: str) -> bool:
    """The whole name: a regular expression, or a text as for files, whose `*` also stands for dots."""
    if isinstance(pattern, re.Pattern):
        return pattern.fullmatch(name) is not None
    return fnmatchcase(name, pattern)


def _shown(pattern: str | re.Pattern[str]) -> str:
    return repr(pattern.pattern if isinstance(pattern, re.Pattern) else pattern)
