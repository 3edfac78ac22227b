"""OpCall: one call of a Relax operator on tensors of known shape, as rules and runtimes look at it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm import ir, relax, tirx

from mesh_tensor.base.dtypes import TensorType
from mesh_tensor.base.errors import refuse


@dataclass(frozen=True, eq=False)
class OpCall:
    """`expr` calls the operator `name` (without "relax."): its tensor operands, with tuples of them flattened, are
    `inputs`; its results are `outputs`."""

    name: str
    expr: relax.Call
    inputs: tuple[TensorType, ...]
    outputs: tuple[TensorType, ...]

    def attr(self, name: str, default: Any = None) -> Any:
        """An attribute as plain Python: ints, floats, strings, bools, tuples of them or None."""
        value = None if self.attrs is None else getattr(self.attrs, name, None)
        return default if value is None else plain(value)

    @property
    def attrs(self) -> Any:
        """The call's attributes, if it has any."""
        return self.expr.attrs

    @cached_property
    def literals(self) -> tuple[Any, ...]:
        """The arguments that are no tensors, in order, as plain Python: R.shape and tuples of R.prim_value become
        tuples of ints, R.prim_value a number, R.str a string."""
        return tuple(arg for arg in self.operands if arg is not None)

    @cached_property
    def operands(self) -> tuple[Any, ...]:
        """Per argument: None for one with tensors, else as in `literals`."""
        return tuple([None if _has_tensor(arg) else plain(arg) for arg in self.expr.args[:]])

    @cached_property
    def options(self) -> tuple:
        """Equal for calls of an operator that are told the same beside their operands."""
        attrs = None if self.expr.attrs is None else Structure(self.expr.attrs)
        return attrs, tuple([_kind_of(arg) for arg in self.expr.args[:]])

    @cached_property
    def kind(self) -> tuple:
        """Equal for calls that differ in nothing but the values of their operands."""
        infos = tuple([Structure(info) for info in self.expr.sinfo_args[:]])
        return self.name, self.inputs, self.outputs, self.options, infos

    @cached_property
    def operator(self) -> str:
        """The operator's name; of a packed function that is called, that function's."""
        if self.name == "call_pure_packed" and isinstance(self.expr.args[0], relax.ExternFunc):
            return str(self.expr.args[0].global_symbol)
        return self.name

    def on(self, tensors: Sequence[relax.Expr]) -> relax.Call:
        """The call on other tensors of the same shapes, given in the order of `inputs`."""
        expr, rest = self.expr, iter(tensors)
        made = relax.Call(expr.op, [_replaced(arg, rest) for arg in expr.args], expr.attrs, expr.sinfo_args)
        relax.expr._update_struct_info(made, expr.struct_info)
        return made

    def axis(self, dim: int, operand: int = 0) -> int:
        """`dim` counted from the front of that operand's dims."""
        return dim % max(1, self.inputs[operand].ndim)

    def axes(self, dims: int | tuple[int, ...] | None) -> tuple[int, ...]:
        """Dims of the first operand, counted from the front; None means all of them."""
        if dims is None:
            return tuple(range(self.inputs[0].ndim))
        return tuple(map(self.axis, (dims,) if isinstance(dims, int) else dims))


def _replaced(arg: relax.Expr, tensors: Iterator[relax.Expr]) -> relax.Expr:
    """The argument with the next ones of `tensors` in place of its own."""
    if isinstance(arg, relax.Tuple):
        return relax.Tuple([_replaced(field, tensors) for field in arg.fields])
    return next(tensors) if _has_tensor(arg) else arg


class Structure:
    """A TVM object, equal to those of the same structure."""

    def __init__(self, node: Any) -> None:
        self._node, self._hash = node, tvm.ir.structural_hash(node)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and tvm.ir.structural_equal(self._node, other._node)


def _kind_of(arg: relax.Expr) -> Any:
    """An argument, of which tensors only count in number."""
    if isinstance(arg, relax.Tuple):
        return tuple(_kind_of(field) for field in arg.fields)
    return len(tensor_infos(arg.struct_info)) or Structure(arg)


def op_call(expr: relax.Call) -> OpCall:
    """The OpCall of a call whose struct info is known. Refused where a tensor's shape is unknown or symbolic."""
    name = op_name(expr.op)
    inputs = tuple(tensor_type(info, name) for arg in expr.args[:] for info in tensor_infos(arg.struct_info))
    return OpCall(name, expr, inputs, tensor_types(expr.struct_info, name))


def op_name(op: relax.Expr) -> str:
    """An operator's name, without "relax."."""
    return op.name.removeprefix("relax.") if isinstance(op, ir.Op) else str(op)


def tensor_infos(info: relax.StructInfo) -> list[relax.StructInfo]:
    """The tensors' struct infos in that of an argument: its own, or those of a tuple's fields; numbers are left out."""
    if isinstance(info, (relax.TensorStructInfo, relax.distributed.DTensorStructInfo)):
        return [info]
    if not isinstance(info, relax.TupleStructInfo):
        return []
    return [leaf for field in info.fields for leaf in tensor_infos(field)]


def tensors_in(args: Iterable[relax.Expr]) -> list[relax.Expr]:
    """The tensors among arguments, tuples flattened."""
    found = []
    for arg in args:
        if isinstance(arg, relax.Tuple):
            found += tensors_in(arg.fields)
        elif isinstance(arg.struct_info, relax.TensorStructInfo):
            found.append(arg)
        elif isinstance(arg.struct_info, relax.TupleStructInfo):
            found += tensors_in([relax.TupleGetItem(arg, n) for n in range(len(arg.struct_info.fields))])
    return found


