"""Text of a saved module is checked before TVM sees it: TVM follows the indices in it unchecked."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from typing import Any, TypeGuard

from . import saved_types as types
from .saved_types import Field, Wanted

#: The longest chain of nodes. TVM recurses along it, and runs out of stack at some 2,000.
DEEPEST = 500
#: The most nodes that walking through a module may meet, where every use of a shared node counts.
LARGEST = 50_000_000
_INT64 = range(-(2**63), 2**63)
_MOST_PROBLEMS = 5


class BadModule(ValueError):
    """A text that is no saved module; the message is a fact in a few words."""


def parse(text: str) -> dict[str, Any]:
    """The object that a JSON text holds; a BadModule for anything that JSON leaves open."""
    try:
        document = json.loads(text, object_pairs_hook=_without_duplicates)
    except RecursionError:
        raise BadModule("it is nested too deeply") from None
    except ValueError as error:
        raise BadModule(str(error)) from None
    if not isinstance(document, dict):
        raise BadModule(f"it holds a {type(document).__name__}, not an object")
    return document


def checked(document: dict[str, Any]) -> str:
    """The text that TVM may load: the root and the nodes alone, each as TVM's types say, without cycles."""
    nodes, root = document.get("nodes"), document.get("root_index")
    if not isinstance(nodes, list) or not nodes:
        raise BadModule("it has no list `nodes`")
    if not _is_index(root, len(nodes)):
        raise BadModule(f"`root_index` is {root!r}, and there are {len(nodes)} nodes")
    for index, node in enumerate(nodes):
        if not isinstance(node, dict) or not isinstance(node.get("type"), str):
            raise BadModule(f"node {index} has no type")
    problems = [problem for index in range(len(nodes)) for problem in _Node(nodes, index).problems()]
    if not problems:
        problems = _problems_of_order(nodes)
    if problems:
        more = [f"and {len(problems) - _MOST_PROBLEMS} more"] if len(problems) > _MOST_PROBLEMS else []
        raise BadModule("; ".join([*problems[:_MOST_PROBLEMS], *more]))
    try:
        text = json.dumps({"root_index": root, "nodes": nodes}, ensure_ascii=False)
        text.encode()
    except UnicodeEncodeError:
        raise BadModule("it has text that is no Unicode") from None
    return text


class _Node:
    """One node, whose problems are told by its number and type."""

    def __init__(self, nodes: list[Any], index: int) -> None:
        self._nodes = nodes
        self._index = index
        self._type = nodes[index]["type"]
        self._data = nodes[index].get("data")

    def problems(self) -> Iterator[str]:
        """What is wrong with the node by itself and with the types of those that it refers to."""
        check = _CHECKS.get(self._type, _Node._object)
        for problem in check(self):
            yield f"node {self._index} ({self._type[:80]}): {problem}"

    def _sequence(self) -> Iterator[str]:
        if not isinstance(self._data, list) or not all(_is_index(i, len(self._nodes)) for i in self._data):
            yield "its elements are no nodes"

    def _map(self) -> Iterator[str]:
        yield from self._sequence()
        if isinstance(self._data, list) and len(self._data) % 2:
            yield "a key has no value"

    def _name(self) -> Iterator[str]:
        if not isinstance(self._data, str):
            yield "it has no name"

    def _derivation(self) -> Iterator[str]:
        if not str(self._data).startswith("tvm.relax.struct_info."):
            yield f"it calls {str(self._data)[:80]!r}, which no module needs"

    def _tensor(self) -> Iterator[str]:
        problem = types.tensor_problem(self._data)
        if problem:
            yield problem

    def _plain(self) -> Iterator[str]:
        if not _PLAIN[self._type](self._data):
            yield f"its value is {str(self._data)[:80]!r}"

    def _object(self) -> Iterator[str]:
        fields = types.fields_of(self._type)
        if fields is None:
            yield "no type of modules of this TVM"
        elif not isinstance(self._data, dict):
            yield "it has no fields"
        else:
            for field in fields:
                problem = self._field(field, self._data)
                if problem:
                    yield f"{field.name} {problem}"
            yield from self._counts(self._data)

    def _field(self, field: Field, data: dict[str, Any]) -> str:
        if field.name not in data:
            return "is missing" if field.required else ""
        value = data[field.name]
        if field.inline:
            choices = types.CHOICES.get((self._type, field.name))
            if not _PLAIN[field.inline](value) or (choices is not None and value not in choices):
                return f"is {str(value)[:80]!r}"
            return ""
        if not _is_index(value, len(self._nodes)):
            return f"is {str(value)[:80]!r}, and there are {len(self._nodes)} nodes"
        if not self._fits(value, field.wanted):
            there = self._nodes[value]["type"][:80]
            return f"is node {value}, a {there}, not the {_worded(field.wanted)} that it has to be"
        return ""

    def _fits(self, index: int, wanted: Wanted) -> bool:
        type_key, data = self._nodes[index]["type"], self._nodes[index].get("data")
        if type_key == "None":
            return wanted.nullable
        if wanted.name in ("Union", "Variant"):
            return any(self._fits(index, arg) for arg in wanted.args)
        if not types.is_a(type_key, wanted.name):
            return False
        if not wanted.args or not isinstance(data, list):
            return True
        if not all(_is_index(i, len(self._nodes)) for i in data):
            return False
        # Elements of maps alternate: a key, its value.
        return all(self._fits(i, wanted.args[place % len(wanted.args)]) for place, i in enumerate(data))

    def _counts(self, data: dict[str, Any]) -> Iterator[str]:
        """What has to have as many elements as something else has, and sizes."""
        for many, path in _COUNTS.get(self._type, ()):
            one, other = self._array(data, many), self._array(data, *path)
            if one is not None and other is not None and len(one) != len(other):
                yield f"{many} has {len(one)} elements, and {' of '.join(reversed(path))} {len(other)}"
        if self._type in _RANKED:
            known, ndim = self._array(data, *_RANKED[self._type]), data.get("ndim")
            if not _is_int(ndim) or not -1 <= ndim <= _MOST_DIMS or (known is not None and len(known) != ndim):
                yield f"ndim is {str(ndim)[:80]}, and it has {'no' if known is None else len(known)} sizes"
        if self._type in _SHAPED:
            yield from self._sizes(self._array(data, *_SHAPED[self._type]))

    def _sizes(self, shape: list[Any] | None) -> Iterator[str]:
        """Sizes that no tensor has."""
        nodes = [self._nodes[i] for i in shape or () if _is_index(i, len(self._nodes))]
        known = [node["data"].get("value") for node in nodes if node["type"] == "ir.IntImm" and _has_fields(node)]
        sizes = [size for size in known if _is_int(size)]
        if min(sizes, default=0) < 0:
            yield f"a size is {min(sizes)}"
        elif math.prod(sizes) > _MOST_ELEMENTS:
            yield f"it has {math.prod(sizes)} elements, more than any memory"

    def _array(self, data: dict[str, Any], *path: str) -> list[Any] | None:
        """The elements of the array that a path of fields leads to; None where there is no such one."""
        value: Any = data
        for name in path:
            index = value.get(name) if isinstance(value, dict) else None
            if not _is_index(index, len(self._nodes)):
                return None
            value = self._nodes[index].get("data")
        return value if isinstance(value, list) else None


