"""A call of an operator as text, and back: what an operator on another operator (`mesh.vjp`) says of it.

The text is JSON, so that it prints, parses and is saved with the module like any other literal; reading it evaluates
nothing.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
from tvm import ir, relax, tirx

from mesh_tensor.base.dtypes import TensorType, is_float
from mesh_tensor.base.errors import MeshTensorError, refuse

from .call import plain, tensor_infos
from .rule import has_rule

_LARGEST = 64  # elements of a constant in a text
_ATTRS = re.compile(r"relax\.attrs\.\w+")


def expression_text(expr: relax.Expr, operands: Sequence[relax.Expr]) -> Any:
    """A call, whose tensor operands are among `operands` or calls themselves, in the form of JSON."""
    for number, operand in enumerate(operands):
        if expr.same_as(operand):
            return {"operand": number}
    for kind, write in _WRITE.items():
        if isinstance(expr, kind):
            return write(expr, operands)
    return refuse(f"{type(expr).__name__} has no form as text", where=str(expr))


def read_expression(text: Any, operands: Sequence[relax.Expr]) -> relax.Expr:
    """The expression that `expression_text` wrote, on these operands. Refused where the text is none that was written
    so."""
    if isinstance(text, list):
        return relax.Tuple([read_expression(item, operands) for item in text])
    try:
        return _READ[next(iter(text))](text, operands)  # the first key says what it is
    except MeshTensorError:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        return refuse(f"{str(text)[:200]} is no call of an operator", why=str(error).splitlines()[0])


def dumps(value: Any) -> str:
    """As JSON in one line."""
    return json.dumps(value, separators=(",", ":"))


@lru_cache(maxsize=4096)
def loads(text: str) -> Any:
    """What JSON says. It is shared: don't change it."""
    try:
        return json.loads(text)
    except ValueError as error:
        return refuse(f"{text[:200]!r} is no JSON", why=str(error))


def type_text(tensor: TensorType) -> list[Any]:
    """Shape and dtype in the form of JSON."""
    return [list(tensor.shape), tensor.dtype]


def type_of(text: Any) -> TensorType:
    """Shape and dtype that `type_text` wrote."""
    shape, dtype = text
    return TensorType(tuple(int(size) for size in shape), str(dtype))


def info_of(tensor: TensorType) -> relax.TensorStructInfo:
    """The struct info of a tensor of that type."""
    return relax.TensorStructInfo(tensor.shape, tensor.dtype)


def _write_call(expr: relax.Call, operands: Sequence[relax.Expr]) -> dict[str, Any]:
    made: dict[str, Any] = {
        "op": expr.op.name.removeprefix("relax."),
        "args": [expression_text(arg, operands) for arg in expr.args],
    }
    if expr.attrs is not None:
        info = type(expr.attrs).__tvm_ffi_type_info__
        fields = {field.name: _attribute(getattr(expr.attrs, field.name)) for field in info.fields}
        made["attrs"] = [info.type_key, fields]
    if len(expr.sinfo_args):
        types = [TensorType(tuple(plain(i.shape)), str(i.dtype)) for i in tensor_infos(expr.sinfo_args[0])]
        made["results"] = [type_text(tensor) for tensor in types]
    return made


def _attribute(value: Any) -> Any:
    value = plain(value)
    return value if value is None or isinstance(value, (bool, int, float, tuple)) else str(value)


def _read_call(text: Any, operands: Sequence[relax.Expr]) -> relax.Expr:
    name, args = text["op"], [read_expression(arg, operands) for arg in text["args"]]
    packed = name == "call_pure_packed" and isinstance(args[0], relax.ExternFunc)
    symbol = str(args[0].global_symbol) if packed else ""
    if not has_rule(symbol or name) and not symbol.startswith("mesh."):
        refuse(f"there is no operator {name!r} with a rule")
    attrs = None
    if "attrs" in text:
        kind, fields = text["attrs"]
        if not _ATTRS.fullmatch(kind):
            refuse(f"{kind!r} are no attributes of an operator")
        attrs = ir.make_node(kind, **fields)
    infos = [info_of(type_of(result)) for result in text.get("results", ())]
    sinfo = infos if len(infos) < 2 else [relax.TupleStructInfo(infos)]
    return relax.Call(ir.Op.get(f"relax.{name}"), args, attrs, sinfo)


def _write_constant(expr: relax.Constant, _: Sequence[relax.Expr]) -> dict[str, Any]:
    data = expr.data.numpy()
    if data.size > _LARGEST:
        refuse(f"a constant of {data.size} elements has no form as text")
    return {"constant": data.tolist(), "dtype": str(data.dtype), "shape": list(data.shape)}


def _read_constant(text: Any, _: Sequence[relax.Expr]) -> relax.Expr:
    return relax.const(np.array(text["constant"], text["dtype"]).reshape(text["shape"]), text["dtype"])


def _write_number(expr: relax.PrimValue, _: Sequence[relax.Expr]) -> dict[str, Any]:
    return {"number": plain(expr.value), "dtype": str(expr.value.dtype)}


def _read_number(text: Any, _: Sequence[relax.Expr]) -> relax.Expr:
    make = tirx.FloatImm if is_float(text["dtype"]) else tirx.IntImm
    return relax.PrimValue(make(text["dtype"], text["number"]))


_WRITE: dict[type, Callable[[Any, Sequence[relax.Expr]], Any]] = {
    relax.Call: _write_call,
    relax.Tuple: lambda expr, operands: [expression_text(field, operands) for field in expr.fields],
    relax.Constant: _write_constant,
    relax.PrimValue: _write_number,
    relax.ShapeExpr: lambda expr, _: {"shape": list(plain(expr))},
    relax.StringImm: lambda expr, _: {"text": str(expr.value)},
    relax.DataTypeImm: lambda expr, _: {"datatype": str(expr.value)},
    relax.ExternFunc: lambda expr, _: {"function": str(expr.global_symbol)},
}
_READ: dict[str, Callable[[Any, Sequence[relax.Expr]], relax.Expr]] = {
    "operand": lambda text, operands: operands[text["operand"]],
    "op": _read_call,
    "constant": _read_constant,
    "number": _read_number,
    "shape": lambda text, _: relax.ShapeExpr(text["shape"]),
    "text": lambda text, _: relax.StringImm(text["text"]),
    "datatype": lambda text, _: relax.DataTypeImm(text["datatype"]),
    "function": lambda text, _: relax.ExternFunc(text["function"]),
}
