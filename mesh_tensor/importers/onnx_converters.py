"""convert: TVM's importer of ONNX, which refuses what it would leave out; operators that it lacks; and those that it
reads wrong where they are of constants, or of sizes."""

from __future__ import annotations

import importlib
import operator
from collections.abc import Callable, Mapping
from functools import partial, reduce
from typing import Any

from tvm import ir, relax, tirx

from mesh_tensor.base.errors import refuse
from mesh_tensor.rules.operator.aten import arguments_text
from mesh_tensor.tir.prover import Prover

# Of operands and options, what an operator makes; None where TVM's conversion is right.
Conversion = Callable[[relax.BlockBuilder, Any, Mapping[str, Any]], relax.Expr | None]
_Op = Callable[[relax.Expr, relax.Expr], relax.Expr]
_OfSizes = Callable[[tirx.PrimExpr, tirx.PrimExpr], "tirx.PrimExpr | None"]


def _shape(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """The sizes of some dims, for which TVM's importer takes those of all."""
    info, part = operands[0].struct_info, slice(options.get("start", 0), options.get("end"))
    if isinstance(info, relax.ShapeStructInfo):
        return relax.ShapeExpr([info.ndim][part])
    if info.shape is None:
        refuse("the sizes of a value of unknown sizes", fix="settle sizes by `shapes`")
    return relax.ShapeExpr(list(info.shape)[part])


def _reshape(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr | None:
    """Of a size, a vector. Whether a 0 means no elements doesn't matter where there is none: open sizes are what they
    are."""
    new = _sizes(operands[1])
    if new is not None and not any(_is_number(size) and int(size) == 0 for size in new):
        options.get("allowzero")
    if isinstance(operands[0], relax.PrimValue) and new is not None and len(new) == 1:
        return relax.ShapeExpr([operands[0].value])
    return None


def _of_all(op: _Op, builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """One operand after the other. (Of constants, TVM's importer takes the second one for an axis.)"""
    return reduce(lambda a, b: builder.normalize(op(a, b)), operands)


def _mean(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """The sum, by the number of operands."""
    total = reduce(lambda a, b: builder.normalize(relax.op.add(a, b)), operands)
    return relax.op.divide(total, relax.const(len(operands), total.struct_info.dtype))


def _compared(op: _Op, builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr | None:
    """Of constants a bool, for which TVM's importer gives the dtype of what is compared."""
    return op(*operands) if all(isinstance(each, relax.Constant) for each in operands) else None


def _of_sizes(
    op: _OfSizes, builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]
) -> relax.Expr | None:
    """Of open sizes, or such and numbers, element by element."""
    values = [_sizes(each) for each in operands]
    if any(each is None for each in values) or all(_is_number(size) for each in values for size in each or ()):
        return None
    length = max(len(each or ()) for each in values)
    pairs = zip(*(each * length if len(each) == 1 else each for each in values if each), strict=True)
    made = [op(a, b) for a, b in pairs]
    if any(each is None for each in made):
        return None
    return relax.ShapeExpr(made) if any(map(_is_vector, operands)) else relax.PrimValue(made[0])


def _quotient(a: tirx.PrimExpr, b: tirx.PrimExpr) -> tirx.PrimExpr | None:
    """Of what is at least 0, where both ways to round are one."""
    least = Prover().const_int_bound(a).min_value
    sizes = [*_parts(a, tirx.Var)]
    positive = not [*_parts(a, tirx.Sub)] and all(int(number) >= 0 for number in _parts(a, tirx.IntImm))
    fine = _is_number(b) and int(b) > 0 and (least >= 0 or (sizes and positive))
    return tirx.floordiv(a, b) if fine else None


def _parts(expr: tirx.PrimExpr, kind: type) -> list[Any]:
    found: list[Any] = []
    tirx.stmt_functor.post_order_visit(expr, lambda part: found.append(part) if isinstance(part, kind) else None)
    return found


def _gather(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr | None:
    """Several sizes, of which TVM's importer takes the first; one is a vector where its index is."""
    sizes, places = operands
    if not isinstance(sizes, relax.ShapeExpr) or not isinstance(places, relax.Constant) or not _is_vector(places):
        return None
    options.get("axis")
    return relax.ShapeExpr([list(sizes)[int(place)] for place in places.data.numpy()])


def _equal(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> None:
    """Refuse what TVM's importer takes for different: an open size and another one that it may be."""
    sizes = [_sizes(each) for each in operands]
    if not any(isinstance(each, relax.ShapeExpr) for each in operands) or None in sizes:
        return
    for a, b in zip(*sizes, strict=False):
        negative = any(_is_number(size) and int(size) < 0 for size in (a, b))
        if not (_is_number(a) and _is_number(b)) and not negative and not ir.structural_equal(a, b):
            texts = [str(int(size)) if _is_number(size) else str(size) for size in (a, b)]
            refuse("whether the size {} is {} tells what is computed".format(*texts), fix="settle sizes by `shapes`")


def _sizes(operand: relax.Expr) -> list[tirx.PrimExpr] | None:
    """What a shape, a size, or a number or vector of whole numbers, is made of."""
    if isinstance(operand, relax.ShapeExpr):
        return list(operand)
    if isinstance(operand, relax.PrimValue):
        return [operand.value] if "int" in operand.value.dtype else None
    if not isinstance(operand, relax.Constant) or operand.struct_info.dtype != "int64" or operand.struct_info.ndim > 1:
        return None
    return [tirx.IntImm("int64", int(number)) for number in operand.data.numpy().flatten()]


def _is_vector(operand: relax.Expr) -> bool:
    return isinstance(operand, relax.ShapeExpr) or (
        isinstance(operand, relax.Constant) and operand.struct_info.ndim > 0
    )


def _is_number(size: tirx.PrimExpr) -> bool:
    return isinstance(size, tirx.IntImm)


SIMPLE: dict[str, Conversion] = {
    "Add": partial(_of_sizes, operator.add),
    "Div": partial(_of_sizes, _quotient),
    "Equal": _equal,
    "Gather": _gather,
    "Greater": partial(_compared, relax.op.greater),
    "GreaterOrEqual": partial(_compared, relax.op.greater_equal),
    "Less": partial(_compared, relax.op.less),
    "LessOrEqual": partial(_compared, relax.op.less_equal),
    "Max": partial(_of_all, relax.op.maximum),
    "Mean": _mean,
    "Min": partial(_of_all, relax.op.minimum),
    "Mul": partial(_of_sizes, operator.mul),
    "Reshape": _reshape,
    "Shape": _shape,
    "Sub": partial(_of_sizes, operator.sub),
    "Sum": partial(_of_all, relax.op.add),
}


# What no result depends on: of how memory lies, of what is for training, or said by other options, too.
_NO_EFFECT = {"tvm_custom", "storage_order", "seed", "is_test", "consumed_inputs"}


def convert(onnx: Any, model: Any, shapes: Mapping[str, Any]) -> ir.IRModule:
    """The Relax module of a model; its weights are parameters, and their values its function's `params`.

    Raises:
        MeshTensorError: an operator has an option or an operand that its conversion does not look at.
    """
    frontend = importlib.import_module("tvm.relax.frontend.onnx.onnx_frontend")
    opset = opset_of(model)
    importer = _importer_class(onnx, frontend)(dict(shapes), "float32", keep_params_in_input=True, sanitize=False)
    return importer.from_onnx(model.graph, opset)


def opset_of(model: Any) -> int:
    """The version of ONNX's own operators in a model."""
    return next((opset.version for opset in model.opset_import if opset.domain in ("", "ai.onnx")), 1)


class _Options(dict[str, Any]):
    """The options of a node, and which of them were looked at."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        super().__init__(options)
        self.seen: set[str] = set()

    def __getitem__(self, name: str) -> Any:
        self.seen.add(name)
        return super().__getitem__(name)

    def __contains__(self, name: object) -> bool:
        self.seen.add(str(name))
        return super().__contains__(name)

    def get(self, name: str, default: Any = None) -> Any:
        self.seen.add(name)
        return super().get(name, default)

    def pop(self, name: str, *default: Any) -> Any:
        self.seen.add(name)
        return super().pop(name, *default)


def _importer_class(onnx: Any, frontend: Any) -> Any:
    class Operands(frontend.onnx_input):  # type: ignore[name-defined,misc]
        """The operands of a node, and which of them were looked at."""

        def __init__(self, given: Any) -> None:
            super().__init__(given)
            self.seen: set[int] = set()

        def __getitem__(self, item: Any) -> Any:
            self.seen.update(range(len(self))[item] if isinstance(item, slice) else [item])
            return super().__getitem__(item)

        def __iter__(self) -> Any:
            self.seen.update(range(len(self)))
            return super().__iter__()

    class Importer(frontend.ONNXGraphImporter):  # type: ignore[name-defined,misc]
        """Converts by `_CONVERSIONS` first; looks what conversions look at."""

        def _convert_operator(self, op_name: str, inputs: Any, attrs: dict[str, Any], opset: int) -> relax.Expr:
            options, operands = _Options(attrs), Operands(inputs)
            own = _CONVERSIONS.get(op_name)
            made = None if own is None else own(self.bb, operands, options)
            if made is None:
                made = super()._convert_operator(op_name, operands, options, opset)
            problems = [
                f"option {name!r} is {_shown(value)}"
                for name, value in attrs.items()
                if name not in options.seen | _NO_EFFECT and not _is_default(onnx, op_name, opset, name, value)
            ]
            problems += [
                f"operand {number} is given"
                for number, given in enumerate(inputs)
                if given is not None
                and number not in {seen % len(inputs) for seen in operands.seen if seen < len(inputs)}
            ]
            if problems:
                refuse(
                    problems,
                    where=f"node {attrs['tvm_custom']['name'] or op_name!r} ({op_name})",
                    why="its conversion leaves that out",
                    fix="export the model without",
                )
            return made

    return Importer


def _is_default(onnx: Any, op: str, opset: int, name: str, value: Any) -> bool:
    try:
        stated = onnx.defs.get_schema(op, opset, "").attributes[name].default_value
    except (KeyError, onnx.defs.SchemaError):
        return False
    if not stated.type:
        return False
    default = onnx.helper.get_attribute_value(stated)
    return bool((tuple(default) if isinstance(value, tuple) else default) == value)


def _shown(value: Any) -> str:
    return repr(value.decode(errors="replace") if isinstance(value, bytes) else value)[:60]


def _scatter_elements(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """With its reduction, which TVM's importer leaves out."""
    reduction = options.get("reduction", b"none").decode()
    data, indices, updates = operands
    return relax.op.scatter_elements(
        data, indices, updates, axis=options.get("axis", 0), reduction={"none": "update"}.get(reduction, reduction)
    )


def _grid_sample(builder: relax.BlockBuilder, operands: Any, options: Mapping[str, Any]) -> relax.Expr:
    """Torch's, which counts modes and what lies outside by numbers."""
    x, grid = operands
    rank = x.struct_info.ndim
    mode = options.get("mode", b"linear").decode()
    mode = {"bilinear": "linear", "bicubic": "cubic"}.get(mode, mode)
    if mode == "cubic" and rank != 4:
        refuse("cubic samples of a grid that is no plane", fix="sample it linearly")
    numbers = [
        ("linear", "nearest", "cubic").index(mode),
        ("zeros", "border", "reflection").index(options.get("padding_mode", b"zeros").decode()),
        bool(options.get("align_corners", 0)),
    ]
    sizes = [*list(x.struct_info.shape)[:2], *list(grid.struct_info.shape)[1:-1]]
    info = relax.TensorStructInfo(sizes, x.struct_info.dtype)
    text = relax.StringImm(arguments_text([{"tensor": 0}, {"tensor": 1}, *numbers], {}))
    return relax.op.call_pure_packed(f"aten.grid_sampler_{rank - 2}d.default", x, grid, text, sinfo_args=[info])


_CONVERSIONS: dict[str, Conversion] = {"GridSample": _grid_sample, "ScatterElements": _scatter_elements, **SIMPLE}