_MOST_DIMS = 64
_MOST_ELEMENTS = 2**48
# Per type: an array, and the path of fields to the one that has to be as long.
_COUNTS: dict[str, tuple[tuple[str, tuple[str, ...]], ...]] = {
    "tirx.BufferLoad": (("indices", ("buffer", "shape")),),
    "tirx.BufferStore": (("indices", ("buffer", "shape")),),
    "tirx.BufferRegion": (("region", ("buffer", "shape")),),
    "tirx.SBlockRealize": (("iter_values", ("block", "iter_vars")),),
}
# Per type: the path to the sizes, which `ndim` counts; and to those that a tensor has.
_RANKED = {"relax.TensorStructInfo": ("shape", "values"), "relax.ShapeStructInfo": ("values",)}
_SHAPED = {"relax.TensorStructInfo": ("shape", "values"), "tirx.Buffer": ("shape",)}


def _has_fields(node: dict[str, Any]) -> bool:
    return isinstance(node.get("data"), dict)


def _numbers(value: object) -> bool:
    return isinstance(value, list) and all(_is_int(number) for number in value)


def _is_int(value: object) -> TypeGuard[int]:
    return type(value) is int and value in _INT64


def _is_text(value: object) -> bool:
    return isinstance(value, str)


_PLAIN: dict[str, Callable[[object], bool]] = {
    "None": lambda value: value is None,
    "int": _is_int,
    "bool": lambda value: isinstance(value, bool),
    "float": lambda value: isinstance(value, float) or _is_int(value),
    "DataType": types.is_dtype,
    "Device": lambda value: _numbers(value) and len(value) == 2,  # type: ignore[arg-type]
    "ffi.String": _is_text,
    "ffi.Bytes": _is_text,
    "ffi.Shape": _numbers,
}
_CHECKS: dict[str, Callable[[_Node], Iterator[str]]] = {
    **dict.fromkeys(types.PLAIN, _Node._plain),
    **dict.fromkeys(types.SEQUENCES, _Node._sequence),
    **dict.fromkeys(types.MAPS, _Node._map),
    **dict.fromkeys(types.NAMED, _Node._name),
    "ir.EnvFunc": _Node._derivation,
    types.TENSOR: _Node._tensor,
}


def _problems_of_order(nodes: list[Any]) -> list[str]:
    """Cycles, chains that are too long, and what is too large where shared nodes count each time."""
    depth, size = [0] * len(nodes), [0] * len(nodes)  # 0: not met yet, -1: on the way to it
    for start in range(len(nodes)):
        todo = [start]
        while todo:
            index = todo[-1]
            if depth[index] > 0:
                todo.pop()
                continue
            below = list(_references(nodes[index]))
            if depth[index] == 0:
                depth[index] = -1
                waiting = [i for i in below if depth[i] <= 0]
                if any(depth[i] < 0 for i in waiting):
                    return [f"node {index} ({nodes[index]['type'][:80]}) is part of itself"]
                todo += waiting
                continue
            todo.pop()
            depth[index] = 1 + max((depth[i] for i in below), default=0)
            size[index] = min(1 + sum(size[i] for i in below), LARGEST + 1)
            if depth[index] > DEEPEST:
                return [f"node {index} is nested {depth[index]} deep, more than the {DEEPEST} that TVM can walk"]
            if size[index] > LARGEST:
                return [f"node {index} is more than {LARGEST} nodes in all"]
    return []


def _references(node: dict[str, Any]) -> Iterator[int]:
    data = node.get("data")
    if node["type"] in (*types.SEQUENCES, *types.MAPS):
        yield from data or ()
    elif isinstance(data, dict):
        for field in types.fields_of(node["type"]) or ():
            if not field.inline and field.name in data:
                yield data[field.name]


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) != len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice[:80]!r} is there twice")
    return made


def _is_index(value: object, count: int) -> TypeGuard[int]:
    return type(value) is int and 0 <= value < count


def _worded(wanted: Wanted) -> str:
    return f"{wanted.name} of {', '.join(_worded(arg) for arg in wanted.args)}" if wanted.args else wanted.name