def tensor_types(info: relax.StructInfo, what: str) -> tuple[TensorType, ...]:
    """The tensors of a struct info, tuples flattened."""
    if isinstance(info, relax.TupleStructInfo):
        return tuple(t for field in info.fields for t in tensor_types(field, what))
    return (tensor_type(info, what),)


def tensor_type(info: relax.StructInfo, what: str) -> TensorType:
    """Shape and dtype of a struct info; `what` names the tensor or operator in messages."""
    tensor = info if isinstance(info, relax.TensorStructInfo) else getattr(info, "tensor_sinfo", None)
    shape, dtype = (None, "") if tensor is None else (tensor.shape, str(tensor.dtype))
    if isinstance(shape, relax.Var):  # what R.shape_of gave
        shape = shape.struct_info
    if shape is None or shape.values is None or not dtype:
        refuse(
            f"{what}: {info} is no tensor of known shape and dtype",
            why="layouts can only be decided for tensors of known size",
            fix="annotate the value's shape in the module, or let TVM infer it (relax.transform.Normalize)",
        )
    sizes = shape.values[:]
    if [size for size in sizes if not isinstance(size, tirx.IntImm)]:
        refuse(
            f"{what}: the shape {plain(sizes)} is symbolic",
            fix="bind the symbolic sizes first (relax.transform.BindSymbolicVars, or call the module with tensors)",
        )
    return _interned(tuple([size.value for size in sizes]), dtype)


@lru_cache(maxsize=4096)
def _interned(shape: tuple[int, ...], dtype: str) -> TensorType:
    """One object per type, of which most modules have few."""
    return TensorType(shape, dtype)


def plain(value: Any) -> Any:
    """A TVM value as plain Python where it has such a form."""
    if isinstance(value, relax.PrimValue):
        return plain(value.value)
    if isinstance(value, (tirx.IntImm, tirx.FloatImm)):
        return bool(value.value) if value.dtype == "bool" else value.value
    if isinstance(value, (relax.StringImm, relax.DataTypeImm)):
        return str(value.value)
    if isinstance(value, relax.ShapeExpr):
        return tuple(plain(size) for size in value.values)
    if isinstance(value, relax.Tuple):
        return tuple(plain(field) for field in value.fields)
    if isinstance(value, (tvm_ffi.Array, list, tuple)):
        return tuple(plain(item) for item in value)
    return value


def _has_tensor(arg: relax.Expr) -> bool:
    return bool(tensor_infos(arg.struct_info))


# Operators whose results are as large as the data says, and what does that in known sizes.
SIZED_BY_DATA = {
    "dynamic_strided_slice": "R.strided_slice, or R.take with as many indices as there are to be",
    "nonzero": "R.where with a mask of the tensor's own shape",
    "unique": "R.sort and compare neighbours, or compute it before the module is called",
}


def with_known_sizes(expr: relax.Call, where: str) -> relax.Expr:
    """An operator's call with sizes in place of the variables that stand for shapes of known sizes; such a shape as a
    tensor (`R.shape_to_tensor`) is a constant. Refused where how large its result is depends on the data; `where` names
    its binding."""
    name = op_name(expr.op)
    if name in SIZED_BY_DATA:
        if any(not isinstance(info.shape, relax.ShapeExpr) for info in tensor_infos(expr.struct_info)):
            refuse(
                f"how large the result of R.{name} is depends on the data",
                where=f"{where} = {expr}",
                why="layouts are decided for sizes that are known ahead",
                fix=f"say how large it is, by an R.match_cast to known sizes, or use {SIZED_BY_DATA[name]}",
            )
        return expr
    known = [_known_shape(arg) for arg in expr.args]
    if all(sizes is None for sizes in known):
        return expr
    if name == "shape_to_tensor":
        return relax.const(np.array([int(size) for size in known[0] or ()]), "int64")
    args = [arg if sizes is None else relax.ShapeExpr(sizes) for arg, sizes in zip(expr.args, known, strict=True)]
    made = relax.Call(expr.op, args, expr.attrs, expr.sinfo_args)
    relax.expr._update_struct_info(made, expr.struct_info)
    return made


def with_said_sizes(expr: relax.Expr, cast: relax.StructInfo | None) -> relax.Expr:
    """A call whose result is as large as its data says, as one of `mesh.` of the type to which the module casts it, if
    that says how large it is; else the expression itself."""
    if cast is None or not isinstance(expr, relax.Call) or op_name(expr.op) not in SIZED_BY_DATA:
        return expr
    found, said = tensor_infos(expr.struct_info), tensor_infos(cast)
    pairs = zip(found, said, strict=False)
    if len(found) != len(said) or not all(a.ndim == b.ndim and a.dtype == b.dtype and is_known(b) for a, b in pairs):
        return expr
    made = relax.op.call_pure_packed(f"mesh.{op_name(expr.op)}", *expr.args, sinfo_args=[cast])
    return relax.BlockBuilder().normalize(made)


def packed(name: str, args: Sequence[relax.Expr], info: relax.StructInfo) -> relax.Call:
    """A call of a registered function that has no side effects."""
    return relax.op.call_pure_packed(name, *args, sinfo_args=[info])


def is_known(info: relax.TensorStructInfo) -> bool:
    """Whether all sizes are numbers."""
    return isinstance(info.shape, relax.ShapeExpr) and all(isinstance(n, tirx.IntImm) for n in info.shape.values)


def _known_shape(arg: relax.Expr) -> list[tirx.PrimExpr] | None:
    """The sizes that a variable stands for, if it is a shape of known sizes."""
    if not isinstance(arg, relax.Var) or not isinstance(arg.struct_info, relax.ShapeStructInfo):
        return None
    values = arg.struct_info.values
    return None if values is None or not all(isinstance(v, tirx.IntImm) for v in values) else list(values)
