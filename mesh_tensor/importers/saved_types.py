"""What the nodes of a saved module may hold, as TVM's own table of types says it."""

from __future__ import annotations

import base64
import binascii
import functools
import json
import math
import re
import struct
from dataclasses import dataclass
from typing import Any

from tvm_ffi import core

ANYTHING = ("Any", "ffi.Object")
INLINE = ("int", "bool", "float", "DataType")
PLAIN = ("None", "int", "bool", "float", "DataType", "Device", "ffi.String", "ffi.Bytes", "ffi.Shape")
SEQUENCES = ("ffi.Array", "ffi.List")
MAPS = ("ffi.Map", "ffi.Dict")
NAMED = ("ir.Op", "ir.EnvFunc", "ir.SourceName", "target.TargetKind")  # their data is a name
TENSOR = "ffi.Tensor"
_KNOWN = re.compile(r"(ir|tirx|s_tir|relax|tl|target)\.\S+")
# Fields that are null without being called optional.
_MAY_BE_NULL = {("relax.expr.Call", "attrs"), ("tirx.IterVar", "dom")}
# Whole numbers stand for expressions, and texts for constants of text.
_ALSO = {
    "ir.PrimExpr": {"int", "bool", "float", "ffi.String"},
    "ir.IntImm": {"int", "bool"},
    "ir.FloatImm": {"int", "float"},
    "float": {"int"},
    "int": {"bool"},
}
_DTYPE = re.compile(r"(|void|handle|bool|(?:u?int|b?float)\d{1,3}(?:_\w+)?)(?:x(\d{1,4}))?")
_TENSOR_MAGIC, _CPU, _MOST_DIMS = 0xDD5E40F096B4A13F, 1, 64
#: Values of numbers that TVM takes for an index into a table of its own.
CHOICES = {
    ("tirx.For", "kind"): range(5),
    ("tirx.IterVar", "iter_type"): range(9),
    ("tirx.Buffer", "buffer_type"): range(1, 3),
}


@dataclass(frozen=True)
class Wanted:
    """What a reference may lead to: a type, with those of its elements. `name` is "Union" for one of `args`."""

    name: str
    nullable: bool
    args: tuple[Wanted, ...] = ()


@dataclass(frozen=True)
class Field:
    """A field of an object: a reference to another node, or a value of its own where `inline` names its type."""

    name: str
    inline: str
    wanted: Wanted
    required: bool


@functools.cache
def fields_of(type_key: str) -> tuple[Field, ...] | None:
    """The fields of objects of a type; None for one that is no part of modules."""
    if not _KNOWN.fullmatch(type_key):
        return None
    try:
        info: Any = core._lookup_or_register_type_info_from_type_key(type_key)
    except ValueError:
        return None
    found: dict[str, Field] = {}
    while info is not None:
        for field in info.fields or ():
            found.setdefault(field.name, _field(type_key, field))
        info = info.parent_type_info
    return tuple(found.values())


@functools.cache
def is_a(type_key: str, wanted: str) -> bool:
    """Whether nodes of a type may stand where another one is wanted."""
    if type_key == wanted or wanted in ANYTHING or type_key in _ALSO.get(wanted, ()):
        return True
    if fields_of(type_key) is None:
        return False
    info = core._lookup_or_register_type_info_from_type_key(type_key).parent_type_info
    while info is not None:
        if info.type_key == wanted:
            return True
        info = info.parent_type_info
    return False


def is_dtype(text: object) -> bool:
    """Whether a text is the name of a dtype."""
    return isinstance(text, str) and _DTYPE.fullmatch(text) is not None


def tensor_problem(blob: object) -> str:
    """What is wrong with a tensor's bytes, in base64; "" if nothing is."""
    if not isinstance(blob, str):
        return "its bytes are no text"
    try:
        data = base64.b64decode(blob.replace("\n", ""), validate=True)
        magic, _, device, _, dims = struct.unpack_from("<QQiii", data)
        if magic != _TENSOR_MAGIC or device != _CPU or not 0 <= dims <= _MOST_DIMS:
            return "its header is none"
        _, bits, lanes = struct.unpack_from("<BBH", data, 28)
        shape = struct.unpack_from(f"<{dims}q", data, 32)
        (size,) = struct.unpack_from("<q", data, 32 + 8 * dims)
    except (binascii.Error, struct.error, ValueError) as error:
        return str(error)
    held = len(data) - 40 - 8 * dims
    stated = math.prod(shape) * -(-bits * lanes // 8)
    if min(shape, default=0) < 0 or not stated == size == held:
        return f"its shape {shape} takes {stated} bytes, and {held} are there"
    return ""


def _field(type_key: str, field: core.TypeField) -> Field:
    schema = json.loads(field.metadata["type_schema"])
    nullable = field.name == "span" or (type_key, field.name) in _MAY_BE_NULL
    inline = schema["type"] if schema["type"] in INLINE else ""
    wanted = _wanted(schema, nullable)
    if field.name == "struct_info_" and type_key.startswith("relax.expr."):
        wanted = Wanted(wanted.name, False, wanted.args)  # every expression has one once it is built
    return Field(field.name, inline, wanted, not field.c_has_default)


def _wanted(schema: dict, nullable: bool = False) -> Wanted:
    name = schema["type"]
    args = tuple(_wanted(arg) for arg in schema.get("args", ()))
    if name == "Optional":
        (inner,) = args
        return Wanted(inner.name, True, inner.args)
    return Wanted(name, nullable or name in ("Any", "None"), args)
