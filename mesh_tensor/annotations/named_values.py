"""Which values of a module the names of a caller mean; and meshes of a module: TVM's device meshes in its global
infos, their axes' names in an attribute."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

from tvm import ir, relax
from tvm.relax.distributed import DeviceMesh

from mesh_tensor.base.errors import did_you_mean, listing, refuse
from mesh_tensor.base.mesh import Mesh, check_countable

from .annotation import from_attr
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
        self._functions = functions

    @cached_property
    def _unused(self) -> set[Key]:
        return {
            (name, param.name_hint)
            for name, func in self._functions.items()
            for param in set(func.params) - set(relax.analysis.free_vars(func.body))
        }

    def meant_by(self, names: Iterable[Any]) -> tuple[list[tuple[Any, Key, relax.Var]], list[str]]:
        """Each name, or pattern, with the values that it means; and what is wrong with names. What a name means,
        patterns don't mean as well. The name of a submodule that is called several times means all that it gives."""
        meant, problems, patterns = [], [], []
        for name in names:
            found = self._find(name)
            if isinstance(found, str) and (is_pattern(name) or f"{name}@0" in self._sources):
                patterns.append(name)
            elif isinstance(found, str):
                problems.append(found)
            elif self._named.ours(name) != name and found[0] in self._unused:
                problems.append(f"nothing uses parameter {name!r}, so there is nothing to lay out")
            else:
                meant.append((name, *found))
        taken = {key for _, key, _ in meant}
        for name in patterns:
            fitting = self._fitting(name)
            if not fitting:
                names = list(self._sources or self._vars[self._function])
                problems.append(
                    f"no value that is used has a name like {_text(name)!r}, but {known(_text(name), names)}"
                )
            meant += [(name, key, var) for key, var in fitting.items() if key not in taken]
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
                value = self._find(name) if _fits(pattern, name) or _fits(pattern, name.partition("@")[0]) else ""
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


def _text(pattern: str | re.Pattern[str]) -> str:
    return pattern.pattern if isinstance(pattern, re.Pattern) else pattern


AXES_ATTR = "mesh_tensor_axes"
_KEY = "mesh"


def device_mesh(mesh: Mesh) -> DeviceMesh:
    """TVM's mesh of that shape, on the devices 0, 1, ..."""
    check_countable(mesh)
    return DeviceMesh(tuple(mesh.shape.values()), ir.Range(0, mesh.num_devices))


def same(a: DeviceMesh, b: DeviceMesh) -> bool:
    """The same shape and devices. (TVM's own `==` of meshes doesn't end.)"""
    return ir.structural_equal(a, b)


def device_meshes(mod: ir.IRModule) -> list[DeviceMesh]:
    """The meshes in the module's global infos, in order."""
    return [info for info in mod.global_infos.get(_KEY, []) if isinstance(info, DeviceMesh)]


def named_mesh(mod: ir.IRModule, device: DeviceMesh) -> Mesh:
    """The Mesh that a module means by a device mesh: its axes are called "axis0", "axis1", ... where the module has no
    names for them. Rank r of the Mesh is the r-th device of the device mesh."""
    sizes = tuple(int(size) for size in device.shape)
    names = given_names(mod, device) or tuple(f"axis{index}" for index in range(len(sizes)))
    return Mesh(dict(zip(names, sizes, strict=True)))


def given_names(mod: ir.IRModule, device: DeviceMesh) -> tuple[str, ...] | None:
    """The axis names that the module gives to a device mesh, if it does."""
    for other, names in zip(device_meshes(mod), _names(mod), strict=False):
        if names and same(other, device):
            if len(names) != len(device.shape):
                refuse(
                    f"the attribute `{AXES_ATTR}` names the axes {names} of a mesh of shape {tuple(device.shape)}",
                    fix="give one name per axis, or an empty list",
                )
            return names
    return None


def fits(mod: ir.IRModule, device: DeviceMesh, mesh: Mesh) -> bool:
    """Whether `mesh` has the sizes of a device mesh, and its axes' names where the module gives it some."""
    sizes = tuple(int(size) for size in device.shape)
    return sizes == tuple(mesh.shape.values()) and given_names(mod, device) in (None, mesh.axis_names)


def with_mesh(mod: ir.IRModule, device: DeviceMesh, mesh: Mesh) -> ir.IRModule:
    """The module with a device mesh among its meshes, its axes named as in `mesh`."""
    meshes: list[Any] = device_meshes(mod)
    if not any(same(device, other) for other in meshes):
        meshes.append(device)
    names = [mesh.axis_names if same(device, other) else given_names(mod, other) or () for other in meshes]
    mod = mod.clone()
    mod.update_global_info(_KEY, meshes)
    return mod.with_attr(AXES_ATTR, [list(axes) for axes in names])


def _names(mod: ir.IRModule) -> tuple[tuple[str, ...], ...]:
    attr = mod.attrs.get(AXES_ATTR) if mod.attrs is not None else None
    return from_attr(attr) if attr is not None else ()
